"""What a trained network takes pictures for: the report's matrix and worst mistakes."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.data import ImageData
from millrace.data.image_source import ImageSource
from millrace.nn.layers import Layer, apply_layers
from millrace.program.compiling import jit
from millrace.program.mixed_precision import narrow
from millrace.program.step import Weights
from millrace.report.sections import Confusion, Gallery, png_of, save_part
from millrace.run.run import Run

MOST_SAMPLES = 10_000
"""Validation samples that are looked at; of more, some evenly spaced."""
NUM_MISTAKES = 24

_NAMES = {
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck".split(),
    "fashion-mnist": [
        *("T-shirt", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ],
}

Predict = Callable[[Any, Any, Any], tuple[jax.Array, jax.Array]]


class Mistake(NamedTuple):
    """A sample that was taken for something else, and how sure the network was."""

    confidence: float
    true: int
    taken: int
    image: np.ndarray


class Predictions(NamedTuple):
    """What validation samples were taken for."""

    counts: Counter[tuple[int, int]]
    """How often, by true class and the class taken for."""
    mistakes: list[Mistake]
    """The most confident ones, those first."""


def report_predictions(
    config: CnnConfig, run: Run, images: ImageData, model: list[Layer], state: Any
) -> None:
    """Look at the validation samples once more, for the report; random ones tell nothing.

    Args:
        config: The run's.
        run: Whose report receives the pictures.
        images: The data set.
        model: The network.
        state: Has its weights, `params` and `model_state`.
    """
    weights = on_host(Weights(state.params, state.model_state))
    if not config.validation or config.synthetic or weights is None or jax.process_index():
        return
    run.console.status("looking at mistakes")
    predictions = predict_samples(
        prediction_of(model, images, config.types.compute),
        weights,
        images.validation,
        min(config.validation_micro_batch_size or config.micro_batch_size, MOST_SAMPLES),
    )
    names = class_names(images, config.resolved_dataset)
    keep_predictions(run.directory.path, predictions, names, len(images.validation))


def prediction_of(model: list[Layer], images: ImageData, compute: str) -> Predict:
    """Return what names each picture of a batch, and how sure it is."""

    @jit
    def predict(params: Any, model_state: Any, image: Any) -> tuple[jax.Array, jax.Array]:
        image = images.prepare(narrow(image, compute), None)
        logits, _ = apply_layers(
            model, narrow(params, compute), model_state, image, training=False
        )
        shares = jax.nn.softmax(logits.astype(jnp.float32))
        return shares.argmax(-1), shares.max(-1)

    return predict


def predict_samples(
    predict: Predict, weights: Any, source: Any, batch_size: int
) -> Predictions:
    """Compare what validation samples are with what they are taken for."""
    counts: Counter[tuple[int, int]] = Counter()
    mistakes: list[Mistake] = []
    weights = jax.device_put(weights, jax.local_devices()[0])
    for counted, batch in _batches(source, batch_size):
        image = jax.device_put(batch["image"], jax.local_devices()[0])
        found = jax.device_get(predict(weights.params, weights.model_state, image))
        for place in counted:
            true, taken = int(batch["label"][place]), int(found[0][place])
            counts[true, taken] += 1
            if true != taken:
                sure = float(found[1][place])
                mistakes.append(Mistake(sure, true, taken, batch["image"][place]))
        mistakes = sorted(mistakes, key=lambda m: -m.confidence)[:NUM_MISTAKES]
    return Predictions(counts, mistakes)


def _batches(source: Any, batch_size: int) -> Iterator[tuple[list[int], Any]]:
    """Yield the places that count in a batch, and the batch.

    What only fills up the last one, or stands in for an unreadable sample, does not.
    """
    number = min(len(source), MOST_SAMPLES)
    some = np.linspace(0, len(source) - 1, number).round().astype(int)
    for start in range(0, number, batch_size):
        indices = some[start : start + batch_size]
        filled = np.pad(indices, (0, batch_size - len(indices)), mode="edge")
        batch = source[filled]
        is_good = np.ones(len(indices), bool)
        if isinstance(source, ImageSource):
            is_good = ~source.unreadable(indices)
        yield np.flatnonzero(is_good).tolist(), batch


def keep_predictions(
    run: Path, predictions: Predictions, names: list[str], num_samples: int
) -> None:
    """Add the matrix and the mistakes to a run's report."""
    looked = sum(predictions.counts.values())
    wrong = sum(n for (true, taken), n in predictions.counts.items() if true != taken)
    of = f" of {num_samples:,}" if looked < num_samples else ""
    note = f"{wrong:,} of {looked:,} validation samples{of} were mistaken."
    counts = [[*place, number] for place, number in sorted(predictions.counts.items())]
    matrix = Confusion(title="Confusion matrix", note=note, names=names, counts=counts)
    save_part(run, "1-confusion", matrix)
    pictures = [
        {
            "png": png_of(_displayed(mistake.image)),
            "caption": f"{names[mistake.true]}, taken for {names[mistake.taken]} "
            f"({mistake.confidence:.0%})",
        }
        for mistake in predictions.mistakes
    ]
    gallery = Gallery(title="Most confident mistakes", pictures=pictures)
    save_part(run, "2-mistakes", gallery)


def _displayed(image: np.ndarray) -> np.ndarray:
    """Bring a picture from the range that networks want to bytes, at least 64 wide."""
    values = np.asarray(image, np.float32)
    low, high = values.min(), values.max()
    values = (values - low) / (high - low if high > low else 1.0) * 255
    factor = max(1, 64 // values.shape[1])
    return values.round().astype(np.uint8).repeat(factor, 0).repeat(factor, 1)


def class_names(images: ImageData, dataset: str) -> list[str]:
    """Return what the classes are called, or their numbers."""
    known = getattr(images.training, "classes", None) or _NAMES.get(dataset)
    return list(known or map(str, range(images.num_classes)))


def on_host(weights: Any) -> Any | None:
    """Return weights that this process can read in whole; None if it cannot."""
    leaves = jax.tree.leaves(weights)
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        return jax.device_get(weights)
    if all(leaf.is_fully_replicated for leaf in leaves):
        return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), weights)
    return None
