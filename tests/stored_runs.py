"""Runs in object storage that is the memory of the tests, made without training."""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import fsspec

from millrace.storage.address import to_local

_numbers = itertools.count()


def new_url() -> str:
    """Return an address in memory that no other test uses."""
    return f"memory://tests/run-{next(_numbers)}"


def checksum(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def make_run(url: str) -> Path:
    """Make the working copy of a new run, without checkpoints."""
    folder = to_local(url)
    folder.mkdir(parents=True)
    (folder / "config.yml").write_text("command: test\n")
    (folder / "metrics.jsonl").write_text("")
    return folder


def save_checkpoint(folder: Path, update: int, content: str = "", **entries: Any) -> Path:
    """Write a checkpoint of two files; its manifest says what they contain."""
    path = folder / "checkpoints" / f"update-{update:09d}"
    (path / "state").mkdir(parents=True, exist_ok=True)
    files = {}
    for name in ("state/a", "state/b"):
        (path / name).write_text(f"{name} after {update} {content}")
        files[name] = [(path / name).stat().st_size, checksum(path / name)]
    manifest = {"update": update, "files": files, **entries}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def stored(url: str) -> dict[str, bytes]:
    """Return all files below an address by name."""
    files, root = fsspec.core.url_to_fs(url)
    return {
        path.removeprefix(f"{root}/"): files.cat_file(path) for path in files.find(root)
    }


def complete_checkpoints(url: str) -> list[str]:
    """Return the checkpoints that a reader finds; assert that they are complete."""
    found = stored(url)
    complete = []
    for name in sorted(found):
        if name.endswith("/manifest.json"):
            folder = name.removesuffix("/manifest.json")
            for file, (size, digest) in json.loads(found[name])["files"].items():
                data = found[f"{folder}/{file}"]
                actual = hashlib.blake2b(data, digest_size=16).hexdigest()
                assert (len(data), actual) == (size, digest), f"{folder}/{file}"
            complete.append(folder.rpartition("/")[2])
    return complete
