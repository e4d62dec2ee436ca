"""The run directory: what a run leaves behind, and the contract other tools read.

``config.yml`` the resolved configuration; ``metrics.jsonl`` one object per log event;
``summary.json`` at the end, whatever the end was; ``checkpoints/``; ``report.html``.
"""

import contextlib
import itertools
import json
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import yaml

from millrace.batching import Batching, resolve_batching
from millrace.config import (
    ConfigurationError,
    as_plain,
    flat_options,
    load_yaml,
    plain_defaults,
)
from millrace.distributed import coordination
from millrace.durable import (
    PARTIAL,
    clear_leftovers,
    finite_json,
    lock_folder,
    locked,
    make_folder,
    sync_file,
    sync_folder,
    write_atomically,
)
from millrace.report.record import read_events

_ACCOUNT = {"config.yml", "summary.json", "report", "report.html"}
"""What a run leaves that has neither trained nor measured anything."""

_OWN = "millrace-process-"
"""How the folder begins in which a process writes for itself."""

_WRITTEN = ("config.yml", "metrics.jsonl", "summary.json", "report.html")
"""What is replaced as a whole."""


class RunDirectory:
    """A directory that belongs to one run of one configuration."""

    def __init__(self, path: Path, *, made: bool | None = None) -> None:
        self.home = path
        self.made = not path.exists() if made is None else made
        self._release: weakref.finalize | None = None
        self.grown: dict[str, Any] = {}
        """What a resumed run is asked for more of than it was started with."""
        self.checkpoints = path / "checkpoints"
        self._metrics = path / "metrics.jsonl"
        self._num_events: int | None = None

    @property
    def path(self) -> Path:
        """Where this process writes; for the first one, that is the run's directory."""
        return self.home

    @property
    def metrics_path(self) -> Path:
        """The log events, one JSON object a line."""
        return self._metrics

    def claim(self) -> None:
        """Keep other processes from writing here until this one is done, or gone."""
        try:
            descriptor = lock_folder(self.path)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"Another process is writing the run in {self.path}. Wait until it has "
                "ended, or choose another --run-dir."
            ) from error
        if descriptor is not None:
            self._release = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        """Let others write here."""
        if self._release is not None:
            self._release()

    def keep_grown(self) -> None:
        """Take it into the record, now that the run goes on with it."""
        if self.grown:
            record = load_yaml(self.path / "config.yml") | self.grown
            write_atomically(
                self.path / "config.yml", yaml.safe_dump(record, sort_keys=False)
            )

    def discard(self) -> None:
        """Take back a run that never began; a folder that was there before stays."""
        (self.path / "config.yml").unlink()
        if self.made:
            shutil.rmtree(self.path)

    def append_metrics(self, event: dict[str, Any]) -> None:
        """Add one log event."""
        with self._metrics.open("a") as file:
            file.write(json.dumps(finite_json(event)) + "\n")
        if self._num_events is not None:
            self._num_events += 1

    def num_events(self) -> int:
        """Count the log events."""
        if self._num_events is None:  # appending counts from here on
            self._num_events = len(self.read_metrics())
        return self._num_events

    def sync_metrics(self) -> None:
        """Wait until the log events are on the disk."""
        if self._metrics.exists():
            sync_file(self._metrics)
            sync_folder(self.path)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the log events; a line that is damaged or cut short is left out."""
        return read_events(self.home)

    def forget_metrics_after(self, update: int) -> int:
        """Drop events that a resumed run will write again; return how many are left."""
        kept = [event for event in self.read_metrics() if event["update"] <= update]
        text = "".join(json.dumps(event) + "\n" for event in kept)
        write_atomically(self._metrics, text)
        self._num_events = len(kept)
        return len(kept)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the final account of the run."""
        text = json.dumps(finite_json(summary), indent=2) + "\n"
        write_atomically(self.path / "summary.json", text)

    def take_summary(self) -> dict[str, Any]:
        """Return the account that an earlier part of the run left, which is no longer true.

        Should this part be killed, there must not be one that says how it ended.
        """
        path = self.home / "summary.json"
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            return {}
        path.unlink(missing_ok=True)
        sync_folder(self.home)
        return found if isinstance(found, dict) else {}


