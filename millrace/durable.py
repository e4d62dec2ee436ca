"""Files that outlive a power cut: the only place that knows what it takes.

Data is on the disk once its file has been synced, and a name once its folder has been. A
file that is renamed without either may be empty, or gone, when the power comes back.
"""

import contextlib
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

PARTIAL = ".partial"
"""The ending of what is being written, or being deleted."""


@contextlib.contextmanager
def replacing(
    path: Path, *, binary: bool = False, newline: str | None = None
) -> Iterator[IO[Any]]:
    """Open a file that takes the place of `path`, in one step, when it is complete.

    A reader sees the old file or the new one, never a part of it, and so does whoever looks
    after a power cut. Where writing fails, the old file stays.

    Args:
        path: What to replace; its folder must exist.
        binary: Whether bytes are written, not text.
        newline: As ``open`` takes it.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        options: dict[str, Any] = {"encoding": "utf-8", "newline": newline}
        mode, options = ("wb", {}) if binary else ("w", options)
        with open(partial, mode, **options, opener=_create) as file:
            yield file
            file.flush()
            _sync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by this text, in one step."""
    with replacing(path) as file:
        file.write(text)


def _create(name: str, flags: int) -> int:
    """Make a new file; never follow a link that somebody else has put there."""
    flags |= os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    return os.open(name, flags, 0o666)


def sync_file(path: Path) -> None:
    """Wait until the contents of a file are on the disk."""
    _open_and_sync(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name != "nt":  # Windows does not let a program open a folder
        _open_and_sync(path, os.O_RDONLY)


def sync_tree(folder: Path) -> None:
    """Wait until a folder is on the disk with all that is in it."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync_file(Path(place, name))
        sync_folder(Path(place))


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
    if full := getattr(fcntl, "F_FULLFSYNC", None):  # macOS: fsync stops at the drive
        with contextlib.suppress(OSError):  # some file systems do not have it
            fcntl.fcntl(descriptor, full)
            return None
    return os.fsync(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder and those above it; their names are on the disk when this returns."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in reversed(missing):
        sync_folder(place.parent)


def rename(old: Path, new: Path) -> None:
    """Give something another name; it has it on the disk when this returns."""
    old.rename(new)
    sync_folder(new.parent)


def discard(path: Path) -> None:
    """Delete a file or a folder; a folder that is half deleted never has its own name."""
    if path.is_symlink() or not path.is_dir():
        return path.unlink(missing_ok=True)
    trash = path
    if not path.name.endswith(PARTIAL):
        trash = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
        # On the disk first: it could be half deleted under its old name otherwise.
        rename(path, trash)
    return shutil.rmtree(trash)


def lock_folder(path: Path) -> int | None:
    """Lock a folder for as long as the returned descriptor is open.

    Returns:
        A descriptor; None where the system or the file system has no locks.

    Raises:
        BlockingIOError: Another descriptor, of any process, holds the lock.
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
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a folder, which says that somebody is at work in it."""
    descriptor = lock_folder(path)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def clear_leftovers(folder: Path, pattern: str = f"*{PARTIAL}") -> None:
    """Delete what was being written, or deleted, when a process was killed.

    What somebody holds the lock of stays, and so does what cannot be deleted.
    """
    for leftover in folder.glob(pattern):
        is_folder = leftover.is_dir() and not leftover.is_symlink()
        with (
            contextlib.suppress(OSError),  # somebody is at work in it, or it is not ours
            locked(leftover) if is_folder else contextlib.nullcontext(),
        ):
            discard(leftover)


def finite_json(value: Any) -> Any:
    """Write NaN and infinities as text: JSON has no numbers for them."""
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
