"""Files that survive a power cut.

Data is on disk once its file has been synced, and a name once its folder has been synced.
A file that is renamed without either may be empty or missing after a power cut.
"""

import contextlib
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

PARTIAL = ".partial"
"""Suffix of files and folders that are being written or deleted."""

_RETRY_SECONDS = 0.1


@contextlib.contextmanager
def replacing(
    path: Path, *, binary: bool = False, newline: str | None = None, private: bool = False
) -> Iterator[IO[Any]]:
    """Open a file that replaces `path` atomically when the block ends.

    Readers see the old file or the new one, never a part, even after a power cut. If the
    block raises an error, the old file stays.

    Args:
        path: The file to replace; its folder must exist.
        binary: Whether to write bytes instead of text.
        newline: As in ``open``.
        private: Whether only this user may read the file.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        options: dict[str, Any] = {"encoding": "utf-8", "newline": newline}
        mode, options = ("wb", {}) if binary else ("w", options)
        opener = _create_private if private else _create
        with open(partial, mode, **options, opener=opener) as file:
            yield file
            file.flush()
            # Before the rename: a new name must not point to data that is not on disk.
            _sync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_atomically(path: Path, text: str, *, private: bool = False) -> None:
    """Replace the contents of a file atomically; only this user may read a private one."""
    with replacing(path, private=private) as file:
        file.write(text)


def _create(name: str, flags: int, mode: int = 0o666) -> int:
    """Create a new file; never follow a link that somebody else has put there."""
    flags |= os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    return os.open(name, flags, mode)


def _create_private(name: str, flags: int) -> int:
    return _create(name, flags, 0o600)


def sync_file(path: Path) -> None:
    """Wait until the contents of a file are on disk."""
    _open_and_sync(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    if os.name != "nt":  # folders cannot be opened on Windows
        _open_and_sync(path, os.O_RDONLY)


def sync_tree(folder: Path) -> None:
    """Wait until a folder and everything in it is on disk."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync_file(Path(root, name))
        sync_folder(Path(root))


def _open_and_sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return os.fsync(descriptor)
    # On macOS, fsync does not reach beyond the cache of the drive.
    if full := getattr(fcntl, "F_FULLFSYNC", None):
        with contextlib.suppress(OSError):  # some file systems do not support it
            fcntl.fcntl(descriptor, full)
            return None
    return os.fsync(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its parents; their names are on disk when this returns."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync_folder(folder.parent)


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder; the new name is on disk when this returns."""
    old.rename(new)
    sync_folder(new.parent)


def discard(path: Path) -> None:
    """Delete a file or folder; a half-deleted folder never has its original name."""
    if path.is_symlink() or not path.is_dir():
        return path.unlink(missing_ok=True)
    trash = path
    if not path.name.endswith(PARTIAL):
        trash = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
        # Synced before anything is deleted; otherwise, after a power cut, the folder could
        # be half deleted under its old name.
        rename(path, trash)
    return shutil.rmtree(trash)


def read_locked_inodes() -> set[int]:
    """Return the inodes that processes have locked; empty if the system does not tell.

    To try the lock itself would keep others from taking it at that moment.
    """
    try:
        with open("/proc/locks", encoding="ascii") as file:
            words = [line.split() for line in file]
        return {int(each[5].rpartition(":")[2]) for each in words if each[1] == "FLOCK"}
    except (OSError, IndexError, ValueError):
        return set()


def lock_folder(path: Path) -> int | None:
    """Lock a folder for as long as the returned descriptor is open.

    Returns:
        A descriptor; None if the system or the file system has no locks.

    Raises:
        BlockingIOError: Another descriptor, in any process, holds the lock.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def locked(path: Path, *, patience: float = 0.0) -> Iterator[None]:
    """Lock a folder while it is being written.

    Args:
        path: The folder.
        patience: Seconds to wait for another process that has locked it.

    Raises:
        BlockingIOError: Another process has it still locked.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            descriptor = lock_folder(path)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_SECONDS)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def clear_leftovers(folder: Path, pattern: str = f"*{PARTIAL}") -> None:
    """Delete files and folders that a killed process was writing or deleting.

    Locked ones stay, and so do those that cannot be deleted.
    """
    for leftover in folder.glob(pattern):
        is_folder = leftover.is_dir() and not leftover.is_symlink()
        with (
            contextlib.suppress(OSError),  # locked, or not permitted
            locked(leftover) if is_folder else contextlib.nullcontext(),
        ):
            discard(leftover)


def finite_json(value: Any) -> Any:
    """Return a copy with NaN and infinities as text, because JSON does not have them."""
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
