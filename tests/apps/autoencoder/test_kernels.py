"""The joint loss in hand-written kernels, interpreted, equals the one compiled by XLA."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_loop import rounding

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.joint_training import (
    build_trials_program,
    get_settings,
    init_trials,
)
from millrace.apps.autoencoder.kernels import joint, tiles
from millrace.apps.autoencoder.loss import build_loss
from millrace.apps.autoencoder.model import Model, init_params
from millrace.apps.autoencoder.program import build_model, init_weights, plan_steps
from millrace.config import build, replace_options

USERS, ITEMS = 16, 77
MODEL = Model(ITEMS, 128, 0.5)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Use several tiles in several parts, the last one not full."""
    monkeypatch.setattr(tiles, "TILE", 16)
    few = {each: tiles.Tiling(2, reads_ahead=True) for each in joint._TILINGS}
    monkeypatch.setattr(joint, "_TILINGS", few)


def batch(dtype, num_updates=None):
    """Users with 1 to 16 ratings each, and eight entries of padding."""
    rng = np.random.default_rng(0)
    rows = np.repeat(np.arange(USERS), np.arange(1, USERS + 1))
    items = np.concatenate([rng.permutation(ITEMS)[: n + 1] for n in range(USERS)])
    values = rng.integers(1, 6, len(rows))

    def pad(x, padding, dtype=np.int32):
        return np.append(x, [padding] * 8).astype(dtype).reshape(USERS, -1)

    made = {
        "user": np.arange(USERS, dtype=np.int32),
        "row": pad(rows, USERS),
        "item": pad(items, 0),
        "value": pad(values, 0, dtype),
    }
    if num_updates:
        return {name: np.stack([x] * num_updates) for name, x in made.items()}
    return made


@functools.cache
def weights():
    """Draw weights in float32: with x64 enabled, the random numbers would differ."""
    with jax.enable_x64(False):
        return jax.device_get(init_params(MODEL, jax.random.key(1)))


def values_and_grads(loss_fn, dtype, *, scale=1.0, params=None):
    """Return the results of the loss for several dropout keys."""
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params or weights())

    def scaled(params, key):
        loss, aux = loss_fn(params, None, batch(dtype), key)
        return loss * scale, aux

    compiled = jax.jit(jax.value_and_grad(scaled, has_aux=True))
    keys = [jax.random.fold_in(jax.random.key(2), number) for number in range(4)]
    return [compiled(params, key) for key in keys]


def value_and_grad(*args, **options):
    return values_and_grads(*args, **options)[0]


@functools.cache
def truths():
    with jax.enable_x64(True):
        found = values_and_grads(build_loss(MODEL, "joint"), jnp.float64)
        return jax.tree.map(np.asarray, found)


def distances(found):
    """Return the relative distance of each gradient from the true one."""
    return [
        np.linalg.norm(np.asarray(ours, np.float64) - theirs) / np.linalg.norm(theirs)
        for (_, gradient), (_, exact) in zip(found, truths(), strict=True)
        for ours, theirs in zip(
            jax.tree.leaves(gradient), jax.tree.leaves(exact), strict=True
        )
    ]


def test_loss_and_gradient_are_exact_up_to_float32_rounding():
    found = values_and_grads(joint.build_joint_loss(MODEL, interpret=True), jnp.float32)
    for (ours, _), (theirs, _) in zip(found, truths(), strict=True):
        (loss, (_, info)), (exact, (_, expected)) = ours, theirs
        np.testing.assert_allclose(loss, exact, rtol=1e-6)
        np.testing.assert_allclose(info["rmse"], expected["rmse"], rtol=1e-6)
    assert max(distances(found)) < rounding()


@pytest.mark.parametrize(
    "dtype", [jnp.float16, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)]
)
def test_the_sixteen_bit_gradient_is_on_average_as_exact_as_that_of_xla(dtype):
    ours = distances(values_and_grads(joint.build_joint_loss(MODEL, interpret=True), dtype))
    xla = distances(values_and_grads(build_loss(MODEL, "joint"), dtype))
    assert np.mean(ours) < 1.05 * np.mean(xla)


