"""``mr.export``: weights and functions that programs without millrace can use."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millrace as mr
from millrace.config import ConfigurationError
from millrace.data.safetensors import read_metadata, read_safetensors
from millrace.exports.card import format_header, format_metrics, may_replace
from millrace.exports.folder import name_arrays
from millrace.nn.convolution import conv2d, portable_convolutions

PARAMS = {
    "first": {"kernel": np.arange(8.0, dtype=np.float32).reshape(4, 2), "bias": np.ones(2)},
    "second/scale": jnp.asarray([1.5, 2], jnp.bfloat16),
}
EXAMPLE = jax.ShapeDtypeStruct((1, 4), jnp.float32)
BARE_JAX = """
import sys
sys.modules["millrace"] = None  # an import of it would fail
import jax, numpy
from jax import export
program = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
x = numpy.load(sys.argv[2])
numpy.save(sys.argv[3], numpy.asarray(program.call(x)))
"""


def apply(params, x):
    hidden = x @ params["first"]["kernel"] + params["first"]["bias"]
    return hidden * params["second/scale"].astype(jnp.float32)


def run_without_millrace(program, x, folder):
    """Run a StableHLO program in a process that cannot import millrace."""
    pytest.importorskip("flatbuffers")
    np.save(folder / "x.npy", x)
    command = [sys.executable, "-c", BARE_JAX, program, folder / "x.npy", folder / "y.npy"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run(command, check=True, cwd=folder, env=environment)
    return np.load(folder / "y.npy")


def test_weights_are_named_by_their_keys_and_16_bits_become_32(tmp_path):
    files = mr.export(tmp_path / "new" / "out", PARAMS, config={"classes": ["a", "b"]})
    assert [file.name for file in files] == [
        *("model.safetensors", "config.json", "README.md")
    ]
    arrays = read_safetensors(files[0])
    assert set(arrays) == {"first.kernel", "first.bias", "second/scale"}
    np.testing.assert_array_equal(arrays["second/scale"], np.float32([1.5, 2]))
    assert arrays["first.bias"].dtype == np.float64  # wider types stay as they are
    assert json.loads(files[1].read_text()) == {"classes": ["a", "b"]}
    assert json.loads(read_metadata(files[0])["classes"]) == ["a", "b"]


def test_the_card_has_the_metrics_and_one_of_others_stays(tmp_path):
    path = mr.export(tmp_path / "mine", PARAMS, metrics={"validation_rmse": 0.875})[-1]
    card = path.read_text()
    assert card.startswith("---\nlibrary_name: millrace\n") and "# mine\n" in card
    assert "| validation rmse | 0.875 |" in card and "`model.safetensors`" in card
    path.write_text("# My own text\n")
    assert path not in mr.export(tmp_path / "mine", PARAMS)
    assert path.read_text() == "# My own text\n"


def test_a_card_for_another_library_is_known_as_ours(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(format_header("mine", {"rmse": 1.0}, library="timm", tags=["a"]) + "\n")
    assert may_replace(path)
    path.write_text("---\nlibrary_name: timm\n---\n- millrace\n")
    assert not may_replace(path)


def test_metrics_that_are_not_finite_are_in_the_card_as_well():
    table = format_metrics({"train_loss": "nan", "train_accuracy": np.float32(0.5)})
    assert "| train loss | nan |" in table and "| train accuracy | 0.5 |" in table


def test_a_function_runs_without_millrace_for_any_batch(tmp_path):
    pytest.importorskip("flatbuffers")
    files = mr.export(tmp_path, PARAMS, apply, EXAMPLE)
    assert [file.name for file in files] == [
        *("model.safetensors", "model.stablehlo", "config.json", "README.md")
    ]
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    found = run_without_millrace(files[1], x, tmp_path)
    np.testing.assert_allclose(found, apply(PARAMS, x), rtol=1e-6)


def test_a_program_is_written_for_cpus_and_gpus_with_plain_convolutions(tmp_path):
    """A convolution is one operation, whatever the device that it was exported on."""
    pytest.importorskip("flatbuffers")
    from jax import export

    layer = mr.layers.conv("conv", 6, groups=3, strides=2)
    kernel = np.random.default_rng(0).standard_normal((3, 3, 1, 6)).astype(np.float32)
    example = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)

    def convolve(params, x):
        return mr.layers.apply_layers([layer], {"conv": params}, {}, x, training=False)[0]

    path = mr.export(tmp_path, {"kernel": kernel}, convolve, example)[1]
    program = export.deserialize(bytearray(path.read_bytes()))
    assert program.platforms == ("cpu", "cuda")
    text = program.mlir_module()
    assert "stablehlo.convolution" in text and "stablehlo.slice" not in text
    x = np.random.default_rng(1).standard_normal((2, 8, 8, 3)).astype(np.float32)
    wanted = convolve({"kernel": kernel}, x)
    np.testing.assert_allclose(program.call(x), wanted, rtol=1e-5, atol=1e-5)


def test_convolutions_are_portable_only_inside_the_block():
    x, kernel = np.zeros((1, 4, 4, 2), np.float32), np.zeros((1, 1, 2, 3), np.float32)

    def primitives():
        # A new function each time, because JAX caches what it has traced.
        return str(jax.make_jaxpr(lambda x: conv2d(x, kernel))(x))

    with portable_convolutions():
        assert "conv_general_dilated" in primitives()
    if jax.default_backend() == "cpu":
        assert "conv_general_dilated" not in primitives()


@pytest.mark.parametrize(("name", "library"), [("stablehlo", "flatbuffers"), ("onnx",) * 2])
def test_a_missing_library_is_named_before_anything_is_written(
    name, library, tmp_path, monkeypatch
):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == library else find_spec(n)
    )
    with pytest.raises(ConfigurationError, match=f"pip install {library}"):
        mr.export(tmp_path / "out", PARAMS, apply, EXAMPLE, formats=[name])
    assert not (tmp_path / "out").exists()


def test_files_of_an_earlier_export_are_not_mixed_with_new_ones(tmp_path):
    for name in ("model.onnx", "model.pt"):
        (tmp_path / name).write_bytes(b"old")
    with pytest.raises(ConfigurationError) as caught:
        mr.export(tmp_path, PARAMS)
    assert "has model.pt and model.onnx of an earlier export" in str(caught.value)
    assert "(safetensors torch onnx)" in str(caught.value)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_type_that_one_of_the_formats_lacks_is_an_error_before_anything_is_written(
    tmp_path,
):
    formats = ["safetensors", "torch"]
    with pytest.raises(ValueError, match="a has the type uint32, unknown to PyTorch"):
        mr.export(tmp_path / "out", {"a": np.ones(2, np.uint32)}, formats=formats)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((PARAMS, apply), {}, "both function and example"),
        ((PARAMS,), {"formats": ["stablehlo"]}, "needs a function and an example"),
        ((PARAMS,), {"formats": ["pickle"]}, "There is no format pickle. Available"),
        (({"a": {"b": np.ones(1)}, "a.b": np.ones(1)},), {}, "Two arrays .* name a.b"),
        (({"key": jax.random.key(0)},), {}, "key is a random key"),
        (
            (PARAMS, lambda p, x: x[: x.shape[0] // 2], EXAMPLE),
            {"formats": ["onnx"]},
            "stablehlo|size of the batch|slice",
        ),
    ],
    ids=lambda _: "",
)
def test_mistakes_are_explained(arguments, options, message, tmp_path):
    if "onnx" in options.get("formats", ()):
        pytest.importorskip("onnx")
    with pytest.raises(ValueError, match=message):
        mr.export(tmp_path, *arguments, **options)


def test_names_of_tuples_and_lists_are_fields_and_numbers():
    class State(NamedTuple):
        weights: list

    named = name_arrays(State([np.zeros(1), np.ones(1)]))
    assert list(named) == ["weights.0", "weights.1"]
