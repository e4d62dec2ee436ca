"""Published weights: read safely, with the same logits as in the original framework."""

import hashlib
import json
import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from saved_cnn import random_weights
from seed_lines import GRAPHCORE

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.commands import ExportConfig
from millrace.apps.cnn.export import describe_model, write_folder
from millrace.apps.cnn.models import catalog
from millrace.apps.cnn.models.pretrained import (
    _is_source,
    _sources,
    fit_pretrained,
    read_pretrained,
    to_published,
)
from millrace.apps.cnn.predictor import TrainedCnn
from millrace.apps.cnn.program import build_norm
from millrace.apps.cnn.train import train
from millrace.checkpoint.store import restore_part
from millrace.config import ConfigurationError, build
from millrace.data.safetensors import write_safetensors as write_arrays
from millrace.nn.layers import apply_layers, init_layers, init_shapes
from millrace.program.step import Weights
from millrace.run.run import run_command


def write_safetensors(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    header, blobs, place = {}, [], 0
    for name, array in arrays.items():
        blob = np.ascontiguousarray(array, np.float32).tobytes()
        entry = {"dtype": "F32", "shape": list(array.shape)}
        header[name] = entry | {"data_offsets": [place, place + len(blob)]}
        blobs.append(blob)
        place += len(blob)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    return path


def norm(features):
    """Return the arrays of a batch norm in such a file; the last one is ignored."""
    random = np.random.default_rng(features)
    names = ("weight", "bias", "running_mean", "running_var")
    values = {name: random.uniform(0.5, 1.5, features) for name in names}
    return values | {"num_batches_tracked": np.float32(7)}


def resnet8_file(path, *, num_classes=10, channels=1, **changes):
    """Write weights of a network for small images, with the names of torchvision."""
    random = np.random.default_rng(0)
    arrays = {"conv1.weight": random.standard_normal((16, channels, 3, 3)) / 3}
    arrays |= {f"bn1.{name}": value for name, value in norm(16).items()}
    before = 16
    for stack, width in enumerate((16, 32, 64), 1):
        for number, inputs in ((1, before), (2, width)):
            prefix = f"layer{stack}.0."
            kernel = random.standard_normal((width, inputs, 3, 3)) / 12
            arrays[f"{prefix}conv{number}.weight"] = kernel
            for name, value in norm(width).items():
                arrays[f"{prefix}bn{number}.{name}"] = value
        before = width
    arrays["fc.weight"] = random.standard_normal((num_classes, 64)) / 8
    arrays["fc.bias"] = random.standard_normal(num_classes)
    arrays |= changes
    present = {name: value for name, value in arrays.items() if value is not None}
    return write_safetensors(path / "resnet8.safetensors", present), arrays


RESNET8 = {"model_name": "resnet", "model_size": "8", "dataset": "digits"}


def load(path, num_classes=10, **options):
    config = build(CnnConfig, GRAPHCORE | RESNET8 | options)
    model = catalog.build_layers(
        "resnet", num_classes, build_norm(config), **config.network
    )
    example = jax.ShapeDtypeStruct((1, 8, 8, 1), np.float32)
    return fit_pretrained(path, read_pretrained(path), *init_shapes(model, example))


def test_weights_are_converted_to_our_dimension_order(tmp_path):
    path, arrays = resnet8_file(tmp_path)
    params, model_state, notices = load(path)
    assert not notices
    kernel = arrays["layer2.0.conv1.weight"].astype(np.float32)
    np.testing.assert_array_equal(
        params["b2/0/conv1"]["kernel"], np.einsum("oihw->hwio", kernel)
    )
    np.testing.assert_array_equal(
        params["fc1"]["kernel"], arrays["fc.weight"].T.astype(np.float32)
    )
    scale, mean = arrays["layer3.0.bn2.weight"], arrays["layer3.0.bn2.running_mean"]
    np.testing.assert_allclose(params["b3/0/norm2"]["scale"], scale)
    np.testing.assert_allclose(model_state["b3/0/norm2"]["mean"], mean)


def small_efficientnet():
    """Return the shapes of the weights and of the model state."""
    config = build(
        CnnConfig,
        GRAPHCORE | {"model_name": "efficientnet", "dataset": "cifar10"},
    )
    model = catalog.build_layers("efficientnet", 10, build_norm(config), **config.network)
    return init_shapes(model, jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32))


