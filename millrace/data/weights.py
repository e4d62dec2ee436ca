"""Published weights from a file, a folder, a URL or a hub, downloaded once and checked.

A download is written to a temporary file, which gets its name once it is complete and its
checksum is right. Next to it, ``source.json`` has the address and the checksum.
"""

import hashlib
import http.client
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from millrace.config import ConfigurationError, shown
from millrace.data.catalog import check_trusted, data_folder
from millrace.durable import replacing, write_atomically

FILE = "model.safetensors"
"""The file that exports, timm and other libraries write to a folder or a repository."""

_HUB = "https://huggingface.co"
_NAME = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?P<path>(/[\w.-]+)*)(@(?P<revision>[\w./-]+))?"
)
_CHECKSUM = re.compile(r"sha256=([0-9a-f]{64})")
_ENDINGS = (".safetensors", ".pth", ".pt", ".bin")  # of files, not of repositories
_TIMEOUT_SECONDS = 10.0  # to connect, and between two parts of the answer
_CHUNK_BYTES = 1 << 20
_SOURCE = "source.json"


class WeightsFile(NamedTuple):
    """A file of weights on this machine."""

    path: Path
    source: str
    """What was asked for: a path, a URL or the name of a repository."""
    sha256: str


class _Download(NamedTuple):
    source: str
    url: str
    folder: Path
    """Where it is kept."""
    sha256: str | None = None
    """The checksum that was asked for."""
    is_name: bool = False
    """Whether the source is the name of a repository, so that it might be a path."""

    @property
    def target(self) -> Path:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.url).path)
        name = path.rpartition("/")[2]
        return self.folder / (FILE if name in ("", ".", "..") else name)


def find_weights(
    source: str | Path, announce: Callable[[str], Any] = lambda line: None
) -> WeightsFile:
    """Return a file of weights, downloaded if necessary.

    Args:
        source: A file; a folder with ``model.safetensors``; a URL, with ``#sha256=…`` at
            its end to check it; or a repository of Hugging Face such as
            ``timm/resnet50.a1_in1k``, with a file and ``@REVISION`` after it if needed. An
            existing path comes first.
        announce: Called with a line about a download.
    """
    text = str(source)
    if not _is_url(text) and (path := _find_local(Path(text))) is not None:
        return WeightsFile(path, text, _digest(path))
    download = _plan_download(text)
    if download is None:
        raise ConfigurationError(
            f"--pretrained: there is no file or folder {shown(text)}, and it is neither a "
            "URL nor the name of a repository (owner/name)."
        )
    check_trusted(download.folder)
    path, checksum = _cached(download) or _fetch(download, announce)
    return WeightsFile(path, text, checksum)


def _find_local(path: Path) -> Path | None:
    if os.path.isdir(path):
        if (inner := path / FILE).is_file():
            return inner
        raise ConfigurationError(f"--pretrained: the folder {path} has no {FILE}.")
    return path if os.path.exists(path) else None


def _plan_download(text: str) -> _Download | None:
    """Return where a URL or the name of a repository leads; None if it is neither."""
    weights = data_folder() / "weights"
    if _is_url(text):
        url, _, fragment = text.partition("#")
        match = _CHECKSUM.fullmatch(fragment)
        if fragment and match is None:
            raise ConfigurationError(
                "--pretrained: after # there must be sha256= and 64 hexadecimal digits, "
                f"got {fragment}."
            )
        key = hashlib.sha256(url.encode()).hexdigest()[:16]
        return _Download(text, url, weights / key, match and match[1])
    match = _NAME.fullmatch(text)
    if match is None or (not match["path"] and text.endswith(_ENDINGS)):
        return None
    if {".", ".."} & set(re.split("[/@]", text)):  # would leave the folder of downloads
        return None
    repo, file = match["repo"], match["path"].lstrip("/") or FILE
    revision = urllib.parse.quote(match["revision"] or "main", safe="")
    hub = os.environ.get("HF_ENDPOINT", _HUB).rstrip("/")
    folder = weights / repo.replace("/", "--") / revision / Path(file).parent
    url = f"{hub}/{repo}/resolve/{revision}/{file}"
    return _Download(text, url, folder, is_name=True)


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


