"""Write a state dict for ``torch.load(weights_only=True)``, without PyTorch.

The file is an uncompressed zip archive: a pickle with the names, shapes and types of the
arrays, and one entry per array with its bytes. The pickle is written operation by
operation, because Python's own writer would import the classes of PyTorch that it names.
"""

import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np

from millrace.durable import replacing

_STORAGES = {
    **{"float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage"},
    **{"int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage"},
    **{"int8": "CharStorage", "uint8": "ByteStorage", "bool": "BoolStorage"},
}
_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
_NO_HOOKS = b"ccollections\nOrderedDict\n" + pickle.EMPTY_TUPLE + pickle.REDUCE
_FOLDER = "model"
_ALIGNMENT = 64  # of arrays, as in PyTorch, for files that are mapped into memory
_LOCAL_HEADER_BYTES = 30
_PADDING_ID = 0x4246  # "FB", the extra field that PyTorch pads with


def check_types(arrays: Mapping[str, np.ndarray]) -> None:
    """Raise an error if a state dict cannot hold one of the arrays."""
    for name, array in arrays.items():
        if array.dtype.name not in _STORAGES:
            raise ValueError(f"{name} has the type {array.dtype}, unknown to PyTorch.")


def write_state_dict(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name as a state dict; the file is replaced as a whole."""
    check_types(arrays)
    with replacing(path, binary=True) as file, zipfile.ZipFile(file, "w") as archive:
        _add(archive, file, "data.pkl", _pickle(arrays))
        _add(archive, file, "byteorder", b"little")
        for number, array in enumerate(arrays.values()):
            little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
            _add(archive, file, f"data/{number}", little.tobytes())
        _add(archive, file, "version", b"3\n")


def _add(archive: zipfile.ZipFile, file: IO[bytes], name: str, content: bytes) -> None:
    """Add an entry whose content starts at a multiple of the alignment."""
    entry = zipfile.ZipInfo(f"{_FOLDER}/{name}")  # with the date 1980: files are repeatable
    start = file.tell() + _LOCAL_HEADER_BYTES + len(entry.filename) + 4
    padding = -start % _ALIGNMENT
    entry.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
    archive.writestr(entry, content)


def _pickle(arrays: Mapping[str, np.ndarray]) -> bytes:
    parts = [pickle.PROTO, b"\x02", pickle.EMPTY_DICT, pickle.MARK]
    for number, (name, array) in enumerate(arrays.items()):
        parts += [_text(name), _tensor(str(number), array)]
    return b"".join([*parts, pickle.SETITEMS, pickle.STOP])


def _tensor(key: str, array: np.ndarray) -> bytes:
    storage = f"ctorch\n{_STORAGES[array.dtype.name]}\n".encode()
    place = [_text("storage"), storage, _text(key), _text("cpu"), _integer(array.size)]
    strides = [
        int(np.prod(array.shape[dim + 1 :], dtype=np.int64)) for dim in range(array.ndim)
    ]
    arguments = [
        _tuple(*place) + pickle.BINPERSID,
        _integer(0),  # the first number of the storage
        _tuple(*map(_integer, array.shape)),
        _tuple(*map(_integer, strides)),
        pickle.NEWFALSE,  # requires no gradient
        _NO_HOOKS,
    ]
    return _REBUILD + _tuple(*arguments) + pickle.REDUCE


def _tuple(*items: bytes) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def _text(text: str) -> bytes:
    encoded = text.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def _integer(number: int) -> bytes:
    if number < 2**31:
        return pickle.BININT + struct.pack("<i", number)
    return pickle.LONG1 + b"\x08" + struct.pack("<q", number)
