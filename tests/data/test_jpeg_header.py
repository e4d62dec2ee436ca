"""Headers of JPEGs: what they say, and what shortening them changes."""

import io

import pytest
from image_files import encode, make_image
from PIL import Image

from millrace.data.jpeg_header import parse_jpeg_header, shorten


@pytest.mark.parametrize("size", [(1, 1), (48, 40), (7, 300), (1025, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"subsampling": 0},
        {"subsampling": 1},
        {"quality": 100, "optimize": True},
        {"restart_marker_blocks": 2},
        {"progressive": True},
        {"comment": b"\xff\xc0 no frame " * 20},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_header_is_parsed_like_pillow_does(mode, options, size):
    content = encode(make_image(1, mode, size), **options)
    header = parse_jpeg_header(content)
    with Image.open(io.BytesIO(content)) as image:
        assert (header.width, header.height) == image.size == size
        assert header.num_components == len(image.getbands())
    is_plain = not {"progressive", "restart_marker_blocks"} & options.keys()
    assert header.is_sequential == is_plain
    at = header.height_at
    assert int.from_bytes(content[at : at + 2], "big") == size[1]
    subsampling = options.get("subsampling", 2 * (mode == "RGB")) * (mode != "L")
    assert header.mcu == {0: (8, 8), 1: (16, 8), 2: (16, 16)}[subsampling]


def test_a_thumbnail_in_the_header_is_not_mistaken_for_the_image():
    thumbnail = encode(make_image(2, size=(16, 8)))
    exif = b"Exif\x00\x00" + b"II*\x00\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00" + thumbnail
    header = parse_jpeg_header(encode(make_image(1), exif=exif))
    assert (header.width, header.height) == (48, 40)


def test_padding_before_a_marker_is_skipped():
    content = encode(make_image(1))
    assert parse_jpeg_header(content[:2] + b"\xff\xff" + content[2:]).width == 48


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xd8",
        b"not an image",
        encode(make_image(1), "PNG"),
        encode(make_image(1))[:30],
        b"\xff\xd8" + bytes(40),
        b"\xff\xd8\xff\xda\x00\x04",  # pixels without a frame
    ],
    ids=lambda content: f"{len(content)} bytes",
)
def test_what_is_not_a_jpeg_has_no_header(content):
    assert parse_jpeg_header(content) is None


def test_a_jpeg_that_ends_in_its_header_has_none():
    content = encode(make_image(1))
    for end in range(content.index(b"\xff\xda")):
        assert parse_jpeg_header(content[:end]) is None


def test_a_jpeg_without_a_height_is_left_to_pillow():
    content = bytearray(encode(make_image(1)))
    at = parse_jpeg_header(bytes(content)).height_at
    content[at : at + 2] = b"\x00\x00"
    assert parse_jpeg_header(bytes(content)) is None


@pytest.mark.parametrize(("subsampling", "margin"), [(0, 0), (1, 0), (2, 8)])
def test_a_shortened_file_promises_the_rows_of_a_crop(subsampling, margin):
    content = encode(make_image(1, size=(40, 100)), subsampling=subsampling)
    header = parse_jpeg_header(content)
    shortened, height = shorten(content, header, 50)
    assert height == 50 + margin
    assert parse_jpeg_header(shortened) == header._replace(height=height)
    assert len(shortened) == len(content)
    assert shorten(content, header, 100) == (content, 100)


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_blocks": 2}])
def test_a_file_that_is_not_stored_row_by_row_is_not_shortened(options):
    content = encode(make_image(1, size=(40, 100)), **options)
    assert shorten(content, parse_jpeg_header(content), 10) == (content, 100)
