"""Which values are kept of those that are measured."""

import pytest
from millrace.bench.latency import latency_calls, supported
from millrace.bench.operations import Counted

from millrace.bench import measuring
from millrace.bench.workload import Workload


class Clocked(Workload):
    """Calls that take as long as they are told to, on a clock of their own."""

    unit, compute, batch = "batch", "float32", 1
    samples_per_unit = units_per_call = num_devices = 1

    def __init__(self, seconds, latencies=()):
        self._seconds, self._latencies, self.now = iter(seconds), list(latencies), 0.0

    def run(self, calls):
        self.now += sum(next(self._seconds) for _ in range(calls))

    def latency(self, seconds):
        return self._latencies

    def compile(self, options=None):
        pass

    start = stop = compile

    def traced(self):
        return Counted(0.0, 0.0)

    def compiled_bytes(self):
        return None


@pytest.fixture
def measure(monkeypatch):
    def measured(work, repeat, seconds):
        monkeypatch.setattr(measuring.time, "perf_counter", lambda: work.now)
        return measuring.measure(work, repeat, seconds)

    return measured


def test_the_first_value_is_dropped_and_only_that(measure):
    found = measure(Clocked([10.0, 1.0, 2.0, 4.0]), repeat=3, seconds=1.0)
    assert found["samples_per_second"]["values"] == [1.0, 0.5, 0.25]


def test_a_value_is_of_as_many_calls_as_fit(measure):
    found = measure(Clocked([0.25, *[0.5] * 4, *[1.0] * 4]), repeat=2, seconds=2.0)
    assert found["samples_per_second"]["values"] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        (99, ["mean", "p50"]),
        (100, ["mean", "p50", "p99"]),
        (999, ["mean", "p50", "p99"]),
        (1000, ["mean", "p50", "p99", "p99.9"]),
    ],
)
def test_a_percentile_is_left_out_where_there_are_too_few_calls(calls, told, measure):
    found = measure(Clocked([1.0] * 9, [1e-3] * calls), repeat=1, seconds=1.0)
    assert list(found["latency_ms"]) == told and found["latency_calls"] == calls
    figures = {"mean": 1.0, "p50": 1.0, "p99": 1.0, "p99.9": 1.0}
    assert list(supported(figures, calls)) == told


def test_as_many_calls_as_a_percentile_needs_are_made_if_they_take_not_too_long():
    assert latency_calls(1e-3, 1.0) == 1000
    assert latency_calls(5e-3, 1.0) == 1000  # five times as long
    assert latency_calls(1e-4, 1.0) == 10_000
    assert latency_calls(0.05, 1.0) == 100  # enough for p99
    assert latency_calls(0.1, 1.0) == 20  # more would not tell more
    assert latency_calls(1.0, 0.1) == 20
