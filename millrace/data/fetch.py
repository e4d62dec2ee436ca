"""Downloads datasets: verified by checksum, resumed after an interruption, atomic.

A file is downloaded as ``NAME.part`` and renamed once its checksum is right, so a file
under its own name is always complete.
"""

import gzip
import hashlib
import http.client
import lzma
import math
import os
import shutil
import stat
import tarfile
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from millrace.data.catalog import DataFile, Dataset, check_trusted
from millrace.durable import locked, sync_folder, sync_tree

Progress = Callable[[str, int, int], None]
"""Called with the name of a file, the bytes received, and its size."""

_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60
_PAUSES_SECONDS = (1.0, 4.0)
_ARCHIVES = (".tar", ".tar.gz", ".tgz")
_DAMAGED_ARCHIVE = (
    *(tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError),
    *(ValueError, OverflowError),  # malformed sizes and names of members
)


class FetchError(RuntimeError):
    """A file could not be downloaded; the message says how to get it manually."""


class _Interrupted(Exception):
    """The download stopped early, or the server has a problem that may pass."""


def fetch(
    dataset: Dataset, folder: Path, *, url: str | None = None, progress: Progress
) -> list[Path]:
    """Download the missing files of a dataset, and unpack archives.

    If another process is doing the same, this one waits for it.

    Args:
        dataset: Names the files and their checksums.
        folder: The folder to download to; created if missing.
        url: The folder to download from, if not that of the catalog: a mirror.
        progress: Called for every megabyte.

    Returns:
        The files that were downloaded. Files that are already correct are left alone.
    """
    source = url or dataset.url
    assert source is not None, "checked by FetchConfig"
    check_trusted(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, patience=math.inf):
        return _fetch_missing(dataset.files, source.rstrip("/"), folder, progress)


def _fetch_missing(
    files: Iterable[DataFile], source: str, folder: Path, progress: Progress
) -> list[Path]:
    downloaded = []
    for file in files:
        target = folder / file.name
        is_present = target.is_file() and digest(target, file) == expected_digest(file)
        if not is_present:
            _download(file, f"{source}/{file.name}", target, progress)
            downloaded.append(target)
        if file.name.endswith(_ARCHIVES) and (not is_present or not _has_folders(folder)):
            unpack(target, folder)
    return downloaded


