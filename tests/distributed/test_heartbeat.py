"""Processes that watch each other: how one of them stops watching."""

import io
import json
import sys
import threading
import time

import pytest

from millrace.distributed import heartbeat
from millrace.distributed.heartbeat import Peers


class SlowStore:
    """What processes share, far away."""

    def __init__(self):
        self.asked = threading.Event()
        self.num_answers = 0

    def key_value_set(self, key, value, *, allow_overwrite=False):
        self.asked.set()
        time.sleep(0.2)
        self.num_answers += 1

    def key_value_dir_get(self, key):
        return []


def test_who_stops_watching_waits_for_what_was_asked(monkeypatch):
    """A thread in the store's call when Python ends would abort the process."""
    store = SlowStore()
    monkeypatch.setattr(heartbeat.coordination, "store", lambda: store)
    watching = Peers()
    assert store.asked.wait(10)
    watching.close()
    assert store.num_answers == 1
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"millrace-peers_beat", "millrace-peers_look"}


class Signs:
    """A store in which another process, which is not here, gives signs of life."""

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


@pytest.mark.parametrize(("theirs", "stuck"), [(3, True), (9, False)])
def test_a_process_that_lives_but_is_stuck_is_named_once(theirs, stuck, monkeypatch):
    said = []
    for name, value in {
        "heartbeat.coordination.store": lambda: Signs(theirs),
        "heartbeat.coordination.num_processes": lambda: 2,
        "heartbeat._log.warning": lambda text, *words: said.append(text % words),
        "heartbeat._BEAT_SECONDS": 0.02,
        "heartbeat._LOOK_SECONDS": 0.02,
        "progress.STUCK_SECONDS": 0.1,
        "progress._Counted.steps": 9,
    }.items():
        monkeypatch.setattr(f"millrace.distributed.{name}", value)
    watching = Peers()
    time.sleep(0.5)
    watching.close()
    expected = "Instance 1 (pid 42 on far) has made no progress for 0 s, and the others"
    assert [line[: len(expected)] for line in said] == [expected] * stuck


class Gone(Exception):
    """In place of the end of this process."""


def test_a_process_leaves_also_if_it_cannot_say_why(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    def leave(status):
        raise Gone(status)

    monkeypatch.setattr(heartbeat.coordination, "store", lambda: Signs(0))
    monkeypatch.setattr(heartbeat.os, "_exit", leave)
    watching = Peers()
    told = []
    watching.on_lost = told.append
    monkeypatch.setattr(sys, "stderr", Broken())
    with pytest.raises(Gone, match="1"):
        watching._leave("Instance 1 is lost.")
    watching.close()
    assert told == ["Instance 1 is lost."]


class Leaving(Signs):
    """A store that knows who has left; the other process already has."""

    left = ("millrace/left/1",)

    def key_value_set(self, key, value, *, allow_overwrite=False):
        super().key_value_set(key, value, allow_overwrite=allow_overwrite)
        if key.startswith("millrace/left/"):
            self.left = (*self.left, key)

    def key_value_dir_get(self, key):
        return list(self.left) if key == "millrace/left" else super().key_value_dir_get(key)


def test_the_first_process_leaves_as_soon_as_all_have_said_good_bye(monkeypatch):
    store = Leaving(0)
    monkeypatch.setattr(heartbeat.coordination, "store", lambda: store)
    monkeypatch.setattr(heartbeat.coordination, "num_processes", lambda: 2)
    watching = Peers()
    began = time.monotonic()
    watching.part()
    assert time.monotonic() - began < heartbeat._GOOD_BYE_SECONDS - 1
    assert store.left == ("millrace/left/1", "millrace/left/0")
    watching.close()
