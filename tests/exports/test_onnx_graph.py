"""ONNX models: ONNX Runtime computes what JAX computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved_cnn import random_weights

from millrace.apps.cnn.augment import get_preprocessing
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.models import catalog
from millrace.apps.cnn.program import build_norm
from millrace.config import build
from millrace.exports.onnx_graph import UnsupportedOperation, build_model
from millrace.nn.convolution import portable_convolutions
from millrace.nn.layers import apply_layers, init_shapes

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def run(model: bytes, x: np.ndarray) -> np.ndarray:
    onnx.checker.check_model(onnx.load_from_string(model), full_check=True)
    (output,) = onnxruntime.InferenceSession(model).run(None, {"x": x})
    return output


def check(function, *shape, dtype=np.float32):
    """Compare results for batches of two sizes, from one model."""
    example = jax.ShapeDtypeStruct((1, *shape), dtype)
    model = build_model(function, example, names=("x", "y"))
    for number in (1, 3):
        x = np.random.default_rng(number).uniform(0, 2, (number, *shape)).astype(dtype)
        wanted = np.asarray(jax.jit(function)(x))
        np.testing.assert_allclose(run(model, x), wanted, rtol=1e-5, atol=1e-5)


MODELS = {
    "digits_cnn": ({}, (8, 8, 1)),
    "toy_model": ({"model_name": "toy_model"}, (32, 32, 3)),
    "padded shortcuts": ({"model_name": "cifar_resnet8"}, (32, 32, 3)),
    "grouped convolutions and group norm": (
        {"model_name": "resnext", "dataset": "cifar10", "groups": 4},
        (32, 32, 3),
    ),
    "max pool with padding": (
        {"model_name": "resnet", "model_size": "10", "dataset": "imagenet"},
        (64, 64, 3),
    ),
    "squeeze and excite, depthwise": (
        {"model_name": "efficientnet", "dataset": "cifar10"},
        (32, 32, 3),
    ),
}
SLOW = {"max pool with padding", "squeeze and excite, depthwise"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in MODELS],
)
def test_logits_of_networks_agree_for_batches_of_any_size(name):
    options, shape = MODELS[name]
    config = build(CnnConfig, options)
    model = catalog.build_layers(
        config.resolved_model, 10, build_norm(config), **config.network
    )
    example = np.zeros((1, *shape), np.float32)
    params, model_state = random_weights(init_shapes(model, example))
    scale = get_preprocessing(config.resolved_dataset).scale_on_device

    def logits(images):
        return apply_layers(model, params, model_state, scale(images), training=False)[0]

    with portable_convolutions():
        example = jax.ShapeDtypeStruct((1, *shape), np.uint8)
        exported = build_model(logits, example, names=("x", "logits"))
    images = np.random.default_rng(1).integers(0, 256, (3, *shape), np.uint8)
    wanted = np.asarray(jax.jit(logits)(images))
    atol = 1e-5 * np.abs(wanted).max()
    np.testing.assert_allclose(run(exported, images), wanted, rtol=0, atol=atol)
    np.testing.assert_allclose(run(exported, images[:1]), wanted[:1], rtol=0, atol=atol)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.nn.softmax(x) + jnp.where(x > 1, x, -x),
        lambda x: jax.nn.gelu(x, approximate=False) * jax.nn.gelu(x),
        lambda x: jnp.log1p(x) + jnp.expm1(x) + x**3 + jax.nn.elu(x - 1),
        lambda x: (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1),
        lambda x: jnp.concatenate([x, jnp.zeros_like(x)], 1),
        lambda x: jax.lax.slice(x, (0, 1), x.shape, (1, 2)),
        lambda x: jnp.einsum(
            "bi,ji->bj", x, np.arange(12.0, dtype=np.float32).reshape(3, 4)
        ),
        lambda x: jnp.broadcast_to(jnp.float32(2), x.shape),
        lambda x: x.reshape(x.shape[0], 2, 2).transpose(0, 2, 1).max(2),
        lambda x: (x != 0).astype(jnp.float32).sum(1),
    ],
    ids=lambda _: "",
)
def test_operations_agree(function):
    check(function, 4)


def test_bytes_are_converted_before_they_are_scaled():
    check(lambda x: x.astype(jnp.float32) / 255 - 0.5, 4, dtype=np.uint8)


def test_what_depends_on_constants_only_is_computed_in_advance():
    scale = np.ones(4, np.float32)

    def function(x):
        return x * (scale / jnp.sqrt(scale + 1e-3))

    example = jax.ShapeDtypeStruct((1, 4), np.float32)
    graph = onnx.load_from_string(build_model(function, example, names=("x", "y"))).graph
    assert [node.op_type for node in graph.node] == ["Mul", "Identity"]


def test_an_operation_without_translation_is_named():
    example = jax.ShapeDtypeStruct((1, 4), np.float32)
    with pytest.raises(UnsupportedOperation, match="The operation sort of JAX"):
        build_model(lambda x: jnp.sort(x), example, names=("x", "y"))
