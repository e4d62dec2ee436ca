"""Frozen layers and learning rates of layers, against optax's own masked optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_loop import stage

import millrace as mr
from millrace.config import ConfigurationError
from millrace.nn import layers
from millrace.nn.freezing import choose_scales, freeze_layers, frozen_state_reduction
from millrace.nn.norms import batch_norm
from millrace.program.optimizers import build_optimizer

NAMES = ["b0/conv", "b0/norm", "b1/conv", "fc"]


def test_patterns_choose_layers_and_the_last_match_counts():
    scales = choose_scales(["b0/*"], {"b*": 0.5, "b1/conv": 0.25}, NAMES)
    assert scales == {"b0/conv": 0.0, "b0/norm": 0.0, "b1/conv": 0.25}


@pytest.mark.parametrize(
    ("frozen", "scales", "message"),
    [
        (["b7/*"], {}, "--freeze: no layer .* like b7/.*b0/conv, b0/norm"),
        ([], {"x": 0.1}, "--lr-scale: no layer .* like x"),
        (["b*", "fc"], {}, r"--freeze b\* fc freezes every layer"),
    ],
)
def test_a_pattern_without_a_layer_or_with_all_is_an_error(frozen, scales, message):
    with pytest.raises(ConfigurationError, match=message):
        choose_scales(frozen, scales, NAMES)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("sgd", {"momentum": 0.9}),
        ("adamw", {}),
        ("lion", {}),
        ("lamb", {}),
        ("lars", {"momentum": 0.9, "weight_decay": 0.1, "eeta": 0.01, "epsilon": 0}),
        (
            "rmsprop",
            {"momentum": 0.9, "base_decay_exponent": -6, "epsilon": 1e-3},
        ),
    ],
)
def test_scaled_layers_equal_optimizers_of_their_own(name, params):
    """``optax.multi_transform`` with one optimizer per learning rate is the oracle."""

    def make(rate, **options):
        return build_optimizer(
            name,
            params,
            learning_rate=lambda count: rate / (1 + count),
            weight_decay=0.0 if name == "lars" else 0.1,
            l2_regularization=0.01,
            global_batch_size=8,
            **options,
        )

    random = np.random.default_rng(0)
    weights = {
        layer: {"kernel": jnp.asarray(random.standard_normal((3, 2)), jnp.float32)}
        for layer in ("slow", "frozen", "rest")
    }
    theirs = optax.multi_transform(
        {"slow": make(0.01), "frozen": optax.set_to_zero(), "rest": make(0.1)},
        {layer: {"kernel": layer} for layer in weights},
    )
    found = wanted = weights
    ours = make(0.1, scales={"slow": 0.1, "frozen": 0.0})
    our_state, their_state = ours.init(found), theirs.init(wanted)
    for seed in range(3):
        drawn = np.random.default_rng(seed).standard_normal((3, 2)).astype(np.float32)
        gradients = jax.tree.map(lambda w, g=drawn: jnp.asarray(g) + 0 * w, weights)
        gradients["frozen"]["kernel"] *= 0
        updates, our_state = ours.update(gradients, our_state, found)
        found = optax.apply_updates(found, updates)
        updates, their_state = theirs.update(gradients, their_state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    for layer in weights:
        one, other = found[layer]["kernel"], wanted[layer]["kernel"]
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(found["frozen"]["kernel"], weights["frozen"]["kernel"])
    assert not np.allclose(found["slow"]["kernel"], weights["slow"]["kernel"])


MODEL = [
    layers.dense("first", 6),
    batch_norm("norm"),
    layers.relu("relu"),
    layers.dense("second", 5),
    layers.relu("relu2"),
    layers.dense("last", 3),
]
FROZEN = {"first", "norm"}
STATISTICS = {"mean": jnp.linspace(-1, 1, 6), "var": jnp.linspace(0.5, 2, 6)}


def initial_weights():
    example = np.zeros((1, 4), np.float32)
    params, _ = layers.init_layers(MODEL, jax.random.key(0), example)
    return params, {"norm": STATISTICS}


def reference(params, x, y):
    """Compute the same in plain JAX, with the first two layers constant."""
    constant = jax.lax.stop_gradient({name: params[name] for name in FROZEN})
    x = x @ constant["first"]["kernel"] + constant["first"]["bias"]
    scale = constant["norm"]["scale"] / jnp.sqrt(STATISTICS["var"] + 1.001e-5)
    x = jax.nn.relu((x - STATISTICS["mean"]) * scale + constant["norm"]["bias"])
    x = jax.nn.relu(x @ params["second"]["kernel"] + params["second"]["bias"])
    x = x @ params["last"]["kernel"] + params["last"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()


def train_plainly(params, x, y):
    labels = {"first": "frozen", "norm": "frozen", "second": "slow", "last": "rest"}
    optimizer = optax.multi_transform(
        {
            "rest": optax.sgd(0.1, momentum=0.9),
            "slow": optax.sgd(0.02, momentum=0.9),
            "frozen": optax.set_to_zero(),
        },
        {n: jax.tree.map(lambda _, n=n: labels[n], tree) for n, tree in params.items()},
    )
    state = optimizer.init(params)
    for images, label in zip(x, y, strict=True):
        gradients = jax.grad(reference)(params, images, label)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


PLANS = {
    "plain": {"micro_batch_size": 12},
    "accumulation": {"micro_batch_size": 4, "gradient_accumulation_count": 3},
    "replicas": {"micro_batch_size": 6, "num_replicas": 2},
    "16 bits": {"micro_batch_size": 12, "precision": "16.32"},
    "pipeline": {
        "micro_batch_size": 3,
        "gradient_accumulation_count": 4,
        "pipeline_splits": ["second"],
    },
    "offloaded": {"micro_batch_size": 12, "optimizer_state_offloading": True},
}
OFTEN_TRIED = ("plain", "pipeline")


@pytest.mark.devices(2)
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan, marks=() if plan in OFTEN_TRIED else pytest.mark.slow)
        for plan in PLANS
    ],
)
def test_fine_tuning_equals_a_plain_loop_with_masked_optimizers(plan):
    random = np.random.default_rng(1)
    x = random.standard_normal((3, 12, 4)).astype(np.float32)
    y = random.integers(0, 3, (3, 12)).astype(np.int32)
    params, model_state = initial_weights()
    wanted = train_plainly(params, x, y)

    loss = mr.LayeredLoss(
        freeze_layers(MODEL, FROZEN),
        lambda batch, key: batch["x"],
        lambda logits, label: (
            optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), label
            ).mean(),
            {},
        ),
        {"x": jax.ShapeDtypeStruct((PLANS[plan]["micro_batch_size"], 4), np.float32)},
        lambda batch, key: batch["y"],
    )
    scales = {"first": 0.0, "norm": 0.0, "second": 0.2}
    optimizer = build_optimizer(
        "sgd", {"momentum": 0.9}, learning_rate=lambda _: 0.1, scales=scales
    )
    chosen = mr.Plan(updates_per_execution=3, **PLANS[plan])
    program = mr.training_program(
        loss, optimizer, chosen, model_state_reduction=frozen_state_reduction(FROZEN)
    )
    state = program.init(params, model_state, seed=0)
    state, _ = program.run(state, stage(program, {"x": x, "y": y}))
    found = jax.device_get(program.unpack_state(state))
    for name in FROZEN:
        jax.tree.map(np.testing.assert_array_equal, found.params[name], params[name])
    jax.tree.map(np.testing.assert_array_equal, found.model_state["norm"], STATISTICS)
    # bfloat16 products have three digits.
    tolerance = 2e-2 if plan == "16 bits" else 1e-6
    for name in ("second", "last"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance),
            found.params[name],
            dict(wanted[name]),
        )
