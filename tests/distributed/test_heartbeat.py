"""Heartbeats: a stuck process is named, and a process exits in order."""

import io
import json
import sys
import threading
import time

import pytest

from millrace.distributed import heartbeat, progress
from millrace.distributed.heartbeat import Heartbeat
from millrace.distributed.progress import Activity


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
        other = {"count": time.monotonic(), "pid": 42, "host": "far"}
        other["activity"] = Activity(self.steps, phase="training")
        return [("millrace/alive/0", self.own), ("millrace/alive/1", json.dumps(other))]


@pytest.fixture
def fast(monkeypatch):
    """Two processes, of which this one has made 9 steps; everything takes moments."""
    for name, value in {
        "heartbeat.coordination.num_processes": lambda: 2,
        "heartbeat._BEAT_SECONDS": 0.02,
        "heartbeat._POLL_SECONDS": 0.02,
        "progress._WARN_SECONDS": 0.1,
        "progress._own": progress._Own(Activity(9, phase="training"), is_watched=True),
    }.items():
        monkeypatch.setattr(f"millrace.distributed.{name}", value)


@pytest.mark.parametrize(("steps", "is_slow"), [(3, True), (9, False)])
def test_a_process_that_is_alive_but_slow_is_named_once(steps, is_slow, fast, monkeypatch):
    warnings = []
    monkeypatch.setattr(heartbeat.coordination, "store", lambda: TwoProcesses(steps))
    monkeypatch.setattr(
        heartbeat._log, "warning", lambda text, *args: warnings.append(text % args)
    )
    watching = Heartbeat()
    time.sleep(0.5)
    watching.close()
    expected = "Process 1 (pid 42 on far) has made no progress for 0 s, and the other"
    assert [line[: len(expected)] for line in warnings] == [expected] * is_slow


def why_it_ends(store, monkeypatch, folder):
    """Return why a process in which nothing moves ends, in one line."""
    ended = threading.Event()
    monkeypatch.setattr(heartbeat.coordination, "store", lambda: store)
    monkeypatch.setattr(heartbeat.os, "_exit", lambda status: ended.set())
    lost = []
    with progress.watched(0.2, folder, lambda: False):
        watching = Heartbeat()
        watching.on_lost = lost.append
        assert ended.wait(10)
        watching.close()
    (line,) = lost
    return line


@pytest.mark.parametrize("steps", [3, 9])
def test_a_process_that_is_stuck_ends_the_run(steps, fast, monkeypatch, tmp_path, capsys):
    line = why_it_ends(TwoProcesses(steps), monkeypatch, tmp_path)
    assert ("Process 1 (pid 42 on far): training after" in line) == (steps == 3)
    assert ("they wait for one another" in line) == (steps == 9)
    assert f"{tmp_path}/stuck-process-0.txt" in line and line in capsys.readouterr().err


class Suspended(TwoProcesses):
    """A store in which process 1 no longer sends heartbeats."""

    def key_value_dir_get(self, key):
        beats = super().key_value_dir_get(key)
        return [(k, text.replace(text.split(",")[0], '{"count": 1')) for k, text in beats]


def test_a_silent_process_is_named_if_nothing_moves(fast, monkeypatch, tmp_path):
    """Before its heartbeat is overdue, and although it seems to be as far as this one."""
    monkeypatch.setattr(heartbeat, "_SUSPICIOUS_SECONDS", 0.1)
    line = why_it_ends(Suspended(9), monkeypatch, tmp_path)
    assert line.startswith("Process 1 (pid 42 on far) has sent no heartbeat for ")


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
