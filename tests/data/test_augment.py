import io
import itertools
import tarfile

import numpy as np
import pytest
from image_files import encode, picture, real_data
from PIL import Image

from millrace.data import augment
from millrace.data.source import ArraySource
from millrace.data.stream import Stream


def generator(seed=0):
    return np.random.default_rng(seed)


def images(count=200, dtype=np.uint8):
    return generator(9).integers(1, 256, (count, 6, 8, 3)).astype(dtype)


def opened(image, kind="JPEG"):
    return Image.open(io.BytesIO(encode(image, kind)))


def test_a_random_flip_mirrors_about_half_of_the_pictures():
    before, after = images(), augment.random_flip(images(), generator())
    same = (after == before).all((1, 2, 3))
    mirrored = (after == before[:, :, ::-1]).all((1, 2, 3))
    assert (same ^ mirrored).all()
    assert 70 < mirrored.sum() < 130
    assert after.dtype == np.uint8


def test_pad_and_crop_moves_each_picture_and_fills_with_zeros():
    before, after = images(), augment.pad_and_crop(images(), generator(), padding=2)
    assert after.shape == before.shape and after.dtype == before.dtype
    padded = np.pad(before, ((0, 0), (2, 2), (2, 2), (0, 0)))
    moves = set()
    for number in range(len(before)):
        fitting = [
            (top, left)
            for top, left in itertools.product(range(5), range(5))
            if (padded[number, top : top + 6, left : left + 8] == after[number]).all()
        ]
        assert len(fitting) == 1
        moves.update(fitting)
    assert len(moves) == 25  # every move occurs among 200


def test_the_same_generator_gives_the_same_pictures_and_another_gives_others():
    source = ArraySource({"image": images(), "label": np.arange(200)})
    transform = augment.on_images(augment.random_flip, augment.pad_and_crop)

    def batches(seed, start):
        stream = Stream(source, 16, seed=seed, transform=transform)
        stream.seek(start)
        return [batch["image"] for batch in itertools.islice(stream, 6 - start)]

    whole, resumed, other = batches(1, 0), batches(1, 4), batches(2, 0)
    np.testing.assert_array_equal(whole[4:], resumed)
    assert not np.array_equal(whole, other)


