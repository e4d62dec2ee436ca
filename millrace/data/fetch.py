"""Downloads data sets: checked, resumed where they broke off, never seen half done."""

import gzip
import hashlib
import http.client
import lzma
import os
import shutil
import stat
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from millrace.data.catalog import DataFile, Dataset

Progress = Callable[[str, int, int], None]
"""Told a file's name, the bytes that are there, and how many there will be."""

_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60
_PAUSES_SECONDS = (1.0, 4.0)
_ARCHIVES = (".tar", ".tar.gz", ".tgz")
_DAMAGED_ARCHIVE = (
    *(tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError),
    *(ValueError, OverflowError),  # numbers and names of entries
)


class FetchError(RuntimeError):
    """A file could not be had; says how to get it by hand."""


class _BrokenOff(Exception):
    """The server stopped in the middle, or has trouble that may pass."""


def fetch(
    dataset: Dataset, folder: Path, *, url: str | None = None, progress: Progress
) -> list[Path]:
    """Download the files of a data set that are not there, and unpack archives.

    Args:
        dataset: Says which files, and their checksums.
        folder: Where they go; made if need be.
        url: The folder they are published in, if not the catalog's: a mirror.
        progress: Called for every megabyte.

    Returns:
        The files that were downloaded; those that were there and right are left alone.
    """
    source = url or dataset.url
    assert source is not None, "the command asks for a URL where there is none"
    folder.mkdir(parents=True, exist_ok=True)
    downloaded = []
    for file in dataset.files:
        target = folder / file.name
        there = target.is_file() and digest(target, file) == expected_digest(file)
        if not there:
            _download(file, f"{source.rstrip('/')}/{file.name}", target, progress)
            downloaded.append(target)
        if file.name.endswith(_ARCHIVES) and (not there or not _has_folders(folder)):
            unpack(target, folder)
    return downloaded


def expected_digest(file: DataFile) -> str:
    """Return the strongest published checksum of a file."""
    return file.sha256 or file.md5


def digest(path: Path, file: DataFile) -> str:
    """Compute what `expected_digest` should be equal to."""
    with path.open("rb") as opened:
        kind = "md5" if file.sha256 is None else "sha256"
        return hashlib.file_digest(opened, kind).hexdigest()


def _download(file: DataFile, address: str, target: Path, progress: Progress) -> None:
    part = target.with_name(f"{target.name}.part")
    resumed = _begun_here(part)
    _receive_all(file, address, part, progress)
    if resumed and digest(part, file) != expected_digest(file):
        # What was there may have been of another version.
        part.unlink()
        _receive_all(file, address, part, progress)
    if (found := digest(part, file)) != expected_digest(file):
        part.unlink()
        raise FetchError(
            f"What {address} sends is not the published {file.name}: its checksum is "
            f"{found}, expected {expected_digest(file)}. It has been deleted. "
            f"{_by_hand(file, target.parent)}"
        )
    part.replace(target)


def _begun_here(part: Path) -> bool:
    """Whether `part` is a plain file of this folder; anything else is taken away.

    The name can be guessed: a link of that name could lead a download into another file.
    """
    if not os.path.lexists(part):
        return False
    found = part.lstat()
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        return True
    if stat.S_ISDIR(found.st_mode):
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
    """Receive until all is there, going on where it broke off."""
    for pause in (*_PAUSES_SECONDS, None):
        try:
            return _receive(file, address, part, progress)
        except _BrokenOff as error:
            if pause is None:
                raise FetchError(
                    f"{address} broke off: {error}. What is there is kept: the same "
                    f"command goes on from it. {_by_hand(file, part.parent)}"
                ) from error
            time.sleep(pause)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and part.exists():  # no such rest: ask for all of it
                part.unlink()
                continue
            raise FetchError(
                f"The server answered {error.code} {error.reason} for {address}. "
                f"{_by_hand(file, part.parent)}"
            ) from error
        except urllib.error.URLError as error:
            raise FetchError(
                f"Cannot reach {address}: {error.reason}. {_by_hand(file, part.parent)}"
            ) from error
    raise FetchError(f"{address} broke off. {_by_hand(file, part.parent)}")


