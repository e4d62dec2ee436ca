"""Safetensors files: those of the reference writer are read, malformed ones rejected."""

import json
import struct

import numpy as np
import pytest

from millrace.data.safetensors import (
    SafetensorsError,
    read_metadata,
    read_safetensors,
    write_safetensors,
)


def write(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(kind, shape, first, last):
    return {"dtype": kind, "shape": shape, "data_offsets": [first, last]}


def test_a_file_written_from_the_format_description_is_read(tmp_path):
    numbers = np.arange(6, dtype="<f4")
    halves = np.array([1.5, -2.0], dtype="<f2")
    brain = np.array([0x3FC0, 0xC000], dtype="<u2")  # 1.5 and -2 in bfloat16
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("F16", [2], 24, 28),
        "a": entry("F32", [2, 3], 0, 24),
        "c": entry("BF16", [2, 1], 28, 32),
        "d": entry("I64", [], 32, 40),
        "e": entry("F32", [0, 4], 40, 40),
    }
    data = numbers.tobytes() + halves.tobytes() + brain.tobytes()
    loaded = read_safetensors(write(tmp_path / "x", header, data + struct.pack("<q", -7)))
    assert set(loaded) == set("abcde")
    np.testing.assert_array_equal(loaded["a"], numbers.reshape(2, 3))
    np.testing.assert_array_equal(loaded["b"], halves)
    np.testing.assert_array_equal(loaded["c"], np.array([[1.5], [-2]], np.float32))
    assert loaded["d"] == -7 and loaded["e"].shape == (0, 4)


def test_a_file_written_by_the_library_is_read(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    random = np.random.default_rng(0)
    arrays = {
        "kernel": random.standard_normal((3, 3, 2, 4)).astype(np.float32),
        "half": random.standard_normal(5).astype(np.float16),
        "count": np.array(3),
    }
    library.save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "np"})
    loaded = read_safetensors(tmp_path / "x.safetensors")
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].dtype == array.dtype


HALF = struct.pack("<f", 1.0)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "is not a safetensors file"),
        (b"\xff\xfe", b"", "is not a safetensors file"),
        (b"[]", b"", "no header"),
        (b'{"a":1,"a":2}', b"", "occurs twice"),
        ({"a": entry("F32", [1], 0, 4)}, b"", "truncated"),
        ({"a": entry("F32", [1], 0, 4)}, HALF + HALF, "trailing bytes"),
        ({"a": entry("F32", [2], 0, 4)}, HALF, r"shape \[2\] of F32"),
        ({"a": entry("F32", [1], 4, 8)}, HALF + HALF, "should start at byte 0"),
        ({"a": entry("F32", [-1], 4, 0)}, HALF, "bytes 4 to 0"),
        ({"a": entry("F32", [1.0], 0, 4)}, HALF, "'a' should have shape"),
        ({"a": entry("PICKLE", [1], 0, 4)}, HALF, "unknown type 'PICKLE'"),
        ({"a": {"dtype": "F32"}}, HALF, "entry 'a' of its header is malformed"),
        ({"a": [1, 2]}, HALF, "entry 'a' of its header is malformed"),
        (b"[" * 100_000, b"", "is not a safetensors file"),
        (b'{"a":' * 100_000, b"", "is not a safetensors file"),
        ({"a": entry("F32", [1] * 70, 0, 4)}, HALF, "should have shape"),
        ({"a": entry("F32", [0, 2**63], 0, 0)}, b"", "should have shape"),
        ({"a": entry("F32", [0, 2**40, 2**40], 0, 0)}, b"", "should have shape"),
        ({"a": entry("F32", [10**400], 0, 4)}, HALF, "should have shape"),
        ({"a": entry("F32", [True], 0, 4)}, HALF, "should have shape"),
        ({"a": entry(["F32"], [1], 0, 4)}, HALF, "unknown type"),
        ({"a": entry({"x": 1}, [1], 0, 4)}, HALF, "unknown type"),
        ({"n" * 10_000: entry("F32", "shape", 0, 4)}, HALF, r"nnn\.\.\.nnn"),
        ({"a": entry("F32", None, 0, 4)}, HALF, "is malformed"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "is not a safetensors file"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_malformed_file_is_rejected_by_name(header, data, message, tmp_path):
    with pytest.raises(SafetensorsError, match=message) as caught:
        read_safetensors(write(tmp_path / "weights.safetensors", header, data))
    assert "weights.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("content", [b"", b"\x01\x00", struct.pack("<Q", 2**62) + b"{}"])
def test_an_impossible_header_length_is_rejected(content, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(SafetensorsError, match="truncated"):
        read_safetensors(tmp_path / "x")


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(SafetensorsError, match="No such file"):
        read_safetensors(tmp_path / "nowhere")
    with pytest.raises(SafetensorsError, match="directory"):
        read_safetensors(tmp_path)


def test_a_written_file_is_read_with_its_metadata(tmp_path):
    random = np.random.default_rng(0)
    arrays = {
        "kernel": random.standard_normal((4, 3)).astype(np.float32).T,  # not contiguous
        "half": random.standard_normal(5).astype(np.float16),
        "count": np.array(3),
        "empty": np.zeros((0, 2), np.float32),
    }
    path = tmp_path / "x.safetensors"
    write_safetensors(path, arrays, {"größe": "8 µm"})
    assert read_metadata(path) == {"größe": "8 µm"}
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    loaded = read_safetensors(path)
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].dtype == array.dtype


def test_the_library_reads_a_written_file(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7)}
    write_safetensors(tmp_path / "x", arrays, {"format": "pt"})
    loaded = library.load_file(tmp_path / "x")
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_a_type_that_the_format_lacks_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="words has the type <U1"):
        write_safetensors(tmp_path / "x", {"words": np.array(["a"])})
    assert not list(tmp_path.iterdir())
