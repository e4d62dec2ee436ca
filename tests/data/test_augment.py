"""Crops, flips and scaling on the host: correct, and determined by the generator."""

import io
import itertools
import tarfile

import numpy as np
import pytest
from image_files import encode, make_image, real_data
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


def test_random_flip_mirrors_about_half_of_the_images():
    before, after = images(), augment.random_flip(images(), generator())
    same = (after == before).all((1, 2, 3))
    mirrored = (after == before[:, :, ::-1]).all((1, 2, 3))
    assert (same ^ mirrored).all()
    assert 70 < mirrored.sum() < 130
    assert after.dtype == np.uint8


def test_pad_and_crop_shifts_each_image_and_fills_with_zeros():
    before, after = images(), augment.pad_and_crop(images(), generator(), padding=2)
    assert after.shape == before.shape and after.dtype == before.dtype
    padded = np.pad(before, ((0, 0), (2, 2), (2, 2), (0, 0)))
    shifts = set()
    for number in range(len(before)):
        offsets = [
            (top, left)
            for top, left in itertools.product(range(5), range(5))
            if (padded[number, top : top + 6, left : left + 8] == after[number]).all()
        ]
        assert len(offsets) == 1
        shifts.update(offsets)
    assert len(shifts) == 25  # every shift occurs among 200


def test_augmentation_depends_only_on_the_seed_and_the_position():
    source = ArraySource({"image": images(), "label": np.arange(200)})
    transform = augment.map_images(augment.random_flip, augment.pad_and_crop)

    def batches(seed, start):
        stream = Stream(source, 16, seed=seed, transform=transform)
        stream.seek(start)
        return [batch["image"] for batch in itertools.islice(stream, 6 - start)]

    whole, resumed, other = batches(1, 0), batches(1, 4), batches(2, 0)
    np.testing.assert_array_equal(whole[4:], resumed)
    assert not np.array_equal(whole, other)


