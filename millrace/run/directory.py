"""The run directory: everything that a run writes, in files that other tools can read.

``config.yml`` has the resolved configuration, ``metrics.jsonl`` one JSON object per log
event, and ``summary.json`` the result, however the run ended. ``checkpoints/`` and
``report.html`` are next to them. Only the first process of a run writes here.
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

from millrace.config import ConfigurationError, as_plain, load_yaml
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
from millrace.run.options import compare_options
from millrace.storage.address import StorageError, display, to_local
from millrace.storage.copy import RECORD
from millrace.storage.download import refresh
from millrace.storage.upload import Uploader, open_uploader

_FILES_WITHOUT_RESULTS = {
    *("config.yml", "launch.log", "summary.json", "report", "report.html"),
}
"""What a run leaves that ended before it had any results."""

_SCRATCH_PREFIX = "millrace-process-"
"""Prefix of the scratch folders of processes other than the first."""

_REPLACED_FILES = ("config.yml", "metrics.jsonl", "summary.json", "report.html")
"""Files that are replaced atomically, so their partial versions may be left over."""


class RunDirectory:
    """The directory of one run of one configuration.

    Args:
        path: The directory.
        created: Whether it was created for this run (default: whether it does not exist).
    """

    def __init__(self, path: Path, *, created: bool | None = None) -> None:
        self.home = path
        """The directory of the run, the same for all of its processes."""
        self.created = not path.exists() if created is None else created
        self.extended_options: dict[str, Any] = {}
        """Options that a resumed run was given larger values for, such as num_epochs."""
        self.checkpoints = path / "checkpoints"
        self._metrics = path / "metrics.jsonl"
        self._num_events: int | None = None
        self._release_lock: weakref.finalize | None = None
        self.uploader: Uploader | None = None
        """Copies the directory to object storage; None for a run on this machine."""

    @property
    def path(self) -> Path:
        """Where this process writes; in the first process, the directory of the run."""
        return self.home

    @property
    def metrics_path(self) -> Path:
        """The file of log events, one JSON object per line."""
        return self._metrics

    def lock(self) -> None:
        """Keep other processes from writing here until this one closes it, or ends."""
        try:
            descriptor = lock_folder(self.path)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"Another process is writing the run in {display(self.path)}. Wait until "
                "it has ended, or choose another --run-dir."
            ) from error
        if descriptor is not None:
            self._release_lock = weakref.finalize(self, os.close, descriptor)

    def start_upload(self) -> None:
        """Begin to copy the directory to object storage, if it belongs there."""
        try:
            self.uploader = open_uploader(self.home)
        except StorageError as error:
            raise ConfigurationError(str(error)) from error

    def close(self) -> None:
        """Release the lock."""
        if self._release_lock is not None:
            self._release_lock()

    def record_extended_options(self) -> None:
        """Write the larger values to config.yml, once the run continues with them."""
        if self.extended_options:
            record = load_yaml(self.path / "config.yml") | self.extended_options
            text = yaml.safe_dump(record, sort_keys=False)
            write_atomically(self.path / "config.yml", text)

    def discard(self) -> None:
        """Undo opening a run that never began; a folder that existed before stays."""
        if self.uploader is not None:
            self.uploader.discard()
        (self.path / "config.yml").unlink()
        if self.created:
            shutil.rmtree(self.path)

    def append_metrics(self, event: dict[str, Any]) -> None:
        """Append a log event. It is not synced: checkpoints do that."""
        with self._metrics.open("a") as file:
            file.write(json.dumps(finite_json(event)) + "\n")
        if self._num_events is not None:
            self._num_events += 1

    def num_events(self) -> int:
        """Return the number of log events."""
        if self._num_events is None:  # read once, then counted by append_metrics
            self._num_events = len(self.read_metrics())
        return self._num_events

    def sync_metrics(self) -> None:
        """Wait until all log events are on disk."""
        if self._metrics.exists():
            sync_file(self._metrics)
            sync_folder(self.path)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the log events, without lines that are damaged or cut short."""
        return read_events(self.home)

    def truncate_metrics(self, update: int) -> int:
        """Delete the events after `update`; return the number of events left.

        A resumed run writes them again. Damaged lines are deleted too.
        """
        kept = [event for event in self.read_metrics() if event["update"] <= update]
        text = "".join(json.dumps(event) + "\n" for event in kept)
        write_atomically(self._metrics, text)
        self._num_events = len(kept)
        return len(kept)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the result of the run."""
        text = json.dumps(finite_json(summary), indent=2) + "\n"
        write_atomically(self.path / "summary.json", text)

    def pop_summary(self) -> dict[str, Any]:
        """Delete and return the summary of a run that is resumed.

        If the run is killed now, no summary must claim that it ended.
        """
        path = self.home / "summary.json"
        try:
            summary = json.loads(path.read_text())
        except (OSError, ValueError):
            return {}
        path.unlink(missing_ok=True)
        sync_folder(self.home)
        return summary if isinstance(summary, dict) else {}


class FollowerRunDirectory(RunDirectory):
    """The run directory in all processes but the first: read, never written.

    Files that an application writes to `path` go to a scratch folder instead.
    """

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._scratch: tuple[Path, contextlib.ExitStack] | None = None

    @property
    def path(self) -> Path:
        """The scratch folder of this process, created on first use.

        This also deletes the scratch folders of processes that were killed.
        """
        if self._scratch is None:
            clear_leftovers(Path(tempfile.gettempdir()), f"{_SCRATCH_PREFIX}*{PARTIAL}")
            path = Path(tempfile.mkdtemp(PARTIAL, _SCRATCH_PREFIX))
            stack = contextlib.ExitStack()
            stack.enter_context(locked(path))
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            self._scratch = path, stack
        return self._scratch[0]

    def discard(self) -> None:
        """Do nothing: the first process does it."""

    def append_metrics(self, event: dict[str, Any]) -> None:
        """Do nothing: the first process does it."""

    def sync_metrics(self) -> None:
        """Do nothing: the first process does it."""

    def truncate_metrics(self, update: int) -> int:
        """Return the number of events up to `update`; the first process deletes them."""
        return sum(event["update"] <= update for event in self.read_metrics())

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Do nothing: the first process does it."""

    def pop_summary(self) -> dict[str, Any]:
        """Return nothing: the first process deletes the summary and broadcasts it."""
        return {}

    def close(self) -> None:
        """Delete the scratch folder."""
        if self._scratch is not None:
            self._scratch[1].close()


