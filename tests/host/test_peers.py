"""Processes that watch each other: how one of them stops watching."""

import threading
import time

from millrace.host import peers
from millrace.host.peers import Peers


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
    monkeypatch.setattr(peers.group, "store", lambda: store)
    watching = Peers()
    assert store.asked.wait(10)
    watching.close()
    assert store.num_answers == 1
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"millrace-peers_beat", "millrace-peers_look"}
