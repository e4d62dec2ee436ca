"""CRC-32C of both implementations, against published values and a third one."""

import struct

import numpy as np
import pytest

from millrace.data import crc32c as module
from millrace.data.crc32c import crc32c, crc32c_numpy, masked_crc32c

GOOGLE = module.google_crc32c


@pytest.fixture(params=["google-crc32c", "NumPy"], autouse=True)
def implementation(request, monkeypatch):
    if request.param == "NumPy":
        monkeypatch.setattr(module, "google_crc32c", None)
    elif module.google_crc32c is None:
        pytest.skip("google-crc32c is not installed")


@pytest.mark.parametrize(
    ("message", "checksum"),  # from RFC 3720, B.4
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
)
def test_the_checksum_equals_published_values(message, checksum):
    assert crc32c(message) == checksum
    # A message that ends in its own checksum always has the same one.
    for length in (0, 300, 5000, 70_000):
        long = np.random.default_rng(length).bytes(length) + message
        assert crc32c(long + struct.pack("<I", crc32c(long))) == 0x48674BC7


@pytest.mark.parametrize("length", [255, 256, 257, 1023, 1024, 1025, 16_384, 16_385])
def test_the_checksum_agrees_with_tensorboard_at_any_length(length):
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as theirs

    message = np.random.default_rng(length).bytes(length)
    assert masked_crc32c(message) == theirs(message)
    assert masked_crc32c(memoryview(message)[3:]) == theirs(message[3:])


@pytest.mark.parametrize("length", [0, 1, 63, 64, 255, 256, 257, 4096, 100_003])
def test_both_implementations_agree(length):
    if GOOGLE is None:
        pytest.skip("google-crc32c is not installed")
    message = np.random.default_rng(length).bytes(length)
    assert crc32c(message) == crc32c_numpy(message) == GOOGLE.value(message)
    part = memoryview(message)[length // 3 :]
    assert crc32c(part) == crc32c_numpy(part) == GOOGLE.value(bytes(part))
