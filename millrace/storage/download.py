"""Bring the working copy of a run up to date with object storage.

Everything but the arrays of checkpoints is downloaded; those follow when a checkpoint is
read, and are verified against the checksums in its manifest.
"""

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace.durable import PARTIAL, discard, locked
from millrace.storage.address import StorageError, display, find_url, working_copies
from millrace.storage.copy import (
    MANIFEST,
    RECORD,
    Record,
    find_runs,
    list_arrays,
    list_files,
    sort_files,
    without_runs,
)
from millrace.storage.remote import (
    WRITER,
    FileInfo,
    Remote,
    attempt,
    storage_errors,
)
from millrace.trust import find_writers

_log = logging.getLogger("millrace")

_LOCK_SECONDS = 60.0


def refresh(path: Path, *, exact: bool = False) -> None:
    """Bring the working copy of a run up to date; do nothing for any other path.

    A working copy that was written on this machine, and by nobody since, is newer than
    what is in storage, and stays as it is.

    Args:
        path: A run directory, a folder in it, or a folder of run directories.
        exact: Whether it is a run directory, which need not exist yet.

    Raises:
        StorageError: The storage cannot be read.
    """
    url = find_url(path)
    if url is None:
        return
    check_trusted()
    with storage_errors(url, "read"):
        folder, remote = attempt(lambda: (path, Remote(url)) if exact else _find_run(path))
        _refresh(folder, remote)


def _refresh(
    folder: Path, remote: Remote, listing: Mapping[str, FileInfo] | None = None
) -> None:
    """Bring a working copy up to date, and then each run in its subfolders.

    Args:
        folder: The working copy.
        remote: Where its files are.
        listing: All files there (default: they are listed).
    """
    if _is_own(folder, remote):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with _locking(folder):
        if _is_own(folder, remote):  # a run in another process has opened it meanwhile
            return
        listing = attempt(remote.list) if listing is None else listing
        if Record.read(folder).writer is not None:
            _set_aside(folder, listing)
            folder.mkdir(exist_ok=True)
        own = without_runs(listing)
        _mirror(remote, folder, {name: listing[name] for name in own})
        for run in find_runs(sort_files(listing).others) | _find_copies(folder):
            inside = {
                name.removeprefix(f"{run}/"): info
                for name, info in listing.items()
                if name.startswith(f"{run}/")
            }
            _refresh(folder / run, Remote(f"{remote.url}/{run}"), inside)
        if not listing:  # a mistyped address leaves no folder
            _remove_empty(folder)


def _find_copies(folder: Path) -> set[str]:
    """Return the runs in a folder that were downloaded, and not written here since."""
    runs = find_runs(sort_files(list_files(folder)).others)
    records = {run: Record.read(folder / run) for run in runs}
    return {run for run, known in records.items() if known.versions and not known.writer}


def check_trusted() -> None:
    """Raise unless only this user can change working copies."""
    root = working_copies()
    if (reason := find_writers(root)) is not None:
        raise StorageError(
            f"Runs in object storage are not copied to {root}, because {reason}. Take that "
            "right away, or choose another folder with XDG_CACHE_HOME."
        )
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)


def read_writer(remote: Remote) -> str | None:
    """Return the name of the working copy that wrote a run last."""
    data = remote.read(WRITER)
    return None if data is None else data.decode(errors="replace")


def _is_own(folder: Path, remote: Remote) -> bool:
    """Whether nobody has written a run since this machine did."""
    writer = attempt(lambda: read_writer(remote))
    return writer is not None and Record.read(folder).writer == writer


def _find_run(path: Path) -> tuple[Path, Remote]:
    """Return the run directory that a path is in; the path itself if there is none."""
    for folder in (path, *path.parents[:2]):
        url = find_url(folder)
        if url is None:
            break
        remote = Remote(url)
        if remote.read("config.yml") is not None:
            return folder, remote
    url = find_url(path)
    assert url is not None, "checked by the caller"
    return path, Remote(url)