def _receive(file: DataFile, address: str, part: Path, progress: Progress) -> None:
    """Append to `part` what is missing, or start again if the server cannot do that."""
    start = part.stat().st_size if part.exists() else 0
    if start == file.num_bytes:
        return
    headers = {"User-Agent": "millrace"}
    if 0 < start < file.num_bytes:
        headers["Range"] = f"bytes={start}-"
    with _ask(urllib.request.Request(address, headers=headers)) as response:
        start = start if _continues(response, start) else 0
        with _open_part(part, append=start > 0) as opened:
            _copy(response, opened, file, start, progress)
    if (size := part.stat().st_size) < file.num_bytes:
        raise _BrokenOff(f"{size:,} of {file.num_bytes:,} bytes came")


def _ask(request: urllib.request.Request) -> http.client.HTTPResponse:
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code < 500:
            raise
        error.close()
        raise _BrokenOff(f"the server answered {error.code} {error.reason}") from error
    except (ConnectionError, TimeoutError, http.client.HTTPException) as error:
        raise _BrokenOff(str(error) or type(error).__name__) from error
    except (ValueError, LookupError) as error:  # it leads to an address that is none
        raise _BrokenOff(f"the server's answer makes no sense: {error}") from error


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK_BYTES)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _BrokenOff(str(error) or type(error).__name__) from error


def _continues(response: http.client.HTTPResponse, start: int) -> bool:
    """Whether the server sends the rest, and not all of it again."""
    sent = response.headers.get("Content-Range", "")
    return response.status == 206 and sent.startswith(f"bytes {start}-")


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
            return  # the checksum will not match; enough has come to know it


def _by_hand(file: DataFile, folder: Path) -> str:
    """Say how to do without the server, and what is wrong with a file put there."""
    there = folder / file.name
    if not there.is_file():
        return (
            f"Put {file.name} ({file.num_bytes:,} bytes) into {folder} by hand and run the "
            "command again, or give the URL of a mirror's folder with --url."
        )
    wrong = _difference(there, file)
    return (
        f"The {file.name} in {folder} is not the published one: {wrong}. Put the right one "
        "in its place and run the command again, or give the URL of a mirror's folder with "
        "--url."
    )


def _difference(path: Path, file: DataFile) -> str:
    if (size := path.stat().st_size) != file.num_bytes:
        return f"it has {size:,} bytes, expected {file.num_bytes:,}"
    return f"its checksum is {digest(path, file)}, expected {expected_digest(file)}"


def _has_folders(folder: Path) -> bool:
    return any(e.is_dir() and not e.name.startswith(".") for e in folder.iterdir())


def unpack(archive: Path, folder: Path) -> None:
    """Unpack plain files and folders into `folder`; they appear when all is done.

    A name that leads out of the folder, a link or a device is refused: an archive from
    elsewhere could write anywhere with them.
    """
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as place:
        try:
            with tarfile.open(archive, "r:*") as opened:
                for member in opened:
                    _unpack_member(opened, member, Path(place), archive)
        except _DAMAGED_ARCHIVE as error:
            raise FetchError(f"{archive} is a damaged archive: {error}.") from error
        for entry in Path(place).iterdir():
            target = folder / entry.name
            if target.is_symlink():
                target.unlink()
            elif target.is_dir():
                shutil.rmtree(target)
            entry.replace(target)


def _unpack_member(
    opened: tarfile.TarFile, member: tarfile.TarInfo, place: Path, archive: Path
) -> None:
    name = PurePosixPath(member.name)
    content = opened.extractfile(member) if member.isfile() else None
    if name.is_absolute() or ".." in name.parts or not (content or member.isdir()):
        raise FetchError(f"{archive} has the entry {name}, which is not safe to unpack.")
    target = place / name
    if content is None:
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        shutil.copyfileobj(content, file)
