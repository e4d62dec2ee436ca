"""When events happen. Seven cases are commands in the README of the CNN reference."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.config import ConfigurationError
from millrace.loop.event_schedule import EventSchedule, closest_divisor, schedule_events
from millrace.plan import resolve_batching


def cifar10(logs_per_epoch: float, *, num_epochs: int = 6) -> EventSchedule:
    """Return the schedule of those commands: 64 of 50,000 samples per update."""
    batching = resolve_batching(micro_batch_size=8, gradient_accumulation_count=8)
    return schedule_events(
        updates_per_epoch=batching.updates_per_epoch(50_000),
        num_epochs=num_epochs,
        events_per_epoch={"log": logs_per_epoch},
    )


def logs(schedule: EventSchedule) -> list[int]:
    """Return the updates after which a log is due."""
    updates = range(1, schedule.total_updates + 1)
    return [update for update in updates if schedule.due("log", update)]


# The seven commands


def test_one_log_per_epoch_runs_an_epoch_per_execution():
    schedule = cifar10(1)
    assert schedule.updates_per_epoch == 781
    assert schedule.updates_per_execution == 781
    assert logs(schedule) == [781, 1562, 2343, 3124, 3905, 4686]
    assert schedule.warnings == []


def test_two_logs_per_epoch_would_split_an_update_and_become_one_with_a_warning():
    schedule = cifar10(2)
    assert schedule.updates_per_execution == 781
    assert len(logs(schedule)) == 6
    (warning,) = schedule.warnings
    assert "2 does not fall on whole weight updates" in warning
    assert "nearest that does is 1," in warning


def test_ten_logs_per_epoch_become_eleven_with_a_warning():
    schedule = cifar10(10)
    assert schedule.updates_per_execution == 71
    assert len(logs(schedule)) == 6 * 11
    (warning,) = schedule.warnings
    assert "nearest that does is 11," in warning


def test_half_a_log_per_epoch_runs_two_epochs_per_execution():
    schedule = cifar10(0.5)
    assert schedule.updates_per_execution == 2 * 781
    assert schedule.total_updates // schedule.updates_per_execution == 3
    assert logs(schedule) == [1562, 3124, 4686]
    assert schedule.warnings == []


def test_a_third_of_a_log_per_epoch_runs_three_epochs_per_execution():
    schedule = cifar10(0.3333333333333333333)
    assert schedule.updates_per_execution == 3 * 781
    assert schedule.total_updates // schedule.updates_per_execution == 2
    assert schedule.warnings == []


def test_a_log_every_two_epochs_is_not_possible_in_five():
    message = r"not possible to log 2\.0 epochs at a time for 5 epochs"
    with pytest.raises(ValueError, match=message):
        cifar10(0.5, num_epochs=5)


def test_no_logs_run_everything_in_one_execution_with_a_warning():
    schedule = cifar10(0)
    assert schedule.updates_per_execution == schedule.total_updates == 6 * 781
    assert logs(schedule) == [6 * 781]  # the end is always logged
    (warning,) = schedule.warnings
    assert "all 4686 updates" in warning


# What the reference gets wrong


@pytest.mark.parametrize(
    ("number", "target", "expected"),
    [
        (100, 10, 10),  # the reference never tries the square root: 5
        (36, 6, 6),  # 4
        (4, 2, 2),  # 1
        (9, 3, 3),  # 1
        (1, 1, 1),
        (781, 10, 11),
        (781, 2, 1),
        (781, 10_000, 781),
        (12, 5, 4),  # 4 and 6 are equally near
        (12, 5.5, 6),
    ],
)
def test_the_nearest_divisor_is_found(number, target, expected):
    assert closest_divisor(number, target) == expected


@settings(deadline=None)
@given(number=st.integers(1, 5_000), target=st.floats(0, 6_000))
def test_no_divisor_is_nearer_than_the_nearest(number, target):
    found = closest_divisor(number, target)
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    assert found in divisors
    assert abs(found - target) == min(abs(d - target) for d in divisors)


def test_checkpoints_without_logs_do_not_divide_by_zero():
    schedule = schedule_events(
        updates_per_epoch=781,
        num_epochs=6,
        events_per_epoch={"log": 0, "checkpoint": 1},
    )
    assert schedule.updates_per_execution == 781
    assert [schedule.due("log", u) for u in (781, 4685, 4686)] == [False, False, True]
    assert [schedule.due("checkpoint", u) for u in (780, 781, 4686)] == [False, True, True]


def test_logs_without_checkpoints_do_not_divide_by_zero():
    schedule = schedule_events(
        updates_per_epoch=781,
        num_epochs=6,
        events_per_epoch={"log": 11, "checkpoint": 0},
    )
    assert schedule.updates_per_execution == 71
    assert not schedule.due("checkpoint", 71)
    assert schedule.due("checkpoint", 4686)


# Several kinds of events


def test_an_execution_ends_wherever_an_event_may_be_due():
    schedule = schedule_events(
        updates_per_epoch=60,
        num_epochs=4,
        events_per_epoch={"log": 10, "checkpoint": 4, "validate": 0.5},
    )
    assert schedule.periods == {"log": 6, "checkpoint": 15, "validate": 120}
    assert schedule.updates_per_execution == math.gcd(6, 15, 120) == 3
    assert schedule.due("log", 6)
    assert not schedule.due("log", 15)
    assert schedule.due("checkpoint", 15)
    assert not schedule.due("validate", 60)
    assert schedule.due("validate", 120)


def test_each_rate_that_changes_has_its_own_warning():
    schedule = schedule_events(
        updates_per_epoch=781,
        num_epochs=2,
        events_per_epoch={"log": 2, "checkpoint": 1, "validate": 10},
    )
    first, second = schedule.warnings
    assert first.startswith("logs per epoch: 2 ")
    assert second.startswith("validat")
    assert "11" in second


def test_without_any_events_the_run_is_one_execution():
    schedule = schedule_events(updates_per_epoch=5, num_epochs=3, events_per_epoch={})
    assert schedule.updates_per_execution == 15
    assert len(schedule.warnings) == 1


def test_an_event_without_a_rate_is_due_only_at_the_end():
    schedule = cifar10(1)
    assert not schedule.due("validate", 781)
    assert schedule.due("validate", schedule.total_updates)


rates = st.one_of(
    st.just(0.0),
    st.floats(1, 2_000),
    st.integers(1, 12).map(lambda epochs: 1 / epochs),
    st.sampled_from([0.75, 0.3, 2 / 3]),
)


@settings(deadline=None)
@given(
    updates_per_epoch=st.integers(1, 2_000),
    num_epochs=st.integers(1, 24),
    log=rates,
    checkpoint=rates,
    validate=rates,
)
@example(updates_per_epoch=1, num_epochs=1, log=1.0, checkpoint=0.0, validate=5.0)
def test_periods_divide_the_run_and_the_execution_divides_the_periods(
    updates_per_epoch, num_epochs, log, checkpoint, validate
):
    rates_per_epoch = {"log": log, "checkpoint": checkpoint, "validate": validate}
    fits = all(
        rate == 0 or rate >= 1 or abs(rate * num_epochs - round(rate * num_epochs)) < 1e-6
        for rate in rates_per_epoch.values()
    )
    arguments = {"updates_per_epoch": updates_per_epoch, "num_epochs": num_epochs}
    if not fits:
        with pytest.raises(ValueError, match="not possible to"):
            schedule_events(**arguments, events_per_epoch=rates_per_epoch)
        return
    schedule = schedule_events(**arguments, events_per_epoch=rates_per_epoch)
    total = schedule.total_updates
    assert total == updates_per_epoch * num_epochs
    assert 1 <= schedule.updates_per_execution <= total
    assert total % schedule.updates_per_execution == 0
    for event, period in schedule.periods.items():
        assert (period == 0) == (rates_per_epoch[event] == 0)
        if period:
            assert total % period == 0
            assert period % schedule.updates_per_execution == 0
        assert schedule.due(event, total)


@settings(deadline=None)
@given(updates_per_epoch=st.integers(1, 2_000), rate=st.integers(1, 2_000))
def test_a_rate_is_kept_if_it_divides_and_changed_with_a_warning_if_not(
    updates_per_epoch, rate
):
    schedule = schedule_events(
        updates_per_epoch=updates_per_epoch,
        num_epochs=2,
        events_per_epoch={"log": rate},
    )
    divides = updates_per_epoch % rate == 0
    assert (schedule.warnings == []) == divides
    if divides:
        assert schedule.periods["log"] == updates_per_epoch // rate


# Invalid schedules


@pytest.mark.parametrize("rate", [-1, -0.5, math.nan, math.inf, -math.inf])
def test_a_negative_or_non_finite_rate_is_refused(rate):
    with pytest.raises(ValueError, match=f"logs per epoch must be 0 or more, got {rate}"):
        cifar10(rate)


@pytest.mark.parametrize("rate", [1e-7, 1e-12, 5e-324])
def test_a_rate_too_small_for_the_run_is_refused_without_dividing_by_zero(rate):
    with pytest.raises(ValueError, match="not possible to log"):
        cifar10(rate)


def test_the_error_suggests_a_number_of_epochs_that_works():
    with pytest.raises(ValueError, match=r"multiple of 2\b"):
        cifar10(0.5, num_epochs=5)
    # 3 logs in 10 epochs: only multiples of 10 work.
    with pytest.raises(ValueError, match=r"multiple of 10\b"):
        cifar10(0.3, num_epochs=6)
    assert cifar10(0.3, num_epochs=10).total_updates == 7810


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"updates_per_epoch": 0, "num_epochs": 1}, "updates_per_epoch .* got 0"),
        ({"updates_per_epoch": 1, "num_epochs": 0}, "num_epochs .* got 0"),
        ({"updates_per_epoch": 1, "num_epochs": -2}, "num_epochs .* got -2"),
    ],
)
def test_a_run_without_updates_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule_events(**arguments, events_per_epoch={"log": 1})


@pytest.mark.parametrize("argument", ["events_per_epoch", "first_epochs"])
def test_a_kind_of_event_that_does_not_exist_is_refused(argument):
    arguments = {"events_per_epoch": {"log": 1}, argument: {"valdate": 1}}
    with pytest.raises(ValueError, match="log, checkpoint, validate, got 'valdate'"):
        schedule_events(updates_per_epoch=4, num_epochs=2, **arguments)


# Uneven events


@pytest.mark.parametrize(
    ("updates", "epochs", "period"),
    # The CNN benchmarks of the TensorFlow 1 reference, 16 lines per epoch
    [(78, 1, 4), (1668, 2, 104), (6405, 2, 400), (1601, 1, 100), (3, 1, 1)],
)
def test_uneven_logs_come_after_whole_updates_and_at_the_end(updates, epochs, period):
    schedule = schedule_events(
        updates_per_epoch=updates,
        num_epochs=epochs,
        events_per_epoch={"log": 16, "checkpoint": 0, "validate": 1},
        uneven=("log",),
    )
    assert schedule.periods["log"] == period
    assert schedule.periods["validate"] == updates
    assert not schedule.warnings
    execution = schedule.updates_per_execution
    assert period % execution == updates % execution == 0
    due = logs(schedule)
    assert due[:2] == [period, 2 * period]
    assert due[-1] == updates * epochs


def test_too_many_updates_to_count_are_refused():
    with pytest.raises(ConfigurationError, match="3,000,000,000 updates, and at most"):
        schedule_events(
            updates_per_epoch=1000, num_epochs=3_000_000, events_per_epoch={"log": 1}
        )
