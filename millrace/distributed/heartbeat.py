"""Heartbeats between the processes of a run: name a lost process, and exit.

A process that waits for a lost one in a collective cannot be interrupted: its main thread
is in C++, where neither exceptions nor signal handlers reach it. So threads watch the
heartbeats of the others, report a lost process and end this one.
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

from millrace.distributed import coordination, progress
from millrace.distributed.environment import (
    LAUNCHER_PIPE,
    get_timeout,
    record_cause,
)
from millrace.output import error_line

_log = logging.getLogger("millrace")

LOST = 1
"""Exit status of a process that stops because another one is lost."""

_BEAT_SECONDS = 1.0
_POLL_SECONDS = 0.25
_SUSPICIOUS_SECONDS = 5.0
"""Without a heartbeat for so long, a process is blamed when nothing moves."""
_GOODBYE_SECONDS = 5.0
"""Shorter than the time in which the launcher kills processes that do not exit."""
_ALIVE, _FAILED, _LEFT = "millrace/alive", "millrace/failed", "millrace/left"


class Heartbeat:
    """Sends the heartbeats of this process and watches those of the others.

    It has three threads, because two of them may block: ``_send`` in the store, if the
    coordinator hangs, and ``_listen`` on the pipe of the launcher. ``_watch`` never does.
    """

    def __init__(self) -> None:
        self.on_lost: Callable[[str], None] | None = None
        """Called with a description of the lost process before this one exits."""
        self.failure_status: int | None = None
        """Exit status of this process after ``report_failure``."""
        self._timeout = get_timeout()
        self._store = coordination.store()
        self._names: dict[int, str] = {}
        now = time.monotonic()
        self._beats = {rank: ("", now) for rank in range(coordination.num_processes())}
        self._progress = progress.Progress(coordination.num_processes(), now)
        self._failures: dict[int, str] = {}
        self._store_answered = now
        self._over = threading.Event()
        self._exiting = threading.Lock()
        self._threads = [
            threading.Thread(
                target=target, name=f"millrace-heartbeat{target.__name__}", daemon=True
            )
            for target in (self._send, self._watch, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop watching: from now on, other processes may exit."""
        self._over.set()
        # A thread that returns from the C++ code of the store while Python shuts down
        # aborts the process. The last thread only reads a pipe, so it may be left behind.
        for thread in self._threads[:-1]:
            thread.join(_GOODBYE_SECONDS)

    def report_failure(self, message: str, status: int) -> None:
        """Tell the other processes that this one has failed.

        Args:
            message: The error, in one line.
            status: The exit status of this process.
        """
        if self.failure_status is not None:
            return  # the first failure is the cause of the others
        self.failure_status = status
        try:
            key = f"{_FAILED}/{coordination.process_id()}"
            self._store.key_value_set(key, message, allow_overwrite=True)
        except Exception as error:  # they will miss our heartbeats
            error_line(f"cannot report the failure to the other processes: {error}")

    def wait_for_lost_process(self) -> None:
        """Wait until a lost process has been found; returns only if there is none."""
        time.sleep(self._timeout + 5)  # 5 s for _watch to notice and exit

    def wait_for_first_failure(self, timeout: float) -> str | None:
        """Return the error that process 0 reports within `timeout` seconds, if any."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and 0 not in self._failures:
            time.sleep(_POLL_SECONDS)
        return self._failures.get(0)

    def _send(self) -> None:
        """Send heartbeats, and read those of the others."""
        own, count = coordination.process_id(), 0
        while not self._over.wait(_BEAT_SECONDS if count else 0):
            count += 1
            beat = {
                "count": count,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "activity": progress.own_activity(),
            }
            try:
                self._store.key_value_set(
                    f"{_ALIVE}/{own}", json.dumps(beat), allow_overwrite=True
                )
                self._receive(self._store.key_value_dir_get(_ALIVE))
                for key, text in self._store.key_value_dir_get(_FAILED):
                    self._failures[int(key.rpartition("/")[2])] = text
                self._store_answered = time.monotonic()
            except Exception:  # the coordinator does not answer: _watch measures how long
                continue

    def _receive(self, beats: list[tuple[str, str]]) -> None:
        # Compares texts with our own clock: clocks of other machines may be wrong.
        now = time.monotonic()
        for key, text in beats:
            rank, beat = int(key.rpartition("/")[2]), json.loads(text)
            self._names[rank] = f"(pid {beat['pid']} on {beat['host']})"
            self._progress.update(rank, progress.Activity(*beat["activity"]), now)
            if self._beats[rank][0] != text:
                self._beats[rank] = text, now

    def _watch(self) -> None:
        """Exit when another process has failed or is lost."""
        before = time.monotonic()
        while not self._over.wait(_POLL_SECONDS):
            now = time.monotonic()
            if now - before > self._timeout / 2:
                # This process was suspended itself, so it knows nothing about the others.
                self._store_answered = now
                self._progress.restart_clock(now)
                self._beats = {rank: (text, now) for rank, (text, _) in self._beats.items()}
            before = now
            own = coordination.process_id()
            # Copied at once: the other thread may add to it meanwhile.
            failures = {r: text for r, text in [*self._failures.items()] if r != own}
            if failures and self.failure_status is None:
                rank, message = min(failures.items())
                self._exit(f"{self._name(rank)} failed: {message}", cause=rank)
            self._warn_about_slow(now)
            stuck = self._progress.find_stuck(now)
            # If nothing moves, a process that is silent is the one the others wait for,
            # even if it may be silent for longer.
            limit = min(self._timeout, _SUSPICIOUS_SECONDS) if stuck else self._timeout
            if (silent := self._find_silent(now, limit)) is not None:
                rank, seconds = silent
                self._exit(
                    f"{self._name(rank)} has sent no heartbeat "
                    f"for {min(round(seconds), self._timeout):g} s.",
                    cause=rank,
                )
            if stuck is not None:
                names = {rank: self._name(rank) for rank in stuck.ranks}
                self._exit_stuck(progress.describe_stuck(stuck, names), stuck.ranks[0])

    def _warn_about_slow(self, now: float) -> None:
        """Warn about a process that makes the others wait; it may still recover."""
        if not coordination.is_first():
            return
        if (slow := self._progress.find_slow(now)) is not None:
            rank, seconds = slow
            _log.warning(
                "%s has made no progress for %.0f s, and the other processes are waiting "
                "for it. It is alive; it may be waiting for its data.",
                self._name(rank),
                seconds,
            )

    def _find_silent(self, now: float, limit: float) -> tuple[int, float] | None:
        """Return a process without a heartbeat for `limit` seconds, and for how many."""
        own = coordination.process_id()
        if (unanswered := now - self._store_answered) > limit:
            # Without the store, which process 0 hosts, nobody can be heard.
            return (0, unanswered) if own else None
        silent = [
            (rank, now - when)
            for rank, (_, when) in list(self._beats.items())
            if rank != own and now - when > limit
        ]
        return min(silent, default=None)

    def _listen(self) -> None:
        """Exit when the launcher says that a process is lost."""
        _follow_launcher(functools.partial(self._exit, silently=True), self._over)

    def _exit(
        self,
        line: str,
        *,
        cause: int | None = None,
        silently: bool = False,
        num_lost: int = 1,
    ) -> None:
        with self._exiting:  # only one thread gets past this line, and ends the process
            if self._over.is_set():
                return
            if cause is not None:
                record_cause(cause)
            progress.try_briefly(functools.partial(self._report, line, silently=silently))
            self.say_goodbye(num_lost)
            # sys.exit would end this thread only, while the main thread is in C++. It
            # would also run the exit handler of JAX, which waits for the lost process.
            progress.exit_now(LOST)

    def _report(self, line: str, *, silently: bool) -> None:
        problem = None
        try:
            if self.on_lost is not None:
                self.on_lost(line)
        except Exception as error:
            problem = str(error)
        # Last, because the output may be what blocks this process.
        if not silently:
            error_line(f"{line} Stopping.")
        if problem is not None:
            error_line(problem)

    def _exit_stuck(self, line: str, cause: int) -> None:
        path = progress.write_stacks(coordination.process_id())
        line = f"{line} What this one does is in {path}." if path else line
        # The others find out as well, a little earlier or later.
        self._exit(line, cause=cause, num_lost=0)

    def say_goodbye(self, num_lost: int = 0) -> None:
        """Announce that this process exits; process 0 waits for the others to do so.

        Process 0 hosts the store: if it exited first, JAX would abort the others before
        they could report anything.

        Args:
            num_lost: Processes that will not say goodbye.
        """
        progress.try_briefly(_flush_output)
        self._over.set()
        # In a thread that can be left behind, because a coordinator that hangs never
        # answers. Process 0 waits longer than the others, who need only one call.
        talk = threading.Thread(target=self._send_goodbye, args=(num_lost,), daemon=True)
        talk.start()
        talk.join(_GOODBYE_SECONDS if coordination.is_first() else 1.0)

    def _send_goodbye(self, num_lost: int) -> None:
        others = coordination.num_processes() - 1 - num_lost
        try:
            self._store.key_value_set(f"{_LEFT}/{coordination.process_id()}", "")
            while coordination.is_first():
                if len(self._store.key_value_dir_get(_LEFT)) > others:
                    return
                time.sleep(_POLL_SECONDS)
        except Exception:  # process 0 is the lost one
            return

    def _name(self, rank: int) -> str:
        return f"Process {rank} {self._names.get(rank, '')}".rstrip()


def _flush_output() -> None:
    # os._exit does not flush what has been printed.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


_heartbeat: Heartbeat | None = None


def start_heartbeat() -> Heartbeat | None:
    """Return the heartbeat of this process, started by the first call.

    Returns None for a single process.
    """
    global _heartbeat
    if _heartbeat is None and coordination.num_processes() > 1:
        _heartbeat = Heartbeat()
        # Exit handlers run in reverse order, so this one runs before that of JAX, which
        # waits for all processes, even for those that are lost.
        atexit.register(_shut_down, _heartbeat)
        sys.excepthook = functools.partial(_report_uncaught, _heartbeat, sys.excepthook)
    return _heartbeat


def _shut_down(heartbeat: Heartbeat) -> None:
    """End this process; after a failure, without waiting for the others."""
    heartbeat.close()
    if heartbeat.failure_status is not None:
        heartbeat.say_goodbye()
        progress.exit_now(heartbeat.failure_status)


def _report_uncaught(
    heartbeat: Heartbeat, hook: Any, kind: Any, error: Any, trace: Any
) -> None:
    hook(kind, error, trace)
    heartbeat.report_failure(f"{kind.__name__}: {error}", 1)


def watch_launcher() -> None:
    """Stop a single process, with a checkpoint, when its launcher is gone."""
    threading.Thread(
        target=_follow_launcher,
        args=(lambda _: None, threading.Event()),
        name="millrace-launcher",
        daemon=True,
    ).start()


def _follow_launcher(on_line: Callable[[str], None], over: threading.Event) -> None:
    """Read the pipe of the launcher; if the launcher is gone, stop this process."""
    if (descriptor := os.environ.pop(LAUNCHER_PIPE, None)) is None:
        return
    try:
        with open(int(descriptor)) as pipe:
            for line in pipe:
                on_line(line.strip())
    except OSError:
        return
    if not over.is_set():
        # The launcher read our output: from now on, writing to its pipes would fail.
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            if not os.isatty(stream):
                os.dup2(null, stream)
        # Handled like SIGTERM from a cluster: training saves a checkpoint and stops.
        os.kill(os.getpid(), signal.SIGTERM)


def is_communication_error(error: BaseException) -> bool:
    """Whether a JAX error comes from another process rather than from this one."""
    text = str(error).lower()
    words = ("gloo", "nccl", "connection", "unavailable", "coordination", "socket")
    is_runtime = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    return is_runtime and any(word in text for word in words)
