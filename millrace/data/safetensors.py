"""Weights in safetensors files: a JSON header, then plain numbers; nothing is executed."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from millrace.config import shown

_TYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_HALF_OF_FLOAT32 = "BF16"
_LONGEST_HEADER = 100_000_000
_MOST_DIMS = 32
_MOST_ITEMS = 2**59  # times eight bytes each, an array's size still fits 64 bits
_PREFIX = 8  # bytes that give the header's length


class SafetensorsError(ValueError):
    """A file is not a safetensors file, or not a whole one; names the file."""


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name; they are read when they are looked at.

    bfloat16, which NumPy lacks, becomes float32.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header, start = _read_header(path, file, size)
    except OSError as error:
        raise SafetensorsError(f"Cannot read {path}: {error.strerror}.") from error
    if size == start:
        data = np.zeros(0, np.uint8)
    else:
        data = np.memmap(path, np.uint8, "r", offset=start)
    entries = {name: _entry(path, name, entry) for name, entry in header.items()}
    _check_cover(path, entries, len(data))
    return {name: _array(data, *entry) for name, entry in entries.items()}


def _read_header(path: Path, file: Any, size: int) -> tuple[dict[str, Any], int]:
    """Return what the file says it holds, and where its numbers start."""
    length = int.from_bytes(file.read(_PREFIX), "little")
    if size < _PREFIX or length > min(_LONGEST_HEADER, size - _PREFIX):
        raise SafetensorsError(
            f"{path} is not a safetensors file, or it is cut short: its header should "
            f"have {length} bytes, and the file has {size}."
        )
    try:
        header = json.loads(file.read(length), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        raise SafetensorsError(f"{path} is not a safetensors file: {error}.") from error
    if not isinstance(header, dict):
        raise SafetensorsError(f"{path} is not a safetensors file: no header.")
    header.pop("__metadata__", None)
    return header, _PREFIX + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError("a name occurs twice in its header")
    return dict(pairs)


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return type, shape, first and last byte of an array, all of them possible."""
    try:
        kind, shape = entry["dtype"], tuple(entry["shape"])
        first, last = entry["data_offsets"]
        numbers = (*shape, first, last)
        possible = len(shape) <= _MOST_DIMS and all(
            type(n) is int and 0 <= n < _MOST_ITEMS for n in numbers
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SafetensorsError(
            f"{path}: the header's entry {shown(name)} is broken."
        ) from error
    if not isinstance(kind, str) or kind not in (*_TYPES, _HALF_OF_FLOAT32):
        raise SafetensorsError(
            f"{path}: {shown(name)} has the type {shown(kind)}, which is not known."
        )
    # NumPy multiplies the dims that are not 0 even where one is.
    if possible and math.prod(filter(None, shape)) >= _MOST_ITEMS:
        possible = False
    if not possible or math.prod(shape) * _item_size(kind) != last - first:
        raise SafetensorsError(
            f"{path}: {shown(name)} should have shape {shown(list(shape))} of {kind}, but "
            f"has bytes {shown(first)} to {shown(last)}."
        )
    return kind, shape, first, last


def _check_cover(path: Path, entries: dict[str, Any], size: int) -> None:
    """Raise unless the arrays lie one behind the other, over all of the file."""
    end = 0
    for name, (_, _, first, last) in sorted(entries.items(), key=lambda e: e[1][2:]):
        if first != end:
            raise SafetensorsError(
                f"{path}: {shown(name)} should start at byte {end}, not {first}."
            )
        end = last
    if end != size:
        raise SafetensorsError(
            f"{path} should hold {end} bytes of numbers, but has {size}: it is cut short "
            "or has something behind its end."
        )


def _item_size(kind: str) -> int:
    return 2 if kind == _HALF_OF_FLOAT32 else _TYPES[kind].itemsize


def _array(
    data: np.ndarray, kind: str, shape: tuple[int, ...], first: int, last: int
) -> np.ndarray:
    part = data[first:last]
    if kind == _HALF_OF_FLOAT32:
        wide = part.view("<u2").astype("<u4") << 16
        return wide.view("<f4").reshape(shape)
    return part.view(_TYPES[kind]).reshape(shape)