def test_a_float16_reconstruction_saturates_at_the_largest_number():
    """Where both passes saturate, only biases of other items have a gradient."""
    params = jax.tree.map(lambda x: jnp.asarray(50 * x, jnp.float16), weights())
    params["decoder"]["fc_3"]["bias"] = jnp.full(ITEMS, 6e4, jnp.float16)
    ours = value_and_grad(
        joint.build_joint_loss(MODEL, interpret=True), jnp.float16, params=params
    )
    xla = value_and_grad(build_loss(MODEL, "joint"), jnp.float16, params=params)
    assert 0 < xla[0][1][1]["rmse"] < 7e4
    np.testing.assert_allclose(ours[0][1][1]["rmse"], xla[0][1][1]["rmse"], rtol=1e-2)


def test_an_overflow_makes_gradients_non_finite():
    loss_fn = joint.build_joint_loss(MODEL, interpret=True)
    _, gradient = value_and_grad(loss_fn, jnp.float16, scale=2.0**24)
    assert not all(np.isfinite(each).all() for each in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    "precision", ["16.32", pytest.param("32.32", marks=pytest.mark.slow)]
)
def test_trials_become_the_same_models_with_and_without_the_kernels(monkeypatch, precision):
    scaling = {"32.32": 1, "16.32": "dynamic"}[precision]
    options = {"size": 128, "batch_size": USERS, "precision": precision, "data": "random"}
    config = build(AutoencoderConfig, options | {"loss_scaling": scaling})
    model = build_model(config, ITEMS)
    steps = plan_steps(config, USERS)._replace(batches_per_step=4)
    device = jax.devices()[0]
    start = init_weights(config, model)[0]

    def trained(config=config):
        settings = get_settings(config, model)
        rates = [2.0**exponent * USERS for exponent in (-10, -9)]
        trials = [settings._replace(learning_rate=rate) for rate in rates]
        program = build_trials_program(config, model, steps, trials, device)
        state = program.init(*init_trials((start, None), 2))
        chunk = jax.device_put(batch(np.float32, 4))
        return jax.device_get(program.run(state, chunk)[0].params)

    expected = trained()
    joint_loss, calls = joint.build_joint_loss, []

    def interpreted(model):
        calls.append(model)
        return joint_loss(model, interpret=True)

    monkeypatch.setattr(joint, "is_supported", lambda *_: True)
    monkeypatch.setattr(joint, "build_joint_loss", interpreted)
    found = trained()
    assert calls == [model]

    def distances(weights, others):
        """Return distances relative to how far the weights have moved."""
        trees = (weights, others, expected, start)
        return [
            np.linalg.norm(x - y) / np.linalg.norm(then - np.asarray(first))
            for x, y, then, first in zip(*map(jax.tree.leaves, trees), strict=True)
        ]

    if precision == "32.32":
        assert max(distances(found, expected)) < 1e-5
    else:  # both round differently: neither is far from the exact result
        monkeypatch.undo()
        wide = replace_options(config, precision="32.32", loss_scaling=1)
        exact = trained(wide)
        ours, xla = distances(found, exact), distances(expected, exact)
        # On a CPU, ours are 0.025; XLA's are 0.044 with jax 0.10 and 0.023 with 0.12.
        assert np.mean(ours) < max(0.03, 1.05 * np.mean(xla)) < 0.05


def test_the_kernels_are_used_only_where_they_were_measured():
    hopper = types.SimpleNamespace(compute_capability="9.0")
    measured = {"num_users": 64, "num_models": 16, "compute_dtype": "bfloat16"}
    is_supported = functools.partial(joint.is_supported, **measured)
    assert is_supported(MODEL, device=hopper)
    assert not is_supported(MODEL, device=jax.devices("cpu")[0])
    assert not is_supported(MODEL, device=types.SimpleNamespace(compute_capability="8.9"))
    assert not is_supported(MODEL, device=hopper, num_models=15)
    assert not is_supported(MODEL, device=hopper, num_users=32)
    assert not is_supported(MODEL, device=hopper, compute_dtype="float32")
    for other in ({"tied": False}, {"selu": False}, {"size": 512}):
        assert not is_supported(MODEL._replace(**other), device=hopper)
    assert not is_supported(MODEL._replace(input_dropout_rate=0.2), device=hopper)
