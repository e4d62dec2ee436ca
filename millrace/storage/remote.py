"""A folder in object storage, opened with fsspec, and what to do when a request fails."""

import contextlib
import functools
import importlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from millrace.storage.address import StorageError

T = TypeVar("T")

WRITER = ".writer"
"""The file with the name of the working copy that wrote the folder last."""

_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs, or millrace with its extra s3"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs, or millrace with its extra gs"),
}
"""What to install for a service."""

_OPTIONS: dict[str, dict[str, Any]] = {
    # By default a lost connection shows after several minutes.
    "s3": {"config_kwargs": {"connect_timeout": 10, "retries": {"max_attempts": 2}}},
    "file": {"auto_mkdir": True},
}
"""Settings of the clients."""

_PERMANENT_ERRORS = (
    *(FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError),
    *(ImportError, NotImplementedError, TypeError, ValueError),
)
_PERMANENT_NAMES = {
    *("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"),
    *("DefaultCredentialsError", "RefreshError", "InvalidEndpoint"),
}
"""Errors of clients that are not among those of Python."""

_FIRST_DELAY_SECONDS = 0.5
_ATTEMPTS = 5
_ATTEMPTS_SECONDS = 30.0


class FileInfo(NamedTuple):
    """What a listing says about a file."""

    size: int
    version: str
    """Changes when the file does."""


def is_permanent(error: BaseException) -> bool:
    """Whether the same request would fail again."""
    names = {type(error).__name__, type(error.__cause__).__name__}
    return isinstance(error, _PERMANENT_ERRORS) or bool(names & _PERMANENT_NAMES)


def describe_error(error: BaseException) -> str:
    """Return an error of a client as one short line."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return (text or type(error).__name__)[:200].rstrip(".")


def attempt(action: Callable[[], T], attempts: int = _ATTEMPTS) -> T:
    """Call an action; repeat it after a temporary error, each time after a longer wait."""
    deadline = time.monotonic() + _ATTEMPTS_SECONDS
    for number in range(attempts - 1):
        try:
            return action()
        except Exception as error:
            # Some clients have then tried often enough already.
            if is_permanent(error) or time.monotonic() > deadline:
                raise
        # At random, so that many processes do not ask again at the same moment.
        time.sleep(_FIRST_DELAY_SECONDS * 2**number * random.uniform(0.5, 1.0))
    return action()


def _get_file_system(url: str) -> tuple[Any, str]:
    scheme = url.partition(":")[0]
    try:
        fsspec = importlib.import_module("fsspec")
        options = _OPTIONS.get(scheme, {})
        # It prints the tracebacks of errors that it raises as well.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        package = _PACKAGES.get(scheme, "the package that fsspec needs for it")
        raise StorageError(
            f"{url} needs a package that is not installed: {describe_error(error)}. "
            f"Install {package}."
        ) from error
    except ValueError as error:
        raise StorageError(f"{url} cannot be opened: {describe_error(error)}.") from error


class Remote:
    """A folder in object storage; names of files are relative to it.

    Args:
        url: Its address.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._files, self._root = _get_file_system(url)
        self.on_progress: Callable[[], None] = lambda: None
        """Called whenever a part of a file has been sent."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def list(self, folder: str = "") -> dict[str, FileInfo]:
        """Return all files in a folder and its subfolders by name."""
        root = self._path(folder).rstrip("/")
        self._files.invalidate_cache()
        try:
            found = self._files.find(root, detail=True)
        except FileNotFoundError:
            return {}
        prefix = f"{self._root.lstrip('/')}/"
        names = {
            path.lstrip("/").removeprefix(prefix): info for path, info in found.items()
        }
        return {
            name: FileInfo(info.get("size") or 0, _get_version(info))
            for name, info in names.items()
            if _is_inside(name) and info.get("type", "file") == "file"
        }

    def read(self, name: str) -> bytes | None:
        """Return the contents of a file; None if there is none."""
        self._files.invalidate_cache()
        try:
            return self._files.cat_file(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, data: bytes) -> None:
        """Replace the contents of a file."""
        self._files.pipe_file(self._path(name), data)
        self.on_progress()

    def upload(self, path: Path, name: str) -> None:
        """Replace a file by one of this machine."""
        callback = _make_callback(self.on_progress)
        self._files.put_file(str(path), self._path(name), callback=callback)
        self.on_progress()

    def download(self, name: str, path: Path) -> None:
        """Copy a file to this machine."""
        self._files.get_file(self._path(name), str(path))

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))


def _get_version(info: dict[str, Any]) -> str:
    """Return the entry of a listing that changes with the contents of a file."""
    keys = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "created")
    return next((str(info[key]) for key in keys if info.get(key)), "")


def _is_inside(name: str) -> bool:
    """Whether a name stays inside its folder: anybody may have written the listing."""
    parts = name.split("/")
    return not any(part in ("", ".", "..") or "\0" in part for part in parts)


@functools.cache
def _callback_type() -> Any:
    callbacks = importlib.import_module("fsspec.callbacks")

    class Callback(callbacks.Callback):
        """Reports each part of a file that has been sent."""

        def __init__(self, on_progress: Callable[[], None]) -> None:
            super().__init__()
            self._on_progress = on_progress

        def relative_update(self, inc: int = 1) -> None:
            super().relative_update(inc)
            self._on_progress()

    return Callback


def _make_callback(on_progress: Callable[[], None]) -> Any:
    return _callback_type()(on_progress)


@contextlib.contextmanager
def storage_errors(url: str, what: str) -> Iterator[None]:
    """Turn any error of a client into one that says what could not be done, and why.

    Args:
        url: The address.
        what: What is being done, such as "opened".
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        advice = (
            "Check the address, and your credentials for it"
            if is_permanent(error)
            else "Check the connection, and try again"
        )
        raise StorageError(
            f"{url} cannot be {what}: {describe_error(error)}. {advice}."
        ) from error