def test_standardized_pictures_have_mean_0_and_deviation_1():
    result = augment.standardize(images(5))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result.mean((1, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(result.std((1, 2, 3)), 1, rtol=1e-5)
    np.testing.assert_allclose(augment.standardize(images(1)[0]), result[0], atol=1e-6)


def test_an_even_picture_is_standardized_to_zeros():
    np.testing.assert_array_equal(augment.standardize(np.full((2, 4, 4, 3), 77)), 0)


def test_normalizing_is_scaling_then_mean_then_deviation():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    result = augment.normalize(images(4), mean, std)
    assert result.dtype == np.float32
    expected = (images(4) / 255 - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize(("width", "height"), [(500, 375), (20, 300), (3, 2), (1, 1)])
def test_a_random_part_lies_in_the_picture_and_keeps_to_area_and_aspect(width, height):
    random = generator()
    for _ in range(300):
        left, top, right, bottom = augment.random_box(width, height, random)
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        if (right - left, bottom - top) == (width, height):
            continue  # nothing fitted in 100 attempts
        # Sides are rounded to whole pixels.
        area = (right - left + 0.5) * (bottom - top + 0.5)
        assert area >= 0.05 * width * height
        assert (right - left + 0.5) / (bottom - top - 0.5) >= 3 / 4
        assert (right - left - 0.5) / (bottom - top + 0.5) <= 4 / 3


def test_random_parts_spread_evenly_over_the_area():
    random = generator()
    boxes = np.array([augment.random_box(1000, 1000, random) for _ in range(4000)])
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / 1e6
    # Up to 3/4 of the area every aspect fits, so no part is drawn again for its size.
    small = np.sort(area[area < 0.75])
    expected = np.linspace(0.05, 0.75, len(small))
    assert np.abs(small - expected).max() < 0.02


def test_a_part_that_never_fits_is_the_whole_picture():
    assert augment.random_box(1, 1000, generator()) == (0, 0, 1, 1000)


def test_the_centre_crop_is_resizing_and_cropping_in_one():
    image = picture(3, size=(400, 300))
    in_steps = image.resize((341, 256), Image.Resampling.BILINEAR)
    left, top = (341 - 224) // 2, (256 - 224) // 2
    in_steps = in_steps.crop((left, top, left + 224, top + 224))
    in_one = augment.imagenet_image(image, None)
    difference = np.asarray(in_steps).astype(int) - in_one
    assert in_one.shape == (224, 224, 3) and in_one.dtype == np.uint8
    assert np.abs(difference).mean() < 1  # half a pixel of offset, on a smooth picture


def test_the_short_side_can_be_chosen():
    image = picture(3, size=(64, 64))
    whole = augment.centre_crop(image, 32, short_side=32)
    np.testing.assert_array_equal(whole, image.resize((32, 32), Image.Resampling.BILINEAR))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("L", "JPEG"), ("CMYK", "JPEG"), ("L", "PNG"), ("P", "PNG"), ("RGBA", "PNG")],
)
def test_other_modes_become_rgb_and_look_the_same(mode, kind):
    image = picture(5, size=(96, 96))
    expected = image.convert("L").convert("RGB") if mode == "L" else image
    converted = image.quantize(256) if mode == "P" else image.convert(mode)
    read = augment.imagenet_image(opened(converted, kind), None, size=64)
    wanted = augment.imagenet_image(expected, None, size=64)
    assert read.shape == (64, 64, 3)
    assert np.abs(read.astype(int) - wanted).mean() < 8


def test_a_palette_with_transparency_and_sixteen_bits_become_rgb():
    stream = io.BytesIO()
    picture(1).quantize(16).save(stream, "PNG", transparency=bytes(range(16)))
    assert augment.to_rgb(Image.open(stream)).mode == "RGB"
    gray = (np.arange(64 * 64, dtype=np.uint16) * 16).reshape(64, 64)
    read = np.asarray(augment.to_rgb(opened(Image.fromarray(gray), "PNG")))
    np.testing.assert_array_equal(read, np.repeat(gray[:, :, None] >> 8, 3, axis=2))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("scale", [2, 4, 8])
def test_a_large_jpeg_is_decoded_small_with_the_same_result(mode, scale):
    large = picture(7, mode, size=(32 * scale + 5, 32 * scale + 3))
    image = opened(large)
    small = augment.centre_crop(image, 32, short_side=32)
    assert max(image.size) < 32 * 2 + 8  # it was never decoded whole
    plain = augment.centre_crop(
        Image.open(io.BytesIO(encode(large, "JPEG"))).copy(), 32, 32
    )
    difference = np.asarray(small).astype(int) - np.asarray(plain)
    assert np.abs(difference).mean() < 3


def test_training_crops_depend_only_on_the_generator():
    image = encode(picture(2, size=(300, 200)))

    def crop(seed):
        return augment.imagenet_image(
            Image.open(io.BytesIO(image)), generator(seed), size=64
        )

    np.testing.assert_array_equal(crop(1), crop(1))
    assert not np.array_equal(crop(1), crop(2))


def test_real_pictures_at_full_size_are_cropped_close_to_a_plain_decode():
    path = real_data("imagenet_small/imagenet_fullsize_125.tar")
    with tarfile.open(path) as tar:
        members = [member for member in tar if member.isfile()][::5]
        files = [tar.extractfile(member).read() for member in members]
    for seed, content in enumerate(files):
        image = Image.open(io.BytesIO(content))
        fast = augment.imagenet_image(image, generator(seed), size=112)
        decoded = Image.open(io.BytesIO(content))
        decoded.load()  # too late for the decoder to skip anything
        plain = augment.imagenet_image(decoded, generator(seed), size=112)
        assert fast.shape == (112, 112, 3)
        assert np.abs(fast.astype(int) - plain).mean() < 4
