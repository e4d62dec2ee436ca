"""Decoding of one image: crops, flips, and four decoders that agree."""

import io
import tarfile

import numpy as np
import pytest
from image_files import SMALL, decode, encode, make_image, real_data
from PIL import Image

from millrace.data import decoding
from millrace.data.decoding import NUM_DRAWS, CorruptSample, Crop
from millrace.data.jpeg_header import parse_jpeg_header

needs_opencv = pytest.mark.skipif(decoding.cv2 is None, reason="OpenCV is not installed")
needs_turbo = pytest.mark.skipif(
    decoding.turbojpeg is None, reason="libturbojpeg or OpenCV is not installed"
)
needs_simplejpeg = pytest.mark.skipif(
    decoding.simplejpeg is None, reason="simplejpeg or OpenCV is not installed"
)
DECODERS = (
    pytest.param("libturbojpeg", marks=needs_turbo),
    pytest.param("simplejpeg", marks=needs_simplejpeg),
    pytest.param("OpenCV", marks=needs_opencv),
    "Pillow",
)


def use(monkeypatch, name):
    """Decode as if only some of the libraries were installed."""
    if name != "libturbojpeg":
        monkeypatch.setattr(decoding, "turbojpeg", None)
    if name not in ("libturbojpeg", "simplejpeg"):
        monkeypatch.setattr(decoding, "simplejpeg", None)
    if name == "Pillow":
        monkeypatch.setattr(decoding, "cv2", None)


@pytest.fixture(params=DECODERS)
def decoder(request, monkeypatch):
    use(monkeypatch, request.param)
    return request.param


def random_draws(seed):
    return np.random.default_rng(seed).random(NUM_DRAWS, np.float32).tolist()


def draws_of(area, aspect, x=0.0, y=0.0, flip=0.9):
    return [flip] + [area, aspect, x, y] * ((NUM_DRAWS - 1) // 4)


def photo(seed, size=(301, 223)):
    """Return an image with detail: smooth, with noise."""
    smooth = np.asarray(make_image(seed, size=size)).astype(int)
    noise = np.random.default_rng(seed).integers(-25, 26, smooth.shape)
    return Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8))


def distance(a, b):
    return np.abs(a.astype(int) - b.astype(int))


# Decoders


CROPS = {
    "center": None,
    "small": draws_of(0.02, 0.5, 0.3, 0.2),
    "random": random_draws(3),
    "flipped": [0.1, *random_draws(4)[1:]],
    "wide": draws_of(0.6, 1.0),
}


@needs_opencv
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("size", [64, 40, 16])
@pytest.mark.parametrize("name", DECODERS[:2])
def test_libjpeg_turbo_gives_the_pixels_of_opencv(monkeypatch, name, size, subsampling):
    content = encode(photo(5), subsampling=subsampling)
    found = {}
    for decoder in (name, "OpenCV"):
        use(monkeypatch, decoder)
        found[decoder] = [decode(content, Crop(size=size), d) for d in CROPS.values()]
    np.testing.assert_array_equal(found[name], found["OpenCV"])


@pytest.mark.parametrize("size", [200, 112, 64, 40, 16])
@pytest.mark.parametrize("draws", CROPS.values(), ids=CROPS)
def test_all_decoders_give_nearly_the_same_pixels(monkeypatch, decoder, size, draws):
    content = encode(photo(6))
    found = decode(content, Crop(size=size), draws)
    use(monkeypatch, "Pillow")
    expected = decode(content, Crop(size=size), draws)
    # Noise of 15 gray levels is where different filters differ the most.
    assert distance(found, expected).mean() < 2
    assert distance(found, expected).max() < 24


@pytest.mark.parametrize("size", [100, 60, 33])
def test_pixels_are_resized_without_aliasing(decoder, size):
    stripes = np.zeros((128, 128, 3), np.uint8)
    stripes[:, ::2] = 255
    resized = decode(stripes, Crop(size=size), draws_of(1.0, 0.428571))
    found = resized[:, 2:-2].astype(int)
    contrast = found.max() - found.min()
    # A resize without a filter would keep all 255 levels of contrast.
    assert contrast < 255 * min(0.9, (size / 128) ** 2 * 1.5)


@needs_opencv
@pytest.mark.parametrize("scale", [1.3, 1.9, 2.15, 2.3, 2.6])
def test_an_image_is_shrunk_like_pillow_does_along_both_sides(scale):
    image = photo(3, size=(round(100 * scale), 130))
    expected = np.asarray(image.resize((100, 100), Image.Resampling.BILINEAR))
    found = np.empty((100, 100, 3), np.uint8)
    decoding._resize_into(found, np.asarray(image), (0, 0, *image.size), flip=False)
    # A filter of the wrong width, or none, differs by 5 or more on this noise.
    assert distance(found, expected).mean() < 1.5


