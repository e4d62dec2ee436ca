"""What a process is doing, and which process of a run is stuck.

Heartbeats come from a thread of their own, so they do not tell whether a process still
works. Its progress does: how many chunks of batches it has staged, the last update it has
seen, and anything else that moves, such as the batches of a validation.
"""

import contextlib
import faulthandler
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_WARN_SECONDS = 120.0
_WARN_STEPS = 3
"""A process is slow if it is behind for `_WARN_SECONDS` and this many times the longest
step of any process so far."""
_PATIENT_STEPS = 10
"""Without a timeout of the user's, a step may take this many times the longest so far."""
DEFAULT_TIMEOUT = 1800.0
"""Seconds without progress after which several processes end."""
_BRIEF_SECONDS = 3.0
"""How long to wait for what a disk or a terminal may block."""


class Activity(NamedTuple):
    """What a process reports about itself."""

    steps: int = 0
    """Chunks of batches that it has staged."""
    update: int = 0
    """The last update whose results it has."""
    phase: str = ""
    """What it is doing; empty outside of training, where nobody watches."""
    moves: int = 0
    """Grows with every sign of progress."""
    is_excused: bool = False
    """Whether it does what cannot be watched, such as compiling."""

    def __str__(self) -> str:
        return f"{self.phase} after update {self.update}"


@dataclass
class _Own:
    """The activity of this process, and how it is watched."""

    activity: Activity = Activity()
    is_watched: bool = False
    is_excused: Callable[[], bool] = lambda: False
    timeout: float | None = None
    """Seconds without progress after which it is stuck; None to choose, 0 for never."""
    folder: Path | None = None
    """Where to write what the threads of a stuck process are doing."""


_own = _Own()


def own_activity() -> Activity:
    """Return what this process is doing."""
    if not _own.is_watched:
        return _own.activity._replace(phase="")
    return _own.activity._replace(is_excused=_own.is_excused())


def count_step() -> None:
    """Record that this process has staged a chunk of batches for its devices."""
    _move(steps=_own.activity.steps + 1)


def reach_update(update: int) -> None:
    """Record that this process has the results of an update."""
    _move(update=update)


def enter_phase(phase: str) -> None:
    """Record what this process begins to do."""
    _move(phase=phase)


def move() -> None:
    """Record any other sign of progress."""
    _move()


def _move(**changes: Any) -> None:
    moves = _own.activity.moves + 1
    _own.activity = _own.activity._replace(moves=moves, **changes)


@contextlib.contextmanager
def watched(
    timeout: float | None,
    folder: Path,
    is_excused: Callable[[], bool],
    *,
    excuses_first_call: bool = False,
) -> Iterator[None]:
    """Watch the progress of this process in the block.

    Args:
        timeout: Seconds without progress after which it is stuck; 0 for never, and None
            for a time that suits the steps, if there are several processes.
        folder: Where to write what its threads do if it is stuck.
        is_excused: Returns whether it does what cannot be watched, such as compiling.
        excuses_first_call: Whether to watch only from the first results on, because nobody
            knows before how long a call takes.
    """
    first = _own.activity.update

    def is_excused_now() -> bool:
        return is_excused() or (excuses_first_call and _own.activity.update == first)

    _own.timeout, _own.folder, _own.is_excused = timeout, folder, is_excused_now
    move()
    _own.is_watched = True
    try:
        yield
    finally:
        _own.is_watched = False


class _Seen(NamedTuple):
    activity: Activity
    since: float
    """When it last moved."""
    step_since: float
    """When it made its last step."""
    update_since: float
    """When it got its last results."""


class Stuck(NamedTuple):
    """Processes that have not moved for too long."""

    ranks: tuple[int, ...]
    """Those for which the others wait or, if nobody is behind, all of them."""
    seconds: float
    activities: dict[int, Activity]


