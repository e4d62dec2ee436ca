"""What can go wrong while a command runs, and how to cause it."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

LONGEST_END = 60.0
"""Seconds within which a command must have ended after a fault that ends it."""
_PAUSE = (0.2, 4.0)
"""Seconds for which a process is stopped: too few for it to count as lost."""
_MARK = "MILLRACE_CHAOS_ATTEMPT"
"""Variable by which the processes of an attempt are recognized, whoever started them."""


@dataclass
class Attempt:
    """One start of a command, in a terminal of its own.

    Args:
        command: The command.
        disk: Where its run directory is.
        variables: Environment variables of the command.
    """

    command: list[str]
    disk: "Disk"
    variables: dict[str, str]
    name: str = field(init=False)
    _events_before: set[bytes] = field(init=False)
    process: subprocess.Popen = field(init=False)
    _terminal: int = field(init=False)
    _screen: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.name = f"{os.getpid()}-{time.monotonic_ns()}"
        self._events_before = self._read_events()
        self._terminal, other = os.openpty()
        os.set_blocking(self._terminal, False)
        self.process = subprocess.Popen(
            # Both are replaced by the command, which sees signals that nohup ignores.
            ["setsid", "--ctty", "env", "--default-signal", *self.command],
            stdin=other,
            stdout=other,
            stderr=other,
            env=self.variables | {_MARK: self.name},
        )
        os.close(other)

    @property
    def is_elastic(self) -> bool:
        """Whether the launcher replaces a lost process."""
        return "--elastic" in self.command

    @property
    def output(self) -> str:
        """What the terminal has shown."""
        self._read()
        return self._screen.decode(errors="replace")

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while part := os.read(self._terminal, 65536):
                self._screen += part

    @property
    def has_logged(self) -> bool:
        """Whether this start has written log events of its run, not only deleted some."""
        return bool(self._read_events() - self._events_before)

    def _read_events(self) -> set[bytes]:
        metrics = self.disk.root / "run/metrics.jsonl"
        return set(metrics.read_bytes().splitlines()) if metrics.exists() else set()

    def wait(self, seconds: float) -> bool:
        """Wait until the command has ended, or for some seconds; return whether it has."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read()
            time.sleep(0.02)
        return self.process.poll() is not None

    def find_processes(self) -> list[int]:
        """Return all processes of this attempt that have not ended."""
        return [pid for pid, _ in self._list_processes()]

    def find(self, kind: str) -> list[int]:
        """Return the processes of a kind: main, launcher, worker or data."""
        launched = self.process.pid if "launch" in self.command else None
        found: dict[str, list[int]] = {"main": [], "launcher": [], "worker": [], "data": []}
        for pid, command in self._list_processes():
            if pid == launched:
                found["launcher"].append(pid)
            elif "millrace.data.decode_worker" in command:
                found["data"].append(pid)
            elif launched is not None:
                found["worker"].append(pid)
            elif pid == self.process.pid:
                found["main"].append(pid)
        return found[kind]

    def _list_processes(self) -> Iterator[tuple[int, str]]:
        mark = f"{_MARK}={self.name}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if mark not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if state not in "ZX":
                    yield int(entry.name), command

    def signal_all(self, number: int) -> None:
        """Send a signal to all processes of this attempt."""
        for pid in self.find_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def hang_up(self) -> None:
        """Close the terminal, as when a connection is lost."""
        self._read()
        os.close(self._terminal)
        self._terminal = os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        """End whatever is left, and close the terminal."""
        self.signal_all(signal.SIGKILL)
        self.process.wait()
        os.close(self._terminal)


