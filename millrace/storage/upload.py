"""Copy a run to object storage while it trains, in a thread.

Readers never find half a checkpoint: its manifest is uploaded after its other files, and
deleted before them. Log events are uploaded before a checkpoint that counts them.
"""

import contextlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from millrace.durable import PARTIAL, clear_leftovers, locked
from millrace.storage.address import display, find_url, working_copies
from millrace.storage.copy import (
    MANIFEST,
    Contents,
    Record,
    find_checkpoint,
    forget,
    list_arrays,
    list_files,
    newest_first,
    sort_files,
    without_runs,
)
from millrace.storage.download import read_writer
from millrace.storage.remote import (
    WRITER,
    Remote,
    attempt,
    describe_error,
    is_permanent,
    storage_errors,
)

T = TypeVar("T")

_log = logging.getLogger("millrace")

_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 1.0, 60.0
_ATTEMPTS = 2
_STAGING = "uploading-"
_REPLACED = ("summary.json", "report", "tensorboard/")
"""Files of an earlier part of the run that a later one may delete."""


class UploadError(RuntimeError):
    """A part of a run could not be uploaded."""


class _TakenOverError(RuntimeError):
    """Another process has continued the run."""


class _Version(NamedTuple):
    """A version of a file on this machine; another one differs in some of these."""

    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, path: Path) -> "_Version":
        found = path.stat()
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


