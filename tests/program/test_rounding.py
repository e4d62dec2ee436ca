import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_loop import GLOBAL_BATCH, make_data, train_with

from millrace.plan import Plan
from millrace.program.rounding import random_bits, stochastic_round

DRAWS = 100_000
HALVES = ["bfloat16", "float16"]


def folded(number: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(11), number)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "value", [1.0 + 2**-12, 0.1, -0.1, 3.14159, -1e-3, 1e-5, 3e-6, 2e-8, 60001.7]
)
def test_the_mean_of_many_draws_is_the_value_within_four_standard_errors(value, dtype):
    value = float(np.float32(value))
    drawn = stochastic_round(jnp.full(DRAWS, value), dtype, folded(1))
    drawn = np.asarray(drawn, np.float64)
    standard_error = drawn.std() / np.sqrt(DRAWS)
    assert len(np.unique(drawn)) <= 2  # the neighbors below and above
    assert abs(drawn.mean() - value) <= 4 * standard_error + 1e-12 * abs(value)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_error_over_random_values_is_unbiased(dtype):
    values = np.random.default_rng(0).standard_normal(4 * DRAWS).astype(np.float32)
    drawn = stochastic_round(jnp.asarray(values), dtype, folded(2))
    error = np.asarray(drawn, np.float64) - values
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(error.size)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_the_type_holds_stays_as_it_is(dtype):
    patterns = jnp.arange(65536, dtype=jnp.uint16)
    every = jax.lax.bitcast_convert_type(patterns, jnp.dtype(dtype))
    finite = np.asarray(jnp.isfinite(every))
    drawn = stochastic_round(every.astype(jnp.float32), dtype, folded(3))
    before, after = (np.asarray(x).view(np.uint16)[finite] for x in (every, drawn))
    np.testing.assert_array_equal(after, before)


def test_infinities_and_nans_are_kept_and_float16_does_not_overflow():
    odd = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 65519.0, -1e30])
    half = np.asarray(stochastic_round(odd, "float16", folded(4)), np.float32)
    np.testing.assert_array_equal(half, [np.inf, -np.inf, np.nan, 65504.0, -65504.0])
    brain = np.asarray(stochastic_round(odd[:3], "bfloat16", folded(4)), np.float32)
    np.testing.assert_array_equal(brain, [np.inf, -np.inf, np.nan])


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="bfloat16 or float16, not float32"):
        stochastic_round(jnp.ones(3), "float32", folded(5))


def test_bits_differ_between_keys_elements_and_are_uniform():
    bits = np.stack([np.asarray(random_bits(folded(i), (4096,))) for i in range(16)])
    assert len(np.unique(bits)) > bits.size - 5
    ones = np.unpackbits(bits.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 4 * 0.5 / np.sqrt(bits.size * 32)
    low = (bits & 0xFFFF) / 65536  # the bits that bfloat16 rounding uses
    assert abs(low.mean() - 0.5) < 4 * np.sqrt(1 / 12 / low.size)
    pairs = np.corrcoef(low.reshape(16, -1))[np.triu_indices(16, 1)]
    assert np.abs(pairs).max() < 5 / np.sqrt(4096)


def test_small_updates_move_half_weights_only_with_stochastic_rounding():
    """From 1, 500 updates of -1e-4: exactly 0.95; rounding to nearest stays at 1."""

    def loss(params, model_state, batch, key):
        return params["w"].sum().astype(jnp.float32), (model_state, {})

    from millrace.program.training import training_program

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
def test_replicas_round_alike():
    """Were the copies rounded differently, they would drift apart unnoticed."""
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
