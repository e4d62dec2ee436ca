"""Safetensors files: a JSON header, then raw arrays; nothing is executed.

The header is untrusted: every size in it is checked before it is used.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millrace.config import shown
from millrace.durable import replacing

_TYPES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BOOL": "?"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1"},
}
_BFLOAT16 = "BF16"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_DIMS = 32  # the limit of NumPy 1
_MAX_ITEMS = 2**59  # times eight bytes each, the size of an array still fits 64 bits
_PREFIX = 8  # bytes that hold the length of the header
_ALIGNMENT = 8  # of the first array, for readers that map the file
_METADATA = "__metadata__"


class SafetensorsError(ValueError):
    """A file is not a complete safetensors file; the message names it."""


class _Tensor(NamedTuple):
    """An entry of the header, checked."""

    kind: str
    shape: tuple[int, ...]
    first: int
    last: int


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name, mapped from disk.

    bfloat16, which NumPy lacks, becomes float32.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header, start = _read_header(path, file, size)
    except OSError as error:
        raise SafetensorsError(f"Cannot read {path}: {error.strerror}.") from error
    if size == start:  # an empty file cannot be mapped
        data = np.zeros(0, np.uint8)
    else:
        data = np.memmap(path, np.uint8, "r", offset=start)
    tensors = {name: _parse_entry(path, name, entry) for name, entry in header.items()}
    _check_cover(path, tensors, len(data))
    return {name: _view(data, tensor) for name, tensor in tensors.items()}


def write_safetensors(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays by name to a file, which is replaced as a whole.

    Args:
        path: The file.
        arrays: Arrays of any type that NumPy has.
        metadata: Texts by name, kept in the header.
    """
    kinds = {np.dtype(code): kind for kind, code in _TYPES.items()}
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, array in arrays.items():
        if (kind := kinds.get(array.dtype)) is None:
            raise ValueError(f"{name} has the type {array.dtype}, unknown to safetensors.")
        start, end = end, end + array.nbytes
        entry = {"dtype": kind, "shape": list(array.shape), "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with replacing(path, binary=True) as file:
        file.write(len(text).to_bytes(_PREFIX, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def read_metadata(path: str | Path) -> dict[str, str]:
    """Return the texts that the header of a file has by name."""
    with Path(path).open("rb") as file:
        length = int.from_bytes(file.read(_PREFIX), "little")
        header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
    return header.get(_METADATA, {})


def _read_header(path: Path, file: Any, size: int) -> tuple[dict[str, Any], int]:
    """Return the header, and the offset at which the arrays start."""
    length = int.from_bytes(file.read(_PREFIX), "little")
    if size < _PREFIX or length > min(_MAX_HEADER_BYTES, size - _PREFIX):
        raise SafetensorsError(
            f"{path} is not a safetensors file or is truncated: its header should have "
            f"{length} bytes, and the file has {size}."
        )
    try:
        header = json.loads(file.read(length), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # ValueError also if not UTF-8
        raise SafetensorsError(f"{path} is not a safetensors file: {error}.") from error
    if not isinstance(header, dict):
        raise SafetensorsError(f"{path} is not a safetensors file: no header.")
    header.pop(_METADATA, None)
    return header, _PREFIX + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError("a name occurs twice in its header")
    return dict(pairs)


def _parse_entry(path: Path, name: str, entry: Any) -> _Tensor:
    try:
        kind, shape = entry["dtype"], tuple(entry["shape"])
        first, last = entry["data_offsets"]
        numbers = (*shape, first, last)
        is_possible = len(shape) <= _MAX_DIMS and all(
            type(n) is int and 0 <= n < _MAX_ITEMS for n in numbers
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SafetensorsError(
            f"{path}: the entry {shown(name)} of its header is malformed."
        ) from error
    if not isinstance(kind, str) or kind not in (*_TYPES, _BFLOAT16):
        raise SafetensorsError(f"{path}: {shown(name)} has the unknown type {shown(kind)}.")
    # NumPy multiplies the nonzero dims even of an empty array.
    if is_possible and math.prod(filter(None, shape)) >= _MAX_ITEMS:
        is_possible = False
    if not is_possible or math.prod(shape) * _item_size(kind) != last - first:
        raise SafetensorsError(
            f"{path}: {shown(name)} should have shape {shown(list(shape))} of {kind}, but "
            f"has bytes {shown(first)} to {shown(last)}."
        )
    return _Tensor(kind, shape, first, last)


def _check_cover(path: Path, tensors: dict[str, _Tensor], size: int) -> None:
    """Raise unless the arrays cover the file without gap or overlap."""
    end = 0
    for name, (_, _, first, last) in sorted(tensors.items(), key=lambda t: t[1][2:]):
        if first != end:
            raise SafetensorsError(
                f"{path}: {shown(name)} should start at byte {end}, not {first}."
            )
        end = last
    if end != size:
        raise SafetensorsError(
            f"{path} should have {end} bytes of arrays, but has {size}: it is truncated or "
            "has trailing bytes."
        )


def _item_size(kind: str) -> int:
    return 2 if kind == _BFLOAT16 else np.dtype(_TYPES[kind]).itemsize


def _view(data: np.ndarray, tensor: _Tensor) -> np.ndarray:
    part = data[tensor.first : tensor.last]
    if tensor.kind == _BFLOAT16:  # the upper half of a float32
        wide = part.view("<u2").astype("<u4") << 16
        return wide.view("<f4").reshape(tensor.shape)
    return part.view(_TYPES[tensor.kind]).reshape(tensor.shape)