@pytest.mark.parametrize(
    "content",
    [
        encode(make_image(5), progressive=True),
        encode(make_image(5), restart_marker_blocks=1),
        encode(make_image(5), quality=100, subsampling=0),
        encode(make_image(5)) + b"trailing garbage",
        encode(make_image(5), "PNG"),
        encode(make_image(5), "WEBP", lossless=True),
    ],
    ids=["progressive", "restarts", "best", "garbage", "PNG", "WebP"],
)
def test_files_of_other_kinds_are_decoded(decoder, content):
    expected = decode(make_image(5), Crop(size=20))
    found = decode(content, Crop(size=20))
    assert distance(found, expected).mean() < 4
    assert np.ptp(expected) > 100


@pytest.mark.parametrize("orientation", [3, 6])
def test_the_orientation_in_exif_is_ignored(decoder, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = encode(make_image(5), exif=exif.tobytes())
    np.testing.assert_array_equal(decode(turned), decode(encode(make_image(5))))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("L", "JPEG"), ("CMYK", "JPEG"), ("L", "PNG"), ("P", "PNG"), ("RGBA", "PNG")],
)
def test_other_modes_become_rgb_and_look_the_same(decoder, mode, kind):
    image = make_image(5, size=(96, 96))
    expected = image.convert("L").convert("RGB") if mode == "L" else image
    converted = image.quantize(256) if mode == "P" else image.convert(mode)
    read = decode(encode(converted, kind), Crop(size=64))
    wanted = decode(expected, Crop(size=64))
    assert distance(read, wanted).mean() < 8


def test_transparent_palettes_and_16_bit_images_become_rgb(decoder):
    stream = io.BytesIO()
    make_image(1).quantize(16).save(stream, "PNG", transparency=bytes(range(16)))
    assert decode(stream.getvalue()).shape == (16, 16, 3)
    gray = (np.arange(64 * 64, dtype=np.uint16) * 16).reshape(64, 64)
    with Image.open(io.BytesIO(encode(Image.fromarray(gray), "PNG"))) as image:
        read = np.asarray(decoding.to_rgb(image))
    np.testing.assert_array_equal(read, np.repeat(gray[:, :, None] >> 8, 3, axis=2))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.9])
def test_a_truncated_file_is_corrupt(decoder, kind, keep):
    content = encode(photo(1, size=(64, 64)), kind)
    with pytest.raises(CorruptSample):
        decode(content[: int(keep * len(content))])


@pytest.mark.parametrize("content", [b"not an image", b"\xff\xd8\xff\xd9", b"GIF89a"])
def test_what_is_not_an_image_is_corrupt(decoder, content):
    with pytest.raises(CorruptSample, match="not a JPEG, PNG or WebP image"):
        decode(content)


def test_noise_in_the_pixels_is_decoded_or_reported_but_never_another_error(decoder):
    content = encode(photo(1, size=(64, 64)))
    for seed in range(60):
        generator = np.random.default_rng(seed)
        damaged = bytearray(content)
        for place in generator.integers(2, len(content), 5):
            damaged[place] = generator.integers(256)
        try:
            assert decode(bytes(damaged)).shape == (16, 16, 3)
        except CorruptSample:
            pass


def test_any_format_is_accepted_for_single_files_and_errors_name_them(tmp_path):
    path = tmp_path / "a.bmp"
    make_image(3).save(path)
    expected = decode(encode(make_image(3), "PNG"))
    np.testing.assert_array_equal(decoding.decode_file(path, 16), expected)
    path.write_bytes(b"no")
    with pytest.raises(ValueError, match=r"a\.bmp cannot be read: not an image\."):
        decoding.decode_file(path, 16)


def test_pixels_are_cropped_like_the_same_pixels_in_a_file(decoder):
    for draws in CROPS.values():
        pixels = np.asarray(make_image(3))
        pixels.setflags(write=False)
        stored = decode(encode(make_image(3), "PNG"), Crop(size=20), draws)
        assert distance(decode(pixels, Crop(size=20), draws), stored).max() <= 24


def test_the_name_of_the_decoder_is_that_of_the_library_in_use(decoder):
    names = {
        "libturbojpeg": "libjpeg-turbo (crops)",
        "simplejpeg": "libjpeg-turbo (simplejpeg)",
    }
    assert decoding.decoder_name() == names.get(decoder, decoder)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("scale", [2, 4, 8])
