"""Watches the other processes of a run, and ends this one when one of them is lost.

A process that waits for a lost one inside a collective cannot be reached: not by an
exception, not by a signal's handler. So a thread of its own listens for signs of life,
says which process is lost, and leaves.
"""

import atexit
import functools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from millrace.distributed import coordination
from millrace.distributed.environment import LAUNCHER_PIPE, patience_seconds
from millrace.distributed.progress import Progress, steps_counted
from millrace.output import error_line

_log = logging.getLogger("millrace")

_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 0.25
_GOOD_BYE_SECONDS = 5.0
_ALIVE, _FAILED, _LEFT = "millrace/alive", "millrace/failed", "millrace/left"

LOST = 1
"""The exit status of a process that stops because another is lost."""


class Peers:
    """The other processes, as far as they give signs of life.

    Args:
        on_lost: Called with a line that names the lost process before this one leaves.
    """

    def __init__(self, on_lost: Callable[[str], None] | None = None) -> None:
        self.on_lost = on_lost
        self.failed_with: int | None = None
        self._patience = patience_seconds()
        self._store = coordination.store()
        self._names: dict[int, str] = {}
        now = time.monotonic()
        self._heard = {rank: ("", now) for rank in range(coordination.num_processes())}
        self._progress = Progress(coordination.num_processes(), now)
        self._failed: dict[int, str] = {}
        self._answered = now
        self._over = threading.Event()
        self._leaving = threading.Lock()
        self._threads = [
            threading.Thread(
                target=target, name=f"millrace-peers{target.__name__}", daemon=True
            )
            for target in (self._beat, self._look, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop watching: from here on, processes may leave."""
        self._over.set()
        # One that comes back from the store while Python ends would abort the process. The
        # last waits for the launcher, in no such call.
        for thread in self._threads[:-1]:
            thread.join(_GOOD_BYE_SECONDS)

    def tell_failure(self, message: str, status: int) -> None:
        """Let the others know that this process has failed, and why.

        Args:
            message: A line.
            status: With which this process will exit.
        """
        if self.failed_with is not None:
            return  # what came first is what matters
        self.failed_with = status
        try:
            key = f"{_FAILED}/{coordination.process_id()}"
            self._store.key_value_set(key, message, allow_overwrite=True)
        except Exception as error:  # they will notice that we are gone
            error_line(f"cannot tell the others: {error}")

    def wait_for_verdict(self) -> None:
        """Let the threads find out who is lost; if one is, this does not return."""
        time.sleep(self._patience + 5)

    def first_failure(self, seconds: float) -> str | None:
        """Return what process 0 said before it failed, if it does so soon."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and 0 not in self._failed:
            time.sleep(_LOOK_SECONDS)
        return self._failed.get(0)

    def _beat(self) -> None:
        """Say that we are alive, and ask who else is."""
        own, count = coordination.process_id(), 0
        while not self._over.wait(_BEAT_SECONDS if count else 0):
            count += 1
            sign = {
                "count": count,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "steps": steps_counted(),
            }
            try:
                self._store.key_value_set(
                    f"{_ALIVE}/{own}", json.dumps(sign), allow_overwrite=True
                )
                self._hear(self._store.key_value_dir_get(_ALIVE))
                for key, text in self._store.key_value_dir_get(_FAILED):
                    self._failed[int(key.rpartition("/")[2])] = text
                self._answered = time.monotonic()
            except Exception:  # the coordinator does not answer: _look counts the time
                continue

    def _hear(self, signs: list[tuple[str, str]]) -> None:
        now = time.monotonic()
        for key, text in signs:
            rank, sign = int(key.rpartition("/")[2]), json.loads(text)
            self._names[rank] = f"(pid {sign['pid']} on {sign['host']})"
            self._progress.hear(rank, sign["steps"], now)
            if self._heard[rank][0] != text:
                self._heard[rank] = text, now

    def _look(self) -> None:
        """Judge by the clock."""
        before = time.monotonic()
        while not self._over.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if now - before > self._patience / 2:  # it was we who stood still
                self._answered = now
                self._progress.forgive(now)
                self._heard = {rank: (text, now) for rank, (text, _) in self._heard.items()}
            before = now
            others = {
                r: m for r, m in self._failed.items() if r != coordination.process_id()
            }
            if others and self.failed_with is None:
                rank, message = min(others.items())
                self._leave(f"{self._name(rank)} failed: {message}")
            self._name_who_is_stuck(now)
            silent = self._silent(now)
            if silent is not None:
                self._leave(
                    f"{self._name(silent)} has given no sign of life for "
                    f"{self._patience:g} s."
                )

    def _name_who_is_stuck(self, now: float) -> None:
        """Warn of a process that is alive but does nothing; maybe it still will."""
        if (
            coordination.is_first()
            and (stuck := self._progress.newly_stuck(now)) is not None
        ):
            rank, seconds = stuck
            _log.warning(
                "%s has made no progress for %.0f s, and the others wait for it. It is "
                "alive: maybe the data it reads does not come.",
                self._name(rank),
                seconds,
            )

    def _silent(self, now: float) -> int | None:
        """Return a process that has been silent too long, if there is one."""
        if now - self._answered > self._patience:
            # Without the coordinator nothing is heard of anyone.
            return 0 if coordination.process_id() else None
        heard = list(self._heard.items())
        late = [rank for rank, (_, when) in heard if now - when > self._patience]
        return min(
            (rank for rank in late if rank != coordination.process_id()), default=None
        )

    def _listen(self) -> None:
        """Take the launcher's word for who is lost."""
        _follow_launcher(functools.partial(self._leave, silently=True), self._over)

    def _leave(self, line: str, *, silently: bool = False) -> None:
        with self._leaving:  # only one thread gets past here
            if self._over.is_set():
                return
            if not silently:
                error_line(f"{line} Stopping.")
            try:
                if self.on_lost is not None:
                    self.on_lost(line)
            except Exception as error:
                error_line(str(error))
            self.part(num_lost=1)
            os._exit(LOST)

    def part(self, num_lost: int = 0) -> None:
        """Say good-bye; the first process goes last, as others hear through it.

        Args:
            num_lost: Processes that will not say it.
        """
        flush()
        self._over.set()
        # On a thread that may be left behind: a coordinator that hangs does not answer.
        talk = threading.Thread(target=self._say_good_bye, args=(num_lost,), daemon=True)
        talk.start()
        talk.join(_GOOD_BYE_SECONDS if coordination.is_first() else 1.0)

    def _say_good_bye(self, num_lost: int) -> None:
        others = coordination.num_processes() - 1 - num_lost
        try:
            self._store.key_value_set(f"{_LEFT}/{coordination.process_id()}", "")
            while coordination.is_first():
                if len(self._store.key_value_dir_get(_LEFT)) > others:
                    return
                time.sleep(_LOOK_SECONDS)
        except Exception:  # the first process is the lost one
            return

    def _name(self, rank: int) -> str:
        return f"Instance {rank} {self._names.get(rank, '')}".rstrip()


def flush() -> None:
    """Have everything printed before leaving without ceremony."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


_peers: Peers | None = None


def watch_launcher() -> None:
    """Have a process alone stop in order when the launcher that started it is gone."""
    threading.Thread(
        target=_follow_launcher,
        args=(lambda _: None, threading.Event()),
        name="millrace-launcher",
        daemon=True,
    ).start()


def _follow_launcher(on_line: Callable[[str], None], over: threading.Event) -> None:
    """Hear what the launcher says; when it is gone before all is over, stop in order."""
    if (descriptor := os.environ.pop(LAUNCHER_PIPE, None)) is None:
        return
    try:
        with open(int(descriptor)) as pipe:
            for line in pipe:
                on_line(line.strip())
    except OSError:
        return
    if not over.is_set():
        # It was the launcher who read what we print: writing would fail from now on.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            if not os.isatty(stream):
                os.dup2(nowhere, stream)
        os.kill(os.getpid(), signal.SIGTERM)


def watch_peers() -> Peers | None:
    """Start to watch, once; None for a process alone."""
    global _peers
    if _peers is None and coordination.num_processes() > 1:
        _peers = Peers()
        # Called before JAX's own, which waits for all, also for those that never come.
        atexit.register(_leave, _peers)
        sys.excepthook = functools.partial(_report_uncaught, _peers, sys.excepthook)
    return _peers


def _report_uncaught(peers: Peers, hook: Any, kind: Any, error: Any, trace: Any) -> None:
    """Tell the others of an exception that ends this process."""
    hook(kind, error, trace)
    peers.tell_failure(f"{kind.__name__}: {error}", 1)


def _leave(peers: Peers) -> None:
    """End a process of several; after a failure, without waiting for the others."""
    peers.close()
    if peers.failed_with is not None:
        peers.part()
        os._exit(peers.failed_with)


def communication_failed(error: BaseException) -> bool:
    """Whether an error of the runtime is about another process rather than this one."""
    text = str(error).lower()
    signs = ("gloo", "nccl", "connection", "unavailable", "coordination", "socket")
    is_runtime = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    return is_runtime and any(sign in text for sign in signs)