class FollowedDirectory(RunDirectory):
    """The directory as another process than the first sees it: to read, not to write.

    What the process writes for itself goes to a folder that nobody will look at.
    """

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._own: tuple[Path, contextlib.ExitStack] | None = None

    @property
    def path(self) -> Path:
        """This process's own folder, made when it is asked for: few processes do.

        One that a killed process has left is deleted by the next that makes one.
        """
        if self._own is None:
            clear_leftovers(Path(tempfile.gettempdir()), f"{_OWN}*{PARTIAL}")
            path = Path(tempfile.mkdtemp(PARTIAL, _OWN))
            stack = contextlib.ExitStack()
            stack.enter_context(locked(path))
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            self._own = path, stack
        return self._own[0]

    def discard(self) -> None:
        """Leave that to the first process."""

    def append_metrics(self, event: dict[str, Any]) -> None:
        """Leave that to the first process."""

    def sync_metrics(self) -> None:
        """Leave that to the first process."""

    def forget_metrics_after(self, update: int) -> int:
        """Leave that to the first process; count as it does."""
        return sum(event["update"] <= update for event in self.read_metrics())

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Leave that to the first process."""

    def take_summary(self) -> dict[str, Any]:
        """Leave that to the first process."""
        return {}

    def close(self) -> None:
        """Delete what this process wrote for itself."""
        if self._own is not None:
            self._own[1].close()


def open_for_all(
    path: Path | None, config: Any, *, command: str, resume: bool
) -> RunDirectory:
    """Open a run directory in the first process, and have the others follow it."""
    if coordination.num_processes() == 1:
        return open_run_directory(path, config, command=command, resume=resume)
    found: dict[str, str] = {}
    directory: RunDirectory | None = None
    if coordination.is_first():
        try:
            directory = open_run_directory(path, config, command=command, resume=resume)
            found = {"path": str(directory.path.absolute())}
        except ConfigurationError as error:
            found = {"error": str(error)}
    found = coordination.broadcast("run-directory", found)
    if "error" in found:
        raise ConfigurationError(found["error"])
    home = Path(found["path"])
    sees = coordination.gather("sees-run-directory", (home / "config.yml").exists())
    if not all(sees):
        raise ConfigurationError(
            f"Process {sees.index(False)} does not see the run directory {home}. All "
            "processes must share its file system."
        )
    return directory or FollowedDirectory(home)


def open_run_directory(
    path: Path | None, config: Any, *, command: str, resume: bool
) -> RunDirectory:
    """Make a new run directory, or open one to continue it.

    Args:
        path: Where; None for ``runs/<command>-<time>``.
        config: The dataclass behind the run; a resumed run must have the same one.
        command: Such as ``cnn-train``.
        resume: Whether the directory is expected to hold a run already.
    """
    fresh = path is None
    path = _fresh_folder(command) if path is None else path
    directory = RunDirectory(path, made=fresh or None)
    record = path / "config.yml"
    if resume:
        if not record.exists():
            raise ConfigurationError(
                f"There is no run to resume in {path}: it has no config.yml."
            )
        directory.grown = _check_same(load_yaml(record), config, command, path)
        directory.claim()
        _clear_leftovers(path)
        return directory
    if path.exists() and not path.is_dir():
        raise ConfigurationError(f"--run-dir {path} is a file, not a directory.")
    if path.exists() and any(path.iterdir()) and not _never_began(path):
        raise ConfigurationError(
            f"The run directory {path} exists and is not empty. Choose another "
            "--run-dir, or add --resume to continue the run in it."
        )
    try:
        make_folder(path)
        directory.claim()
        _clear(path)
        plain = {"command": command} | as_plain(config)
        write_atomically(record, yaml.safe_dump(plain, sort_keys=False))
    except OSError as error:
        raise _cannot_write(path, error) from error
    return directory


def _never_began(path: Path) -> bool:
    """Whether there is nothing but the account of a run that failed before it trained."""
    names = {entry.name for entry in path.iterdir()}
    names -= {entry.name for entry in _leftovers(path)}
    if not names:
        return True
    if not names <= _ACCOUNT:
        return False
    try:
        is_ours = "command" in load_yaml(path / "config.yml")
        summary = path / "summary.json"
        found = json.loads(summary.read_text()) if summary.exists() else {}
    except (OSError, ValueError):
        return False
    return is_ours and found.get("status", "failed") in ("failed", "interrupted")


def _clear(path: Path) -> None:
    """Delete such an account."""
    _clear_leftovers(path)
    for name in _ACCOUNT:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink(missing_ok=True)


def _leftovers(path: Path) -> list[Path]:
    """Return the files that were being written when a run was killed."""
    return [
        *(entry for name in _WRITTEN for entry in path.glob(f".{name}.*{PARTIAL}")),
        *(path / "report").glob(f".*{PARTIAL}"),
    ]


def _clear_leftovers(path: Path) -> None:
    for leftover in _leftovers(path):
        with contextlib.suppress(OSError):  # they are in nobody's way
            leftover.unlink()


def _fresh_folder(command: str) -> Path:
    """Make a folder that no other run has, also of those that start at this moment."""
    name = f"{command}-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    path = Path("runs") / name
    try:
        make_folder(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from error
    for number in itertools.count(2):
        try:
            path.mkdir()
            sync_folder(path.parent)
            return path
        except FileExistsError:
            path = path.with_name(f"{name}-{number}")
        except OSError as error:
            raise _cannot_write(path, error) from error
    raise AssertionError("numbers do not end")


def _cannot_write(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"Cannot write to the run directory {path}: {error.strerror}."
    )


def _check_same(
    old: dict[str, Any], config: Any, command: str, path: Path
) -> dict[str, Any]:
    """Refuse another configuration; return what there is to be more of."""
    if old.get("command") != command:
        raise ConfigurationError(
            f"{path} holds a run of {old.get('command')}, not of {command}."
        )
    # What the run did not know when it was started was as it is by default.
    old, new = plain_defaults(type(config)) | old, as_plain(config)
    shared_out = _how_batches_are_shared_out(old, config)
    differing = {
        name: option
        for name, option in flat_options(type(config)).items()
        if not option.metadata.get("may_change")
        and name not in shared_out
        and old.get(name) != new[name]
    }
    grown = {
        name: new[name]
        for name, option in differing.items()
        if option.metadata.get("may_grow") and _is_more(new[name], old.get(name))
    }
    changed = [
        f"{name} was {old.get(name)!r}, now {new[name]!r}"
        for name in differing
        if name not in grown
    ]
    if changed:
        raise ConfigurationError(
            f"{path} belongs to another configuration: {'; '.join(changed)}. Repeat "
            "the options the run was started with, or choose another --run-dir."
        )
    return grown


def _is_more(new: Any, old: Any) -> bool:
    return all(isinstance(x, int | float) for x in (new, old)) and new > old


def _how_batches_are_shared_out(old: dict[str, Any], config: Any) -> set[str]:
    """Return the options that may change as long as every update has the same samples."""
    batching = getattr(getattr(config, "plan", config), "batching", None)
    names = {"num_replicas", "gradient_accumulation_count", "global_batch_size"}
    if not isinstance(batching, Batching):
        return set()
    given: dict[str, Any] = {n: old[n] for n in names if old.get(n) is not None}
    try:
        before = resolve_batching(micro_batch_size=old["micro_batch_size"], **given)
    except (KeyError, TypeError, ValueError):
        return set()
    same = before.global_batch_size == batching.global_batch_size
    return names if same else set()
