"""Readers and a source of generated images, importable by data workers."""

import io
import os
import time

import numpy as np
from PIL import Image

from millrace.data.decoding import Crop
from millrace.data.image_source import ImageSource


def make_content(index: int) -> bytes:
    """Return a small image of noise that depends on the index."""
    pixels = np.random.default_rng(index).integers(0, 256, (24, 20, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def read_made(index: int) -> tuple[bytes, int]:
    return make_content(index), index


def read_or_fail(index: int) -> tuple[bytes, int]:
    if index == 7:
        raise OSError(5, "Input/output error", "disk/7")
    return read_made(index)


class TwoArguments(Exception):
    """An exception that pickle cannot restore."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def read_or_fail_oddly(index: int) -> tuple[bytes, int]:
    raise TwoArguments("one", "two")


def read_slowly(index: int) -> tuple[bytes, int]:
    time.sleep(0.01)
    return read_made(index)


class PartlyCorruptReader:
    """Reads images of which some cannot be decoded."""

    def __init__(self, corrupt: set[int]) -> None:
        self._corrupt = corrupt

    def __call__(self, index: int) -> tuple[bytes, int]:
        return (b"" if index in self._corrupt else make_content(index)), index


class Unloadable:
    """A reader that cannot be unpickled."""

    def __call__(self, index: int) -> tuple[bytes, int]:
        return read_made(index)

    def __reduce__(self):
        return _fail_to_load, ()


def _fail_to_load():
    raise RuntimeError("cannot be loaded here")


class MadeImages(ImageSource):
    """Generated images; the label is the index."""

    def __init__(self, count: int = 40, *, read=read_made, size: int = 8, **options):
        super().__init__(count, Crop(size=size), **options)
        self._read = read

    @property
    def reader(self):
        return self._read

    def locate(self, index: int) -> int:
        return index

    def name(self, index: int) -> str:
        return f"number {index}"


def find_workers(parent: int | None = None) -> set[int]:
    """Return the data workers that a process has started, by default this one."""
    parent = os.getpid() if parent is None else parent
    return {pid for pid in _find_all_workers() if _parent_of(pid) == parent}


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    fields = _read_stat(pid)
    return bool(fields) and fields[0] != "Z"


def _find_all_workers() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if b"millrace.data.decode_worker" in file.read() and is_running(int(name)):
                    found.append(int(name))
        except OSError:
            continue
    return found


def _parent_of(pid: int) -> int | None:
    fields = _read_stat(pid)
    return int(fields[1]) if fields else None


def _read_stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
