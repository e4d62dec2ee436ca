"""Predictions of a trained model for the report: confusion matrix, worst mistakes."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.data import ImageData
from millrace.apps.cnn.evaluate import validation_batch_size
from millrace.data.image_source import ImageSource
from millrace.nn.layers import Layer, apply_layers
from millrace.program.compiling import jit
from millrace.program.mixed_precision import narrow
from millrace.program.step import Weights
from millrace.report.sections import Confusion, Gallery, encode_png, save_section
from millrace.run.run import Run

MAX_SAMPLES = 10_000
"""Validation samples to classify; from a larger set, that many evenly spaced ones."""
NUM_MISTAKES = 24

_CLASS_NAMES = {
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck".split(),
    "fashion-mnist": [
        *("T-shirt", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ],
}

Predict = Callable[[Any, Any, Any], tuple[jax.Array, jax.Array]]
"""``(params, model_state, images)``: returns predicted classes and confidences."""


class Mistake(NamedTuple):
    """A misclassified sample."""

    confidence: float
    true: int
    predicted: int
    image: np.ndarray


class Predictions(NamedTuple):
    """The predictions for validation samples."""

    counts: Counter[tuple[int, int]]
    """Number of samples by true and predicted class."""
    mistakes: list[Mistake]
    """The most confident mistakes, in descending order."""


def report_predictions(
    config: CnnConfig, run: Run, images: ImageData, model: list[Layer], state: Any
) -> None:
    """Classify validation samples, unless synthetic, and add the results to the report."""
    weights = _fetch_weights(Weights(state.params, state.model_state))
    is_synthetic = config.data.synthetic is not None
    if not config.workflow.validation or is_synthetic or weights is None:
        return
    if jax.process_index():  # one process writes the report
        return
    run.console.status("finding the worst mistakes")
    predictions = _predict_samples(
        _build_predict(model, images, config.plan.types.compute),
        weights,
        images.validation,
        min(validation_batch_size(config), MAX_SAMPLES),
    )
    names = class_names(images, config.resolved_dataset)
    _save_predictions(run.directory.path, predictions, names, len(images.validation))


def _build_predict(model: list[Layer], images: ImageData, compute: str) -> Predict:
    @jit
    def predict(
        params: Any,
        model_state: Any,
        image: Any,  # (batch, height, width, channels)
    ) -> tuple[jax.Array, jax.Array]:
        image = images.preprocess(narrow(image, compute), None)
        logits, _ = apply_layers(
            model, narrow(params, compute), model_state, image, training=False
        )
        probabilities = jax.nn.softmax(logits.astype(jnp.float32))
        return probabilities.argmax(-1), probabilities.max(-1)

    return predict


def _predict_samples(
    predict: Predict, weights: Any, source: Any, batch_size: int
) -> Predictions:
    counts: Counter[tuple[int, int]] = Counter()
    mistakes: list[Mistake] = []
    device = jax.local_devices()[0]
    weights = jax.device_put(weights, device)
    for counted, batch in _batches(source, batch_size):
        image = jax.device_put(batch["image"], device)
        classes, confidences = jax.device_get(
            predict(weights.params, weights.model_state, image)
        )
        for place in counted:
            true, predicted = int(batch["label"][place]), int(classes[place])
            counts[true, predicted] += 1
            if true != predicted:
                shown = batch["image"][place]
                mistakes.append(Mistake(float(confidences[place]), true, predicted, shown))
        mistakes = sorted(mistakes, key=lambda m: -m.confidence)[:NUM_MISTAKES]
    return Predictions(counts, mistakes)


def _batches(source: Any, batch_size: int) -> Iterator[tuple[list[int], Any]]:
    """Yield batches of one size, each after the positions in it that count.

    Padding of the last batch and replacements of unreadable samples do not count.
    """
    number = min(len(source), MAX_SAMPLES)
    chosen = np.linspace(0, len(source) - 1, number).round().astype(int)
    for start in range(0, number, batch_size):
        indices = chosen[start : start + batch_size]
        padded = np.pad(indices, (0, batch_size - len(indices)), mode="edge")
        batch = source[padded]
        counts = np.ones(len(indices), bool)
        if isinstance(source, ImageSource):
            counts = ~source.is_corrupt(indices)
        yield np.flatnonzero(counts).tolist(), batch


def _save_predictions(
    run: Path, predictions: Predictions, names: list[str], num_samples: int
) -> None:
    """Add the confusion matrix and the worst mistakes to the report of a run."""
    total = sum(predictions.counts.values())
    wrong = sum(n for (true, guess), n in predictions.counts.items() if true != guess)
    of_all = f" of {num_samples:,}" if total < num_samples else ""
    note = f"{wrong:,} of {total:,} validation samples{of_all} were misclassified."
    counts = [[*place, number] for place, number in sorted(predictions.counts.items())]
    matrix = Confusion(title="Confusion matrix", note=note, names=names, counts=counts)
    save_section(run, "1-confusion", matrix)
    pictures = [
        {
            "png": encode_png(_for_display(mistake.image)),
            "caption": f"{names[mistake.true]}, predicted {names[mistake.predicted]} "
            f"({mistake.confidence:.0%})",
        }
        for mistake in predictions.mistakes
    ]
    gallery = Gallery(title="Most confident mistakes", pictures=pictures)
    save_section(run, "2-mistakes", gallery)


def _for_display(
    image: np.ndarray,  # (height, width, channels)
) -> np.ndarray:
    """Rescale an image to bytes, and enlarge it to about 64 pixels."""
    values = np.asarray(image, np.float32)
    low, high = values.min(), values.max()
    values = (values - low) / (high - low if high > low else 1.0) * 255
    factor = max(1, 64 // values.shape[1])
    return values.round().astype(np.uint8).repeat(factor, 0).repeat(factor, 1)


def class_names(images: ImageData, dataset: str) -> list[str]:
    """Return the names of the classes, or their numbers if they have none."""
    known = getattr(images.training, "classes", None) or _CLASS_NAMES.get(dataset)
    return list(known or map(str, range(images.num_classes)))


def _fetch_weights(weights: Any) -> Any | None:
    """Copy weights to the host; return None if this process has only a part of them."""
    leaves = jax.tree.leaves(weights)
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        return jax.device_get(weights)
    if all(leaf.is_fully_replicated for leaf in leaves):
        return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), weights)
    return None