def open_shared_run_directory(
    path: Path | None, config: Any, *, command: str, resume: bool
) -> RunDirectory:
    """Open a run directory in the first process; the others wait and follow it."""
    if coordination.num_processes() == 1:
        return open_run_directory(path, config, command=command, resume=resume)
    outcome: dict[str, str] = {}
    directory: RunDirectory | None = None
    if coordination.is_first():
        try:
            directory = open_run_directory(path, config, command=command, resume=resume)
            outcome = {"path": str(directory.path.absolute())}
        except ConfigurationError as error:
            outcome = {"error": str(error)}
    outcome = coordination.broadcast("run-directory", outcome)
    if "error" in outcome:
        raise ConfigurationError(outcome["error"])
    home = Path(outcome["path"])
    visible = coordination.gather("sees-run-directory", (home / "config.yml").exists())
    if not all(visible):
        raise ConfigurationError(
            f"Process {visible.index(False)} does not see the run directory {home}. All "
            "processes must share its file system."
        )
    return directory or FollowerRunDirectory(home)


def open_run_directory(
    path: Path | None, config: Any, *, command: str, resume: bool
) -> RunDirectory:
    """Create a run directory, or open an existing one to resume its run.

    Args:
        path: The directory; None for ``runs/<command>-<time>``.
        config: The configuration of the run; it must be the same in a resumed run.
        command: The name of the command, such as ``cnn-train``.
        resume: Whether the directory must contain a run already.
    """
    is_unnamed = path is None
    path = _create_unnamed(command) if path is None else _refresh(path)
    directory = RunDirectory(path, created=is_unnamed or None)
    record = path / "config.yml"
    if resume:
        if not record.exists():
            raise ConfigurationError(
                f"There is no run to resume in {display(path)}: it has no config.yml."
            )
        directory.extended_options = compare_options(
            load_yaml(record), config, command=command, path=path
        )
        directory.lock()
        _clear_leftovers(path)
        directory.start_upload()
        return directory
    if path.exists() and not path.is_dir():
        raise ConfigurationError(f"--run-dir {path} is a file, not a directory.")
    if path.exists() and any(path.iterdir()) and not _has_no_results(path):
        raise ConfigurationError(
            f"The run directory {display(path)} exists and is not empty. Choose another "
            "--run-dir, or add --resume to continue the run in it."
        )
    try:
        make_folder(path)
        directory.lock()
        _clear_files_without_results(path)
        plain = {"command": command} | as_plain(config)
        write_atomically(record, yaml.safe_dump(plain, sort_keys=False))
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        directory.start_upload()
    except ConfigurationError:
        directory.discard()
        raise
    return directory


def _refresh(path: Path) -> Path:
    """Return the folder of a run; a working copy is brought up to date."""
    try:
        folder = to_local(path)
        refresh(folder, exact=True)
        return folder
    except StorageError as error:
        raise ConfigurationError(str(error)) from error


def has_begun(path: Path) -> bool:
    """Whether a folder has a run with something to continue."""
    path = _refresh(path)
    return (path / "config.yml").exists() and not _has_no_results(path)


def _has_no_results(path: Path) -> bool:
    """Whether a folder only has the files of a run that ended before it had results."""
    names = {entry.name for entry in path.iterdir()}
    names -= {RECORD, *(entry.name for entry in _leftovers(path))}
    if not names:
        return True
    if not names <= _FILES_WITHOUT_RESULTS:
        return False
    try:
        is_run = "command" in load_yaml(path / "config.yml")
        summary_path = path / "summary.json"
        summary = json.loads(summary_path.read_text()) if summary_path.exists() else {}
    except (OSError, ValueError):
        return False
    return is_run and summary.get("status", "failed") in ("failed", "interrupted")


def _clear_files_without_results(path: Path) -> None:
    _clear_leftovers(path)
    for name in _FILES_WITHOUT_RESULTS:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink(missing_ok=True)


def _leftovers(path: Path) -> list[Path]:
    """Return the files that were being written when a run was killed."""
    return [
        *(entry for name in _REPLACED_FILES for entry in path.glob(f".{name}.*{PARTIAL}")),
        *(path / "report").glob(f".*{PARTIAL}"),
    ]


def _clear_leftovers(path: Path) -> None:
    for leftover in _leftovers(path):
        with contextlib.suppress(OSError):  # they do no harm
            leftover.unlink()


def _create_unnamed(command: str) -> Path:
    """Create a folder with a unique name, even if other runs start at the same time."""
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
    raise AssertionError("unreachable: itertools.count does not end")


def _cannot_write(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"Cannot write to the run directory {path}: {error.strerror}."
    )