def names_by_layer(params):
    return {
        layer: [source.name for source in jax.tree.leaves(tree, is_leaf=_is_source)]
        for layer, tree in params.items()
    }


def test_names_of_timms_efficientnet_are_known():
    params, model_state = _sources(*small_efficientnet())
    found = names_by_layer(params)
    assert found["block0/conv"] == ["conv_stem.weight"]
    assert found["block1a/b/norm"] == ["blocks.0.0.bn1.bias", "blocks.0.0.bn1.weight"]
    assert found["block1a/c/conv"] == ["blocks.0.0.conv_pw.weight"]
    assert found["block3b/a/conv"] == ["blocks.2.1.conv_pw.weight"]
    assert found["block3b/b/conv"] == ["blocks.2.1.conv_dw.weight"]
    assert found["block3b/c/norm"] == ["blocks.2.1.bn3.bias", "blocks.2.1.bn3.weight"]
    assert "blocks.6.0.se.conv_reduce.weight" in found["block7a/SE"]
    assert params["block7a/SE"]["reduce"]["kernel"].shape[2:] == (1, 1)
    assert found["Top/norm"] == ["bn2.bias", "bn2.weight"]
    assert found["fc1"] == ["classifier.bias", "classifier.weight"]
    assert model_state["Top/norm"]["var"].name == "bn2.running_var"


def test_names_of_torchvisions_efficientnet_are_known():
    params, model_state = _sources(*small_efficientnet(), torchvision=True)
    found = names_by_layer(params)
    assert found["block0/conv"] == ["features.0.0.weight"]
    assert model_state["block0/norm"]["mean"].name == "features.0.1.running_mean"
    first = "features.1.0.block"
    assert found["block1a/b/conv"] == [f"{first}.0.0.weight"]
    assert f"{first}.1.fc1.weight" in found["block1a/SE"]
    assert found["block1a/c/norm"] == [f"{first}.2.1.bias", f"{first}.2.1.weight"]
    inner = "features.3.1.block"
    assert found["block3b/a/conv"] == [f"{inner}.0.0.weight"]
    assert found["block3b/b/norm"] == [f"{inner}.1.1.bias", f"{inner}.1.1.weight"]
    assert f"{inner}.2.fc2.bias" in found["block3b/SE"]
    assert found["block3b/c/conv"] == [f"{inner}.3.0.weight"]
    assert found["Top/conv"] == ["features.8.0.weight"]
    assert model_state["Top/norm"]["var"].name == "features.8.1.running_var"
    assert found["fc1"] == ["classifier.1.bias", "classifier.1.weight"]


@pytest.mark.parametrize("torchvision", [False, True])
def test_efficientnet_weights_are_read_from_timm_or_torchvision(torchvision):
    shapes = small_efficientnet()
    sources = _sources(*shapes, torchvision=torchvision)
    found = {
        source.name: np.full(source.shape, number, np.float32)
        for number, source in enumerate(jax.tree.leaves(sources, is_leaf=_is_source))
    }
    params, _, notices = fit_pretrained(Path("theirs"), found, *shapes)
    assert not notices
    name = "classifier.1.weight" if torchvision else "classifier.weight"
    assert (params["fc1"]["kernel"] == found[name][0, 0]).all()


