"""Heartbeats: a stuck process is named, and a process exits in order."""

import io
import json
import sys
import threading
import time

import pytest
from small_runner import batches, make_runner

from millrace.distributed import heartbeat
from millrace.distributed.heartbeat import Heartbeat, Progress


class SlowStore:
    """A key-value store that is slow to answer."""

    def __init__(self):
        self.asked = threading.Event()
        self.num_answers = 0

    def key_value_set(self, key, value, *, allow_overwrite=False):
        self.asked.set()
        time.sleep(0.2)
        self.num_answers += 1

    def key_value_dir_get(self, key):
        return []


def test_closing_waits_for_calls_of_the_store(monkeypatch):
    """A thread in a call of the store when Python shuts down would abort the process."""
    store = SlowStore()
    monkeypatch.setattr(heartbeat.coordination, "store", lambda: store)
    watching = Heartbeat()
    assert store.asked.wait(10)
    watching.close()
    assert store.num_answers == 1
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"millrace-heartbeat_send", "millrace-heartbeat_watch"}


class TwoProcesses:
    """A store in which process 1, which does not exist, sends heartbeats."""

    def __init__(self, steps):
        self.steps = steps
        self.own = "{}"

    def key_value_set(self, key, value, *, allow_overwrite=False):
        if key == "millrace/alive/0":
            self.own = value

    def key_value_dir_get(self, key):
        if key != "millrace/alive":
            return []
        other = {"count": time.monotonic(), "pid": 42, "host": "far", "steps": self.steps}
        return [("millrace/alive/0", self.own), ("millrace/alive/1", json.dumps(other))]


@pytest.mark.parametrize(("steps", "is_stuck"), [(3, True), (9, False)])
def test_a_process_that_is_alive_but_stuck_is_named_once(steps, is_stuck, monkeypatch):
    warnings = []
    for name, value in {
        "coordination.store": lambda: TwoProcesses(steps),
        "coordination.num_processes": lambda: 2,
        "_log.warning": lambda text, *args: warnings.append(text % args),
        "_BEAT_SECONDS": 0.02,
        "_POLL_SECONDS": 0.02,
        "_STUCK_SECONDS": 0.1,
        "_num_steps": 9,
    }.items():
        monkeypatch.setattr(f"millrace.distributed.heartbeat.{name}", value)
    watching = Heartbeat()
    time.sleep(0.5)
    watching.close()
    expected = "Process 1 (pid 42 on far) has made no progress for 0 s, and the other"
    assert [line[: len(expected)] for line in warnings] == [expected] * is_stuck


class Exited(Exception):
    """Raised instead of ending this process."""


def test_a_process_exits_even_if_it_cannot_print_why(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    def leave(status):
        raise Exited(status)

    monkeypatch.setattr(heartbeat.coordination, "store", lambda: TwoProcesses(0))
    monkeypatch.setattr(heartbeat.os, "_exit", leave)
    watching = Heartbeat()
    lost = []
    watching.on_lost = lost.append
    monkeypatch.setattr(sys, "stderr", Broken())
    with pytest.raises(Exited, match="1"):
        watching._exit("Process 1 is lost.")
    watching.close()
    assert lost == ["Process 1 is lost."]


class Leaving(TwoProcesses):
    """A store that records who has left; process 1 already has."""

    left = ("millrace/left/1",)

    def key_value_set(self, key, value, *, allow_overwrite=False):
        super().key_value_set(key, value, allow_overwrite=allow_overwrite)
        if key.startswith("millrace/left/"):
            self.left = (*self.left, key)

    def key_value_dir_get(self, key):
        return list(self.left) if key == "millrace/left" else super().key_value_dir_get(key)


def test_process_0_leaves_as_soon_as_all_others_have_said_goodbye(monkeypatch):
    store = Leaving(0)
    monkeypatch.setattr(heartbeat.coordination, "store", lambda: store)
    monkeypatch.setattr(heartbeat.coordination, "num_processes", lambda: 2)
    watching = Heartbeat()
    began = time.monotonic()
    watching.say_goodbye()
    assert time.monotonic() - began < heartbeat._GOODBYE_SECONDS - 1
    assert store.left == ("millrace/left/1", "millrace/left/0")
    watching.close()


# Progress


def progress_after(*steps: int, at: float = 0.0) -> Progress:
    progress = Progress(len(steps), at)
    for rank, count in enumerate(steps):
        progress.update(rank, count, at)
    return progress


def test_a_process_that_has_staged_fewer_chunks_for_too_long_is_stuck():
    progress = progress_after(5, 4, 5)
    assert progress.find_stuck(119.0) is None
    assert progress.find_stuck(121.0) == (1, 121.0)


def test_processes_that_all_wait_for_their_devices_are_not_stuck():
    assert progress_after(5, 5, 5).find_stuck(1e6) is None


def test_a_stuck_process_is_named_again_only_after_a_step():
    progress = progress_after(5, 4)
    assert progress.find_stuck(200.0) is not None
    assert progress.find_stuck(300.0) is None
    progress.update(1, 5, 301.0)
    progress.update(0, 7, 301.0)
    assert progress.find_stuck(302.0) is None
    assert progress.find_stuck(301.0 + 3 * 301 + 1) is not None


def test_with_long_steps_it_takes_longer_to_count_as_stuck():
    progress = progress_after(0, 0)
    for rank in range(2):
        progress.update(rank, 1, 100.0)
    progress.update(0, 2, 101.0)
    assert progress.find_stuck(100.0 + 299) is None
    assert progress.find_stuck(100.0 + 301) == (1, 301.0)


def test_nobody_is_stuck_because_this_process_was_suspended():
    progress = progress_after(5, 4)
    progress.restart_clock(500.0)
    assert progress.find_stuck(510.0) is None


@pytest.mark.cpu("a GPU has programs for fixed numbers of updates")
@pytest.mark.parametrize("updates", [12])
def test_training_counts_its_calls(tmp_path, updates):
    before = heartbeat._num_steps
    runner, state, _, _ = make_runner(tmp_path, batches([1.0] * updates), updates=updates)
    runner.run(state)
    assert heartbeat._num_steps - before == 4  # logs=4: one execution before each
