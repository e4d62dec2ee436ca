"""The joint loss in kernels of our own, interpreted: what XLA's own form gives."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_loop import rounding

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.joint_training import first_state, trials_program
from millrace.apps.autoencoder.kernels import joint, tiles
from millrace.apps.autoencoder.loss import loss_of
from millrace.apps.autoencoder.model import Model, init_params
from millrace.apps.autoencoder.program import model_of
from millrace.apps.autoencoder.reference_steps import steps_of
from millrace.apps.autoencoder.train import first_weights
from millrace.config import build, replace_options

USERS, ITEMS = 16, 77
MODEL = Model(ITEMS, 128, 0.5)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles in each of several parts, the last one not full."""
    monkeypatch.setattr(tiles, "TILE", 16)
    few = {each: tiles.Tiling(2, reads_ahead=True) for each in joint._TILINGS}
    monkeypatch.setattr(joint, "_TILINGS", few)


def batch(dtype, num_updates=None):
    """Users with 1 to 16 ratings each, and eight places of filling."""
    rng = np.random.default_rng(0)
    rows = np.repeat(np.arange(USERS), np.arange(1, USERS + 1))
    items = np.concatenate([rng.permutation(ITEMS)[: n + 1] for n in range(USERS)])
    values = rng.integers(1, 6, len(rows))

    def filled(x, filling, dtype=np.int32):
        return np.append(x, [filling] * 8).astype(dtype).reshape(USERS, -1)

    made = {
        "user": np.arange(USERS, dtype=np.int32),
        "row": filled(rows, USERS),
        "item": filled(items, 0),
        "value": filled(values, 0, dtype),
    }
    if num_updates:
        return {name: np.stack([x] * num_updates) for name, x in made.items()}
    return made


@functools.cache
def weights():
    """In float32 whatever is enabled: wider ones would be others."""
    with jax.enable_x64(False):
        return jax.device_get(init_params(MODEL, jax.random.key(1)))


def values_and_grads(loss_fn, dtype, *, scale=1.0, params=None):
    """What the loss gives with each of several keys of dropout."""
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params or weights())

    def scaled(params, key):
        loss, told = loss_fn(params, None, batch(dtype), key)
        return loss * scale, told

    compiled = jax.jit(jax.value_and_grad(scaled, has_aux=True))
    keys = [jax.random.fold_in(jax.random.key(2), number) for number in range(4)]
    return [compiled(params, key) for key in keys]


def value_and_grad(*args, **options):
    return values_and_grads(*args, **options)[0]


@functools.cache
def truths():
    with jax.enable_x64(True):
        found = values_and_grads(loss_of(MODEL, "joint"), jnp.float64)
        return jax.tree.map(np.asarray, found)


def distances(found):
    """How far each gradient is from the true one, in proportion to it."""
    return [
        np.linalg.norm(np.asarray(ours, np.float64) - theirs) / np.linalg.norm(theirs)
        for (_, gradient), (_, exact) in zip(found, truths(), strict=True)
        for ours, theirs in zip(
            jax.tree.leaves(gradient), jax.tree.leaves(exact), strict=True
        )
    ]


def test_loss_and_gradient_are_exact_to_what_float32_can_say():
    found = values_and_grads(joint.joint_loss(MODEL, interpret=True), jnp.float32)
    for (ours, _), (theirs, _) in zip(found, truths(), strict=True):
        (loss, (_, told)), (exact, (_, expected)) = ours, theirs
        np.testing.assert_allclose(loss, exact, rtol=1e-6)
        np.testing.assert_allclose(told["rmse"], expected["rmse"], rtol=1e-6)
    assert max(distances(found)) < rounding()


@pytest.mark.parametrize(
    "dtype", [jnp.float16, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)]
)
def test_in_sixteen_bits_the_gradient_is_on_the_whole_as_exact_as_xlas(dtype):
    ours = distances(values_and_grads(joint.joint_loss(MODEL, interpret=True), dtype))
    xlas = distances(values_and_grads(loss_of(MODEL, "joint"), dtype))
    assert np.mean(ours) < 1.05 * np.mean(xlas)


