"""Mixup and CutMix against a NumPy implementation."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats
from seed_lines import GRAPHCORE

from millrace.apps.cnn import augment, program
from millrace.apps.cnn.augment import MixDraw, Mixing
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.program import build_loss
from millrace.config import build
from millrace.nn.layers import dense, flatten, init_layers
from millrace.nn.losses import cross_entropy
from millrace.program.training import training_program

HEIGHT, WIDTH, CLASSES = 12, 10, 7
KEY = jax.random.key(5)
IMAGES: Any = types.SimpleNamespace(
    image_shape=(HEIGHT, WIDTH, 3), preprocess=lambda image, key: image
)

draw = jax.jit(augment.draw_mix, static_argnums=(0, 2, 3, 4))
mix_images = jax.jit(augment.mix_images)
mix_labels = jax.jit(augment.mix_labels, static_argnums=(2, 3))


def samples(count):
    random = np.random.default_rng(0)
    images = random.standard_normal((count, HEIGHT, WIDTH, 3)).astype(np.float32)
    return images, random.integers(0, CLASSES, count).astype(np.int32)


def fixed_draw(count, *, mixup=False, cutmix=False):
    random = np.random.default_rng(1)
    shares = random.uniform(0.5, 1, count).astype(np.float32) if mixup else None
    return MixDraw(shares, np.array([2, 9, 0, 4]) if cutmix else None)


def oracle(images, labels, chosen):
    """Blend images and one-hot labels in the same way, sample by sample."""
    count = len(images)
    blended, soft = images.astype(np.float64), np.eye(CLASSES)[labels]
    if chosen.shares is not None:
        m = chosen.shares
        blended = np.stack([m[i] * blended[i] + (1 - m[i]) * blended[i - 1]
                            for i in range(count)])  # fmt: skip
        soft = np.stack([m[i] * soft[i] + (1 - m[i]) * soft[i - 1] for i in range(count)])
    if chosen.box is not None:
        top, bottom, left, right = chosen.box
        back = 2 if count > 2 else 1
        whole, blended = blended, blended.copy()
        for i in range(count):
            blended[i, top:bottom, left:right] = whole[i - back, top:bottom, left:right]
        part = (bottom - top) * (right - left) / (HEIGHT * WIDTH)
        soft = (1 - part) * soft + part * np.stack([soft[i - back] for i in range(count)])
    return blended, soft


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("kinds", [{"mixup": True}, {"cutmix": True},
                                   {"mixup": True, "cutmix": True}], ids=str)  # fmt: skip
def test_images_and_labels_are_blended_in_the_same_way(count, kinds):
    images, labels = samples(count)
    chosen = fixed_draw(count, **kinds)
    blended, soft = oracle(images, labels, chosen)
    np.testing.assert_allclose(mix_images(images, chosen), blended, atol=1e-6)
    parts = mix_labels(labels, chosen, HEIGHT, WIDTH)
    assert len(parts) == 2 ** len(kinds)
    found = sum(share[:, None] * np.eye(CLASSES)[label] for label, share in parts)
    np.testing.assert_allclose(found, soft, atol=1e-6)


def test_mixup_and_cutmix_together_give_four_labels():
    count, m = 5, np.linspace(0.5, 1, 5, dtype=np.float32)
    parts = mix_labels(jnp.arange(count), MixDraw(m, np.array([0, 6, 0, 5])), HEIGHT, WIDTH)
    kept, rolled = 1 - 30 / (HEIGHT * WIDTH), np.roll(m, 2)
    shares = [m * kept, (1 - m) * kept, rolled * (1 - kept), (1 - rolled) * (1 - kept)]
    for (label, share), back, wanted in zip(parts, range(4), shares, strict=True):
        np.testing.assert_array_equal(label, (np.arange(count) - back) % count)
        np.testing.assert_allclose(share, wanted, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_shares_are_the_larger_part_of_a_beta_distribution(alpha):
    shares = np.sort(draw(Mixing(alpha, 1.0), KEY, 20_000, 8, 8).shares)
    assert shares[0] >= 0.5
    # The larger of x and 1 - x is below y with probability F(y) - F(1 - y).
    y, exact = np.linspace(0.5, 0.9999, 500), stats.beta(alpha, alpha)
    found = np.searchsorted(shares, y) / len(shares)
    distance = np.abs(found - (exact.cdf(y) - exact.cdf(1 - y))).max()
    assert distance < 1.6 / len(shares) ** 0.5  # 99 % quantile of Kolmogorov-Smirnov


def test_boxes_are_uniform_and_clipped_at_the_edges():
    every = jax.jit(jax.vmap(lambda key: draw(Mixing(0.0, 0.75), key, 4, 40, 20).box))
    boxes = every(jax.random.split(KEY, 2000))
    top, bottom, left, right = np.asarray(boxes).T
    assert top.min() == left.min() == 0
    assert (bottom.max(), right.max()) == (40, 20)
    assert (bottom - top).max() == 20 and (right - left).max() == 10  # half of each side
    assert (bottom - top).min() < 20  # clipped
    whole = (bottom - top == 20) & (right - left == 10)
    assert 0.15 < whole.mean() < 0.4  # a quarter of the centers is far enough inside
    assert abs((top + bottom).mean() - 40) < 1


def test_the_key_determines_the_draw():
    both = Mixing(0.4, 0.5)
    first, again = (draw(both, KEY, 8, 32, 32) for _ in range(2))
    other = draw(both, jax.random.key(6), 8, 32, 32)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first.shares, other.shares)
    assert draw(Mixing(), KEY, 8, 32, 32) == MixDraw(None, None)


def test_cutmix_keeps_a_share_drawn_from_a_beta_distribution():
    """Boxes inside the image have the drawn area; those at the border are clipped."""
    side = 200
    every = jax.jit(
        jax.vmap(lambda key: draw(Mixing(0.0, 1.0, 1.0), key, 4, side, side).box)
    )
    top, bottom, left, right = np.asarray(every(jax.random.split(KEY, 4000))).T
    inside = (top > 0) & (bottom < side) & (left > 0) & (right < side)
    sides = (bottom - top)[inside] / side
    np.testing.assert_array_equal((bottom - top)[inside], (right - left)[inside])
    # A box of side s has 1 - lambda = s² and fits with probability (1 - s)².
    steps = np.linspace(0, 1, 2001)
    mass = np.cumsum(2 * steps * (1 - steps) ** 2)
    found = stats.kstest(sides, lambda s: np.interp(s, steps, mass / mass[-1]))
    assert found.statistic < 0.04  # sides are whole, even numbers of pixels
    assert ((bottom - top) * (right - left)).max() > 0.8 * side**2


def test_a_micro_batch_gets_mixup_or_cutmix():
    every = jax.jit(
        jax.vmap(lambda key: draw(Mixing(0.2, 1.0, 1.0), key, 4, HEIGHT, WIDTH))
    )
    chosen = every(jax.random.split(KEY, 400))
    box, shares = np.asarray(chosen.box), np.asarray(chosen.shares)
    is_mixup = (shares < 1).any(1)
    assert 150 < is_mixup.sum() < 250
    assert (box[is_mixup] == 0).all() and (box[~is_mixup].sum(1) > 0).mean() > 0.95


def test_accuracy_counts_the_label_with_the_largest_share():
    labels = [(jnp.array([1, 2]), jnp.array([0.3, 0.6])),
              (jnp.array([5, 6]), jnp.array([0.7, 0.4]))]  # fmt: skip
    np.testing.assert_array_equal(program._largest_label(labels), [5, 2])


@pytest.mark.parametrize("over", ["all", "others"])
def test_label_smoothing_spreads_over_all_classes_or_the_others(over):
    logits = np.random.default_rng(0).standard_normal((6, CLASSES)).astype(np.float32)
    labels = np.arange(6) % CLASSES
    s, one_hot = 0.2, np.eye(CLASSES)[labels]
    soft = one_hot * (1 - s) + s / CLASSES
    if over == "others":
        soft = np.where(one_hot > 0, 1 - s, s / (CLASSES - 1))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = -(soft * log_p).sum(-1)
    found = cross_entropy(jnp.array(logits), jnp.array(labels), s, over=over)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_the_loss_is_the_cross_entropy_with_the_blended_labels():
    count, s, over = 6, 0.1, "others"
    config = build(CnnConfig, GRAPHCORE | {
        "micro_batch_size": count, "mixup_alpha": 0.3, "cutmix_lambda": 0.6,
        "label_smoothing": s, "label_smoothing_over": over})  # fmt: skip
    images, labels = samples(count)
    model = [flatten("flatten")]  # the pixels are the logits
    loss_fn = build_loss(config, IMAGES, model)
    loss, (_, info) = jax.jit(lambda *values: loss_fn({}, {}, *values))(
        {"image": images, "label": labels}, KEY
    )
    chosen = draw(Mixing(0.3, 0.6), KEY, count, HEIGHT, WIDTH)
    blended, soft = oracle(images, labels, jax.tree.map(np.asarray, chosen))
    logits = blended.reshape(count, -1)
    soft = np.pad(soft, ((0, 0), (0, logits.shape[1] - CLASSES)))
    classes = logits.shape[1]
    spread = s * classes / (classes - 1)
    soft = (1 - spread) * soft + spread / classes
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert float(loss) == pytest.approx(-(soft * log_p).sum(-1).mean(), rel=1e-5)
    right = (logits.argmax(-1) == labels).mean()
    assert float(info["accuracy"]) == pytest.approx(right)


@pytest.mark.slow
def test_a_pipeline_blends_images_and_labels_in_the_same_way():
    """Images are blended in the first stage, labels in the last."""
    options = {"micro_batch_size": 3, "gradient_accumulation_count": 4}
    config = build(CnnConfig, GRAPHCORE | options | {"cutmix_lambda": 0.4})
    images, labels = samples(12)
    chunk = {
        "image": images.reshape(4, 3, *images.shape[1:]),
        "label": labels.reshape(4, 3),
    }
    model = [flatten("flatten"), dense("hidden", 5), dense("out", CLASSES)]
    params, _ = init_layers(model, KEY, images)
    weights = []
    for splits in ([], ["out"]):
        plan = dataclasses.replace(config.plan, pipeline_splits=splits)
        loss_fn = build_loss(config, IMAGES, model)
        trained = training_program(loss_fn, optax.sgd(0.1), plan)
        staged = jax.device_put(chunk, trained.chunk_sharding)
        state, _ = trained.run(trained.init(params, {}), staged)
        weights.append(trained.unpack_state(state).params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *weights)
    assert not np.allclose(weights[0]["out"]["kernel"], params["out"]["kernel"])