@contextlib.contextmanager
def _locking(folder: Path) -> Iterator[None]:
    """Keep other processes from changing a working copy; wait for them to finish."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, patience=_LOCK_SECONDS))
        except BlockingIOError as error:
            raise StorageError(
                f"Another process is using {folder}, the working copy of "
                f"{display(folder)}. Wait until it has ended."
            ) from error
        yield


def _set_aside(folder: Path, listing: Mapping[str, FileInfo]) -> None:
    """Make room: the run was continued elsewhere, or deleted from storage.

    Checkpoints that storage does not have are kept under another name.
    """
    stored = sort_files(listing).checkpoints
    if sort_files(list_files(folder)).checkpoints.keys() <= stored.keys():
        return discard(folder)
    aside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.kept")
    folder.rename(aside)
    _log.warning(
        "%s has been written elsewhere since this machine wrote it. What only this machine "
        "has is kept in %s.",
        *(display(folder), aside),
    )


def _mirror(remote: Remote, folder: Path, listing: Mapping[str, FileInfo]) -> None:
    """Download what has changed, and delete what was downloaded and is gone."""
    contents = sort_files(listing)
    manifests = {f"{checkpoint}/{MANIFEST}" for checkpoint in contents.checkpoints}
    wanted = contents.others | manifests
    record = Record.read(folder)
    versions = dict(record.versions)
    for name in sorted(versions.keys() - wanted):
        _delete(folder, name)
        del versions[name]
    try:
        for name in sorted(wanted):
            version = f"{listing[name].size} {listing[name].version}"
            if versions.get(name) != version or not (folder / name).is_file():
                versions.pop(name, None)
                if _download(remote, folder, name):
                    versions[name] = version
    finally:
        Record(None, versions).write(folder)


def _delete(folder: Path, name: str) -> None:
    """Delete a file that was downloaded; with a manifest, the whole checkpoint."""
    path = folder / name
    if path.name == MANIFEST:
        with contextlib.suppress(FileNotFoundError):
            discard(path.parent)
    else:
        path.unlink(missing_ok=True)


def _download(remote: Remote, folder: Path, name: str) -> bool:
    """Download a file; return whether it was still there."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    before = _list_local_arrays(path)
    try:
        attempt(lambda: _replace(remote, name, path))
    except FileNotFoundError:
        return False
    if path.name == MANIFEST and before not in ({}, list_arrays(path.read_bytes())):
        # The arrays here are those of another checkpoint with this name.
        for entry in [each for each in path.parent.iterdir() if each != path]:
            discard(entry)
    return True


def _list_local_arrays(path: Path) -> dict[str, Any]:
    is_manifest = path.name == MANIFEST and path.is_file()
    return list_arrays(path.read_bytes()) if is_manifest else {}


def _replace(remote: Remote, name: str, path: Path) -> None:
    """Download a file under another name, and replace the old one."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        remote.download(name, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _remove_empty(folder: Path) -> None:
    """Delete a working copy without files, and the folders above that only it was in."""
    if any(name != RECORD for name in list_files(folder)):
        return  # such as a run of this machine that could not be uploaded
    shutil.rmtree(folder, ignore_errors=True)
    for parent in folder.parents:
        if parent == working_copies():
            return
        try:
            parent.rmdir()
        except OSError:
            return


def download_arrays(
    folder: Path, files: Mapping[str, Any], checksum: Callable[[Path], str]
) -> None:
    """Download the files of a checkpoint that are missing or damaged here.

    Files that storage does not have, or has in another version, are left to the caller.

    Args:
        folder: A folder ``update-<n>`` of a working copy; nothing is done for other paths.
        files: Size and checksum of every file, from the manifest.
        checksum: Computes the checksum of a file.

    Raises:
        StorageError: The storage cannot be read.
    """
    if (url := find_url(folder)) is None:
        return

    def is_intact(name: str) -> bool:
        path, (size, digest) = folder / name, files[name]
        with contextlib.suppress(OSError):
            return path.stat().st_size == size and checksum(path) == digest
        return False

    if not (wanted := [name for name in files if not is_intact(name)]):
        return
    with storage_errors(url, "read"):
        remote = Remote(url)
        for name in wanted:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            for _ in range(2):  # once more, if it was damaged on its way
                try:
                    attempt(lambda n=name, p=path: _replace(remote, n, p))
                except FileNotFoundError:
                    break
                if is_intact(name):
                    break
                path.unlink()
