"""16-bit training: precisions, stochastic rounding and loss scaling."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_loop import (
    GLOBAL_BATCH,
    largest_difference,
    make_data,
    plain_loop,
    run_scalar,
    train_with,
)

from millrace.plan import Plan
from millrace.program.mixed_precision import (
    LossScale,
    adjust_loss_scale,
    all_finite,
    init_loss_scale,
    random_bits,
    stochastic_round,
)
from millrace.program.training import training_program

# --- precisions: the cases of the reference tests ---


@pytest.mark.parametrize(
    ("precision", "survives"), [("16.16", 0), ("16.32", 0), ("32.32", 1)]
)
def test_a_product_underflows_in_float16_but_not_in_float32(precision, survives):
    plan = Plan(precision=precision, half_type="float16")
    _, info = run_scalar(1e-7, 0.1, plan)
    assert bool(info["product"][0] > 0) == bool(survives)


@pytest.mark.parametrize(("precision", "moves"), [("16.16", 0), ("16.32", 1), ("32.32", 1)])
def test_1000_minus_a_tenth_changes_only_with_a_float32_update(precision, moves):
    plan = Plan(precision=precision, half_type="float16")
    state, _ = run_scalar(1000.0, 0.1, plan)
    assert bool(state.params["w"][0] != 1000) == bool(moves)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize(("precision", "weights"), [("16.16", None), ("16.32", "float32")])
def test_weights_are_stored_in_the_dtype_of_the_plan(precision, weights, half):
    plan = Plan(micro_batch_size=GLOBAL_BATCH, precision=precision, half_type=half)
    state, _, _ = train_with(plan)
    assert {str(p.dtype) for p in jax.tree.leaves(state.params)} == {weights or half}


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("precision", ["16.16", "16.32"])
def test_16_bits_train_about_as_well_as_32(precision, half):
    """Within 0.02, for weights of order 1."""
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


def test_adam_works_with_float16_weights():
    """Squared gradients underflow in float16, so the state is kept in float32."""
    plan = Plan(micro_batch_size=GLOBAL_BATCH, precision="16.16", half_type="float16")
    state, _, _ = train_with(plan)
    assert all(
        np.isfinite(np.asarray(p, np.float32)).all() for p in jax.tree.leaves(state.params)
    )
    kinds = {str(s.dtype) for s in jax.tree.leaves(state.optimizer_state) if s.ndim}
    assert kinds == {"float32"}


def test_static_loss_scaling_preserves_small_float16_gradients():
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


def test_dynamic_scaling_grows_after_2000_updates_without_overflow():
    plan = Plan(precision="16.32", half_type="float16", loss_scaling="dynamic")
    _, info = run_scalar(1.0, 1e-4, plan, updates=2002, learning_rate=1e-6)
    assert (info["loss_scale"][1999], info["loss_scale"][2000]) == (2**15, 2**16)


# --- stochastic rounding ---


def copies_seen(weight, half, updates, **options):
    """Return the mean of the 16-bit copies of many equal weights, by update."""

    def loss(params, model_state, batch, key):
        copy = params["w"]
        assert copy.dtype == jnp.dtype(half)
        mean = copy.astype(jnp.float32).mean()
        return (copy * batch[0]).sum(), (model_state, {"copy": mean})

    plan = Plan(precision="16.32", half_type=half, **options)
    program = training_program(loss, optax.sgd(0.0), plan)
    state = program.init({"w": jnp.full(SAMPLES, weight, jnp.float32)}, seed=3)
    count = updates * plan.batching.gradient_accumulation_count
    chunk = np.ones((count, 1), np.float32)
    state, info = program.run(state, jax.device_put(chunk, program.chunk_sharding))
    assert state.params["w"].dtype == jnp.float32
    assert (np.asarray(state.params["w"]) == np.float32(weight)).all()
    return np.asarray(info["copy"])


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_copies_of_float32_weights_are_right_on_average(half):
    """1.0003 lies between two 16-bit numbers; the nearest is 1 or 1.00098."""
    weight, spacing = 1.0003, float(jnp.finfo(half).eps)
    nearest = float(jnp.asarray(weight, half))
    assert copies_seen(weight, half, 1) == nearest
    means = copies_seen(weight, half, 2, stochastic_rounding=True)
    share = (weight - 1) / spacing
    error = spacing * np.sqrt(share * (1 - share) / SAMPLES)
    assert (abs(means - weight) < 4 * error).all()
    assert means[0] != means[1]  # every update draws again


def test_the_gradient_of_a_rounded_copy_reaches_the_float32_weight():
    plan = Plan(precision="16.32", stochastic_rounding=True)
    state, _ = run_scalar(1.0, 0.25, plan, learning_rate=2.0**-12)
    assert float(state.params["w"][0]) == 1 - 2.0**-14


def test_micro_batches_of_an_update_share_their_copies():
    once = copies_seen(1.0003, "bfloat16", 2, stochastic_rounding=True)
    options = {"gradient_accumulation_count": 3, "stochastic_rounding": True}
    np.testing.assert_allclose(copies_seen(1.0003, "bfloat16", 2, **options), once)


SAMPLES = 100_000
HALF_TYPES = ["bfloat16", "float16"]


def make_key(number: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(11), number)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize(
    "value", [1.0 + 2**-12, 0.1, -0.1, 3.14159, -1e-3, 1e-5, 3e-6, 2e-8, 60001.7]
)
def test_rounding_is_right_on_average_within_four_standard_errors(value, dtype):
    value = float(np.float32(value))
    rounded = stochastic_round(jnp.full(SAMPLES, value), dtype, make_key(1))
    rounded = np.asarray(rounded, np.float64)
    standard_error = rounded.std() / np.sqrt(SAMPLES)
    assert len(np.unique(rounded)) <= 2  # the neighbors below and above
    assert abs(rounded.mean() - value) <= 4 * standard_error + 1e-12 * abs(value)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_the_error_over_random_values_is_unbiased(dtype):
    values = np.random.default_rng(0).standard_normal(4 * SAMPLES).astype(np.float32)
    rounded = stochastic_round(jnp.asarray(values), dtype, make_key(2))
    error = np.asarray(rounded, np.float64) - values
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(error.size)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_numbers_that_the_dtype_represents_exactly_do_not_change(dtype):
    patterns = jnp.arange(65536, dtype=jnp.uint16)
    every = jax.lax.bitcast_convert_type(patterns, jnp.dtype(dtype))
    finite = np.asarray(jnp.isfinite(every))
    rounded = stochastic_round(every.astype(jnp.float32), dtype, make_key(3))
    before, after = (np.asarray(x).view(np.uint16)[finite] for x in (every, rounded))
    np.testing.assert_array_equal(after, before)


def test_infinities_and_nans_are_kept_and_float16_does_not_overflow():
    odd = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 65519.0, -1e30])
    half = np.asarray(stochastic_round(odd, "float16", make_key(4)), np.float32)
    np.testing.assert_array_equal(half, [np.inf, -np.inf, np.nan, 65504.0, -65504.0])
    brain = np.asarray(stochastic_round(odd[:3], "bfloat16", make_key(4)), np.float32)
    np.testing.assert_array_equal(brain, [np.inf, -np.inf, np.nan])


def test_other_dtypes_are_an_error():
    with pytest.raises(ValueError, match="bfloat16 or float16, got float32"):
        stochastic_round(jnp.ones(3), "float32", make_key(5))


def test_bits_are_uniform_and_differ_between_keys_and_elements():
    bits = np.stack([np.asarray(random_bits(make_key(i), (4096,))) for i in range(16)])
    assert len(np.unique(bits)) > bits.size - 5
    ones = np.unpackbits(bits.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 4 * 0.5 / np.sqrt(bits.size * 32)
    low = (bits & 0xFFFF) / 65536  # the bits that bfloat16 rounding uses
    assert abs(low.mean() - 0.5) < 4 * np.sqrt(1 / 12 / low.size)
    pairs = np.corrcoef(low.reshape(16, -1))[np.triu_indices(16, 1)]
    assert np.abs(pairs).max() < 5 / np.sqrt(4096)


def test_small_updates_move_16_bit_weights_only_with_stochastic_rounding():
    """500 updates of -1e-4, from 1: exactly 0.95, but rounding to nearest stays at 1."""

    def loss(params, model_state, batch, key):
        return params["w"].sum().astype(jnp.float32), (model_state, {})

    ends = {}
    for stochastic in (False, True):
        plan = Plan(precision="16.16", stochastic_rounding=stochastic)
        program = training_program(loss, optax.sgd(1e-4), plan)
        state = program.init({"w": jnp.ones(4096)})
        chunk = jax.device_put(np.zeros((500, 1), np.float32), program.chunk_sharding)
        state, _ = program.run(state, chunk)
        ends[stochastic] = np.asarray(state.params["w"], np.float64)
    assert (ends[False] == 1).all()
    error = ends[True].std() / np.sqrt(4096)
    assert abs(ends[True].mean() - 0.95) < 4 * error


@pytest.mark.devices(4)
def test_replicas_round_the_same_way():
    """If copies were rounded differently, they would drift apart unnoticed."""
    plan = Plan(
        micro_batch_size=GLOBAL_BATCH // 4,
        num_replicas=4,
        precision="16.16",
        stochastic_rounding=True,
    )
    state, _, _ = train_with(plan, data=make_data())
    for leaf in jax.tree.leaves(state.params):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == 4
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])


@pytest.mark.parametrize("other", [(5, 9), (8, 7)], ids=["last word", "first word"])
def test_every_word_of_a_key_changes_the_bits(other):
    keys = [jax.random.wrap_key_data(jnp.array(w, jnp.uint32)) for w in ((5, 7), other)]
    one, two = (np.asarray(random_bits(key, (1000,))) for key in keys)
    assert (one == two).sum() <= 1


# --- loss scaling ---


def scale(factor, good=0, skipped=0):
    return LossScale(jnp.float32(factor), jnp.int32(good), jnp.int32(skipped))


def numbers(scale):
    return tuple(float(x) for x in scale)


@pytest.mark.parametrize(
    ("before", "finite", "after"),
    [
        (scale(1024, 7, 2), True, (1024, 8, 2)),
        (scale(1024, 7, 2), False, (512, 0, 3)),  # counting restarts
        (scale(1024, 1998), True, (1024, 1999, 0)),
        (scale(1024, 1999), True, (2048, 0, 0)),
        (scale(1024, 1999), False, (512, 0, 1)),
        (scale(2.0**24, 1999), True, (2.0**24, 0, 0)),  # the largest factor
        (scale(2.0**23, 1999), True, (2.0**24, 0, 0)),
        (scale(1), False, (1, 0, 1)),  # the smallest factor
        (scale(2), False, (1, 0, 1)),
    ],
)
def test_the_factor_halves_after_an_overflow_and_doubles_after_2000_updates(
    before, finite, after
):
    assert numbers(adjust_loss_scale(before, jnp.bool_(finite))) == after


@pytest.mark.parametrize(
    ("setting", "factor"), [(0.0, 1), (128.0, 128), ("dynamic", 2**15)]
)
def test_the_plan_sets_the_initial_factor(setting, factor):
    assert numbers(init_loss_scale(setting)) == (factor, 0, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_single_non_finite_number_is_found_anywhere(bad):
    tree = {"a": jnp.ones(3), "b": [jnp.ones((2, 2))]}
    assert all_finite(tree)
    assert all_finite({})
    assert not all_finite({**tree, "b": [jnp.ones((2, 2)).at[1, 0].set(bad)]})
    assert not all_finite({**tree, "a": jnp.ones(3).at[2].set(bad)})