class Disk:
    """A small ext4 file system in a file, whose power can be cut.

    Args:
        folder: Where the file and the mounted file system are.
    """

    _OPTIONS = "loop,commit=300,data=writeback,noauto_da_alloc"
    """Nothing reaches the file on its own, and a rename does not write contents."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._image, self.root = folder / "disk.img", folder / "disk"
        self._filler = self.root / "filler"
        self._image.write_bytes(b"")
        os.truncate(self._image, 96 << 20)
        subprocess.run(
            ["mkfs.ext4", "-q", str(self._image)], check=True, capture_output=True
        )
        self.root.mkdir()
        self._mount()

    def _mount(self) -> None:
        words = ["mount", "-t", "ext4", "-o", self._OPTIONS]
        subprocess.run(
            [*words, str(self._image), str(self.root)], check=True, capture_output=True
        )

    def copy_image(self) -> Path:
        """Return a copy of what has reached the file; the processes must be stopped."""
        copy = self._image.with_suffix(".copy")
        before, now = b"", self._image.read_bytes()
        while before != now:  # the kernel may be writing
            before, now = now, self._image.read_bytes()
        copy.write_bytes(now)
        subprocess.run(["fallocate", "--dig-holes", str(copy)], check=True)
        return copy

    def restore(self, copy: Path) -> None:
        """Continue with a copy: the file system replays its journal."""
        self.unmount()
        copy.replace(self._image)
        self._mount()

    def fill(self) -> None:
        """Leave no room for another file."""
        free = shutil.disk_usage(self.root).free
        with contextlib.suppress(OSError), self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, free - (4 << 10)))

    def free(self) -> None:
        """Undo `fill`."""
        self._filler.unlink(missing_ok=True)

    def unmount(self) -> None:
        """Take the file system away; its processes must have ended."""
        deadline = time.monotonic() + 10
        while subprocess.run(["umount", str(self.root)], capture_output=True).returncode:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.root} is still in use.")
            time.sleep(0.1)


Fault = Callable[[Attempt, random.Random], bool]
"""Causes a fault; returns whether the command has to end because of it. A fault that cannot
happen now, because nothing of its kind is running, raises ``LookupError``."""


def _choose(attempt: Attempt, kind: str, chance: random.Random) -> int:
    found = attempt.find(kind)
    if not found:
        raise LookupError(f"no process of the kind {kind}")
    return chance.choice(found)


def _kill(kind: str) -> Fault:
    def cause(attempt: Attempt, chance: random.Random) -> bool:
        os.kill(_choose(attempt, kind, chance), signal.SIGKILL)
        return not (kind == "worker" and attempt.is_elastic)

    return cause


def _press(number: int) -> Fault:
    def cause(attempt: Attempt, chance: random.Random) -> bool:
        os.kill(attempt.process.pid, number)
        return True

    return cause


def _stop_for_a_while(attempt: Attempt, chance: random.Random) -> bool:
    stopped = chance.choice(attempt.find_processes() or [attempt.process.pid])
    os.kill(stopped, signal.SIGSTOP)
    attempt.wait(chance.uniform(*_PAUSE))
    with contextlib.suppress(ProcessLookupError):
        os.kill(stopped, signal.SIGCONT)
    return False


def _stop_for_good(attempt: Attempt, chance: random.Random) -> bool:
    """Stop a launched process, or all data workers, so that the others must notice.

    Before the processes of a run have joined, they wait for one another for five minutes.
    """
    launched = attempt.find("worker")
    stopped = [chance.choice(launched)] if launched else attempt.find("data")
    if not stopped or not attempt.has_logged:
        raise LookupError("no process that another one watches")
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    return not attempt.is_elastic


def _lose_terminal(attempt: Attempt, chance: random.Random) -> bool:
    attempt.hang_up()
    return True


def _fill_disk(attempt: Attempt, chance: random.Random) -> bool:
    attempt.disk.fill()
    attempt.wait(chance.uniform(*_PAUSE))
    attempt.disk.free()
    return False  # unless something was written in the meantime


def _cut_power(attempt: Attempt, chance: random.Random) -> bool:
    attempt.signal_all(signal.SIGSTOP)
    copy = attempt.disk.copy_image()
    attempt.signal_all(signal.SIGKILL)
    attempt.process.wait()
    attempt.disk.restore(copy)
    return True


def _damage_newest_checkpoint(attempt: Attempt, chance: random.Random) -> bool:
    """Shorten a file of the newest checkpoint after a kill, as a bad disk would."""
    os.kill(attempt.process.pid, signal.SIGKILL)
    if attempt.process.wait() == 0:
        return True  # it had just completed, so nothing would repair what is damaged
    attempt.signal_all(signal.SIGKILL)
    found = sorted(attempt.disk.root.glob("run/checkpoints/update-*[0-9]"))
    # With a single checkpoint, there would be nothing to continue from.
    if len(found) > 1:
        files = [path for path in found[-1].rglob("*") if path.is_file()]
        victim = max(files, key=lambda path: path.stat().st_size)
        os.truncate(victim, victim.stat().st_size - 1)
    return True


FAULTS: dict[str, Fault] = {
    "kill -9 of the process": _kill("main"),
    "kill -9 of the launcher": _kill("launcher"),
    "kill -9 of a launched process": _kill("worker"),
    "kill -9 of a data worker": _kill("data"),
    "Ctrl-C": _press(signal.SIGINT),
    "SIGTERM": _press(signal.SIGTERM),
    "a process stopped for a while": _stop_for_a_while,
    "processes stopped for good": _stop_for_good,
    "terminal lost": _lose_terminal,
    "disk full for a while": _fill_disk,
    "power cut": _cut_power,
    "newest checkpoint damaged": _damage_newest_checkpoint,
}
