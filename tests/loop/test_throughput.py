"""Throughput in the steady state, on a fake clock."""

from types import SimpleNamespace

import pytest

from millrace.loop import progress as module
from millrace.loop.progress import Throughput


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        fake = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(module, "time", fake)

    def call(self, throughput, samples, seconds, *, ends=True):
        """Simulate a call of the program that takes `seconds`."""
        self.now += seconds
        throughput.add(samples, execution_ends=ends)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def throughput(clock):
    started = Throughput()
    started.start()
    return started


def test_throughput_is_zero_before_the_first_call(clock, throughput):
    assert Throughput().per_second() == 0
    clock.now += 5
    assert throughput.per_second() == 0


def test_the_first_execution_is_dropped(clock, throughput):
    clock.call(throughput, 100, 50)
    clock.call(throughput, 100, 2)
    clock.call(throughput, 100, 2)
    assert throughput.per_second() == 50


def test_the_first_execution_is_dropped_with_all_its_calls(clock, throughput):
    for seconds, ends in [(50, False), (7, True), (1, False), (1, True)]:
        clock.call(throughput, 100, seconds, ends=ends)
    assert throughput.per_second() == 100


def test_with_a_single_execution_only_its_first_call_is_dropped(clock, throughput):
    clock.call(throughput, 100, 50, ends=False)
    clock.call(throughput, 100, 4, ends=False)
    clock.call(throughput, 100, 4, ends=True)
    assert throughput.per_second() == 25


def test_a_single_call_counts(clock, throughput):
    clock.call(throughput, 100, 50)
    assert throughput.per_second() == 2


def test_an_unfinished_execution_does_not_count_yet(clock, throughput):
    for seconds, ends in [(50, True), (2, True), (1000, False)]:
        clock.call(throughput, 100, seconds, ends=ends)
    assert throughput.per_second() == 50


def test_pauses_are_excluded(clock, throughput):
    clock.call(throughput, 100, 50)
    with throughput.paused():
        clock.now += 500
    clock.call(throughput, 100, 2)
    with throughput.paused():
        clock.now += 700
    clock.call(throughput, 100, 2)
    assert throughput.per_second() == 50


def test_a_pause_that_fails_is_excluded_too(clock, throughput):
    clock.call(throughput, 100, 1)
    with pytest.raises(OSError), throughput.paused():
        clock.now += 500
        raise OSError
    clock.call(throughput, 100, 4)
    assert throughput.per_second() == 25


def test_calls_faster_than_the_clock_do_not_divide_by_zero(clock, throughput):
    clock.call(throughput, 100, 0)
    clock.call(throughput, 100, 0)
    clock.call(throughput, 100, 0)
    assert throughput.per_second() == 0


def test_executions_are_weighted_by_their_samples(clock, throughput):
    for samples, seconds in [(1, 9), (300, 1), (100, 3)]:
        clock.call(throughput, samples, seconds)
    assert throughput.per_second() == 100