def test_in_float16_a_reconstruction_stops_at_the_largest_number():
    """Where both passes are at the end, only the bias of what is not can be learned."""
    params = jax.tree.map(lambda x: jnp.asarray(50 * x, jnp.float16), weights())
    params["decoder"]["fc_3"]["bias"] = jnp.full(ITEMS, 6e4, jnp.float16)
    ours = value_and_grad(
        joint.joint_loss(MODEL, interpret=True), jnp.float16, params=params
    )
    xlas = value_and_grad(loss_of(MODEL, "joint"), jnp.float16, params=params)
    assert 0 < xlas[0][1][1]["rmse"] < 7e4
    np.testing.assert_allclose(ours[0][1][1]["rmse"], xlas[0][1][1]["rmse"], rtol=1e-2)


def test_what_overflows_is_seen_to():
    loss_fn = joint.joint_loss(MODEL, interpret=True)
    _, gradient = value_and_grad(loss_fn, jnp.float16, scale=2.0**24)
    assert not all(np.isfinite(each).all() for each in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    "precision", ["16.32", pytest.param("32.32", marks=pytest.mark.slow)]
)
def test_models_trained_together_become_what_they_become_without(monkeypatch, precision):
    scaling = {"32.32": 1, "16.32": "dynamic"}[precision]
    options = {"size": 128, "batch_size": USERS, "precision": precision}
    config = build(AutoencoderConfig, options | {"loss_scaling": scaling})
    model = model_of(config, ITEMS)
    steps = steps_of(config, USERS)._replace(batches_per_step=4)
    device = jax.devices()[0]
    start = first_weights(config, model)[0]

    def trained(config=config):
        program = trials_program(config, model, steps, [-10.0, -9.0], device)
        state = program.init(*first_state((start, None), 2))
        chunk = jax.device_put(batch(np.float32, 4))
        return jax.device_get(program.run(state, chunk)[0].params)

    expected = trained()
    joint_loss, calls = joint.joint_loss, []

    def interpreted(model):
        calls.append(model)
        return joint_loss(model, interpret=True)

    monkeypatch.setattr(joint, "are_for", lambda *_: True)
    monkeypatch.setattr(joint, "joint_loss", interpreted)
    found = trained()
    assert calls == [model]

    def distances(weights, others):
        """How far apart they are, in proportion to how far they have come."""
        trees = (weights, others, expected, start)
        return [
            np.linalg.norm(x - y) / np.linalg.norm(then - np.asarray(first))
            for x, y, then, first in zip(*map(jax.tree.leaves, trees), strict=True)
        ]

    if precision == "32.32":
        assert max(distances(found, expected)) < 1e-5
    else:  # each rounds in its own way: neither is further from the truth than the other
        monkeypatch.undo()
        wide = replace_options(config, precision="32.32", loss_scaling=1)
        exact = trained(wide)
        ours, xlas = distances(found, exact), distances(expected, exact)
        assert np.mean(ours) < 1.05 * np.mean(xlas) < 0.05


def test_they_are_for_what_they_can_do_on_the_gpu_they_were_measured_on():
    hopper = types.SimpleNamespace(compute_capability="9.0")
    usual = {"num_users": 64, "num_models": 16, "compute": "bfloat16"}
    are_for = functools.partial(joint.are_for, **usual)
    assert are_for(MODEL, device=hopper)
    assert not are_for(MODEL, device=jax.devices("cpu")[0])
    assert not are_for(MODEL, device=types.SimpleNamespace(compute_capability="8.9"))
    assert not are_for(MODEL, device=hopper, num_models=15)
    assert not are_for(MODEL, device=hopper, num_users=32)
    assert not are_for(MODEL, device=hopper, compute="float32")
    for other in ({"tied": False}, {"selu": False}, {"size": 512}):
        assert not are_for(MODEL._replace(**other), device=hopper)
    assert not are_for(MODEL._replace(input_dropout_rate=0.2), device=hopper)
