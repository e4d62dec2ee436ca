"""Learning-rate schedules follow their formulas at every update."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_loop import GLOBAL_BATCH, train_with

from millrace.config import ConfigurationError
from millrace.plan import Plan
from millrace.program.learning_rate import learning_rate_schedule

BATCH, PER_EPOCH = 48, 7
UPDATE_NUMBERS = np.arange(90)

RECIPES = {
    "const": {"initial_learning_rate": 0.01},
    "cosine": {"initial_learning_rate": 0.01, "epochs_to_total_decay": 9.5},
    "stepped": {"boundaries": [2, 3.5, 8], "values": [0.4, 0.3, 0.7, 0.1]},
    "polynomial": {
        "initial_learning_rate": 0.01,
        "epochs_to_total_decay": 9.5,
        "end_learning_rate_ratio": 0.1,
        "power": 2,
    },
    "exponential": {
        "initial_learning_rate": 0.01,
        "epochs_to_total_decay": 9.5,
        "num_decays": 12,
        "decay_rate": 0.9,
    },
}
WARMUPS = {
    "none": None,
    "shift": {"warmup_mode": "shift", "warmup_epochs": 2.5},
    "mask": {"warmup_mode": "mask", "warmup_epochs": 2.5},
}


def make(name, params=None, *, per_epoch=PER_EPOCH, batch=BATCH, **options) -> Any:
    return learning_rate_schedule(
        name,
        RECIPES[name] if params is None else params,
        global_batch_size=batch,
        updates_per_epoch=per_epoch,
        **options,
    )


def evaluate(schedule, updates=UPDATE_NUMBERS) -> np.ndarray:
    return np.asarray(schedule(updates))


def oracle(name, update, *, factor=1.0, warmup=None, staircase=False) -> float:
    """Return the learning rate of one update in float64, straight from the formulas."""
    params = RECIPES[name]

    def rate(t):
        if name == "stepped":
            passed = [b for b in params["boundaries"] if t > int(b * PER_EPOCH)]
            return params["values"][len(passed)] * factor
        start = params["initial_learning_rate"] * BATCH * factor
        if name == "const":
            return start
        total = int(params["epochs_to_total_decay"] * PER_EPOCH)
        if name == "cosine":
            return 0.5 * start * (1 + math.cos(math.pi * min(t, total) / total))
        if name == "polynomial":
            end = start * params["end_learning_rate_ratio"]
            return (start - end) * (1 - min(t, total) / total) ** params["power"] + end
        for decay in range(1, params["num_decays"] + 1):
            if t > math.floor(total * decay / params["num_decays"]):
                start *= params["decay_rate"]
        return start

    if staircase:
        update = math.floor(update / PER_EPOCH) * PER_EPOCH
    if warmup is None:
        return rate(update)
    rise = int(warmup["warmup_epochs"] * PER_EPOCH)
    if warmup["warmup_mode"] == "shift":
        if update < rise:
            return rate(0) * (update + 1) / (rise + 1)
        return rate(update - rise)
    if update < rise:
        return rate(update) * (update + 1) / (rise + 1)
    return rate(update)


@pytest.mark.parametrize("staircase", [False, True], ids=["smooth", "staircase"])
@pytest.mark.parametrize("warmup", WARMUPS)
@pytest.mark.parametrize("name", RECIPES)
def test_every_update_follows_the_formula(name, warmup, staircase):
    options = {"factor": 1.5, "warmup": WARMUPS[warmup], "staircase": staircase}
    expected = [oracle(name, update, **options) for update in UPDATE_NUMBERS.tolist()]
    found = evaluate(make(name, **options))
    # Relative to the largest: near its end, the cosine subtracts numbers close to 1.
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-7 * max(expected))


def test_the_published_recipes_start_and_end_at_their_rates():
    mlperf = {
        "initial_learning_rate": 0.001991319,
        "epochs_to_total_decay": 39,
        "end_learning_rate_ratio": 2.18e-5,
        "power": 2,
    }
    options = {"per_epoch": 556, "batch": 2304}
    rate = make("polynomial", mlperf, warmup=WARMUPS["shift"], **options)
    rise = int(2.5 * 556)
    assert float(rate(rise)) == pytest.approx(4.588, rel=1e-4)
    assert float(rate(rise + 39 * 556)) == pytest.approx(1e-4, rel=1e-3)

    pipeline = {"initial_learning_rate": 2**-13, "epochs_to_total_decay": 95}
    for batch, start in ((16384, 2.0), (8192, 1.0)):
        rate = make("cosine", pipeline, per_epoch=78, batch=batch)
        assert float(rate(0)) == start
        assert float(rate(95 * 78)) == float(rate(10**6)) == 0.0

    efficientnet = {
        "initial_learning_rate": 2**-14,
        "epochs_to_total_decay": 350,
        "num_decays": 146,
        "decay_rate": 0.97,
    }
    rate = make("exponential", efficientnet, per_epoch=1668, batch=768)
    every_2_4_epochs = 350 * 1668 * np.arange(1, 146) // 146
    before, after = (evaluate(rate, every_2_4_epochs + more) for more in (0, 1))
    np.testing.assert_allclose(before, 768 / 2**14 * 0.97 ** np.arange(145), rtol=1e-6)
    np.testing.assert_allclose(after, 0.97 * before, rtol=1e-6)


def test_all_but_stepped_values_are_multiplied_by_the_global_batch():
    for name in RECIPES:
        one, other = (evaluate(make(name, batch=batch)) for batch in (BATCH, 2 * BATCH))
        times = 1 if name == "stepped" else 2
        np.testing.assert_allclose(other, times * one, rtol=1e-6)


@pytest.mark.parametrize("warmup", WARMUPS)
@pytest.mark.parametrize("name", RECIPES)
def test_a_staircase_keeps_the_rate_of_the_first_update_of_an_epoch(name, warmup):
    stairs = evaluate(make(name, warmup=WARMUPS[warmup], staircase=True))
    smooth = evaluate(make(name, warmup=WARMUPS[warmup]))
    first = UPDATE_NUMBERS // PER_EPOCH * PER_EPOCH
    np.testing.assert_array_equal(stairs, smooth[first])


@pytest.mark.parametrize("name", RECIPES)
def test_the_schedule_is_unchanged_after_warm_up(name):
    plain = evaluate(make(name))
    rise = int(2.5 * PER_EPOCH)
    shifted = evaluate(make(name, warmup=WARMUPS["shift"]))
    masked = evaluate(make(name, warmup=WARMUPS["mask"]))
    np.testing.assert_array_equal(shifted[rise:], plain[: len(plain) - rise])
    np.testing.assert_array_equal(masked[rise:], plain[rise:])


def test_warm_up_rises_linearly_and_does_not_start_at_zero():
    for mode in ("shift", "mask"):
        values = evaluate(make("const", warmup=WARMUPS[mode]))
        rise = int(2.5 * PER_EPOCH)
        top = 0.01 * BATCH
        np.testing.assert_allclose(np.diff(values[: rise + 1]), top / (rise + 1), rtol=1e-5)
        assert values[0] == pytest.approx(top / (rise + 1))
        assert (values[rise:] == np.float32(top)).all()


@pytest.mark.parametrize("warmup", WARMUPS)
def test_smooth_schedules_do_not_jump(warmup):
    """No step exceeds the steepest slopes of decay and warm-up together."""
    total, start = int(9.5 * PER_EPOCH), 0.01 * BATCH
    rising = start / (int(2.5 * PER_EPOCH) + 1) if WARMUPS[warmup] else 0.0
    for name, slope in (("cosine", math.pi / 2), ("polynomial", 2 * 0.9)):
        steps = np.abs(np.diff(evaluate(make(name, warmup=WARMUPS[warmup]))))
        assert steps.max() <= (start * slope / total + rising) * (1 + 1e-5)


def test_equivalent_schedules_agree():
    equal = np.testing.assert_allclose
    const = evaluate(make("const"))
    flat = RECIPES["polynomial"] | {"end_learning_rate_ratio": 1.0}
    equal(evaluate(make("polynomial", flat)), const, rtol=1e-6)
    equal(evaluate(make("polynomial", RECIPES["polynomial"] | {"power": 0})), const, 1e-6)
    equal(evaluate(make("exponential", RECIPES["exponential"] | {"num_decays": 0})), const)
    one_value = {"boundaries": [], "values": [0.01 * BATCH]}
    equal(evaluate(make("stepped", one_value)), const)

    no_time = {"warmup_epochs": 0, "warmup_mode": "shift"}
    for name in RECIPES:
        equal(evaluate(make(name, warmup=no_time)), evaluate(make(name)), rtol=0)

    decays = {
        "initial_learning_rate": 0.5,
        "epochs_to_total_decay": 12,
        "num_decays": 4,
        "decay_rate": 0.5,
    }
    steps = {"boundaries": [3, 6, 9], "values": [0.5, 0.25, 0.125, 0.0625]}
    before_the_end = np.arange(12 * PER_EPOCH)
    equal(
        evaluate(make("exponential", decays, batch=1), before_the_end),
        evaluate(make("stepped", steps), before_the_end),
        rtol=0,
    )


def test_a_boundary_is_exact_even_where_float32_cannot_count():
    edge = 2**24 + 1
    steps = {"boundaries": [edge], "values": [1.0, 0.5]}
    rate = make("stepped", steps, per_epoch=1)
    assert [float(rate(edge + more)) for more in (-1, 0, 1)] == [1.0, 1.0, 0.5]


def test_a_staircase_delays_a_boundary_by_one_epoch():
    steps = {"boundaries": [3], "values": [1.0, 0.5]}
    values = evaluate(make("stepped", steps, staircase=True))
    assert np.flatnonzero(values == 0.5)[0] == 4 * PER_EPOCH


@pytest.mark.parametrize("name", RECIPES)
def test_any_type_of_update_number_gives_the_same_float32(name):
    schedule = make(name, warmup=WARMUPS["mask"], staircase=True)
    with jax.numpy_dtype_promotion("strict"):
        traced = jax.jit(schedule)(jnp.int32(20))
        others = [schedule(20), schedule(np.int64(20)), schedule(np.arange(30))[20]]
    for value in (traced, *others):
        assert value.dtype == jnp.float32
        assert value.shape == () and not value.weak_type
        assert float(value) == pytest.approx(float(traced), rel=1e-6)


def test_a_program_reports_the_schedule_as_extra_info():
    steps = {"boundaries": [0, 1], "values": [0.3, 0.1, 0.2]}
    schedule = make("stepped", steps, per_epoch=1)
    _, info, _ = train_with(
        Plan(micro_batch_size=GLOBAL_BATCH),
        optimizer=optax.sgd(schedule),
        extra_info={"learning_rate": schedule},
    )
    np.testing.assert_allclose(info["learning_rate"], [0.3, 0.1, 0.2], rtol=1e-6)


def check_error(message, *arguments, **options) -> None:
    with pytest.raises(ConfigurationError) as raised:
        make(*arguments, **options)
    assert str(raised.value) == message


def test_an_unknown_schedule_or_warm_up_mode_suggests_the_nearest():
    check_error(
        "--lr-schedule must be one of const, cosine, stepped, polynomial, exponential; "
        "got 'cosin'. Did you mean cosine?",
        "cosin",
        {},
    )
    check_error(
        "--lr-warmup-params: warmup_mode must be one of shift, mask; got 'shfit'. "
        "Did you mean shift?",
        "const",
        warmup={"warmup_mode": "shfit", "warmup_epochs": 5},
    )
    check_error(
        "--lr-warmup-params: warmup_mode must be one of shift, mask; got ['mask']. "
        "Did you mean mask?",
        "const",
        warmup={"warmup_mode": ["mask"], "warmup_epochs": 5},
    )


def test_missing_and_unknown_keys_are_errors_that_list_the_keys():
    check_error(
        "--lr-schedule-params of cosine needs the keys initial_learning_rate, "
        "epochs_to_total_decay; got initial_learning_rate.",
        "cosine",
        {"initial_learning_rate": 0.1},
    )
    check_error(
        "--lr-schedule-params of const needs the keys initial_learning_rate; got "
        "inital_learning_rate. Did you mean initial_learning_rate?",
        "const",
        {"inital_learning_rate": 0.1},
    )
    check_error(
        "--lr-schedule-params of const needs the keys initial_learning_rate; got "
        "initial_learning_rate, power.",
        "const",
        {"initial_learning_rate": 0.1, "power": 2},
    )
    check_error(
        "--lr-warmup-params needs the keys warmup_mode, warmup_epochs; got none.",
        "const",
        warmup={},
    )
    check_error(
        "--lr-warmup-params needs the keys warmup_mode, warmup_epochs; got warmup_mode, "
        "warmup_epoch. Did you mean warmup_epochs?",
        "const",
        warmup={"warmup_mode": "mask", "warmup_epoch": 5},
    )


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("stepped", "values", [1, 2], "one more than boundaries; got 2 values and 3"),
        ("stepped", "boundaries", [3, 2, 8], "must not decrease, got [3.0, 2.0, 8.0]."),
        ("stepped", "boundaries", 3, "must be a list, got 3."),
        ("stepped", "values", [1, "x"], "must be a number of at least 0, got 'x'."),
        ("const", "initial_learning_rate", "0,1", "must be a number of at least 0, got"),
        ("const", "initial_learning_rate", True, "number of at least 0, got True."),
        ("const", "initial_learning_rate", math.nan, "number of at least 0, got nan."),
        ("polynomial", "power", -1, "must be a number of at least 0, got -1."),
        ("cosine", "epochs_to_total_decay", 0, "must be more than 0, got 0."),
        ("exponential", "num_decays", 1.5, "must be a whole number, got 1.5."),
    ],
)
def test_an_invalid_value_is_an_error(name, key, value, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)) as raised:
        make(name, RECIPES[name] | {key: value})
    assert str(raised.value).startswith(f"--lr-schedule-params: {key} must ")


def test_a_decay_takes_at_least_one_update():
    for name in ("cosine", "polynomial", "exponential"):
        rate = make(name, RECIPES[name] | {"epochs_to_total_decay": 0.1})
        shortest = make(name, RECIPES[name] | {"epochs_to_total_decay": 1 / PER_EPOCH})
        np.testing.assert_array_equal(evaluate(rate), evaluate(shortest))


def test_a_negative_warm_up_is_an_error():
    check_error(
        "--lr-warmup-params: warmup_epochs must be a number of at least 0, got -1.",
        "const",
        warmup={"warmup_mode": "mask", "warmup_epochs": -1},
    )