class Uploader:
    """Copies a working copy to object storage whenever it is asked to.

    Opening it checks that the storage can be written. A failure later delays the upload
    until the next attempt, and the run is not disturbed.

    Args:
        folder: The working copy, which this process has locked.

    Raises:
        StorageError: The storage cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        url = find_url(folder)
        assert url is not None, "only working copies are uploaded"
        self.url = url
        self.folder = folder
        self._uploaded: dict[str, _Version] = {}
        """Files of no checkpoint as they are in storage."""
        self._manifests: dict[str, bytes] = {}
        """The manifest of each complete checkpoint in storage."""
        self._stored: dict[str, set[str]] = {}
        """The files of each checkpoint in storage, complete or not."""
        self._arrays: dict[str, _Version] = {}
        """Files of checkpoints as they are in storage."""
        self._strange: set[str] = set()
        """Files of an earlier part of the run, which may not be in this one."""
        self._changed = threading.Condition()
        self._asked = self._done = 0
        self._closing = self._discarded = False
        self._error: BaseException | None = None
        self._progress_at = time.monotonic()
        with storage_errors(url, "written"):
            self._remote = Remote(url)
            self._remote.on_progress = self._note_progress
            self._writer = self._claim()
            self._list_stored()
            self._upload_others(self._list_local().others & {"config.yml"})
        self._thread = threading.Thread(
            target=self._work, name="millrace-upload", daemon=True
        )
        self._thread.start()

    # Called by the run.

    def request(self) -> None:
        """Upload what has changed, in the background."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    @property
    def is_done(self) -> bool:
        """Whether everything that was asked for is in storage."""
        return self._done == self._asked

    def finish(self, timeout: float, announce: Callable[[str], None]) -> None:
        """Upload everything, and end the thread.

        Args:
            timeout: Seconds without progress after which to give up.
            announce: Called with a line if this takes a while.

        Raises:
            UploadError: Something could not be uploaded; says what, and where it is.
        """
        self.request()
        announced = False
        started = self._progress_at = time.monotonic()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        while not self.is_done and self._thread.is_alive():
            with self._changed:
                self._changed.wait(0.2)
            now = time.monotonic()
            if now - self._progress_at > timeout:
                break
            if not announced and now - started > 1.0:
                announced = True
                announce(f"uploading the rest to {self.url}")
        if not self.is_done:
            raise UploadError(self.describe_missing())

    def describe_missing(self) -> str:
        """Return what is not in storage, and where it is; empty if everything is."""
        if self.is_done:
            return ""
        checkpoints = self._list_local().checkpoints
        missing = [name for name in newest_first(checkpoints) if not self._has(name)]
        what = "The results were"
        if missing:
            what = f"The checkpoint {Path(missing[0]).name} was"
        reason = f" ({describe_error(self._error)})" if self._error else ""
        advice = f"--resume {self.url} on this machine uploads what is missing"
        if isinstance(self._error, _TakenOverError):
            advice = "Nothing of it will be used by whoever has continued the run"
        return (
            f"{what} not uploaded to {self.url}{reason}. All of the run is in "
            f"{self.folder}. {advice}."
        )

    @property
    def is_discarded(self) -> bool:
        """Whether `discard` has been called."""
        return self._discarded

    def discard(self) -> None:
        """Delete from storage what was uploaded of a run that never began."""
        self._discarded = True
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=10.0)
        with contextlib.suppress(Exception):  # it does no harm
            for name in [*self._uploaded, WRITER]:
                self._remote.delete(name)
        forget(self.folder)

    # Called when it is opened.

    def _claim(self) -> str:
        """Write who is about to write this run, so that an earlier writer stops."""
        stored, own = attempt(lambda: read_writer(self._remote)), Record.read(self.folder)
        if own.writer is not None and own.writer == stored:
            return own.writer
        writer = secrets.token_hex(16)
        attempt(lambda: self._remote.write(WRITER, writer.encode()))
        Record(writer).write(self.folder)
        return writer

    def _list_stored(self) -> None:
        """Find out what is in storage already."""
        listing = without_runs(attempt(self._remote.list))
        contents = sort_files(listing)
        for folder in contents.checkpoints:
            name = f"{folder}/{MANIFEST}"
            manifest = attempt(lambda n=name: self._remote.read(n))
            if manifest is not None:
                self._manifests[folder] = manifest
            self._stored[folder] = set(contents.checkpoints[folder])
        self._strange = {n for n in contents.others if n.startswith(_REPLACED)}
        for name in listing - contents.others:
            if (folder := find_checkpoint(name)) is not None:
                self._stored.setdefault(folder, set()).add(name)

    # Called by the thread.

    def _note_progress(self) -> None:
        self._progress_at = time.monotonic()

    def _work(self) -> None:
        delay, is_late = _FIRST_DELAY_SECONDS, False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done or self._closing)
                if self._asked == self._done:
                    return
                asked = self._asked
            try:
                self._upload()
            except Exception as error:
                self._error = error
                is_over = isinstance(error, _TakenOverError)
                if is_over or not is_late:
                    _log.warning("%s", self._describe_delay())
                if is_over or (self._closing and is_permanent(error)):
                    return
                is_late = True
                with self._changed:  # at once when the run ends
                    closing = self._closing
                    self._changed.wait_for(lambda c=closing: self._closing != c, delay)
                delay = min(2 * delay, _LONGEST_DELAY_SECONDS)
                if self._closing:
                    delay = min(delay, 5.0)
                continue
            if is_late:
                _log.warning("The upload to %s has caught up.", self.url)
            delay, is_late, self._error = _FIRST_DELAY_SECONDS, False, None
            with self._changed:
                self._done = asked
                self._changed.notify_all()

    def _describe_delay(self) -> str:
        assert self._error is not None
        reason = describe_error(self._error)
        if isinstance(self._error, _TakenOverError):
            return f"{reason}. Nothing more is uploaded."
        return f"The upload to {self.url} is late: {reason}. It is tried again."

    def _upload(self) -> None:
        """Make storage equal to the working copy."""
        self._check_writer()
        # Listed before log events are read, which then include those of each checkpoint.
        contents = self._list_local()
        self._upload_others(contents.others)
        for folder in newest_first(contents.checkpoints):
            self._upload_checkpoint(folder)
        for folder in newest_first(self._stored.keys() | self._manifests.keys()):
            if not (self.folder / folder / MANIFEST).is_file():
                self._delete_checkpoint(folder)

    def _check_writer(self) -> None:
        writer = self._attempt(lambda: read_writer(self._remote))
        if writer == self._writer:
            return
        if writer is not None:
            raise _TakenOverError(f"Another process has continued the run in {self.url}")
        # All of it has been deleted: upload it again.
        self._attempt(lambda: self._remote.write(WRITER, self._writer.encode()))
        for known in (self._uploaded, self._manifests, self._stored, self._arrays):
            known.clear()
        self._strange = set()

    def _attempt(self, action: Callable[[], T]) -> T:
        return attempt(action, 1 if self._closing else _ATTEMPTS)

    def _list_local(self) -> Contents:
        return sort_files(list_files(self.folder, with_runs=False))

    def _has(self, checkpoint: str) -> bool:
        try:
            manifest = (self.folder / checkpoint / MANIFEST).read_bytes()
        except OSError:
            return True  # deleted since
        return self._manifests.get(checkpoint) == manifest

    def _upload_others(self, names: set[str]) -> None:
        for name in sorted(names):
            with _unless_deleted(self.folder / name):
                version = _Version.of(self.folder / name)
                if self._uploaded.get(name) != version:
                    self._upload_copy(name)
                    self._uploaded[name] = version
        gone = {n for n in self._uploaded if not (self.folder / n).exists()}
        gone |= {n for n in self._strange if not (self.folder / n).exists()}
        for name in sorted(gone):
            self._attempt(lambda n=name: self._remote.delete(n))
            self._uploaded.pop(name, None)
        self._strange = {name for name in self._strange if name not in gone}

    def _upload_copy(self, name: str) -> None:
        """Upload a copy of a file, because log events are appended meanwhile."""
        with self._staging() as staging:
            shutil.copyfile(self.folder / name, staging / "file")
            self._send(staging / "file", name)

    def _send(self, path: Path, name: str) -> None:
        try:
            self._attempt(lambda: self._remote.upload(path, name))
        except FileNotFoundError as error:
            # Not of this machine: the bucket is gone.
            raise PermissionError(describe_error(error)) from error

    def _upload_checkpoint(self, folder: str) -> None:
        """Upload a checkpoint that storage does not have, its manifest last."""
        with (
            _unless_deleted(self.folder / folder / MANIFEST),
            self._staging() as staging,
        ):
            manifest = (self.folder / folder / MANIFEST).read_bytes()
            if self._manifests.get(folder) == manifest:
                return
            arrays = list_arrays(manifest)
            if list_arrays(self._manifests.get(folder, b"")) != arrays:
                # Links, so that the upload ends even if the run deletes the checkpoint.
                for number, name in enumerate(arrays):
                    _link(self.folder / folder / name, staging / str(number))
                self._delete_manifest(folder)
                for number, name in enumerate(arrays):
                    self._send_array(staging / str(number), f"{folder}/{name}", folder)
            (staging / MANIFEST).write_bytes(manifest)
            name = f"{folder}/{MANIFEST}"
            self._stored.setdefault(folder, set()).add(name)
            self._send(staging / MANIFEST, name)
            self._manifests[folder] = manifest
            kept = {name, *(f"{folder}/{array}" for array in arrays)}
            for extra in sorted(self._stored[folder] - kept):
                self._delete_file(folder, extra)

    def _send_array(self, path: Path, name: str, folder: str) -> None:
        version = _Version.of(path)
        if self._arrays.get(name) != version:  # otherwise, it was sent before a failure
            self._stored.setdefault(folder, set()).add(name)
            self._arrays.pop(name, None)
            self._send(path, name)
            self._arrays[name] = version

    def _delete_checkpoint(self, folder: str) -> None:
        self._delete_manifest(folder)
        for name in sorted(self._stored.get(folder, ())):
            self._delete_file(folder, name)
        self._stored.pop(folder, None)

    def _delete_manifest(self, folder: str) -> None:
        name = f"{folder}/{MANIFEST}"
        if name in self._stored.get(folder, ()):
            self._delete_file(folder, name)
        self._manifests.pop(folder, None)

    def _delete_file(self, folder: str, name: str) -> None:
        self._attempt(lambda: self._remote.delete(name))
        self._stored[folder].discard(name)
        self._arrays.pop(name, None)
        self._note_progress()

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        """Create a folder for files that are being sent, on the disk of the run."""
        parent = working_copies()
        path = parent / f"{_STAGING}{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir()
        try:
            with locked(path):
                # Only now may `clear_staging` of another process find it.
                path = path.rename(f"{path}{PARTIAL}")
                yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _unless_deleted(path: Path) -> Iterator[None]:
    """Ignore that something is missing, if the run has deleted this since it was listed."""
    try:
        yield
    except FileNotFoundError:
        if path.exists():
            raise


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def clear_staging() -> None:
    """Delete what killed processes were sending."""
    clear_leftovers(working_copies(), f"{_STAGING}*{PARTIAL}")


def open_uploader(folder: Path) -> Uploader | None:
    """Return an uploader of a working copy; None for any other folder."""
    if find_url(folder) is None:
        return None
    clear_staging()
    return Uploader(folder)


def publish(path: Path) -> str:
    """Upload a file that was written next to a saved run; return where it is now.

    Nothing is uploaded of a file outside the working copies.
    """
    url = find_url(path)
    if url is not None:
        with storage_errors(url, "written"):
            attempt(lambda: Remote(url.rpartition("/")[0]).upload(path, path.name))
    return display(path)
