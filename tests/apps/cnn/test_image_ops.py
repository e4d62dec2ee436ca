"""The operations of RandAugment and TrivialAugment against Pillow, and their choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats
from sklearn.datasets import load_sample_image

from millrace.apps.cnn import auto_augment, image_ops
from millrace.apps.cnn.auto_augment import OPERATIONS, Choice

HEIGHT, WIDTH = 36, 48
KEY = jax.random.key(3)
EXACT = {
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate"),
    *("posterize", "solarize", "equalize"),
}
apply_operation = jax.jit(auto_augment.apply_operation)
color_jitter = jax.jit(auto_augment.color_jitter, static_argnums=2)


def sample_images():
    """A photograph, noise, noise with few values, and a uniform image."""
    photo = Image.fromarray(load_sample_image("flower.jpg")).resize((WIDTH, HEIGHT))
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    return [np.asarray(photo), noise, noise // 5 + 60, np.full_like(noise, 77)]


def with_pillow(name, pixels, magnitude):
    """Apply an operation as torchvision does to a Pillow image."""
    gray = pixels.shape[-1] == 1
    image = Image.fromarray(pixels[..., 0] if gray else pixels)
    moved = int(magnitude)
    matrices = {
        "shear_x": (1, magnitude, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, magnitude, 1, 0),
        "translate_x": (1, 0, -moved, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, -moved),
    }
    nearest = Image.Resampling.NEAREST
    if name in matrices:
        affine = Image.Transform.AFFINE
        image = image.transform(image.size, affine, matrices[name], nearest)
    elif name == "rotate":
        image = image.rotate(magnitude, nearest)
    elif name in ("brightness", "color", "contrast", "sharpness"):
        image = getattr(ImageEnhance, name.capitalize())(image).enhance(1 + magnitude)
    elif name == "posterize":
        image = ImageOps.posterize(image, moved)
    elif name == "solarize":
        image = ImageOps.solarize(image, magnitude)
    elif name in ("autocontrast", "equalize"):
        image = getattr(ImageOps, name)(image)
    return np.asarray(image).reshape(pixels.shape)


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment"])
def test_every_operation_gives_the_pixels_of_pillow(policy, channels):
    """Exactly; where Pillow rounds down a float, 1 level off in at most 2 % of values."""
    table = auto_augment.magnitude_table(policy, HEIGHT, WIDTH)
    cases = [
        (number, sign * table[number, level], pixels[..., :channels])
        for number in range(len(OPERATIONS))
        for level in (0, 1, 9, 17, 30)
        for sign in ((1, -1) if auto_augment.SIGNED[number] else (1,))
        for pixels in sample_images()
    ]
    numbers, magnitudes, images = (np.stack(column) for column in zip(*cases, strict=True))
    found = np.asarray(apply_operation(images, Choice(numbers, magnitudes)))
    for index, (number, magnitude, pixels) in enumerate(cases):
        wanted = with_pillow(OPERATIONS[number], pixels, float(magnitude))
        off = np.abs(found[index].astype(int) - wanted)
        case = (OPERATIONS[number], magnitude)
        assert off.max() <= (0 if OPERATIONS[number] in EXACT else 1), case
        assert (off > 0).mean() <= 0.02, case


def test_both_ways_of_counting_values_agree_with_numpy():
    images = np.stack(sample_images())
    wanted = [
        [np.bincount(image[..., n].ravel(), minlength=256) for n in range(3)]
        for image in images
    ]
    for count in (image_ops._count_by_scatter, image_ops._count_by_product):
        np.testing.assert_array_equal(jax.jit(count)(images), wanted)


def test_operations_follow_one_another():
    image = np.stack(sample_images()[:1])
    choices = [("rotate", 20.0), ("solarize", 100.0), ("shear_x", -0.2)]
    numbers = [[OPERATIONS.index(name)] for name, _ in choices]
    magnitudes = [[magnitude] for _, magnitude in choices]
    given = Choice(jnp.array(numbers), jnp.array(magnitudes))
    wanted = image[0]
    for name, magnitude in choices:
        wanted = with_pillow(name, wanted, magnitude)
    np.testing.assert_array_equal(
        jax.jit(auto_augment.apply_operations)(image, given)[0], wanted
    )


# Magnitudes and choices

PUBLISHED = {
    # In torchvision, with 31 magnitudes: those with the numbers 0, 9 and 30.
    "randaugment": {
        "identity": (0, 0, 0), "shear_x": (0, 0.09, 0.3), "shear_y": (0, 0.09, 0.3),
        "translate_x": (0, 30.453, 101.51), "translate_y": (0, 30.453, 101.51),
        "rotate": (0, 9, 30), "brightness": (0, 0.27, 0.9), "color": (0, 0.27, 0.9),
        "contrast": (0, 0.27, 0.9), "sharpness": (0, 0.27, 0.9), "posterize": (8, 7, 4),
        "solarize": (255, 178.5, 0), "autocontrast": (0, 0, 0), "equalize": (0, 0, 0),
    },
    "trivialaugment": {
        "identity": (0, 0, 0), "shear_x": (0, 0.297, 0.99), "shear_y": (0, 0.297, 0.99),
        "translate_x": (0, 9.6, 32), "translate_y": (0, 9.6, 32), "rotate": (0, 40.5, 135),
        "brightness": (0, 0.297, 0.99), "color": (0, 0.297, 0.99),
        "contrast": (0, 0.297, 0.99), "sharpness": (0, 0.297, 0.99),
        "posterize": (8, 6, 2), "solarize": (255, 178.5, 0), "autocontrast": (0, 0, 0),
        "equalize": (0, 0, 0),
    },
}  # fmt: skip


@pytest.mark.parametrize("policy", PUBLISHED)
def test_magnitudes_are_the_published_ones(policy):
    table = auto_augment.magnitude_table(policy, 224, 224)
    wanted = [PUBLISHED[policy][name] for name in OPERATIONS]
    np.testing.assert_allclose(table[:, [0, 9, 30]], wanted, rtol=1e-4)


def test_trivialaugment_moves_small_images_by_at_most_their_side():
    table = auto_augment.magnitude_table("trivialaugment", 8, 28)
    assert table[OPERATIONS.index("translate_y"), 30] == 8
    assert table[OPERATIONS.index("translate_x"), 30] == 28


@pytest.mark.parametrize("policy", PUBLISHED)
def test_operations_signs_and_magnitudes_are_uniformly_random(policy):
    count = 14_000
    choose = jax.jit(
        lambda key: auto_augment.choose_operations(
            policy, key, magnitude=9, shape=(count, 32, 32, 3), num_ops=2
        )
    )
    choices = choose(KEY)
    operations, values = (np.asarray(part) for part in choices)
    assert operations.shape == (2, count)
    table = auto_augment.magnitude_table(policy, 32, 32)
    counts = np.stack([np.bincount(row, minlength=14) for row in operations])
    assert stats.chisquare(counts.ravel()).pvalue > 1e-3
    joint = np.bincount(14 * operations[0] + operations[1], minlength=196)
    assert stats.chisquare(joint).pvalue > 1e-3  # the operations of a sample differ
    for number in range(14):
        drawn = values[operations == number]
        if policy == "randaugment":
            np.testing.assert_allclose(np.abs(drawn), table[number, 9])
        elif number == OPERATIONS.index("rotate"):
            levels = np.round(np.abs(drawn) / 4.5).astype(int)
            assert stats.chisquare(np.bincount(levels, minlength=31)).pvalue > 1e-3
        share = (drawn < 0).mean()
        assert abs(share - 0.49) < 0.05 if auto_augment.SIGNED[number] else share == 0


# Color jitter and erasing


def test_color_jitter_multiplies_brightness_by_uniform_factors():
    """Contrast and saturation do not change a uniform gray image."""
    gray = np.full((2000, 4, 4, 3), 100, np.uint8)
    changed = np.asarray(
        jax.jit(auto_augment.color_jitter, static_argnums=2)(gray, KEY, 0.4)
    )
    assert (changed == changed[:, :1, :1, :1]).all()
    levels = changed[:, 0, 0, 0] + 0.5
    assert stats.kstest((levels - 60) / 80, "uniform").pvalue > 1e-3


def test_color_jitter_changes_contrast_and_saturation_in_any_order():
    image = np.zeros((200, 2, 2, 3), np.uint8)
    image[:, 0] = (200, 100, 50)
    image[:, 1] = (50, 40, 60)
    changed = np.asarray(color_jitter(image, KEY, 0.5)).astype(int)
    spread = changed[:, 0, 0].max(-1) - changed[:, 0, 0].min(-1)
    assert spread.min() < 60 and spread.max() > 200  # 150 in the original
    brightness = changed.sum(-1)
    contrast = brightness[:, 0, 0] / np.maximum(1, brightness[:, 1, 0])
    assert contrast.min() < 1.8 and contrast.max() > 3.5  # 2.33 in the original
    one_channel = color_jitter(image[..., :1], KEY, 0.5)
    assert one_channel.shape == (200, 2, 2, 1)


def test_erasing_has_the_probability_area_and_aspect_of_torchvision():
    count, side = 4000, 100
    images = np.ones((count, side, side, 1), np.float32)
    erase = jax.jit(auto_augment.random_erasing, static_argnums=2)
    erased = np.asarray(erase(images, KEY, 0.25))[..., 0] == 0
    areas = erased.sum((1, 2)) / side**2
    hit = areas > 0
    assert abs(hit.mean() - 0.25) < 0.03
    rows, columns = erased.any(2).sum(1)[hit], erased.any(1).sum(1)[hit]
    np.testing.assert_array_equal(rows * columns, erased.sum((1, 2))[hit])  # rectangles
    assert stats.kstest((areas[hit] - 0.02) / (1 / 3 - 0.02), "uniform").pvalue > 1e-3
    ratio = np.log(rows / columns) / -np.log(0.3)
    assert stats.kstest((ratio + 1) / 2, "uniform").pvalue > 1e-3
    borders = (erased[:, 0], erased[:, -1], erased[:, :, 0], erased[:, :, -1])
    assert all(border.any() for border in borders)
    np.testing.assert_array_equal(erase(images[:5], KEY, 0.0), images[:5])
