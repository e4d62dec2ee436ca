"""``millrace cnn export``: models that other programs load."""

import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
import yaml
from saved_cnn import METRICS, write_cnn_run

import millrace as mr
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.model_card import timm_name, torchvision_code
from millrace.cli import main
from millrace.config import build
from millrace.data.mnist import load_digits
from millrace.data.safetensors import read_metadata, read_safetensors


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run with 16-bit weights: exports and predictions are in float32."""
    path = tmp_path_factory.mktemp("export") / "run"
    return write_cnn_run(path, model_name="digits_cnn", precision="16.16")


@pytest.fixture(scope="module")
def images():
    return load_digits()[1][np.arange(7)]["image"]


def test_weights_and_statistics_are_float32_with_the_names_of_layers(run, tmp_path):
    mr.cnn.export(run, output=tmp_path)
    model, arrays = mr.cnn.load(run), read_safetensors(tmp_path / "model.safetensors")
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
    wanted = jax.tree.leaves((model.params, model.model_state))
    assert len(arrays) == len(wanted)
    kernel = np.asarray(model.params["conv2"]["kernel"], np.float32)
    np.testing.assert_array_equal(arrays["conv2.kernel"], kernel)
    mean = model.model_state["conv3_bn"]["mean"]
    np.testing.assert_array_equal(arrays["conv3_bn.mean"], mean)


def test_the_folder_describes_the_model(run, capsys):
    with pytest.raises(SystemExit) as left:
        main(["cnn", "export", str(run)])
    assert left.value.code == 0
    folder = run / "export"
    names = ["model.safetensors", "config.json", "README.md"]
    assert capsys.readouterr().out.split() == [str(folder / name) for name in names]
    facts = json.loads((folder / "config.json").read_text())
    assert facts["label_names"] == [str(n) for n in range(10)]
    assert facts["image_size"] == [8, 8] and facts["num_channels"] == 1
    assert facts["preprocessing"]["scale"] == 1 / 16
    assert facts["metrics"] == METRICS  # not those of earlier weights
    metadata = read_metadata(folder / "model.safetensors")
    assert json.loads(metadata["label_names"]) == facts["label_names"]
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: millrace\n")
    assert "| validation accuracy | 0.75 |" in card
    assert "multiply pixels by 0.0625." in card and "stablehlo" not in card
    header = yaml.safe_load(card.split("---")[1])
    (result,) = header["model-index"][0]["results"]
    assert result["task"]["type"] == header["pipeline_tag"] == "image-classification"
    assert {m["name"]: m["value"] for m in result["metrics"]} == {
        "train loss": 0.5,
        "validation accuracy": 0.75,
    }
    assert facts["id2label"]["3"] == "3" and facts["label2id"]["3"] == 3


def test_a_card_of_others_stays(run, tmp_path, capsys):
    (tmp_path / "README.md").write_text("mine")
    mr.cnn.export(run, output=tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert "README.md" not in capsys.readouterr().out


def test_a_program_runs_by_the_code_of_the_card_without_millrace(run, images, tmp_path):
    pytest.importorskip("flatbuffers")
    mr.cnn.export(run, output=tmp_path, format=["stablehlo"])
    np.save(tmp_path / "images.npy", images)
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), re.S)
    script = (
        "import sys; sys.modules['millrace'] = None\n"
        "import numpy; images = numpy.load('images.npy')\n"
        f"{code}\nnumpy.save('logits.npy', numpy.asarray(logits))\n"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    wanted = mr.cnn.load(run).logits(images)
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), wanted, atol=1e-4)


def test_onnx_runtime_computes_the_same_logits(run, images, tmp_path):
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    mr.cnn.export(run, output=tmp_path, format=["onnx"])
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(["logits"], {"images": images})
    np.testing.assert_allclose(found, mr.cnn.load(run).logits(images), atol=1e-4)


def test_a_wrong_run_or_format_is_one_line(run, tmp_path, capsys):
    for words, message in [
        ((str(tmp_path),), "There are no checkpoints in"),
        ((str(run), "--which", "7"), "no checkpoint after update 7"),
        ((str(run), "--format", "pickle"), "--format must be one of safetensors"),
        ((str(run), "--output", str(run / "config.yml")), "Cannot write"),
    ]:
        with pytest.raises(SystemExit) as left:
            main(["cnn", "export", *words])
        error = capsys.readouterr().err
        assert left.value.code == 2 and message in error
        lines = [x for x in error.splitlines() if not x.startswith("using the best")]
        assert len(lines) == 1


@pytest.mark.parametrize(
    ("options", "timm", "torchvision"),
    [
        ({"model_name": "resnet", "model_size": "50"}, "resnet50", "Bottleneck, [3, 4, 6"),
        ({"model_name": "resnet", "model_size": "10"}, None, "BasicBlock, [1, 1, 1, 1]"),
        ({"model_name": "resnext", "model_size": "50"}, "resnext50_32x4d", "groups=32"),
        (
            {"model_name": "resnext", "model_size": "50", "group_dim": 8},
            None,
            "width_per_group=8",
        ),
        ({"model_name": "resnet", "batch_norm": False}, None, "nn.GroupNorm"),
        ({"model_name": "efficientnet"}, None, "models.efficientnet_b0("),
        ({"model_name": "efficientnet", "group_dim": 16, "expand_ratio": 4}, None, None),
        ({"model_name": "resnet", "dataset": "cifar10"}, None, None),
        ({"model_name": "resnet50"}, None, None),  # another padding than torchvision's
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_models_are_named_only_where_others_have_them(options, timm, torchvision):
    defaults = {"dataset": "imagenet", "batch_norm": True}
    config = build(CnnConfig, defaults | options)
    assert timm_name(config, "torchvision") == timm
    code = torchvision_code(config, 10, "torchvision")
    assert code is None if torchvision is None else torchvision in str(code)


def test_an_efficientnet_has_the_names_of_one_library():
    config = build(CnnConfig, {"model_name": "efficientnet", "dataset": "imagenet",
                               "batch_norm": True})  # fmt: skip
    assert timm_name(config, "timm") == "efficientnet_b0"
    assert torchvision_code(config, 10, "timm") is None
