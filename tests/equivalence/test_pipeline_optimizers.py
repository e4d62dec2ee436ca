"""An optimizer gives the same weights with and without a pipeline."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelined import largest_difference

from millrace.nn.layers import dense, init_layers, relu
from millrace.nn.losses import LayeredLoss
from millrace.plan import Plan
from millrace.program import offload, state_layout
from millrace.program.optimizers import build_optimizer
from millrace.program.training import training_program

pytestmark = pytest.mark.devices(4)

TOLERANCE = 1e-6
UPDATES, MICRO_BATCHES, FEATURES = 5, 6, 5
LAYERS = [
    dense("first", 8),
    relu("relu"),
    dense("second", 8),
    dense("third", 6),
    dense("last", 4),
]


def mean_squared_error(y, batch):
    return jnp.square(y - batch["y"]).mean(), {}


LOSS = LayeredLoss(LAYERS, lambda batch, key: batch["x"], mean_squared_error)


@functools.cache
def weights():
    return init_layers(LAYERS, jax.random.key(0), np.zeros((1, FEATURES), np.float32))


def train(optimizer, **plan):
    """Make five updates; return the unpacked state."""
    batching = {"micro_batch_size": 2, "gradient_accumulation_count": MICRO_BATCHES}
    program = training_program(LOSS, optimizer, Plan(**(batching | plan)))
    rng = np.random.default_rng(0)
    shape = (UPDATES * MICRO_BATCHES, 2 * program.plan.num_replicas)
    chunk = {
        "x": rng.standard_normal((*shape, FEATURES)).astype(np.float32),
        "y": rng.standard_normal((*shape, 4)).astype(np.float32),
    }
    state = program.init(*weights())
    state, _ = program.run(state, jax.device_put(chunk, program.chunk_sharding))
    return jax.device_get(program.unpack_state(state))


def first_half(params):
    """Label the layers by their position in the tree."""
    return {name: "ab"[position >= 2] for position, name in enumerate(params)}


def by_depth():
    """Decay the learning rate from layer to layer."""
    return optax.stateless(
        lambda updates, _: {
            name: jax.tree.map(lambda u, position=position: u * 0.5**position, layer)
            for position, (name, layer) in enumerate(updates.items())
        }
    )


def kernels(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def clipped(inner=None):
    return optax.chain(optax.clip_by_global_norm(0.2), inner or optax.adamw(1e-2))


OPTIMIZERS = {
    "clip": clipped,
    "clip_updates": lambda: optax.chain(clipped(), optax.clip_by_global_norm(0.01)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "multi_steps_clip": lambda: optax.MultiSteps(clipped(), 2),
    "masked": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=kernels),
    "masked_clip": lambda: optax.chain(
        optax.masked(optax.clip_by_global_norm(0.1), kernels), optax.sgd(0.1, 0.9)
    ),
    "by_position": lambda: optax.multi_transform(
        {"a": clipped(optax.sgd(0.1)), "b": optax.adam(1e-2)}, first_half
    ),
    "layerwise": lambda: optax.chain(optax.adam(1e-2), by_depth()),
    "dadapt": lambda: optax.contrib.dadapt_adamw(1.0, estim_lr0=1e-2),
    "prodigy": lambda: optax.contrib.prodigy(0.1, estim_lr0=1e-2),
    "adaptive_clip": lambda: optax.chain(
        optax.adaptive_grad_clip(0.01), optax.sgd(0.1, 0.9)
    ),
    "lars": lambda: optax.lars(0.1, 1e-2),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=1e-2),
    "if_finite": lambda: optax.apply_if_finite(clipped(), 3),
    "noise": lambda: optax.chain(optax.add_noise(0.01, 0.5, 0), optax.sgd(0.1)),
    "loss": lambda: optax.chain(
        optax.polyak_sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)
    ),
    "muon_ema": lambda: build_optimizer(
        "muon", {}, learning_rate=lambda _: 1e-2, weight_decay=0.1, clip_norm=0.2, ema=0.8
    ),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(1e-2),
}
OFTEN = ("multi_steps_clip", "masked_clip", "by_position", "dadapt", "muon_ema")
# tests/program/test_partitioned_update.py covers most others.
USUAL = {"pipeline_splits": ["second", "last"], "device_mapping": [0, 1, 0]}
PIPELINES = {
    "grouped": {"pipeline_splits": ["second", "last"]},
    "interleaved": USUAL | {"pipeline_schedule": "interleaved"},
    "two_replicas": USUAL | {"num_replicas": 2},
    "offloaded": USUAL
    | {"optimizer_state_offloading": True, "min_remote_tensor_size": 100},
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Offload even small state, in several buckets."""
    monkeypatch.setattr(state_layout, "_BUCKET_BYTES", 300)


@functools.cache
def plain(name, num_replicas):
    return train(OPTIMIZERS[name](), num_replicas=num_replicas)


def check(name, **plan):
    got = train(OPTIMIZERS[name](), **plan)
    expected = plain(name, plan.get("num_replicas", 1))
    assert largest_difference(got.params, expected.params) < TOLERANCE
    one, other = (_without_keys(state.optimizer_state) for state in (got, expected))
    assert largest_difference(one, other) < 1e-5
    moved = largest_difference(expected.params, weights()[0])
    assert moved > 1e-4, "the optimizer must change something"


def _without_keys(tree):
    keys = jax.dtypes.prng_key
    return [x for x in jax.tree.leaves(tree) if not jnp.issubdtype(x.dtype, keys)]


@pytest.mark.parametrize(
    "name",
    [
        name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_an_optimizer_gives_the_same_weights(name):
    check(name, **USUAL)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize(
    "name",
    [
        "clip",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *("clip_updates", "multi_steps_clip", "by_position", "dadapt"),
                "muon_ema",
            )
        ),
    ],
)
def test_an_optimizer_gives_the_same_weights_in_any_pipeline(name, pipeline):
    check(name, **PIPELINES[pipeline])


def test_clipping_by_global_norm_works_with_stochastic_rounding():
    plan = {"precision": "16.16", "stochastic_rounding": True, "fp_exceptions": True}
    got = train(clipped(), **plan, **USUAL)
    expected = train(clipped(), **plan)
    # Gradients are summed in another order, which may change the last bit of a weight.
    assert largest_difference(got.params, expected.params) < 2**-7


def test_offloading_without_host_memory_keeps_state_on_the_device(monkeypatch):
    """It is still divided into buckets, all of which are updated on the device."""
    monkeypatch.setattr(offload, "host_memory_kind", lambda device: None)
    check("clip", **PIPELINES["offloaded"])