@pytest.mark.parametrize("torchvision", [False, True])
@pytest.mark.parametrize("family", ["efficientnet", "resnet", "resnext"])
def test_exported_weights_are_read_back_unchanged(family, torchvision, tmp_path):
    config = build(CnnConfig, {"model_name": family, "dataset": "cifar10"})
    model = catalog.build_layers(family, 10, build_norm(config), **config.network)
    shapes = init_shapes(model, jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32))
    weights = random_weights(shapes)
    path = tmp_path / "ours.safetensors"
    write_arrays(path, to_published(*weights, torchvision=torchvision))
    *found, notices = fit_pretrained(path, read_pretrained(path), *shapes)
    assert not notices
    jax.tree.map(np.testing.assert_array_equal, tuple(found), weights)


def test_exported_weights_in_16_bits_become_float32():
    weights = random_weights(small_efficientnet())
    halves = jax.tree.map(lambda x: x.astype(np.float16), weights)
    found = to_published(*halves)
    counts = {n for n, x in found.items() if n.endswith("num_batches_tracked")}
    assert len(counts) == 49 and all(found[n].dtype == np.int64 for n in counts)
    assert {found[n].dtype for n in found.keys() - counts} == {np.dtype(np.float32)}


def test_the_last_layer_is_kept_if_the_classes_differ(tmp_path):
    path, _ = resnet8_file(tmp_path)
    params, _, notices = load(path, num_classes=7)
    assert notices == [
        "resnet8.safetensors has other classes: the last layer starts from random weights."
    ]
    assert params["fc1"]["kernel"].shape == (64, 7)
    assert isinstance(params["fc1"]["kernel"], jax.ShapeDtypeStruct)  # untouched


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"conv1.weight": None}, {}, "conv1.weight is missing"),
        ({"features.0.weight": np.zeros(3)}, {}, "features.0.weight is not in this model"),
        ({"fc.bias": np.zeros(9)}, {}, r"fc.bias is \[9\], this model has \[10\]"),
        ({}, {"model_size": "14"}, "layer1.1.conv1.weight is missing.*and 27 more"),
        ({}, {"groups": 4}, "Give --batch-norm"),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_are_a_one_line_error(changes, options, message, tmp_path):
    path, _ = resnet8_file(tmp_path, **changes)
    with pytest.raises(ConfigurationError, match=message) as caught:
        load(path, **options)
    assert "\n" not in str(caught.value)


def run(tmp_path, pretrained):
    options = RESNET8 | {
        "pretrained": pretrained,
        "micro_batch_size": 8,
        "num_epochs": 1,
        "weight_updates_per_epoch": 1,
        "l2_regularization": 0,
        "lr_schedule": "const",
        "lr_schedule_params": {"initial_learning_rate": 0},
        "validation": False,
        "run_dir": tmp_path / "run",
        "quiet": True,
    }
    config = build(CnnConfig, GRAPHCORE | options)
    return run_command(train, config, command="cnn-train", command_line="test")


@pytest.mark.slow
def test_training_starts_from_the_file(tmp_path):
    path, _ = resnet8_file(tmp_path)
    assert run(tmp_path, path) == 0
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    wanted = Weights(*load(path)[:2])
    found = restore_part(checkpoint, wanted).state
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    assert summary["pretrained"] == {"source": str(path), "sha256": checksum}


def test_training_changes_all_layers_but_the_frozen_ones(tmp_path):
    options = {"micro_batch_size": 8, "num_epochs": 1, "weight_updates_per_epoch": 2}
    options |= {"validation": False, "run_dir": tmp_path / "run", "quiet": True}
    frozen = ["conv1*", "conv2_bn"]
    config = build(CnnConfig, options | {"freeze": frozen, "lr_scale": ["conv3=0.5"]})
    assert run_command(train, config, command="cnn-train", command_line="test") == 0
    model = catalog.build_layers("digits_cnn", 10, build_norm(config), **config.network)
    key, example = jax.random.key(config.run.seed), np.zeros((1, 8, 8, 1), np.float32)
    before = Weights(*init_layers(model, key, example))
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    after = restore_part(checkpoint, before).state
    different = jax.tree.map(lambda a, b: bool(np.any(a != b)), after, before)
    changed = {
        layer for tree in different for layer in tree if any(jax.tree.leaves(tree[layer]))
    }
    assert changed == {"conv2", "conv3", "conv3_bn", "fc_layer"}


