"""What the three precisions mean for numbers, as the references' tests have it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_loop import GLOBAL_BATCH, largest_difference, make_data, plain_loop, train_with

from millrace.plan import Plan
from millrace.program.accumulate import accumulator_types
from millrace.program.training import training_program


def run_scalar(weight, slope, plan, *, updates=1, learning_rate=1.0):
    """Gradient descent on slope x weight; the gradient is `slope`."""

    def loss(params, model_state, batch, key):
        # The slope's root, twice: what underflows must be the gradient, not the slope.
        seen = params["w"] * batch[:1] * batch[:1]
        return seen.sum(), (model_state, {"product": seen.sum()})

    program = training_program(loss, optax.sgd(learning_rate), plan)
    state = program.init({"w": jnp.full(1, weight, jnp.float32)})
    count = updates * plan.batching.gradient_accumulation_count
    chunk = jax.device_put(
        np.full((count, plan.batching.samples_per_step), np.sqrt(slope), np.float32),
        program.chunk_sharding,
    )
    return program.run(state, chunk)


@pytest.mark.parametrize(
    ("precision", "survives"), [("16.16", 0), ("16.32", 0), ("32.32", 1)]
)
def test_a_product_below_float16s_range_vanishes_unless_compute_is_32(precision, survives):
    plan = Plan(precision=precision, half_type="float16")
    _, info = run_scalar(1e-7, 0.1, plan)
    assert bool(info["product"][0] > 0) == bool(survives)


@pytest.mark.parametrize(("precision", "moves"), [("16.16", 0), ("16.32", 1), ("32.32", 1)])
def test_a_thousand_minus_a_tenth_moves_only_with_a_32_bit_update(precision, moves):
    plan = Plan(precision=precision, half_type="float16")
    state, _ = run_scalar(1000.0, 0.1, plan)
    assert bool(state.params["w"][0] != 1000) == bool(moves)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize(("precision", "weights"), [("16.16", None), ("16.32", "float32")])
def test_weights_are_stored_in_the_type_the_plan_says(precision, weights, half):
    plan = Plan(micro_batch_size=GLOBAL_BATCH, precision=precision, half_type=half)
    state, _, _ = train_with(plan)
    assert {str(p.dtype) for p in jax.tree.leaves(state.params)} == {weights or half}


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("precision", ["16.16", "16.32"])
def test_sixteen_bits_train_close_to_thirty_two(precision, half):
    """Adam moves each weight by up to the learning rate; half of that is close."""
    plan = Plan(
        micro_batch_size=GLOBAL_BATCH // 4,
        gradient_accumulation_count=4,
        precision=precision,
        half_type=half,
        loss_scaling=64.0,
    )
    expected, _, losses = plain_loop(optax.sgd(0.1, momentum=0.9), make_data())
    state, info, _ = train_with(plan, optimizer=optax.sgd(0.1, momentum=0.9))
    assert largest_difference(state.params, expected) < 2e-2
    np.testing.assert_allclose(info["loss"], losses, atol=2e-2)


def test_adams_state_survives_float16_weights():
    """Squared gradients underflow in float16; the state is kept in float32 for it."""
    plan = Plan(micro_batch_size=GLOBAL_BATCH, precision="16.16", half_type="float16")
    state, _, _ = train_with(plan)
    assert all(
        np.isfinite(np.asarray(p, np.float32)).all() for p in jax.tree.leaves(state.params)
    )
    kinds = {str(s.dtype) for s in jax.tree.leaves(state.optimizer_state) if s.ndim}
    assert kinds == {"float32"}


def test_static_loss_scaling_saves_small_float16_gradients():
    for scale, moved in ((0.0, False), (1024.0, True)):
        plan = Plan(precision="16.32", half_type="float16", loss_scaling=scale)
        state, _ = run_scalar(1.0, 1e-8, plan, learning_rate=1e6)
        end = float(state.params["w"][0])
        assert end == pytest.approx(0.99 if moved else 1.0, abs=1e-4)


def test_dynamic_scaling_skips_an_overflow_and_halves_the_factor():
    plan = Plan(precision="16.32", half_type="float16", loss_scaling="dynamic")
    state, info = run_scalar(1.0, 60000.0, plan, updates=20, learning_rate=1e-6)
    factors = np.asarray(info["loss_scale"])
    finite = np.asarray(info["gradients_finite"])
    assert factors[0] == 2**15 and not finite[0]
    skipped = int((finite == 0).sum())
    assert 0 < skipped < 20
    np.testing.assert_array_equal(
        factors[: skipped + 1], 2.0 ** (15 - np.arange(skipped + 1))
    )
    expected = 1.0 - (20 - skipped) * 60000.0 * 1e-6
    assert float(state.params["w"][0]) == pytest.approx(expected, rel=1e-3)


def test_dynamic_scaling_grows_after_two_thousand_good_updates():
    plan = Plan(precision="16.32", half_type="float16", loss_scaling="dynamic")
    _, info = run_scalar(1.0, 1e-4, plan, updates=2002, learning_rate=1e-6)
    assert (info["loss_scale"][1999], info["loss_scale"][2000]) == (2**15, 2**16)


@pytest.mark.parametrize("setting", [None, "float32", "bfloat16", jnp.float32, np.float16])
def test_the_accumulator_has_the_type_asked_for(setting):
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.float32)}
    types = accumulator_types(params, setting)
    if setting is None:
        assert types == {"a": jnp.dtype("bfloat16"), "b": jnp.dtype("float32")}
    else:
        assert set(types.values()) == {jnp.dtype(setting)}


def test_a_function_chooses_each_accumulators_type_by_path_and_value():
    params = {"block": {"kernel": jnp.ones((2, 2), jnp.bfloat16), "bias": jnp.ones(2)}}
    types = accumulator_types(
        params, lambda path, value: "float32" if path == "block/kernel" else value.dtype
    )
    assert types["block"] == {"kernel": jnp.dtype("float32"), "bias": jnp.dtype("float32")}
    with pytest.raises(ValueError, match="block/bias must be a floating type, got int32"):
        accumulator_types(params, lambda path, value: "int32")


@pytest.mark.parametrize("reduction", ["sum", "mean", "running_mean"])
def test_a_float32_accumulator_keeps_what_a_bfloat16_one_loses(reduction):
    """A hundred thirds: each addition to a bfloat16 sum loses its last bits."""
    errors = {}
    once, _ = run_scalar(0.0, 1 / 3, Plan(precision="16.32"))
    exact = -float(once.params["w"][0]) * (100 if reduction == "sum" else 1)
    for dtype in ("bfloat16", "float32"):
        plan = Plan(
            gradient_accumulation_count=100,
            gradient_accumulation_dtype=dtype,
            gradient_accumulation_reduction=reduction,
            precision="16.32",
        )
        state, _ = run_scalar(0.0, 1 / 3, plan)
        gradient = -float(state.params["w"][0])
        errors[dtype] = abs(gradient - exact) / exact
    assert errors["float32"] < 1e-6
    if reduction != "running_mean":  # whose terms are alike here, and exact in any type
        assert errors["bfloat16"] > 1e-4


def test_a_float16_gradient_is_widened_before_it_is_divided():
    """1e-7 / 64 is nothing in float16."""
    plan = Plan(
        gradient_accumulation_count=64,
        precision="16.16",
        half_type="float16",
    )
    state, _ = run_scalar(1.0, 1e-7, plan, learning_rate=1e6)
    assert float(state.params["w"][0]) == pytest.approx(0.9, abs=0.03)


def test_a_bfloat16_running_mean_is_not_biased():
    """Were its two factors rounded, they would not add up to one, and the error grows."""
    rng = np.random.default_rng(0)
    values = (0.3 + 0.1 * rng.standard_normal((250, 400))).astype(np.float32)

    def loss(params, model_state, batch, key):
        return (params["w"] * batch[0]).sum(), (model_state, {})

    plan = Plan(
        gradient_accumulation_count=250,
        gradient_accumulation_dtype="bfloat16",
        gradient_accumulation_reduction="running_mean",
    )
    program = training_program(loss, optax.sgd(1.0), plan)
    state = program.init({"w": jnp.zeros(400)})
    chunk = jax.device_put(values[:, None], program.chunk_sharding)
    state, _ = program.run(state, chunk)
    error = -np.asarray(state.params["w"]) - values.mean(0)
    assert abs(error.mean()) < 4 * error.std() / 20 + 1e-4
    assert np.abs(error).max() < 0.02


@pytest.mark.parametrize("reduction", ["mean", "running_mean"])
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.devices(2))])
def test_float64_gradients_are_accumulated_in_float64(replicas, reduction):
    def loss(params, model_state, batch, key):
        return (params["w"] * batch).mean(), (model_state, {})

    with jax.enable_x64(True):
        plan = Plan(
            gradient_accumulation_count=6,
            num_replicas=replicas,
            gradient_accumulation_reduction=reduction,
        )
        program = training_program(loss, optax.sgd(1.0), plan)
        state = program.init({"w": jnp.zeros((), jnp.float64)})
        data = np.random.default_rng(0).standard_normal((12, replicas))
        state, _ = program.run(state, jax.device_put(data, program.chunk_sharding))
        assert state.params["w"].dtype == jnp.float64
        assert abs(float(state.params["w"]) + 2 * data.mean()) < 1e-15
        params = {"w": jnp.zeros(2, jnp.float64)}
        assert accumulator_types(params, lambda *_: "float32")["w"] == jnp.float32