def is_reachable(url: str, timeout_seconds: float = 4.0) -> bool:
    """Whether a server answers, and soon: a machine without a network must not wait.

    Args:
        url: Any address of the server; an error that it returns is an answer.
        timeout_seconds: Time for the name, the connection and the answer together.
    """
    answers: list[bool] = []

    def ask() -> None:
        request = urllib.request.Request(
            url, method="HEAD", headers={"User-Agent": "millrace"}
        )
        try:
            urllib.request.urlopen(request, timeout=timeout_seconds).close()
        except urllib.error.HTTPError as error:
            error.close()
        except (OSError, ValueError, http.client.HTTPException):
            return
        answers.append(True)

    # A thread, since nothing limits the time that looking up a name takes.
    thread = threading.Thread(target=ask, name="millrace-reachable", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    return bool(answers)


def expected_digest(file: DataFile) -> str:
    """Return the strongest published checksum of a file."""
    return file.sha256 or file.md5


def digest(path: Path, file: DataFile) -> str:
    """Compute the checksum of `path` to compare with `expected_digest`."""
    with path.open("rb") as opened:
        algorithm = "md5" if file.sha256 is None else "sha256"
        return hashlib.file_digest(opened, algorithm).hexdigest()


def _download(file: DataFile, address: str, target: Path, progress: Progress) -> None:
    part = target.with_name(f"{target.name}.part")
    is_resumed = _can_resume(part)
    _receive_all(file, address, part, progress)
    if is_resumed and digest(part, file) != expected_digest(file):
        # The earlier part may belong to another version of the file.
        part.unlink()
        _receive_all(file, address, part, progress)
    if (actual := digest(part, file)) != expected_digest(file):
        part.unlink()
        raise FetchError(
            f"{address} is not the published {file.name}: its checksum is {actual}, "
            f"expected {expected_digest(file)}. The download has been deleted. "
            f"{_manual_instructions(file, target.parent)}"
        )
    part.replace(target)


def _can_resume(part: Path) -> bool:
    """Whether `part` is a plain file of this folder; remove anything else.

    The name is predictable: a link with that name could redirect the download into
    another file.
    """
    if not os.path.lexists(part):
        return False
    status = part.lstat()
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return True
    if stat.S_ISDIR(status.st_mode):
        raise FetchError(f"{part} is a folder. Remove it and run the command again.")
    part.unlink()
    return False


def _open_part(part: Path, *, append: bool) -> BinaryIO:
    """Open `part` for writing, never through a link."""
    if not append:
        part.unlink(missing_ok=True)
        return part.open("xb")
    return os.fdopen(os.open(part, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW), "ab")


def _receive_all(file: DataFile, address: str, part: Path, progress: Progress) -> None:
    """Receive the whole file, resuming after interruptions."""
    for pause in (*_PAUSES_SECONDS, None):
        try:
            return _receive(file, address, part, progress)
        except _Interrupted as error:
            if pause is None:
                raise FetchError(
                    f"The download of {address} was interrupted: {error}. The part "
                    "received is kept; run the same command again to continue. "
                    f"{_manual_instructions(file, part.parent)}"
                ) from error
            time.sleep(pause)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and part.exists():  # bad range: request the whole file
                part.unlink()
                continue
            raise FetchError(
                f"The server answered {error.code} {error.reason} for {address}. "
                f"{_manual_instructions(file, part.parent)}"
            ) from error
        except urllib.error.URLError as error:
            raise FetchError(
                f"Cannot reach {address}: {error.reason}. "
                f"{_manual_instructions(file, part.parent)}"
            ) from error
    raise FetchError(
        f"The download of {address} was interrupted. "
        f"{_manual_instructions(file, part.parent)}"
    )


def _receive(file: DataFile, address: str, part: Path, progress: Progress) -> None:
    """Append the missing bytes to `part`, or start again if the server cannot resume."""
    start = part.stat().st_size if part.exists() else 0
    if start == file.num_bytes:
        return
    headers = {"User-Agent": "millrace"}
    if 0 < start < file.num_bytes:
        headers["Range"] = f"bytes={start}-"
    with _request(urllib.request.Request(address, headers=headers)) as response:
        start = start if _continues(response, start) else 0
        with _open_part(part, append=start > 0) as opened:
            _copy(response, opened, file, start, progress)
    if (size := part.stat().st_size) < file.num_bytes:
        raise _Interrupted(f"{size:,} of {file.num_bytes:,} bytes received")


def _request(request: urllib.request.Request) -> http.client.HTTPResponse:
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code < 500:
            raise
        error.close()
        raise _Interrupted(f"the server answered {error.code} {error.reason}") from error
    except (ConnectionError, TimeoutError, http.client.HTTPException) as error:
        raise _Interrupted(str(error) or type(error).__name__) from error
    except (ValueError, LookupError) as error:  # a redirect to an invalid address
        raise _Interrupted(f"invalid response of the server: {error}") from error


def _read(response: http.client.HTTPResponse) -> bytes:
    # Apart from the write of the same loop: a full disk is not a network error.
    try:
        return response.read(_CHUNK_BYTES)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _Interrupted(str(error) or type(error).__name__) from error


def _continues(response: http.client.HTTPResponse, start: int) -> bool:
    """Whether the server sends only the rest of the file."""
    content_range = response.headers.get("Content-Range", "")
    return response.status == 206 and content_range.startswith(f"bytes {start}-")


def _copy(
    response: http.client.HTTPResponse,
    opened: BinaryIO,
    file: DataFile,
    done: int,
    progress: Progress,
) -> None:
    progress(file.name, done, file.num_bytes)
    while chunk := _read(response):
        opened.write(chunk)
        done += len(chunk)
        progress(file.name, done, file.num_bytes)
        if done > file.num_bytes:
            return  # too long to be right; a server could send without end


def _manual_instructions(file: DataFile, folder: Path) -> str:
    """Explain how to do without the server, and what is wrong with a file in its place."""
    path = folder / file.name
    if not path.is_file():
        return (
            f"Put {file.name} ({file.num_bytes:,} bytes) into {folder} manually and run "
            "the command again, or give the URL of a mirror's folder with --url."
        )
    if (size := path.stat().st_size) != file.num_bytes:
        difference = f"it has {size:,} bytes, expected {file.num_bytes:,}"
    else:
        difference = (
            f"its checksum is {digest(path, file)}, expected {expected_digest(file)}"
        )
    return (
        f"The {file.name} in {folder} is not the published file: {difference}. Replace it "
        "manually and run the command again, or give the URL of a mirror's folder with "
        "--url."
    )


def _has_folders(folder: Path) -> bool:
    return any(e.is_dir() and not e.name.startswith(".") for e in folder.iterdir())


def unpack(archive: Path, folder: Path) -> None:
    """Unpack files and folders into `folder`; they appear once all are complete.

    A name that leads out of the folder, a link or a device is rejected: with them an
    archive could write anywhere.
    """
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as staging:
        try:
            with tarfile.open(archive, "r:*") as opened:
                for member in opened:
                    _unpack_member(opened, member, Path(staging), archive)
        except _DAMAGED_ARCHIVE as error:
            raise FetchError(f"{archive} is a damaged archive: {error}.") from error
        sync_tree(Path(staging))  # after a power cut, nobody would unpack it again
        for entry in Path(staging).iterdir():
            target = folder / entry.name
            if target.is_symlink():
                target.unlink()
            elif target.is_dir():
                shutil.rmtree(target)
            entry.replace(target)
        sync_folder(folder)


def _unpack_member(
    opened: tarfile.TarFile, member: tarfile.TarInfo, staging: Path, archive: Path
) -> None:
    name = PurePosixPath(member.name)
    content = opened.extractfile(member) if member.isfile() else None
    if name.is_absolute() or ".." in name.parts or not (content or member.isdir()):
        raise FetchError(f"{archive} has the entry {name}, which is not safe to unpack.")
    target = staging / name
    if content is None:
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        shutil.copyfileobj(content, file)