def test_standardized_images_have_mean_0_and_std_1():
    result = augment.standardize(images(5))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result.mean((1, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(result.std((1, 2, 3)), 1, rtol=1e-5)
    np.testing.assert_allclose(augment.standardize(images(1)[0]), result[0], atol=1e-6)


def test_a_uniform_image_is_standardized_to_zeros():
    np.testing.assert_array_equal(augment.standardize(np.full((2, 4, 4, 3), 77)), 0)


def test_normalize_scales_then_subtracts_the_mean_and_divides_by_the_std():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    result = augment.normalize(images(4), mean, std)
    assert result.dtype == np.float32
    expected = (images(4) / 255 - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize(("width", "height"), [(500, 375), (20, 300), (3, 2), (1, 1)])
def test_a_random_box_is_inside_the_image_and_respects_area_and_aspect(width, height):
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


def test_random_boxes_are_uniform_in_area():
    random = generator()
    boxes = np.array([augment.random_box(1000, 1000, random) for _ in range(4000)])
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / 1e6
    # Up to 3/4 of the area every aspect fits, so no box is rejected for its size.
    small = np.sort(area[area < 0.75])
    expected = np.linspace(0.05, 0.75, len(small))
    assert np.abs(small - expected).max() < 0.02


def test_a_box_that_never_fits_becomes_the_whole_image():
    assert augment.random_box(1, 1000, generator()) == (0, 0, 1, 1000)


def test_center_crop_resizes_and_crops_in_one_step():
    image = make_image(3, size=(400, 300))
    in_steps = image.resize((341, 256), Image.Resampling.BILINEAR)
    left, top = (341 - 224) // 2, (256 - 224) // 2
    in_steps = in_steps.crop((left, top, left + 224, top + 224))
    in_one_step = augment.prepare_image(image, None)
    difference = np.asarray(in_steps).astype(int) - in_one_step
    assert in_one_step.shape == (224, 224, 3) and in_one_step.dtype == np.uint8
    assert np.abs(difference).mean() < 1  # half a pixel of offset, on a smooth image


def test_the_short_side_can_be_chosen():
    image = make_image(3, size=(64, 64))
    whole = augment.center_crop(image, 32, short_side=32)
    np.testing.assert_array_equal(whole, image.resize((32, 32), Image.Resampling.BILINEAR))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("L", "JPEG"), ("CMYK", "JPEG"), ("L", "PNG"), ("P", "PNG"), ("RGBA", "PNG")],
)
def test_other_modes_become_rgb_and_look_the_same(mode, kind):
    image = make_image(5, size=(96, 96))
    expected = image.convert("L").convert("RGB") if mode == "L" else image
    converted = image.quantize(256) if mode == "P" else image.convert(mode)
    read = augment.prepare_image(opened(converted, kind), None, size=64)
    wanted = augment.prepare_image(expected, None, size=64)
    assert read.shape == (64, 64, 3)
    assert np.abs(read.astype(int) - wanted).mean() < 8


def test_transparent_palettes_and_16_bit_images_become_rgb():
    stream = io.BytesIO()
    make_image(1).quantize(16).save(stream, "PNG", transparency=bytes(range(16)))
    assert augment.to_rgb(Image.open(stream)).mode == "RGB"
    gray = (np.arange(64 * 64, dtype=np.uint16) * 16).reshape(64, 64)
    read = np.asarray(augment.to_rgb(opened(Image.fromarray(gray), "PNG")))
    np.testing.assert_array_equal(read, np.repeat(gray[:, :, None] >> 8, 3, axis=2))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("scale", [2, 4, 8])
def test_a_large_jpeg_is_decoded_at_reduced_size_with_the_same_result(mode, scale):
    large = make_image(7, mode, size=(32 * scale + 5, 32 * scale + 3))
    image = opened(large)
    small = augment.center_crop(image, 32, short_side=32)
    assert max(image.size) < 32 * 2 + 8  # it was never decoded in full
    plain = augment.center_crop(
        Image.open(io.BytesIO(encode(large, "JPEG"))).copy(), 32, 32
    )
    difference = np.asarray(small).astype(int) - np.asarray(plain)
    assert np.abs(difference).mean() < 3


def test_training_crops_depend_only_on_the_generator():
    image = encode(make_image(2, size=(300, 200)))

    def crop(seed):
        return augment.prepare_image(
            Image.open(io.BytesIO(image)), generator(seed), size=64
        )

    np.testing.assert_array_equal(crop(1), crop(1))
    assert not np.array_equal(crop(1), crop(2))


def test_reduced_decoding_of_real_images_is_close_to_full_decoding():
    path = real_data("imagenet_small/imagenet_fullsize_125.tar")
    with tarfile.open(path) as tar:
        members = [member for member in tar if member.isfile()][::5]
        files = [tar.extractfile(member).read() for member in members]
    for seed, content in enumerate(files):
        image = Image.open(io.BytesIO(content))
        fast = augment.prepare_image(image, generator(seed), size=112)
        decoded = Image.open(io.BytesIO(content))
        decoded.load()  # too late for the decoder to skip anything
        plain = augment.prepare_image(decoded, generator(seed), size=112)
        assert fast.shape == (112, 112, 3)
        assert np.abs(fast.astype(int) - plain).mean() < 4


def test_flipping_can_be_left_to_the_device():
    image = make_image(0, size=(16, 16))
    crops = [
        augment.prepare_image(image, generator(seed), size=16, flip=flip)
        for flip in (True, False)
        for seed in range(20)
    ]
    pairs = list(zip(crops[:20], crops[20:], strict=True))
    same = [np.array_equal(a, b) for a, b in pairs]
    mirrored = [np.array_equal(a, b[:, ::-1]) for a, b in pairs]
    assert all(s or m for s, m in zip(same, mirrored, strict=True))
    assert 4 <= sum(same) <= 16
