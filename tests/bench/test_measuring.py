"""Which of the measured values are kept, and how many calls they take."""

import itertools
import re

import pytest

from millrace.bench import workload
from millrace.bench.measuring import count_latency_calls, drop_unsupported
from millrace.bench.roofline import Cost
from millrace.bench.workload import Workload
from millrace.loop.activity import listening


class Clocked(Workload):
    """A workload whose calls take given times, on its own clock."""

    unit, compute, batch = "batch", "float32", 1
    samples_per_unit = units_per_call = num_devices = 1

    def __init__(self, seconds, latencies=()):
        endless = itertools.chain(seconds, itertools.repeat(seconds[-1]))
        self._seconds, self._latencies, self.now = endless, list(latencies), 0.0

    def run(self, seconds):
        until, calls = self.now + seconds, 0
        while not calls or self.now < until:
            self.now += next(self._seconds)
            calls += 1
        return calls

    def time_single_calls(self, seconds):
        return self._latencies

    def compile(self, options=None):
        pass

    start = stop = compile

    def trace_cost(self):
        return Cost(0.0, 0.0)

    def compiled_bytes(self):
        return None


@pytest.fixture
def measure(monkeypatch):
    def run(work, repeat, seconds):
        monkeypatch.setattr(workload.time, "perf_counter", lambda: work.now)
        return workload.measure(work, repeat, seconds)

    return run


def test_only_the_first_value_is_dropped_and_a_stable_figure_is_not_repeated(measure):
    figures = measure(Clocked([10.0, 0.5]), repeat=3, seconds=1.5)
    assert figures["samples_per_second"]["values"] == [2.0, 2.0, 2.0]
    assert figures["measured"]["how"] == "stable after 1.5 s"


def test_an_unstable_figure_is_measured_for_30_seconds(measure):
    times = [10.0, *[0.5, 1.5] * 20]
    figures = measure(Clocked(times), repeat=5, seconds=1.0)
    assert figures["measured"]["seconds"] == pytest.approx(30.0, abs=1.5)
    assert not figures["measured"]["stable"]
    assert re.fullmatch(r"±\d+\.\d% after 3\d\.\d s", figures["measured"]["how"])
    assert len(figures["samples_per_second"]["values"]) == 5


def test_the_bar_shows_how_much_of_the_time_is_over(measure):
    seen = []
    with listening(show=lambda done, total: seen.append((done, total))):
        measure(Clocked([10.0, *[0.5, 1.5] * 20]), repeat=5, seconds=1.0)
    assert seen == sorted(seen) and seen[0] == (0, 30)
    assert 28 <= seen[-1][0] < 30


def test_a_call_that_takes_longer_than_that_is_measured_once(measure):
    figures = measure(Clocked([80.0, 80.0]), repeat=5, seconds=1.0)
    assert figures["samples_per_second"]["values"] == [1 / 80]
    assert figures["measured"]["how"] == "one measurement of 80.0 s"


@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        (99, ["mean", "p50"]),
        (100, ["mean", "p50", "p99"]),
        (999, ["mean", "p50", "p99"]),
        (1000, ["mean", "p50", "p99", "p99.9"]),
    ],
)
def test_a_percentile_is_left_out_if_there_are_too_few_calls(calls, kept, measure):
    figures = measure(Clocked([1.0] * 9, [1e-3] * calls), repeat=1, seconds=1.0)
    assert list(figures["latency_ms"]) == kept and figures["latency_calls"] == calls
    latency = {"mean": 1.0, "p50": 1.0, "p99": 1.0, "p99.9": 1.0}
    assert list(drop_unsupported(latency, calls)) == kept


def test_latency_takes_the_calls_of_a_percentile_unless_they_take_too_long():
    assert count_latency_calls(1e-3, 1.0) == 1000
    assert count_latency_calls(5e-3, 1.0) == 1000  # five times as long
    assert count_latency_calls(1e-4, 1.0) == 10_000
    assert count_latency_calls(0.05, 1.0) == 100  # enough for p99
    assert count_latency_calls(0.1, 1.0) == 20  # more would give no other percentile
    assert count_latency_calls(1.0, 0.1) == 20