def test_a_hub_out_of_reach_is_a_one_line_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")  # nobody listens
    assert run(tmp_path, "timm/resnet8") == 2
    assert "cannot reach the server" in (output := capsys.readouterr().err)
    assert len(output.splitlines()) == 1


def test_a_file_that_is_not_safetensors_is_a_one_line_error(tmp_path, capsys):
    (tmp_path / "weights").write_bytes(b"no weights at all")
    assert run(tmp_path, tmp_path / "weights") == 2
    assert "is not a safetensors file" in (output := capsys.readouterr().err)
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize("start", [b"PK\x03\x04\x14", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j"])
def test_a_pickle_is_an_error_that_explains_how_to_convert_it(start, tmp_path):
    (path := tmp_path / "weights.pth").write_bytes(start + bytes(100))
    with pytest.raises(
        ConfigurationError, match=r"a PyTorch pickle.* can run code"
    ) as caught:
        read_pretrained(path)
    assert f"'{tmp_path / 'weights.safetensors'}'" in str(caught.value)


def test_a_pickle_converted_as_explained_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    path = tmp_path / "weights.pth"
    torch.save({"a": torch.arange(3.0)}, path)
    with pytest.raises(ConfigurationError) as refused:
        read_pretrained(path)
    command = shlex.split(str(refused.value).partition("file: ")[2])
    subprocess.run([sys.executable, *command[1:]], check=True)
    found = read_pretrained(tmp_path / "weights.safetensors")
    np.testing.assert_array_equal(found["a"], np.arange(3.0))


def test_a_truncated_safetensors_file_is_not_called_a_pickle(tmp_path):
    (path := tmp_path / "w").write_bytes(struct.pack("<Q", 0x280) + b'{"a": ')
    with pytest.raises(ConfigurationError, match="or is truncated"):
        read_pretrained(path)


def model_and_weights(num_classes=1000, **options):
    values = {"dataset": "imagenet", "batch_norm": True} | options
    config = build(CnnConfig, GRAPHCORE | values)
    norm = build_norm(config)
    model = catalog.build_layers(config.resolved_model, num_classes, norm, **config.network)
    example = np.zeros((1, 64, 64, 3), np.float32)
    return model, *init_layers(model, jax.random.key(0), example)


def torch_model(make, seed=0):
    """Return a PyTorch model in evaluation mode, with no number at its default."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(seed)
    model = make().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("running_mean"):
                value.uniform_(-0.1, 0.1, generator=generator)
            elif name.endswith("running_var") or (value.ndim == 1 and "weight" in name):
                value.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("bias"):
                value.uniform_(-0.1, 0.1, generator=generator)
    return torch, model


def resnet50():
    return pytest.importorskip("torchvision").models.resnet50()


def resnet18():
    return pytest.importorskip("torchvision").models.resnet18()


def resnext101():
    resnet = pytest.importorskip("torchvision").models.resnet
    return resnet.ResNet(resnet.Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4)


def efficientnet_b0():
    return pytest.importorskip("torchvision").models.efficientnet_b0()


def timms_efficientnet_b0():
    return pytest.importorskip("timm").create_model("efficientnet_b0")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (resnet50, {"model_name": "resnet", "model_size": "50"}),
        (resnet18, {"model_name": "resnet", "model_size": "18"}),
        (resnext101, {"model_name": "resnext", "model_size": "101"}),
        (efficientnet_b0, {"model_name": "efficientnet", "model_size": "B0"}),
        (timms_efficientnet_b0, {"model_name": "efficientnet", "model_size": "B0"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_logits_equal_those_of_the_original_model(make, options, tmp_path):
    torch, theirs = torch_model(make)
    arrays = {name: value.numpy() for name, value in theirs.state_dict().items()}
    path = write_safetensors(tmp_path / "theirs.safetensors", arrays)
    model, params, model_state = model_and_weights(**options)
    found = read_pretrained(path)
    params, model_state, notices = fit_pretrained(path, found, params, model_state)
    assert not notices
    images = np.random.default_rng(1).standard_normal((2, 224, 224, 3), np.float32)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(images.transpose(0, 3, 1, 2))).numpy()
    found, _ = apply_layers(model, params, model_state, images, training=False)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def exported_folder(
    folder, *, names="torchvision", side=64, formats=("safetensors",), **options
):
    """Export a model with random weights; return it and the code of its model card."""
    values = {"dataset": "imagenet", "batch_norm": True, "image_size": side} | options
    config = build(CnnConfig, values)
    norm = build_norm(config)
    model = catalog.build_layers(config.resolved_model, 7, norm, **config.network)
    shapes = init_shapes(model, jax.ShapeDtypeStruct((1, side, side, 3), np.float32))
    classes = [f"class {n}" for n in range(7)]
    weights = random_weights(shapes)
    trained = TrainedCnn(config, model, *weights, classes, (side, side, 3), folder)
    facts = describe_model(trained, names, {"update": 3, "epoch": 1.0})
    chosen = ExportConfig(run=folder, names=names, format=list(formats))
    write_folder(folder, trained, facts, chosen)
    card = (folder / "README.md").read_text()
    return trained, re.findall(r"```python\n(.*?)```", card, re.DOTALL)


def check_logits(trained, torch, theirs):
    images = np.random.default_rng(1).integers(0, 256, (2, 64, 64, 3), np.uint8)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    scaled = np.float32((images / 255 - mean) / std).transpose(0, 3, 1, 2)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(np.ascontiguousarray(scaled))).numpy()
    found = trained.logits(images)
    largest = np.abs(wanted).max()
    assert largest < 20  # as of a trained model; float32 rounds larger logits more
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * min(1, largest))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {"model_name": "resnet", "model_size": "18"},
        {"model_name": "resnet", "model_size": "50"},
        {"model_name": "resnet", "model_size": "18", "batch_norm": False},
        {"model_name": "resnext", "model_size": "50"},
        {"model_name": "efficientnet", "model_size": "B0"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_an_export_loads_in_torchvision_with_the_same_logits(
    options, tmp_path, monkeypatch
):
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchvision")
    pytest.importorskip("safetensors")
    trained, (code, *_) = exported_folder(tmp_path, **options)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)  # as a reader of the model card would
    check_logits(trained, torch, names["model"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_state_dict_loads_in_torchvision_with_the_same_logits(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchvision")
    options = {"model_name": "resnet", "model_size": "18", "formats": ["torch"]}
    trained, (code,) = exported_folder(tmp_path, **options)
    assert "torch.load" in code
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)  # as a reader of the model card would
    check_logits(trained, torch, names["model"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {"model_name": "resnet", "model_size": "18"},
        {"model_name": "resnext", "model_size": "50"},
        {"model_name": "efficientnet", "model_size": "B0", "names": "timm"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_an_exported_folder_is_a_model_of_timm(options, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    timm = pytest.importorskip("timm")
    pytest.importorskip("safetensors")
    trained, codes = exported_folder(tmp_path, **options)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(next(code for code in codes if "import timm" in code), names)
    check_logits(trained, torch, names["model"])
    settings = timm.data.resolve_model_data_config(names["model"])
    assert list(settings["input_size"]) == [3, 64, 64]
    assert list(settings["mean"]) == [0.485, 0.456, 0.406]
    assert names["model"].pretrained_cfg["label_names"] == trained.classes