def test_a_large_jpeg_is_decoded_at_reduced_size_with_the_same_result(
    decoder, monkeypatch, mode, scale
):
    seen = []
    to_rgb, resize = decoding.to_rgb, decoding._resize_into

    def watch_pillow(image):
        image = to_rgb(image)
        seen.append(image.width)
        return image

    def watch_opencv(out, pixels, box, *, flip):
        seen.append(pixels.shape[1])
        resize(out, pixels, box, flip=flip)

    monkeypatch.setattr(decoding, "to_rgb", watch_pillow)
    monkeypatch.setattr(decoding, "_resize_into", watch_opencv)
    image = make_image(7, mode, size=(64 * scale + 5, 64 * scale + 3))
    small = decode(encode(image), Crop(size=48))
    assert len(seen) == 1 and seen[0] <= -(-image.width // scale)  # never in full
    plain = decode(encode(image.convert("RGB"), "PNG"), Crop(size=48))
    assert distance(small, plain).mean() < (8 if mode == "CMYK" else 3)


@needs_simplejpeg
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("scale", [1, 2, 4, 8])
def test_decoding_stops_after_the_crop_with_the_same_pixels(
    monkeypatch, scale, mode, subsampling
):
    content = encode(photo(2, size=(160, 640)).convert(mode), subsampling=subsampling)
    header = parse_jpeg_header(content)
    simplejpeg, decoded = decoding.simplejpeg, []

    class Watched:
        @staticmethod
        def decode_jpeg(*args, **options):
            decoded.append(simplejpeg.decode_jpeg(*args, **options))
            return decoded[-1]

    monkeypatch.setattr(decoding, "simplejpeg", Watched)
    whole = decoding._decode_simplejpeg(content, header, (0, 0, 160, 640), scale)
    for bottom in (8, 40, 104, 248, 520, 600):
        rows = bottom // scale
        part = decoding._decode_simplejpeg(content, header, (0, 0, 160, bottom), scale)
        np.testing.assert_array_equal(part[:rows], whole[:rows])
        assert len(part) <= -(-(bottom + 8) // scale)
    assert len(decoded[0]) == 640 // scale


@needs_simplejpeg
@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"restart_marker_blocks": 3}], ids=str
)
def test_other_jpegs_are_decoded_to_their_end(options):
    content = encode(photo(2, size=(64, 640)), **options)
    header = parse_jpeg_header(content)
    assert len(decoding._decode_simplejpeg(content, header, (0, 0, 64, 40), 1)) == 640


# Crops


@pytest.mark.parametrize(("width", "height"), [(500, 375), (20, 300), (3, 2), (1, 1)])
def test_a_random_box_is_inside_the_image_and_respects_area_and_aspect(width, height):
    for seed in range(300):
        crop = Crop(size=1000)  # nothing is snapped
        left, top, *size = crop.choose_box(width, height, random_draws(seed))
        assert 0 <= left and left + size[0] <= width and size[0] > 0
        assert 0 <= top and top + size[1] <= height and size[1] > 0
        if size == [width, height]:
            continue  # nothing fitted in 10 attempts
        # Sides are rounded to whole pixels.
        assert (size[0] + 0.5) * (size[1] + 0.5) >= 0.05 * width * height
        assert (size[0] + 0.5) / (size[1] - 0.5) >= 3 / 4
        assert (size[0] - 0.5) / (size[1] + 0.5) <= 4 / 3


def test_random_boxes_are_uniform_in_area_and_aspect():
    crop = Crop(size=10_000)
    boxes = [crop.choose_box(1000, 1000, random_draws(seed)) for seed in range(4000)]
    width, height = np.array(boxes)[:, 2:].T
    # Up to 3/4 of the area every aspect fits, so no box is rejected for its size.
    is_small = width * height < 0.75e6
    for values, low, high in (
        (width * height / 1e6, 0.05, 0.75),
        (width / height, 3 / 4, 4 / 3),
    ):
        found = np.sort(values[is_small])
        expected = np.linspace(low, high, len(found))
        assert np.abs(found - expected).max() < 0.04 * (high - low)


def test_random_boxes_are_anywhere_in_the_image():
    crop = Crop(size=1000, area=(0.1, 0.1), aspect=(1.0, 1.0))
    boxes = np.array(
        [crop.choose_box(100, 100, random_draws(seed)) for seed in range(3000)]
    )
    for start in boxes[:, 0], boxes[:, 1]:
        assert set(start) == set(range(100 - 32 + 1))
        assert np.bincount(start, minlength=69).min() > 15


def test_area_and_aspect_can_be_chosen():
    crop = Crop(size=1000, area=(0.25, 0.25), aspect=(1.0, 1.0))
    for seed in range(20):
        assert crop.choose_box(100, 100, random_draws(seed))[2:] == (50, 50)


