"""The network: its size, its initial weights and its output."""

import functools

import autoencoder_oracle as oracle
import jax
import numpy as np
import pytest

from millrace.apps.autoencoder.model import (
    KnownRatings,
    Model,
    activate,
    draw_dropout_masks,
    init_params,
    reconstruct,
    reconstruct_known,
)
from millrace.apps.autoencoder.predictor import get_weight_shapes
from millrace.nn.layers import num_parameters

NETFLIX = 17_768


@pytest.mark.parametrize(
    ("size", "parameters"), [(128, 2_391_400), (256, 4_764_520), (512, 9_904_488)]
)
def test_models_have_the_number_of_parameters_of_the_reference(size, parameters):
    shapes = get_weight_shapes(Model(NETFLIX, size, 0.8), "float32")
    assert num_parameters(shapes) == parameters


def test_an_untied_model_has_the_number_of_parameters_of_the_paper():
    """Table 2 of the paper: six layers, hidden width 128, 4,632,552 parameters."""
    shapes = get_weight_shapes(Model(NETFLIX, 128, 0.8, tied=False), "float32")
    first, last = shapes["encoder"]["fc_1"], shapes["decoder"]["fc_3"]
    of_128 = 4 * (128 * 128 + 128)
    assert num_parameters((first, last)) + of_128 == 4_632_552


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def network(request):
    model = Model(19, 128, 0.65, tied=request.param)
    params = jax.device_get(init_params(model, jax.random.key(0)))
    random = np.random.default_rng(0)
    rows = random.integers(1, 6, (5, 19)) * (random.random((5, 19)) < 0.4)
    return model, params, rows.astype(np.float32)


def test_initial_kernels_are_glorot_uniform_and_biases_are_zero(network):
    model, params, _ = network
    layers = [*params["encoder"].values(), *params["decoder"].values()]
    for layer in layers:
        assert not layer["bias"].any()
    for kernel in (layer["kernel"] for layer in layers if "kernel" in layer):
        limit = (6 / sum(kernel.shape)) ** 0.5
        assert 0.98 * limit < np.abs(kernel).max() <= limit
        assert kernel.std() == pytest.approx(limit / 3**0.5, rel=0.05)
    assert ("kernel" in params["decoder"]["fc_1"]) != model.tied


def test_a_reconstruction_matches_the_oracle(network):
    model, params, rows = network
    found = jax.jit(reconstruct, static_argnums=0)(model, params, rows)
    as_float64 = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    expected = oracle.Pass(as_float64, rows.astype(np.float64)).output
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_known_ratings_are_reconstructed_as_in_dense_rows(network):
    model, params, rows = network
    row, item = np.nonzero(rows)
    padded = KnownRatings(
        np.append(row, len(rows)), np.append(item, 0), np.append(rows[row, item], 0.0)
    )
    known = jax.jit(reconstruct_known, static_argnums=(0, 3))
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, params)
        (mask,) = draw_dropout_masks(model, jax.random.key(1), 1, len(rows))
        found = known(model, params, padded, len(rows), mask)
        whole = jax.jit(reconstruct, static_argnums=0)
        expected = np.asarray(whole(model, params, rows.astype(float), mask))
    np.testing.assert_allclose(found[:-1], expected[row, item], rtol=1e-12)


def test_the_float32_activation_and_its_gradient_match_selu():
    model = Model(19, 128, 0.65)
    x = np.concatenate([np.linspace(-30, 5, 1001), -np.logspace(-8, 0, 101), [0.0]])

    def values_and_gradients(function, x):
        return jax.vmap(jax.value_and_grad(function))(x)

    found = values_and_gradients(functools.partial(activate, model), x.astype(np.float32))
    with jax.enable_x64(True):
        expected = values_and_gradients(jax.nn.selu, x)
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, exact, rtol=1e-6, atol=3e-7)


def test_float16_saturates_at_the_largest_number():
    model = Model(900, 128, 0.0)
    params = init_params(model, jax.random.key(0))
    params["encoder"]["fc_1"]["kernel"] = jax.numpy.full((900, 128), 30.0)
    params = jax.tree.map(lambda x: x.astype("float16"), params)
    rows = jax.numpy.full((2, 900), 5.0, "float16")

    def total(params):
        return reconstruct(model, params, rows).astype("float32").mean()

    value, gradient = jax.jit(jax.value_and_grad(total))(params)
    assert 0 < value <= np.finfo(np.float16).max
    assert all(np.isfinite(each).all() for each in jax.tree.leaves(gradient))
    largest = jax.numpy.asarray([3e38], "bfloat16")
    assert activate(model, largest) > 65504


def test_dropout_masks_have_the_right_rate_and_are_independent():
    model = Model(19, 128, 0.65)
    keys = [jax.random.fold_in(jax.random.key(0), number) for number in range(2)]
    masks = [np.asarray(m) for key in keys for m in draw_dropout_masks(model, key, 2, 500)]
    for mask in masks:
        assert mask.mean() == pytest.approx(0.35, abs=0.005)
    for number, mask in enumerate(masks):  # passes are independent
        for other in masks[:number]:
            assert (mask & other).mean() == pytest.approx(0.35**2, abs=0.005)
    assert draw_dropout_masks(model._replace(dropout_rate=0.0), keys[0], 2, 5) == [
        None,
        None,
    ]