# ---------------------------------------------------------------------------- the cache


def _cached(download: _Download) -> tuple[Path, str] | None:
    """Return an earlier download and its checksum if it is complete and unchanged."""
    path, record = download.target, download.folder / _SOURCE
    try:
        known = json.loads(record.read_text())
    except (OSError, ValueError):
        return None
    if not path.is_file() or known.get("url") != download.url:
        return None
    checksum = _digest(path)
    if checksum != known.get("sha256") or download.sha256 not in (None, checksum):
        return None
    return path, checksum


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigurationError(
            f"--pretrained: cannot read {path}: {error.strerror}."
        ) from error


# ------------------------------------------------------------------------- the download


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Remembers the checksum that a hub sends with the redirect to its storage."""

    def __init__(self) -> None:
        self.linked: str | None = None

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        self.linked = self.linked or _linked_checksum(headers)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _linked_checksum(headers: Any) -> str | None:
    tag = (headers.get("X-Linked-Etag") or "").removeprefix("W/").strip('"')
    return tag if re.fullmatch(r"[0-9a-f]{64}", tag) else None


def _fetch(download: _Download, announce: Callable[[str], Any]) -> tuple[Path, str]:
    """Download a file; return it and its checksum."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no"):
        raise ConfigurationError(
            f"--pretrained: {download.url} is not in {download.folder}, and HF_HUB_OFFLINE "
            "is set."
        )
    try:
        download.folder.mkdir(parents=True, exist_ok=True)
        with replacing(download.target, binary=True) as file:
            checksum = _receive(download, file, announce)
    except urllib.error.HTTPError as error:
        error.close()
        reason = f"the server answered {error.code} {error.reason}"
        raise _failed(download, reason) from error
    except urllib.error.URLError as error:
        raise _failed(download, f"cannot reach the server: {error.reason}") from error
    except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
        reason = f"the connection broke: {error or type(error).__name__}"
        raise _failed(download, reason) from error
    except OSError as error:
        reason = f"cannot write to {download.folder}: {error.strerror}"
        raise _failed(download, reason) from error
    record = {"url": download.url, "sha256": checksum}
    write_atomically(download.folder / _SOURCE, json.dumps(record, indent=2) + "\n")
    return download.target, checksum


def _receive(download: _Download, file: IO[bytes], announce: Callable[[str], Any]) -> str:
    """Write the content of a URL to a file; return its checksum, which is right."""
    redirects = _Redirects()
    opener = urllib.request.build_opener(redirects)
    headers = {"User-Agent": "millrace", "Accept-Encoding": "identity"}
    request = urllib.request.Request(download.url, headers=headers)
    digest, received = hashlib.sha256(), 0
    with opener.open(request, timeout=_TIMEOUT_SECONDS) as response:
        length = response.headers.get("Content-Length")
        size = f", {int(length) / 1e6:.0f} MB" if length else ""
        announce(f"downloading {download.url}{size}")
        while chunk := response.read(_CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
            received += len(chunk)
        linked = redirects.linked or _linked_checksum(response.headers)
    if length and received != int(length):
        raise _failed(download, f"only {received:,} of {int(length):,} bytes arrived")
    actual, wanted = digest.hexdigest(), download.sha256 or linked
    if wanted not in (None, actual):
        raise _failed(download, f"its SHA-256 is {actual}, expected {wanted}")
    return actual


def _failed(download: _Download, reason: str) -> ConfigurationError:
    local = f"There is no file {download.source}, and " if download.is_name else ""
    return ConfigurationError(
        f"--pretrained: {local}{download.url} was not downloaded: {reason}. Give a file: "
        f"download it elsewhere, and pass its path."
    )
