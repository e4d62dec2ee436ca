"""Optimizers follow their formulas, in a program and alone."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_loop import (
    GLOBAL_BATCH,
    largest_difference,
    loss_fn,
    make_data,
    make_model_state,
    make_params,
    plain_loop,
    rounding,
    train_with,
)

from millrace.config import ConfigurationError
from millrace.plan import Plan
from millrace.program import offload
from millrace.program.learning_rate import learning_rate_schedule
from millrace.program.optimizers import build_optimizer
from millrace.program.training import training_program

SHAPES = {
    "conv1": {"kernel": (3, 3, 2, 4)},
    "conv1_bn": {"scale": (4,), "bias": (4,)},
    "fc_layer": {"kernel": (8, 3), "bias": (3,)},
}
RATES = [0.5, 0.1, 0.3, 0.3, 0.02, 0.7]
BATCH = 96

LARS = {"momentum": 0.9, "weight_decay": 0.05, "eeta": 0.02, "epsilon": 0}
RMSPROP = {"momentum": 0.9, "base_decay_exponent": -10, "epsilon": 0.001}
OPTIMIZERS = {"sgd": {"momentum": 0.9}, "lars": LARS, "rmsprop": RMSPROP}


def muon_dimensions(params):
    """Kernels of convolutions as matrices of all inputs by outputs; None for Adam."""
    dimensions = {
        2: optax.contrib.MuonDimensionNumbers((0,), 1),
        4: optax.contrib.MuonDimensionNumbers((0, 1, 2), 3),
    }
    return jax.tree.map(lambda p: dimensions.get(p.ndim), params)


DECAY = 0.05
OPTAX = {
    # name, its parameters, and what somebody would write in optax
    "nesterov": (
        *("sgd", {"momentum": 0.9, "nesterov": True}),
        lambda rate: optax.chain(
            optax.trace(0.9, nesterov=True),
            optax.add_decayed_weights(DECAY),
            optax.scale_by_learning_rate(rate),
        ),
    ),
    "adam": (*("adam", {}), lambda rate: optax.adamw(rate, weight_decay=DECAY)),
    "adamw": (
        *("adamw", {"b1": 0.8, "b2": 0.99, "epsilon": 1e-6}),
        lambda rate: optax.adamw(rate, 0.8, 0.99, 1e-6, weight_decay=DECAY),
    ),
    "lamb": (*("lamb", {}), lambda rate: optax.lamb(rate, weight_decay=DECAY)),
    "lion": (*("lion", {}), lambda rate: optax.lion(rate, weight_decay=DECAY)),
    "muon": (
        *("muon", {"momentum": 0.9}),
        lambda rate: optax.contrib.muon(
            rate, beta=0.9, weight_decay=DECAY, adam_weight_decay=DECAY,
            muon_weight_dimension_numbers=muon_dimensions, consistent_rms=0.2,
        ),
    ),
}  # fmt: skip


def changing(count):
    return jnp.array(RATES, jnp.float32)[count]


def make(name, params=None, *, learning_rate=changing, **options):
    params = OPTIMIZERS[name] if params is None else params
    options = {"global_batch_size": BATCH} | options
    return build_optimizer(name, params, learning_rate=learning_rate, **options)


def random_tree(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return {
        layer: {
            name: rng.standard_normal(shape).astype(np.float32)
            for name, shape in variables.items()
        }
        for layer, variables in SHAPES.items()
    }


def gradients() -> list[dict]:
    return [random_tree(100 + update) for update in range(len(RATES))]


def train(optimizer, weights, every_gradient) -> Any:
    """Return the weights after updates with the given gradients."""

    @jax.jit
    def step(weights, state, gradient):
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    state = optimizer.init(weights)
    for gradient in every_gradient:
        weights, state = step(weights, state, gradient)
    return weights


def sgd(params, name, w, g, lr, memory):
    del name
    v = memory["v"] = params["momentum"] * memory.get("v", 0.0) + g
    return lr * v


def lars(params, name, w, g, lr, memory):
    decay, epsilon = params["weight_decay"], params["epsilon"] or 1e-7
    if name not in ("bias", "scale"):
        w_norm, g_norm = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
        ratio = 1.0
        if w_norm > 0 and g_norm > 0:
            ratio = params["eeta"] * w_norm / (g_norm + decay * w_norm + epsilon)
        g = ratio * (g + decay * w)
    v = memory["v"] = params["momentum"] * memory.get("v", 0.0) + lr * g
    return v


def rmsprop(params, name, w, g, lr, memory):
    del name
    rho = 1 - 2 ** params["base_decay_exponent"] * BATCH
    start = params.get("initial_accumulator", 0.0)
    m = memory["m"] = rho * memory.get("m", start) + (1 - rho) * g**2
    step = lr * g / np.sqrt(m + params["epsilon"])
    v = memory["v"] = params["momentum"] * memory.get("v", 0.0) + step
    return v


def oracle(rule, params, weights, every_gradient, *, decay=0.0, l2=0.0, rates=RATES):
    """Do the same in float64, variable by variable."""
    result = {}
    for layer, variables in weights.items():
        for name, start in variables.items():
            w, memory = start.astype(np.float64), {}
            for lr, gradient in zip(rates, every_gradient, strict=True):
                g = gradient[layer][name].astype(np.float64) + l2 * w
                w = w - rule(params, name, w, g, lr, memory) - lr * decay * w
            result.setdefault(layer, {})[name] = w
    return result


def assert_close(found, expected, tolerance=2e-6) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("l2", "decay"), [(0.0, 0.0), (0.2, 0.1)])
@pytest.mark.parametrize("momentum", [0, 0.9])
@pytest.mark.parametrize("rule", [sgd, lars, rmsprop], ids=lambda rule: rule.__name__)
def test_updates_follow_the_formulas_while_the_learning_rate_changes(
    rule, momentum, l2, decay
):
    params = OPTIMIZERS[rule.__name__] | {"momentum": momentum}
    optimizer = make(rule.__name__, params, weight_decay=decay, l2_regularization=l2)
    found = train(optimizer, random_tree(0), gradients())
    expected = oracle(rule, params, random_tree(0), gradients(), decay=decay, l2=l2)
    assert_close(found, expected)


def test_an_optimizer_follows_a_learning_rate_schedule():
    schedule = learning_rate_schedule(
        "cosine",
        {"initial_learning_rate": 0.005, "epochs_to_total_decay": 2},
        global_batch_size=BATCH,
        updates_per_epoch=3,
        warmup={"warmup_mode": "mask", "warmup_epochs": 1},
    )
    rates = [
        0.005 * BATCH * 0.5 * (1 + np.cos(np.pi * t / 6)) * min(1, (t + 1) / 4)
        for t in range(len(RATES))
    ]
    found = train(
        make("lars", learning_rate=schedule, weight_decay=0.1), random_tree(0), gradients()
    )
    expected = oracle(lars, LARS, random_tree(0), gradients(), decay=0.1, rates=rates)
    assert_close(found, expected)


def test_decay_and_l2_shrink_a_weight_without_gradient():
    weights, zeros = {"w": jnp.ones(3)}, {"w": jnp.zeros(3)}
    for options in ({"weight_decay": 0.1}, {"l2_regularization": 0.1}):
        plain = make("sgd", {"momentum": 0}, learning_rate=lambda count: 1.0, **options)
        np.testing.assert_allclose(train(plain, weights, [zeros])["w"], 0.9, rtol=1e-6)


@pytest.mark.parametrize("option", ["weight_decay", "l2_regularization"])
def test_decay_can_skip_biases_and_norms(option):
    options = {option: 0.1, "decay_kernels_only": True}
    found = train(make("rmsprop", **options), random_tree(0), gradients())
    short = {"weight_decay": "decay", "l2_regularization": "l2"}[option]
    decayed, plain = (
        oracle(rmsprop, RMSPROP, random_tree(0), gradients(), **{short: amount})
        for amount in (0.1, 0.0)
    )
    expected = {
        layer: {n: (decayed if n == "kernel" else plain)[layer][n] for n in variables}
        for layer, variables in SHAPES.items()
    }
    assert_close(found, expected)


def test_decay_and_l2_are_the_same_without_momentum_and_differ_with_it():
    for momentum in (0, 0.9):
        decayed, regularized = (
            train(
                make("sgd", {"momentum": momentum}, **{option: 0.1}),
                random_tree(0),
                gradients(),
            )
            for option in ("weight_decay", "l2_regularization")
        )
        difference = largest_difference(decayed, regularized)
        assert difference < 1e-6 if momentum == 0 else difference > 1e-2


def test_lars_is_sgd_for_biases_and_scales_at_a_constant_learning_rate():
    """When it changes, they differ: LARS has it inside the velocity."""
    only = ["conv1_bn"]
    weights = {layer: random_tree(0)[layer] for layer in only}
    every = [{layer: gradient[layer] for layer in only} for gradient in gradients()]
    differences = {}
    for name, rate in (("constant", lambda count: jnp.float32(0.3)), ("changes", changing)):
        one = train(make("lars", learning_rate=rate), weights, every)
        other = train(make("sgd", learning_rate=rate), weights, every)
        differences[name] = largest_difference(one, other)
    assert differences["constant"] < 1e-6
    assert differences["changes"] > 1e-2


def test_lars_neither_scales_nor_decays_biases_and_norms():
    w, g = np.full(4, 2.0, np.float32), np.arange(4, dtype=np.float32)
    names = ["bias", "scale", "beta", "gamma", "query_bias"]
    weights = {"layer": dict.fromkeys(names, w)}
    found = train(make("lars"), weights, [{"layer": dict.fromkeys(names, g)}])
    for value in found["layer"].values():
        np.testing.assert_allclose(value, w - RATES[0] * g, rtol=1e-6)


def test_lars_looks_at_the_name_of_a_variable_and_not_of_its_layer():
    w, g = np.full(4, 2.0, np.float32), np.arange(4, dtype=np.float32)
    layers = [
        train(make("lars"), {layer: {"kernel": w}}, [{layer: {"kernel": g}}])[layer]
        for layer in ("conv1", "scale_and_bias")
    ]
    assert largest_difference(layers[0], layers[1]) == 0
    assert largest_difference(layers[0]["kernel"], w - RATES[0] * g) > 0.1


def test_the_ratio_of_lars_is_one_if_a_norm_is_zero():
    """Zero weights: a plain step. Zero gradients: the unscaled decay."""
    some, none = np.full((2, 3), 2.0, np.float32), np.zeros((2, 3), np.float32)
    lr, decay = RATES[0], LARS["weight_decay"]
    for w, g, expected in (
        (none, some, -lr * some),
        (some, none, some - lr * decay * some),
        (none, none, none),
    ):
        found = train(make("lars"), {"kernel": w}, [{"kernel": g}])["kernel"]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_l2_counts_in_the_norms_of_lars():
    """Without a gradient the ratio is that of the L2 term: eeta / (l2 + decay)."""
    w, g = np.full((2, 3), 2.0, np.float32), np.zeros((2, 3), np.float32)
    optimizer = make("lars", l2_regularization=0.2)
    found = train(optimizer, {"kernel": w}, [{"kernel": g}])["kernel"]
    step = 0.02 / (0.2 + 0.05) * (0.2 + 0.05) * w
    np.testing.assert_allclose(found, w - RATES[0] * step, rtol=1e-6)


def test_a_step_of_lars_does_not_depend_on_the_norm_of_the_gradient():
    params = LARS | {"weight_decay": 0}
    once, tenfold = (
        train(
            make("lars", params),
            {"kernel": random_tree(0)["conv1"]["kernel"]},
            [{"kernel": size * g["conv1"]["kernel"]} for g in gradients()],
        )
        for size in (1, 10)
    )
    assert largest_difference(once, tenfold) < 1e-6


def test_an_epsilon_of_zero_means_the_epsilon_of_keras():
    tiny = {"kernel": np.full(4, 1e-7, np.float32)}
    zero, written, larger = (
        train(make("lars", LARS | {"epsilon": epsilon}), tiny, [tiny])
        for epsilon in (0, 1e-7, 1e-6)
    )
    assert largest_difference(zero, written) == 0
    assert largest_difference(zero, larger) > 0


def test_rmsprop_averages_over_the_same_number_of_samples_for_any_batch():
    """Without momentum, a batch 4 times as large decays 4 times as fast."""
    params = RMSPROP | {"momentum": 0}
    state = {}
    for batch in (BATCH, 4 * BATCH):
        optimizer = make("rmsprop", params, global_batch_size=batch)
        weights = {"kernel": jnp.ones(3)}
        _, after = optimizer.update(weights, optimizer.init(weights), weights)
        (state[batch],) = (x for x in jax.tree.leaves(after) if x.shape == (3,))
    np.testing.assert_allclose(state[BATCH], BATCH * 2.0**-10, rtol=1e-6)
    np.testing.assert_allclose(state[4 * BATCH], 4 * state[BATCH], rtol=1e-6)


def test_rmsprop_can_start_from_one_as_in_tensorflow_1():
    params = RMSPROP | {"initial_accumulator": 1.0}
    found = train(make("rmsprop", params), random_tree(0), gradients())
    assert_close(found, oracle(rmsprop, params, random_tree(0), gradients()))


def test_rmsprop_does_not_move_if_the_gradient_is_always_zero():
    weights, zeros = {"kernel": np.ones(3)}, {"kernel": np.zeros(3)}
    found = train(make("rmsprop"), weights, [zeros] * 3)["kernel"]
    np.testing.assert_array_equal(found, 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_contains_only_what_is_used(name):
    sizes = {}
    for momentum in (0, 0.9):
        optimizer = make(name, OPTIMIZERS[name] | {"momentum": momentum})
        leaves = jax.tree.leaves(optimizer.init(random_tree(0)))
        sizes[momentum] = sum(leaf.size for leaf in leaves if leaf.ndim)
    size = sum(leaf.size for leaf in jax.tree.leaves(random_tree(0)))
    means = size if name == "rmsprop" else 0
    assert sizes == {0: means, 0.9: means + size}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_offloading_has_one_bucket_per_variable(name):
    optimizer = make(
        name,
        weight_decay=0.1,
        l2_regularization=0.2,
        decay_kernels_only=name == "rmsprop",
    )
    program = training_program(loss_fn, optimizer, Plan(micro_batch_size=GLOBAL_BATCH))
    state = program.init(make_params(), make_model_state())
    owned = {
        position: 1 << 30 for position in offload._owned_positions(state, program.plan)
    }
    result = offload.GradientResult(
        state.params, state.model_state, {"loss": jnp.float32(0)}
    )
    jaxpr = jax.make_jaxpr(lambda s, g: offload.steps.apply_update(program._step, s, g))(
        state, result
    )
    split = offload._split_outputs(offload.input_dependencies(jaxpr), owned)
    groups = [set(group) & set(owned) for group in split]
    assert sum(map(bool, groups)) == len(jax.tree.leaves(state.params))


@pytest.mark.parametrize(
    "name",
    [
        name if name != "sgd" else pytest.param(name, marks=pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_a_program_gives_the_weights_of_the_plain_loop(name):
    steps = {"boundaries": [0, 1], "values": [0.5, 0.1, 0.3]}
    rate = learning_rate_schedule(
        "stepped", steps, global_batch_size=BATCH, updates_per_epoch=1
    )
    optimizer = make(
        name,
        learning_rate=rate,
        weight_decay=0.01,
        l2_regularization=0.02,
        decay_kernels_only=name == "rmsprop",
    )
    expected, _, _ = plain_loop(optimizer, make_data())
    assert largest_difference(expected, make_params()) > 1e-2
    for offloading in (False, True):
        plan = Plan(
            micro_batch_size=GLOBAL_BATCH,
            precision="32.32",
            optimizer_state_offloading=offloading,
        )
        state, _, _ = train_with(plan, optimizer=optimizer)
        assert largest_difference(state.params, expected) < rounding()


@pytest.mark.parametrize("name", OPTAX)
def test_an_optimizer_of_optax_is_that_of_optax(name):
    kind, params, in_optax = OPTAX[name]
    found = train(make(kind, params, weight_decay=DECAY), random_tree(0), gradients())
    expected = train(in_optax(changing), random_tree(0), gradients())
    assert_close(found, expected)
    # An epsilon of 1e-8 next to gradients of 1 must not hide another learning rate.
    assert largest_difference(found, random_tree(0)) > 0.01


def test_gradients_are_clipped_by_their_norm_before_anything_else():
    """L2 regularization is added afterwards, as in PyTorch."""
    every = gradients()
    norms = [np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(x))) for x in every]
    limit = float(np.median(norms))
    scaled = [
        jax.tree.map(lambda g, n=norm: g * min(1, limit / n), gradient)
        for gradient, norm in zip(every, norms, strict=True)
    ]
    found = train(
        make("sgd", clip_norm=limit, l2_regularization=0.1), random_tree(0), every
    )
    expected = oracle(sgd, {"momentum": 0.9}, random_tree(0), scaled, l2=0.1)
    assert_close(found, expected)


def test_muon_decays_kernels_only_if_asked():
    zeros = [jax.tree.map(np.zeros_like, random_tree(0))] * 2
    options = {"weight_decay": 0.1, "decay_kernels_only": True}
    found = train(make("muon", {}, **options), random_tree(0), zeros)
    factor = (1 - 0.1 * RATES[0]) * (1 - 0.1 * RATES[1])
    for layer, variables in random_tree(0).items():
        for name, start in variables.items():
            expected = factor * start if name == "kernel" else start
            np.testing.assert_allclose(found[layer][name], expected, rtol=1e-6)


MUON_SGD = {"momentum": 0.6, "iterations": 3, "sgd_momentum": 0.85, "sgd_factor": 4.0}


def orthogonalized(matrix):
    """Three steps of the published iteration of Newton and Schulz, in float64."""
    x = matrix.astype(np.float64)
    x = x.T if x.shape[0] > x.shape[1] else x
    x /= np.linalg.norm(x)
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def test_muon_sgd_keeps_the_norms_of_convolutions_and_moves_all_else_by_sgd():
    found = train(
        make("muon_sgd", MUON_SGD, weight_decay=DECAY), random_tree(0), gradients()
    )
    for layer, variables in random_tree(0).items():
        for name, start in variables.items():
            w, v, m = start.astype(np.float64), 0.0, 0.0
            is_kernel = start.ndim == 4
            for number, (tree, lr) in enumerate(zip(gradients(), RATES, strict=True), 1):
                g = tree[layer][name].astype(np.float64)
                v, m = g + 0.85 * v, 0.4 * g + 0.6 * m
                if not is_kernel:
                    w -= 4.0 * lr * (g + 0.85 * v + DECAY * w)
                    continue
                # The momentum ahead, with both parts corrected for their start at 0.
                ahead = 0.6 * m / (1 - 0.6 ** (number + 1)) + 0.4 * g / (1 - 0.6**number)
                update = orthogonalized(ahead.reshape(-1, 4)).reshape(g.shape)
                w = w * 2 / np.linalg.norm(w) - lr * update  # the root of 4 outputs
            np.testing.assert_allclose(found[layer][name], w, rtol=2e-4, atol=2e-4)


def test_layers_stop_after_their_number_of_updates():
    limits = {"fc_layer": 2, "conv1": 4}
    optimizer = make("muon_sgd", MUON_SGD, weight_decay=DECAY, limits=limits)
    plain = make("muon_sgd", MUON_SGD, weight_decay=DECAY)
    found = train(optimizer, random_tree(0), gradients())
    for layer in SHAPES:
        expected = train(plain, random_tree(0), gradients()[: limits.get(layer)])
        jax.tree.map(np.testing.assert_array_equal, found[layer], expected[layer])


def test_frozen_layers_keep_their_norm_with_muon_sgd():
    found = train(
        make("muon_sgd", MUON_SGD, scales={"conv1": 0.0}), random_tree(0), gradients()
    )
    np.testing.assert_array_equal(
        found["conv1"]["kernel"], random_tree(0)["conv1"]["kernel"]
    )


@pytest.mark.devices(2)
@pytest.mark.parametrize(
    "name",
    ["adamw", "muon", *(pytest.param(n, marks=pytest.mark.slow) for n in ("lamb", "lion"))],
)
def test_a_program_with_replicas_and_offloading_gives_the_weights_of_optax(
    name, monkeypatch
):
    kind, params, in_optax = OPTAX[name]
    monkeypatch.setattr(offload, "_BUCKET_BYTES", 1)
    expected, _, _ = plain_loop(in_optax(lambda count: 0.01), make_data())
    optimizer = make(kind, params, learning_rate=lambda _: 0.01, weight_decay=DECAY)
    plan = Plan(
        micro_batch_size=GLOBAL_BATCH // 4,
        gradient_accumulation_count=2,
        num_replicas=2,
        optimizer_state_offloading=True,
    )
    state, _, _ = train_with(plan, optimizer=optimizer)
    assert largest_difference(state.params, expected) < rounding()


def check_error(message, *arguments, **options) -> None:
    with pytest.raises(ConfigurationError, match="^" + re.escape(message) + "$"):
        make(*arguments, **options)


def test_an_unknown_optimizer_suggests_the_nearest():
    check_error(
        "--optimizer must be one of sgd, lars, rmsprop, adam, adamw, lamb, lion, muon, "
        "muon_sgd; got 'rmprop'. Did you mean rmsprop?",
        "rmprop",
        {},
    )


def test_missing_and_unknown_keys_are_errors_that_list_the_keys():
    check_error(
        "--optimizer-params of lars needs the keys momentum, weight_decay, eeta, epsilon; "
        "got momentum.",
        "lars",
        {"momentum": 0.9},
    )
    check_error(
        "--optimizer-params of lars needs the keys momentum, weight_decay, eeta, epsilon; "
        "got momentum, weight_decay, eta, epsilon. Did you mean eeta?",
        "lars",
        {"momentum": 0.9, "weight_decay": 0, "eta": 0.001, "epsilon": 0},
    )
    check_error(
        "--optimizer-params of sgd needs the keys momentum and may have the keys nesterov; "
        "got none.",
        "sgd",
        {},
    )
    check_error(
        "--optimizer-params of adamw may have the keys b1, b2, epsilon; got beta1, b2.",
        "adamw",
        {"beta1": 0.9, "b2": 0.99},
    )


@pytest.mark.parametrize(
    ("name", "key", "value", "limits"),
    [
        ("sgd", "momentum", 1, " of at least 0 and below 1"),
        ("sgd", "momentum", "high", " of at least 0 and below 1"),
        ("lars", "eeta", -0.001, " of at least 0"),
        ("lars", "epsilon", True, " of at least 0"),
        ("rmsprop", "base_decay_exponent", None, ""),
    ],
)
def test_an_invalid_value_is_an_error(name, key, value, limits):
    check_error(
        f"--optimizer-params: {key} must be a number{limits}, got {value!r}.",
        name,
        OPTIMIZERS[name] | {key: value},
    )


@pytest.mark.parametrize("option", ["weight_decay", "l2_regularization"])
def test_a_negative_decay_is_an_error(option):
    flag = "--" + option.replace("_", "-")
    message = f"{flag} must be a number of at least 0, got -0.1."
    check_error(message, "sgd", **{option: -0.1})


def test_rmsprop_rejects_a_negative_decay_and_an_epsilon_of_zero():
    check_error(
        "--optimizer-params: base_decay_exponent must be at most -6.585 for a global "
        "batch of 96, got 14. The decay, 1 - 2^base_decay_exponent * global batch, would "
        "be negative.",
        "rmsprop",
        RMSPROP | {"base_decay_exponent": 14},
    )
    check_error(
        "--optimizer-params: epsilon must be more than 0 for rmsprop, got 0. A gradient "
        "that has always been 0 would be divided by 0.",
        "rmsprop",
        RMSPROP | {"epsilon": 0},
    )
    with pytest.raises(ValueError, match="rmsprop needs global_batch_size"):
        make("rmsprop", global_batch_size=None)
