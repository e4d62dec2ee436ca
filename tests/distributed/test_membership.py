"""Who takes part in an elastic run after failures, and when the absent are tried again."""

import math

import pytest

from millrace.config import ConfigurationError, parse
from millrace.distributed.membership import Membership
from millrace.distributed.options import LaunchConfig


def fail(members, slot, now=0.0, *, made_progress=False):
    return members.record_failure(slot, made_progress=made_progress, now=now)


def test_a_process_is_lost_only_if_it_fails_again_without_progress():
    members = Membership(2, 4, 600)
    assert not fail(members, 1, made_progress=True)
    assert not fail(members, 1, made_progress=True)
    assert members.slots == [0, 1, 2, 3]
    assert fail(members, 1)
    assert members.slots == [0, 2, 3] and members.absent == (1,)


def test_whoever_fails_last_is_lost():
    members = Membership(1, 3, 600)
    fail(members, 2)
    fail(members, 0)
    assert members.slots == [1, 2]


def test_absent_processes_are_tried_again_later_and_each_time_later():
    members = Membership(1, 2, 100)
    fail(members, 1, 0.0), fail(members, 1, 10.0)
    assert not members.is_return_due(109.0) and members.is_return_due(110.0)
    assert members.return_absent() == (1,)
    assert members.slots == [0, 1] and not members.is_return_due(1e9)
    assert fail(members, 0, 120.0)  # at once, whoever it was: the others were well before
    assert members.slots == [0]
    assert not members.is_return_due(319.0) and members.is_return_due(320.0)


def test_a_return_with_progress_counts_as_success():
    members = Membership(1, 2, 100)
    fail(members, 1), fail(members, 1)
    members.return_absent()
    assert not fail(members, 1, 500.0, made_progress=True)
    assert fail(members, 1, 510.0)
    assert members.is_return_due(610.0)  # as long as at first


def test_with_too_few_the_run_ends():
    members = Membership(3, 4, 100)
    fail(members, 0), fail(members, 0)
    assert members.has_enough
    members.rest(0.0)
    assert members.slots == [1, 2] and not members.has_enough


def test_nobody_returns_if_that_is_not_wanted():
    members = Membership(1, 2, math.inf)
    fail(members, 1), fail(members, 1)
    assert not members.is_return_due(1e12)


@pytest.mark.parametrize(
    "given", ["4:2", "0:2", "2", "a:b", "2:4:8", ":3"], ids=lambda text: text
)
def test_the_range_has_to_be_one(given):
    with pytest.raises(ConfigurationError, match=f"MIN:MAX.*got {given}"):
        parse(LaunchConfig, ["--elastic", given], program="millrace launch")


def test_the_number_of_processes_is_the_most():
    with pytest.raises(ConfigurationError, match="starts 4 processes, but num_instances"):
        parse(LaunchConfig, ["--elastic", "2:4", "-n", "3"], program="millrace launch")
    config, _ = parse(LaunchConfig, ["--elastic", "2:4"], program="millrace launch")
    assert config.process_range == (2, 4) and config.replicas_per_process(8) == 2
