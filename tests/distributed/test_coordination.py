"""How processes agree, through a store that all of them see."""

import collections
import threading
import time
import types

import jax
import pytest

from millrace.config import ConfigurationError
from millrace.distributed import coordination
from millrace.distributed.coordination import StopPoint
from millrace.distributed.environment import ProcessInfo


class Store:
    """The coordinator's key-value store, in this process."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value):
        if key in self.values:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
        self.values[key] = value

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]

    def blocking_key_value_get(self, key, milliseconds):
        del milliseconds
        return self.key_value_try_get(key)


class Processes:
    """Lets a test be one process after the other."""

    def __init__(self, monkeypatch, count):
        self.store = Store()
        self.counts = [collections.Counter() for _ in range(count)]
        self._monkeypatch = monkeypatch

    def be(self, number):
        state = types.SimpleNamespace(
            process_id=number, num_processes=len(self.counts), client=self.store
        )
        self._monkeypatch.setattr(coordination, "_state", lambda: state)
        self._monkeypatch.setattr(coordination, "_counts", self.counts[number])


@pytest.fixture
def processes(monkeypatch):
    return Processes(monkeypatch, 2)


EXECUTION, AHEAD = 5, 2


@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize("ahead", range(AHEAD + 1))
def test_all_processes_stop_after_the_same_update(processes, asked, ahead):
    """Also where the one that is not asked has run as far ahead as it can."""
    points = {}
    for number in (0, 1):
        processes.be(number)
        points[number] = StopPoint(EXECUTION)

    def run(number, done, *, until=10**6, told=False):
        processes.be(number)
        while done < until and not points[number].reached(done, asked=told):
            done += EXECUTION
        return done

    other = run(1 - asked, 0, until=10 + ahead * EXECUTION)
    stops_at = run(asked, 10, told=True)
    assert run(1 - asked, other) == stops_at == 10 + AHEAD * EXECUTION


def test_if_both_are_asked_the_first_word_counts(processes):
    points = {}
    for number, done in ((0, 10), (1, 15)):
        processes.be(number)
        points[number] = StopPoint(EXECUTION)
        assert not points[number].reached(done, asked=True)
    for number in (0, 1):
        processes.be(number)
        assert not points[number].reached(15, asked=True)
        assert points[number].reached(20, asked=True)


def test_a_process_alone_stops_at_once():
    point = StopPoint(EXECUTION)
    assert not point.reached(10, asked=False)
    assert point.reached(10, asked=True)


def test_what_everyone_says_comes_in_their_order_and_calls_do_not_mix(processes):
    processes.store.values |= {
        "millrace/gather/x/1/1": '"b"',
        "millrace/gather/x/2/1": '{"n": 1}',
    }
    processes.be(0)
    assert coordination.gather("x", "a") == ["a", "b"]
    assert coordination.gather("x", 7) == [7, {"n": 1}]


def test_what_the_first_process_says_is_heard_by_the_others(processes):
    for number, said in ((0, "first"), (1, "other")):
        processes.be(number)
        assert coordination.broadcast("x", said) == "first"
    processes.be(0)
    assert coordination.broadcast("x", "second") == "second"
    processes.be(1)
    assert coordination.broadcast("x", None) == "second"


def test_while_others_are_waited_for_signals_are_heard(monkeypatch):
    """JAX waits in C++, where no handler is called; so it must not be our main thread."""
    threads = []
    monkeypatch.setattr(coordination, "_state", lambda: types.SimpleNamespace(client=None))
    monkeypatch.setattr(coordination, "num_processes", lambda: 2)
    monkeypatch.setattr(coordination, "_keep_on_loopback", lambda: None)
    monkeypatch.setattr(
        jax.distributed,
        "initialize",
        lambda *_, **__: threads.append(threading.current_thread()),
    )
    assert coordination.join(ProcessInfo("127.0.0.1:5", 1, 2))
    assert threads != [threading.main_thread()] and len(threads) == 1


def test_what_is_wrong_with_a_cluster_is_said(monkeypatch):
    def fail(*_, **__):
        time.sleep(0.01)
        raise ValueError("no such job")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(ConfigurationError, match=r"that Slurm started: no such job"):
        coordination.join(ProcessInfo(None, None, None, "Slurm"))
