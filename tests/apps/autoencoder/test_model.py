"""The network: its size, its first weights, and what it computes."""

import functools

import autoencoder_oracle as oracle
import jax
import numpy as np
import pytest

from millrace.apps.autoencoder.model import (
    Known,
    Model,
    activate,
    init_params,
    kept_codes,
    reconstruct,
    reconstruct_known,
)
from millrace.apps.autoencoder.trained import weight_shapes
from millrace.nn.layers import num_parameters

NETFLIX = 17_768


@pytest.mark.parametrize(
    ("size", "parameters"), [(128, 2_391_400), (256, 4_764_520), (512, 9_904_488)]
)
def test_the_models_have_as_many_parameters_as_the_reference_says(size, parameters):
    shapes = weight_shapes(Model(NETFLIX, size, 0.8), "float32")
    assert num_parameters(shapes) == parameters


def test_an_untied_decoder_has_as_many_parameters_as_the_paper_says():
    """Its table 2: six layers, every hidden one 128 wide, 4,632,552 parameters."""
    shapes = weight_shapes(Model(NETFLIX, 128, 0.8, tied=False), "float32")
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


def test_first_weights_are_glorots_and_biases_are_zero(network):
    model, params, _ = network
    layers = [*params["encoder"].values(), *params["decoder"].values()]
    for layer in layers:
        assert not layer["bias"].any()
    for kernel in (layer["kernel"] for layer in layers if "kernel" in layer):
        limit = (6 / sum(kernel.shape)) ** 0.5
        assert 0.98 * limit < np.abs(kernel).max() <= limit
        assert kernel.std() == pytest.approx(limit / 3**0.5, rel=0.05)
    assert ("kernel" in params["decoder"]["fc_1"]) != model.tied


def test_a_reconstruction_is_the_oracles(network):
    model, params, rows = network
    found = jax.jit(reconstruct, static_argnums=0)(model, params, rows)
    as_float64 = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    expected = oracle.Pass(as_float64, rows.astype(np.float64)).output
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_known_ratings_are_reconstructed_as_in_the_whole(network):
    model, params, rows = network
    row, item = np.nonzero(rows)
    filled = Known(
        np.append(row, len(rows)), np.append(item, 0), np.append(rows[row, item], 0.0)
    )
    known = jax.jit(reconstruct_known, static_argnums=(0, 3))
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, params)
        (kept,) = kept_codes(model, jax.random.key(1), 1, len(rows))
        found = known(model, params, filled, len(rows), kept)
        whole = jax.jit(reconstruct, static_argnums=0)
        expected = np.asarray(whole(model, params, rows.astype(float), kept))
    np.testing.assert_allclose(found[:-1], expected[row, item], rtol=1e-12)


def test_an_activation_in_float32_and_its_gradient_are_those_of_selu():
    model = Model(19, 128, 0.65)
    x = np.concatenate([np.linspace(-30, 5, 1001), -np.logspace(-8, 0, 101), [0.0]])

    def of_all(function, x):
        return jax.vmap(jax.value_and_grad(function))(x)

    found = of_all(functools.partial(activate, model), x.astype(np.float32))
    with jax.enable_x64(True):
        expected = of_all(jax.nn.selu, x)
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, exact, rtol=1e-6, atol=3e-7)


def test_in_float16_what_is_too_large_stops_at_the_largest_number():
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


def test_dropout_keeps_its_share_and_the_mean_of_the_code():
    model = Model(19, 128, 0.65)
    keys = [jax.random.fold_in(jax.random.key(0), number) for number in range(2)]
    masks = [np.asarray(m) for key in keys for m in kept_codes(model, key, 2, 500)]
    for mask in masks:
        assert mask.mean() == pytest.approx(0.35, abs=0.005)
    for number, mask in enumerate(masks):  # no pass knows of another
        for other in masks[:number]:
            assert (mask & other).mean() == pytest.approx(0.35**2, abs=0.005)
    assert kept_codes(model._replace(dropout_rate=0.0), keys[0], 2, 5) == [None, None]
