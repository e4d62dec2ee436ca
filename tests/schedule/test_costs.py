"""Costs and links: the time of a ring all-reduce, and what is rejected."""

import math

import pytest

from millrace.config import ConfigurationError
from millrace.schedule.simulate import Costs, Link, ring_all_reduce_seconds


def test_a_transfer_takes_the_latency_and_the_time_of_its_bytes():
    assert Link(bytes_per_second=100, latency_seconds=0.5).seconds(200) == 2.5
    assert Link().seconds(1e12) == 0


def test_a_ring_of_any_size_passes_on_nearly_twice_the_bytes():
    link = Link(bytes_per_second=1000)
    assert ring_all_reduce_seconds(500, 1, link) == 0
    assert ring_all_reduce_seconds(500, 2, link) == pytest.approx(0.5)
    assert ring_all_reduce_seconds(500, 64, link) == pytest.approx(63 / 64)
    slow_to_start = Link(latency_seconds=0.001)
    assert ring_all_reduce_seconds(500, 8, slow_to_start) == pytest.approx(0.014)


def test_a_cost_that_is_not_given_is_0():
    costs = Costs(forward=(1.0, 2.0), update=(3.0, 4.0))
    assert costs.get("forward", 1) == 2
    assert costs.get("update", 0) == 3
    assert costs.get("backward", 1) == 0
    assert costs.get("recompute", 1) == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backward": (1.0,)}, "backward has 1 values for 2 stages"),
        ({"update": (1.0, -2.0)}, "update must be at least 0"),
        ({"update": (1.0, math.nan)}, "update must be at least 0"),
        ({"input_bytes": -1.0}, "input_bytes must be at least 0"),
    ],
)
def test_impossible_costs_are_rejected(values, message):
    with pytest.raises(ConfigurationError, match=message):
        Costs(forward=(1.0, 1.0), **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bytes_per_second": 0}, "must be positive, got 0"),
        ({"bytes_per_second": math.nan}, "must be positive"),
        ({"latency_seconds": -1}, "must be at least 0, got -1"),
    ],
)
def test_an_impossible_link_is_rejected(values, message):
    with pytest.raises(ConfigurationError, match=message):
        Link(**values)
