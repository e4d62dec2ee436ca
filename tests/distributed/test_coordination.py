"""How processes agree through a key-value store that they share."""

import collections
import re
import threading
import time
import types

import jax
import pytest

from millrace.config import ConfigurationError
from millrace.distributed import addresses, coordination, environment
from millrace.distributed.coordination import CoordinatedStop
from millrace.distributed.environment import ProcessInfo, StartError


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
    """Lets a test act as one process after the other."""

    def __init__(self, monkeypatch, count):
        self.store = Store()
        self.counts = [collections.Counter() for _ in range(count)]
        self._monkeypatch = monkeypatch

    def act_as(self, number):
        state = types.SimpleNamespace(
            process_id=number, num_processes=len(self.counts), client=self.store
        )
        self._monkeypatch.setattr(coordination, "_state", lambda: state)
        self._monkeypatch.setattr(coordination, "_counts", self.counts[number])


@pytest.fixture
def processes(monkeypatch):
    return Processes(monkeypatch, 2)


EXECUTION, AHEAD = 5, 2


@pytest.mark.parametrize("stopping", [0, 1])
@pytest.mark.parametrize("ahead", range(AHEAD + 1))
def test_all_processes_stop_after_the_same_update(processes, stopping, ahead):
    """Even if the other process has run as far ahead as it can."""
    stops = {}
    for number in (0, 1):
        processes.act_as(number)
        stops[number] = CoordinatedStop(EXECUTION)

    def run(number, done, *, until=10**6, requested=False):
        processes.act_as(number)
        while done < until and not stops[number].should_stop(done, requested=requested):
            done += EXECUTION
        return done

    other = run(1 - stopping, 0, until=10 + ahead * EXECUTION)
    stops_at = run(stopping, 10, requested=True)
    assert run(1 - stopping, other) == stops_at == 10 + AHEAD * EXECUTION


def test_if_both_processes_should_stop_the_first_request_counts(processes):
    stops = {}
    for number, done in ((0, 10), (1, 15)):
        processes.act_as(number)
        stops[number] = CoordinatedStop(EXECUTION)
        assert not stops[number].should_stop(done, requested=True)
    for number in (0, 1):
        processes.act_as(number)
        assert not stops[number].should_stop(15, requested=True)
        assert stops[number].should_stop(20, requested=True)


def test_a_single_process_stops_at_once():
    stop = CoordinatedStop(EXECUTION)
    assert not stop.should_stop(10, requested=False)
    assert stop.should_stop(10, requested=True)


def test_gathered_values_are_in_order_and_calls_do_not_mix(processes):
    processes.store.values |= {
        "millrace/gather/x/1/1": '"b"',
        "millrace/gather/x/2/1": '{"n": 1}',
    }
    processes.act_as(0)
    assert coordination.gather("x", "a") == ["a", "b"]
    assert coordination.gather("x", 7) == [7, {"n": 1}]


def test_the_value_of_process_0_is_broadcast(processes):
    for number, value in ((0, "first"), (1, "other")):
        processes.act_as(number)
        assert coordination.broadcast("x", value) == "first"
    processes.act_as(0)
    assert coordination.broadcast("x", "second") == "second"
    processes.act_as(1)
    assert coordination.broadcast("x", None) == "second"


def test_signals_are_handled_while_waiting_for_other_processes(monkeypatch):
    """JAX waits in C++, where no handler runs; that must not be the main thread."""
    threads = []
    monkeypatch.setattr(coordination, "_state", lambda: types.SimpleNamespace(client=None))
    monkeypatch.setattr(coordination, "num_processes", lambda: 2)
    monkeypatch.setattr(
        jax.distributed,
        "initialize",
        lambda *_, **__: threads.append(threading.current_thread()),
    )
    assert coordination.join(ProcessInfo("127.0.0.1:5", 1, 2))
    assert threads != [threading.main_thread()] and len(threads) == 1


@pytest.mark.parametrize("is_launched", [True, False])
def test_processes_that_do_not_start_in_time_are_named(is_launched, tmp_path, monkeypatch):
    """JAX would abort this process, with a message about remote procedure calls."""
    release = threading.Event()
    monkeypatch.setattr(coordination, "_START_SECONDS", 0.05)
    monkeypatch.setattr(coordination, "_state", lambda: types.SimpleNamespace(client=None))
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: release.wait(30))
    if is_launched:
        monkeypatch.setenv(environment.LAUNCH_DIR, str(tmp_path))
    named = "Processes 0, 2 have not started" if is_launched else "do they reach far:5?"
    try:
        with pytest.raises(StartError, match=re.escape(named)):
            coordination.join(ProcessInfo("far:5", 1, 3))
    finally:
        release.set()
    if is_launched:
        assert environment.pop_cause(str(tmp_path)) == 0
        environment.forget_starts(str(tmp_path))  # as before a restart
        assert environment.find_missing(3) == [0, 1, 2]


def test_an_error_of_a_cluster_is_reported(monkeypatch):
    def fail(*_, **__):
        time.sleep(0.01)
        raise ValueError("no such job")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(ConfigurationError, match=r"started by Slurm: no such job"):
        coordination.join(ProcessInfo(None, None, None, "Slurm"))


def test_a_task_with_gpus_of_its_own_uses_all_that_it_sees(monkeypatch):
    """JAX would take the GPU of the task's number, which it does not see."""
    given = []
    monkeypatch.setattr(coordination, "_state", lambda: types.SimpleNamespace(client=None))
    monkeypatch.setattr(coordination, "num_processes", lambda: 2)
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *_, **named: given.append(named)
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    for has_own_gpus in (True, False):
        info = ProcessInfo(None, None, None, "Slurm", has_own_gpus=has_own_gpus)
        assert coordination.join(info)
    assert [each["local_device_ids"] for each in given] == [[0, 1], None]


def test_gloo_listens_where_other_machines_reach_it(processes, monkeypatch):
    toward = {"node-a": "127.0.1.1", "10.0.0.2": "10.0.0.1"}
    monkeypatch.setattr(coordination, "find_address_toward", toward.get)
    monkeypatch.setattr(addresses, "find_address_toward", toward.get)
    processes.store.values["millrace/gather/addresses/1/1"] = '"10.0.0.2"'
    processes.act_as(0)
    assert coordination._find_gloo_address("node-a:5") == "10.0.0.1"
    assert coordination._find_gloo_address("localhost:5") == "127.0.0.1"
