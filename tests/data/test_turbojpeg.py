"""A part of a JPEG, decoded by libturbojpeg: the pixels of the whole, and its limits."""

import importlib.util
import struct
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from image_files import encode, make_image
from PIL import Image

from millrace.data import turbojpeg
from millrace.data.jpeg_header import parse_jpeg_header
from millrace.data.turbojpeg import TurboJpeg

library = turbojpeg.load()
needs_library = pytest.mark.skipif(library is None, reason="no TurboJPEG 3 is installed")
simplejpeg = pytest.importorskip("simplejpeg") if library else None


def make_file(generator, subsampling):
    """Return a JPEG of noise, where every wrong neighbor shows, of any size."""
    height, width = generator.integers(1, 150, 2)
    pixels = generator.integers(0, 256, (height, width, 3), np.uint8)
    quality = int(generator.integers(20, 100))
    if subsampling == "gray":
        return encode(Image.fromarray(pixels).convert("L"), quality=quality)
    return simplejpeg.encode_jpeg(pixels, quality, colorsubsampling=subsampling)


def decode_all(content, header, scale):
    size = {
        "min_height": -(-header.height // scale),
        "min_width": -(-header.width // scale),
    }
    return simplejpeg.decode_jpeg(content, **(size if scale > 1 else {}))


def decode_box(content, box, scale=1):
    """Return the pixels of a box, and the shape of what was decoded for it."""
    pixels, (x, y) = library.decode(content, parse_jpeg_header(content), box, scale)
    left, top, width, height = (edge // scale for edge in box)
    return pixels[top - y :, left - x :][:height, :width].copy(), pixels.shape


@needs_library
@pytest.mark.parametrize("scale", [1, 2, 4, 8])
@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "gray"])
def test_a_part_has_the_pixels_of_the_whole(subsampling, scale):
    generator = np.random.default_rng(scale)
    for _ in range(30):
        content = make_file(generator, subsampling)
        header = parse_jpeg_header(content)
        across, down = header.width // scale, header.height // scale
        if not (across and down):
            continue
        whole = decode_all(content, header, scale)
        for corner in range(8):
            width, height = (int(generator.integers(1, n + 1)) for n in (across, down))
            # The first four touch the corners of the image.
            shares = generator.random(2) if corner > 3 else (corner & 1, corner >> 1)
            left, top = int(shares[0] * (across - width)), int(shares[1] * (down - height))
            box = tuple(edge * scale for edge in (left, top, width, height))
            found, _ = decode_box(content, box, scale)
            expected = whole[top : top + height, left : left + width]
            np.testing.assert_array_equal(found, expected)


@needs_library
@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"restart_marker_blocks": 3}, {"optimize": True}]
)
def test_a_part_of_another_kind_of_file_has_the_pixels_of_the_whole(options):
    content = encode(make_image(3, size=(200, 170)), **options)
    expected = simplejpeg.decode_jpeg(content)[40:90, 70:150]
    np.testing.assert_array_equal(decode_box(content, (70, 40, 80, 50))[0], expected)


@needs_library
def test_little_more_than_the_box_is_decoded():
    content = encode(make_image(3, size=(640, 480)), subsampling=0)
    _, (height, width, _) = decode_box(content, (320, 240, 64, 48))
    assert 48 <= height <= 48 + 4 and 64 <= width <= 64 + 3 * 8


@needs_library
def test_files_that_the_library_objects_to_raise_an_error_and_the_next_is_decoded():
    good = encode(make_image(3))
    header = parse_jpeg_header(good)
    without_pixels = good[: good.index(b"\xff\xda")] + b"\xff\xd9"
    without_tables = good.replace(b"\xff\xdb", b"\xff\xe5")
    wrong_width = bytearray(good)
    struct.pack_into(">H", wrong_width, header.height_at + 2, 3)
    expected, _ = decode_box(good, (8, 8, 16, 16))
    for bad in (without_pixels, without_tables, bytes(wrong_width)):
        with pytest.raises(ValueError, match="objects to the file"):
            library.decode(bad, header, (8, 8, 16, 16), 1)
        np.testing.assert_array_equal(decode_box(good, (8, 8, 16, 16))[0], expected)


@needs_library
def test_threads_do_not_share_pixels():
    files = [encode(make_image(seed, size=(120, 90))) for seed in range(4)]
    expected = [simplejpeg.decode_jpeg(content)[10:80, 16:110] for content in files]
    wrong = []

    def work(number):
        for _ in range(50):
            found, _ = decode_box(files[number], (16, 10, 94, 70))
            if not np.array_equal(found, expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Finding the library


def test_the_library_of_the_wheel_is_found_without_importing_its_module(
    monkeypatch, tmp_path
):
    (tmp_path / "turbojpeg.libs").mkdir()
    (tmp_path / "turbojpeg.libs" / "libturbojpeg-12ab.so.0.3.0").touch()
    spec = SimpleNamespace(origin=str(tmp_path / "turbojpeg.so"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    found = [str(tmp_path / "turbojpeg.libs" / "libturbojpeg-12ab.so.0.3.0")]
    assert turbojpeg._find_in_wheel() == found
    assert "turbojpeg" not in sys.modules


def test_libraries_that_are_missing_broken_or_too_old_are_passed_over(
    monkeypatch, tmp_path
):
    broken = tmp_path / "libturbojpeg.so"
    broken.write_bytes(b"no library")
    for paths in ([], [str(broken)], ["libc.so.6"]):
        monkeypatch.setattr(turbojpeg, "_find_in_wheel", lambda paths=paths: paths)
        monkeypatch.setattr(turbojpeg, "_SYSTEM_NAMES", ("libnothing.so.0",))
        assert turbojpeg.load() is None
    with pytest.raises(AttributeError):
        TurboJpeg("libc.so.6")


def test_a_package_without_the_library_is_passed_over(monkeypatch, tmp_path):
    for spec in (None, SimpleNamespace(origin=None), SimpleNamespace(origin=str(tmp_path))):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        assert turbojpeg._find_in_wheel() == []
