"""Reads the header of a JPEG, and makes it promise fewer rows than the file has."""

import struct
from typing import NamedTuple

Encoded = bytes | memoryview
"""The bytes of an image file."""

_BLOCK = 8  # pixels


class JpegHeader(NamedTuple):
    """What the header of a JPEG says."""

    height: int
    width: int
    num_components: int
    is_sequential: bool
    """Whether rows are decoded as they are read: neither progressive nor with restarts."""
    height_at: int
    """Where in the file the height is."""
    mcu: tuple[int, int]
    """Width and height, in pixels, of the parts that are stored one after the other."""


def parse_jpeg_header(content: Encoded) -> JpegHeader | None:
    """Parse the header of a JPEG; return None for anything unusual."""
    position, has_restarts = 2, False
    header = None
    if content[:2] != b"\xff\xd8":
        return None
    try:
        while True:
            if content[position] != 0xFF:
                return None
            marker = content[position + 1]
            if marker == 0xFF:  # padding
                position += 1
                continue
            if marker == 0xDA:  # the pixels begin
                break
            if marker in (0xC0, 0xC1, 0xC2):  # baseline, extended, progressive
                header = _parse_frame(content, position + 5, marker == 0xC0)
            has_restarts |= marker == 0xDD
            position += 2 + (content[position + 2] << 8) + content[position + 3]
    except (IndexError, ValueError, struct.error):
        return None
    if header is None or not (header.height and header.width):
        return None
    return header._replace(is_sequential=False) if has_restarts else header


def _parse_frame(content: Encoded, at: int, is_sequential: bool) -> JpegHeader:
    height, width, num_components = struct.unpack_from(">HHB", content, at)
    # Three bytes per component: its number, the sampling factors, the table.
    factors = content[at + 6 : at + 6 + 3 * num_components : 3]
    # A single component is stored block by block, whatever its factors are.
    wide = max(factor >> 4 for factor in factors) if num_components > 1 else 1
    high = max(factor & 15 for factor in factors) if num_components > 1 else 1
    mcu = (_BLOCK * wide, _BLOCK * high)
    return JpegHeader(height, width, num_components, is_sequential, at, mcu)


def shorten(content: Encoded, header: JpegHeader, bottom: int) -> tuple[Encoded, int]:
    """Return a file whose header promises the rows above `bottom` only, and how many.

    Files store rows from top to bottom, so the decoder then stops early, with the same
    pixels in the rows above `bottom`. Color that was stored at half the height is
    interpolated, so that the last row depends on the next ones: these are kept.
    """
    needed = bottom + (_BLOCK if header.mcu[1] > _BLOCK else 0)
    if not header.is_sequential or needed >= header.height:
        return content, header.height
    shortened = bytearray(content)
    struct.pack_into(">H", shortened, header.height_at, needed)
    return memoryview(shortened), needed
