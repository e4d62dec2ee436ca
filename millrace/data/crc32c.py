"""CRC-32C, the checksum of TFRecord files, fast enough without a library of its own.

The checksum is linear: the bits of each byte contribute a pattern that depends only on
how many bytes follow, and the patterns are added without carry. So 64 bytes at a time
are looked up in 64 tables and added, which NumPy does for all blocks of a message at
once. The four-byte results, each standing for its block, are then put together by
sixteens in the same manner, and so on until one is left.
"""

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed
_BLOCK = 64
_STATES = _BLOCK // 4  # four-byte states in a block of the later rounds
_MASK_DELTA = 0xA282EAD8  # from the TFRecord format


def masked_crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of `data` as TFRecord files store it."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of `data`.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    if len(data) < 4 * _BLOCK:
        return _short(bytes(data))
    # The register starts as ones, which is the same as inverting the first four bytes;
    # zeros put in front of a message then change nothing.
    padding = -len(data) % _BLOCK
    message = np.zeros(padding + len(data), np.uint8)
    message[padding:] = np.frombuffer(data, np.uint8)
    message[padding : padding + 4] ^= 0xFF
    states = _look_up(message, _first_tables())
    bytes_per_state = _BLOCK
    while len(states) > 1:
        padding = -len(states) % _STATES
        states = np.concatenate([np.zeros(padding, np.uint32), states])
        message = states.astype("<u4").view(np.uint8)
        states = _look_up(message, _later_tables(bytes_per_state))
        bytes_per_state *= _STATES
    return int(states[0]) ^ 0xFFFFFFFF


def _short(data: bytes) -> int:
    crc = 0xFFFFFFFF
    table = _byte_list()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _look_up(message: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Add up what the bytes of each block contribute."""
    places = np.arange(_BLOCK, dtype=np.intp) * 256
    blocks = message.reshape(-1, _BLOCK) + places
    return np.bitwise_xor.reduce(tables.ravel().take(blocks), axis=1)


@functools.cache
def _byte_table() -> np.ndarray:
    """What each of the 256 bytes contributes when nothing follows it."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ np.where(table & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return table


@functools.cache
def _byte_list() -> list[int]:
    return _byte_table().tolist()  # plain integers are faster one at a time


@functools.cache
def _first_tables() -> np.ndarray:
    """What a byte contributes at each place of a block: (64, 256)."""
    tables = np.empty((_BLOCK, 256), np.uint32)
    tables[-1] = _byte_table()
    for place in reversed(range(_BLOCK - 1)):
        tables[place] = _append_zero(tables[place + 1])
    return tables


@functools.cache
def _later_tables(bytes_per_state: int) -> np.ndarray:
    """What each byte of sixteen states contributes, the last one unchanged: (64, 256)."""
    tables = np.empty((_STATES, 4, 256), np.uint32)
    for byte in range(4):
        tables[-1, byte] = np.arange(256, dtype=np.uint32) << np.uint32(8 * byte)
    shift = _shift_tables(bytes_per_state)
    for state in reversed(range(_STATES - 1)):
        tables[state] = _apply(shift, tables[state + 1])
    return tables.reshape(_BLOCK, 256)


@functools.cache
def _shift_tables(num_bytes: int) -> np.ndarray:
    """The effect of `num_bytes` following zeros on each byte of a state: (4, 256)."""
    if num_bytes > 1:
        half = _shift_tables(num_bytes // 2)  # always a power of two
        return _apply(half, half)
    one_byte = np.arange(256, dtype=np.uint32)
    return np.stack([_append_zero(one_byte << np.uint32(8 * byte)) for byte in range(4)])


def _append_zero(states: np.ndarray) -> np.ndarray:
    return _byte_table()[states & 0xFF] ^ (states >> 8)


def _apply(shift: np.ndarray, states: np.ndarray) -> np.ndarray:
    parts = (shift[byte][(states >> (8 * byte)) & 0xFF] for byte in range(4))
    return functools.reduce(np.bitwise_xor, parts)