class Progress:
    """Finds the processes that all others wait for.

    All processes stage the same chunks in the same order, so whoever has staged fewer is
    behind. Each process decides alone, by what it has heard and by its own clock.

    Args:
        num_processes: The number of processes.
        now: The current time, in seconds of any clock.
    """

    def __init__(self, num_processes: int, now: float) -> None:
        self._seen = {
            rank: _Seen(Activity(), now, now, now) for rank in range(num_processes)
        }
        self._longest = 0.0
        self._reported: tuple[int, int] | None = None

    def update(self, rank: int, activity: Activity, now: float) -> None:
        """Record what a process reports."""
        before = self._seen[rank]
        _, since, step_since, update_since = before
        if activity.moves != before.activity.moves or activity.is_excused:
            since = now
        if activity.steps != before.activity.steps:
            self._longest = max(self._longest, now - step_since)
            step_since = now
        if activity.update != before.activity.update:
            # Calls are staged ahead: only results tell how long the first one has taken.
            self._longest = max(self._longest, now - update_since)
            update_since = now
        self._seen[rank] = _Seen(activity, since, step_since, update_since)

    def restart_clock(self, now: float) -> None:
        """Measure all waiting times from now, after this process was suspended itself."""
        self._seen = {
            rank: seen._replace(since=now, step_since=now, update_since=now)
            for rank, seen in self._seen.items()
        }

    def find_slow(self, now: float) -> tuple[int, float] | None:
        """Return a process that makes the others wait, and for how many seconds.

        A process is returned only once until it makes another step.
        """
        newest = max(seen.activity.steps for seen in self._seen.values())
        limit = max(_WARN_SECONDS, _WARN_STEPS * self._longest)
        for rank, (activity, _, since, _) in self._seen.items():
            is_slow = activity.steps < newest and now - since > limit
            if is_slow and (rank, activity.steps) != self._reported:
                self._reported = rank, activity.steps
                return rank, now - since
        return None

    def find_stuck(self, now: float) -> Stuck | None:
        """Return the processes that are stuck, if nothing has moved for too long."""
        limit = self._limit()
        seen = self._seen.values()
        shortest = min(now - each.since for each in seen)
        if shortest <= limit or any(not each.activity.phase for each in seen):
            return None
        least = min(each.activity.steps for each in seen)
        ranks = [r for r, each in self._seen.items() if each.activity.steps == least]
        seconds = max(now - self._seen[rank].since for rank in ranks)
        activities = {rank: each.activity for rank, each in self._seen.items()}
        return Stuck(tuple(ranks), seconds, activities)

    def _limit(self) -> float:
        if _own.timeout is None and len(self._seen) > 1:
            return max(DEFAULT_TIMEOUT, _PATIENT_STEPS * self._longest)
        return _own.timeout or math.inf


def write_stacks(rank: int) -> Path | None:
    """Write what the threads and children of this process do; return the file.

    None if it cannot be written soon: perhaps the file server is why the run is stuck.
    """
    if _own.folder is None:
        return None
    path, written = _own.folder / f"stuck-process-{rank}.txt", threading.Event()

    def write() -> None:
        with contextlib.suppress(OSError):
            _write_stacks(path)
            written.set()

    try_briefly(write)
    return path if written.is_set() else None


def _write_stacks(path: Path) -> None:
    with path.open("w") as file:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"{when}, pid {os.getpid()}: {own_activity()}\n\n")
        file.write("".join(f"{line}\n" for line in _describe_children()))
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def try_briefly(action: Callable[[], Any]) -> None:
    """Do something, but do not wait long for it: output may be blocked, or a disk."""
    thread = threading.Thread(target=action, name="millrace-brief", daemon=True)
    thread.start()
    thread.join(_BRIEF_SECONDS)


def exit_now(status: int) -> NoReturn:
    """End this process without waiting for its threads.

    Data workers notice that, unless they are suspended; those are killed.
    """
    for pid, state, _ in _list_children():
        if state.startswith("T"):  # stopped by a signal; t is for debuggers
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    os._exit(status)


def _describe_children() -> Iterator[str]:
    """Yield a line for each child process."""
    for pid, state, command in _list_children():
        yield f"child {pid}, {state}: {command[:120]}"


def _list_children() -> Iterator[tuple[int, str, str]]:
    """Yield pid, state and command line of each child process; only on Linux."""
    pids: list[str] = []
    for listed in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            pids += listed.read_text().split()
    for pid in pids:
        with contextlib.suppress(OSError):  # the child has ended
            folder = Path("/proc") / pid
            state = folder.joinpath("status").read_text().partition("State:")[2]
            command = folder.joinpath("cmdline").read_bytes().split(b"\0")
            text = " ".join(part.decode(errors="replace") for part in command)
            yield int(pid), state.splitlines()[0].strip(), text


class Watch:
    """Watches the progress of a single process, on a thread.

    Args:
        on_stuck: Called on that thread with a description; it should end the process.
    """

    def __init__(self, on_stuck: Callable[[str], None], poll_seconds: float = 0.5) -> None:
        self._on_stuck = on_stuck
        self._poll_seconds = poll_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="millrace-progress", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        progress = Progress(1, time.monotonic())
        before = time.monotonic()
        while not self._over.wait(self._poll_seconds):
            now = time.monotonic()
            if now - before > 10 * self._poll_seconds:  # suspended itself
                progress.restart_clock(now)
            before = now
            progress.update(0, own_activity(), now)
            if (stuck := progress.find_stuck(now)) is not None:
                return self._on_stuck(describe_stuck(stuck, {}))


def describe_stuck(stuck: Stuck, names: dict[int, str]) -> str:
    """Return a sentence about processes that are stuck."""
    activities = stuck.activities
    if len(activities) == 1:
        return f"No progress for {stuck.seconds:.0f} s: {activities[0]}."
    if len(stuck.ranks) < len(activities):
        who = ", ".join(f"{names[rank]}: {activities[rank]}" for rank in stuck.ranks)
        return f"No progress for {stuck.seconds:.0f} s, waiting for {who}."
    doing = ", ".join(f"{rank} {activity}" for rank, activity in activities.items())
    return (
        f"No progress for {stuck.seconds:.0f} s, and no process is behind the others: "
        f"they wait for one another ({doing})."
    )
