"""Costs and links: the formula of a ring, and what is refused."""

import math

import pytest

from millrace.config import ConfigurationError
from millrace.schedule.costs import Costs, Link, ring_all_reduce_seconds


def test_a_link_takes_its_latency_and_then_its_bytes():
    assert Link(bytes_per_second=100, latency_seconds=0.5).seconds(200) == 2.5
    assert Link().seconds(1e12) == 0


def test_a_ring_passes_nearly_twice_the_bytes_whatever_its_size():
    link = Link(bytes_per_second=1000)
    assert ring_all_reduce_seconds(500, 1, link) == 0
    assert ring_all_reduce_seconds(500, 2, link) == pytest.approx(0.5)
    assert ring_all_reduce_seconds(500, 64, link) == pytest.approx(63 / 64)
    slow_to_start = Link(latency_seconds=0.001)
    assert ring_all_reduce_seconds(500, 8, slow_to_start) == pytest.approx(0.014)


def test_a_cost_not_given_is_none():
    costs = Costs(forward=(1.0, 2.0), update=(3.0, 4.0))
    assert costs.of("forward", 1) == 2
    assert costs.of("update", 0) == 3
    assert costs.of("backward", 1) == 0
    assert costs.of("recompute", 1) == 0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"backward": (1.0,)}, "backward has 1 values for 2 stages"),
        ({"update": (1.0, -2.0)}, "update must be 0 or more"),
        ({"update": (1.0, math.nan)}, "update must be 0 or more"),
        ({"input_bytes": -1.0}, "input_bytes must be 0 or more"),
    ],
)
def test_costs_that_do_not_fit_are_refused(values, said):
    with pytest.raises(ConfigurationError, match=said):
        Costs(forward=(1.0, 1.0), **values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"bytes_per_second": 0}, "must be positive, got 0"),
        ({"bytes_per_second": math.nan}, "must be positive"),
        ({"latency_seconds": -1}, "must be 0 or more, got -1"),
    ],
)
def test_an_impossible_link_is_refused(values, said):
    with pytest.raises(ConfigurationError, match=said):
        Link(**values)