def test_a_box_that_never_fits_becomes_the_whole_image():
    assert Crop(size=16).choose_box(1, 1000, random_draws(0)) == (0, 0, 1, 1000)


@pytest.mark.parametrize("size", [25, 50, 64])
def test_boxes_are_snapped_to_the_pixels_of_a_reduced_decode(size):
    crop, scales = Crop(size=size), set()
    for seed in range(300):
        draws = random_draws(seed) if seed else None
        left, top, width, height = crop.choose_box(517, 431, draws)
        scale = crop.reduction(width, height)
        scales.add(scale)
        assert all(edge % scale == 0 for edge in (left, top, width, height))
        assert left + width <= 517 and top + height <= 431
        # Never enlarged after the reduction, unless it was too small before.
        assert scale == 1 or min(width, height) // scale >= size
    assert len(scales) > 2


def test_the_center_is_the_middle_seven_eighths_of_the_short_side():
    assert Crop(size=224).choose_box(400, 256, None) == (88, 16, 224, 224)


def test_center_crop_resizes_and_crops_in_one_step():
    image = make_image(3, size=(400, 300))
    in_steps = image.resize((341, 256), Image.Resampling.BILINEAR)
    left, top = (341 - 224) // 2, (256 - 224) // 2
    in_steps = np.asarray(in_steps.crop((left, top, left + 224, top + 224)))
    in_one_step = decode(image, Crop())
    assert in_one_step.shape == (224, 224, 3) and in_one_step.dtype == np.uint8
    assert distance(in_steps, in_one_step).mean() < 1  # half a pixel, on a smooth image


def test_a_crop_has_the_pixels_of_its_box(decoder):
    pixels = np.asarray(photo(1, size=(100, 80)))
    crop = Crop(size=32, area=(0.128, 0.128), aspect=(1.0, 1.0))  # 32 x 32, not resized
    draws = draws_of(0.5, 0.5, 0.4, 0.7)
    left, top, *size = crop.choose_box(100, 80, draws)
    assert size == [32, 32]
    for content in (pixels, encode(Image.fromarray(pixels), "PNG")):
        expected = pixels[top : top + 32, left : left + 32]
        np.testing.assert_array_equal(decode(content, crop, draws), expected)


@pytest.mark.parametrize("size", [200, 60, 16])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_half_of_the_training_images_are_mirrored(decoder, kind, size):
    content = encode(photo(1), kind)
    for flip, is_mirrored in ((0.49, True), (0.5, False)):
        draws = [flip, *random_draws(1)[1:]]
        plain = decode(content, Crop(size=size, flip=False), draws)
        found = decode(content, Crop(size=size), draws)
        np.testing.assert_array_equal(found, plain[:, ::-1] if is_mirrored else plain)
    assert not np.array_equal(plain, plain[:, ::-1])


def test_the_center_is_never_mirrored():
    assert not Crop().is_flipped(None)


def test_training_crops_depend_only_on_the_random_numbers(decoder):
    content = encode(make_image(2, size=(300, 200)))
    first, again, other = (decode(content, SMALL, random_draws(s)) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def read_photographs():
    """Return untouched files of ImageNet, or skip the test."""
    with tarfile.open(real_data("imagenet_small/imagenet_fullsize_125.tar")) as tar:
        return [tar.extractfile(member).read() for member in tar if member.isfile()]


def test_reduced_decoding_of_real_images_is_close_to_full_decoding(decoder):
    for seed, content in enumerate(read_photographs()[::5]):
        fast = decode(content, Crop(size=112), random_draws(seed))
        with Image.open(io.BytesIO(content)) as image:
            plain = decode(image.convert("RGB"), Crop(size=112), random_draws(seed))
        assert distance(fast, plain).mean() < 4  # at most 3.60
        assert np.percentile(distance(fast, plain), 99) <= 20  # at most 19


def test_crops_of_photographs_have_nearly_the_pixels_of_pillow(decoder, monkeypatch):
    differences = []
    for seed, content in enumerate(read_photographs()):
        use(monkeypatch, decoder)
        found = decode(content, Crop(), random_draws(seed))
        use(monkeypatch, "Pillow")
        differences.append(distance(found, decode(content, Crop(), random_draws(seed))))
        monkeypatch.undo()
    # Measured: 0.666; 2.6, 14 and 52 in the worst crops. Over 5,000 crops: docs/images.md.
    assert np.mean(differences) < 0.7
    assert max(crop.mean() for crop in differences) < 2.8
    assert max(np.percentile(crop, 99) for crop in differences) <= 16
    assert np.max(differences) <= 56
