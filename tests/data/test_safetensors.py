"""Safetensors files: what the format's own writer makes, and what nobody should."""

import json
import struct

import numpy as np
import pytest

from millrace.data.safetensors import SafetensorsError, read_safetensors


def write(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(kind, shape, first, last):
    return {"dtype": kind, "shape": shape, "data_offsets": [first, last]}


def test_a_file_written_by_hand_is_read(tmp_path):
    """As the format's description has it: length, header, numbers in any order."""
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
    found = read_safetensors(write(tmp_path / "x", header, data + struct.pack("<q", -7)))
    assert set(found) == set("abcde")
    np.testing.assert_array_equal(found["a"], numbers.reshape(2, 3))
    np.testing.assert_array_equal(found["b"], halves)
    np.testing.assert_array_equal(found["c"], np.array([[1.5], [-2]], np.float32))
    assert found["d"] == -7 and found["e"].shape == (0, 4)


def test_a_file_written_by_the_library_is_read(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    random = np.random.default_rng(0)
    arrays = {
        "kernel": random.standard_normal((3, 3, 2, 4)).astype(np.float32),
        "half": random.standard_normal(5).astype(np.float16),
        "count": np.array(3),
    }
    library.save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "np"})
    found = read_safetensors(tmp_path / "x.safetensors")
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


HALF = struct.pack("<f", 1.0)


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (b"{", b"", "is not a safetensors file"),
        (b"\xff\xfe", b"", "is not a safetensors file"),
        (b"[]", b"", "no header"),
        (b'{"a":1,"a":2}', b"", "occurs twice"),
        ({"a": entry("F32", [1], 0, 4)}, b"", "cut short"),
        ({"a": entry("F32", [1], 0, 4)}, HALF + HALF, "behind its end"),
        ({"a": entry("F32", [2], 0, 4)}, HALF, r"shape \[2\] of F32"),
        ({"a": entry("F32", [1], 4, 8)}, HALF + HALF, "should start at byte 0"),
        ({"a": entry("F32", [-1], 4, 0)}, HALF, "bytes 4 to 0"),
        ({"a": entry("F32", [1.0], 0, 4)}, HALF, "'a' should have shape"),
        ({"a": entry("PICKLE", [1], 0, 4)}, HALF, "type 'PICKLE', which is not known"),
        ({"a": {"dtype": "F32"}}, HALF, "entry 'a' is broken"),
        ({"a": [1, 2]}, HALF, "entry 'a' is broken"),
        (b"[" * 100_000, b"", "is not a safetensors file"),
        (b'{"a":' * 100_000, b"", "is not a safetensors file"),
        ({"a": entry("F32", [1] * 70, 0, 4)}, HALF, "should have shape"),
        ({"a": entry("F32", [0, 2**63], 0, 0)}, b"", "should have shape"),
        ({"a": entry("F32", [0, 2**40, 2**40], 0, 0)}, b"", "should have shape"),
        ({"a": entry("F32", [10**400], 0, 4)}, HALF, "should have shape"),
        ({"a": entry("F32", [True], 0, 4)}, HALF, "should have shape"),
        ({"a": entry(["F32"], [1], 0, 4)}, HALF, "which is not known"),
        ({"a": entry({"x": 1}, [1], 0, 4)}, HALF, "which is not known"),
        ({"n" * 10_000: entry("F32", "shape", 0, 4)}, HALF, r"nnn\.\.\.nnn"),
        ({"a": entry("F32", None, 0, 4)}, HALF, "is broken"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "is not a safetensors file"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_anything_else_is_refused_by_name(header, data, said, tmp_path):
    with pytest.raises(SafetensorsError, match=said) as caught:
        read_safetensors(write(tmp_path / "weights.safetensors", header, data))
    assert "weights.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("content", [b"", b"\x01\x00", struct.pack("<Q", 2**62) + b"{}"])
def test_a_length_that_cannot_be_is_no_length(content, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(SafetensorsError, match="cut short"):
        read_safetensors(tmp_path / "x")


def test_a_file_that_is_not_there_is_said_so(tmp_path):
    with pytest.raises(SafetensorsError, match="No such file"):
        read_safetensors(tmp_path / "nowhere")
    with pytest.raises(SafetensorsError, match="directory"):
        read_safetensors(tmp_path)
