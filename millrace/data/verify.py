"""Compares a dataset on disk with its entry in the catalog."""

from collections.abc import Callable, Iterator

import numpy as np

from millrace.data.catalog import Dataset
from millrace.data.image_source import ImageSource
from millrace.data.packed import PackedImages
from millrace.data.source import ArraySource, Source

_BATCH_SIZE = 64


Progress = Callable[[str, int, int], None]
"""Called with the split, and the samples of it that have been read and will be."""


def verify(
    sources: tuple[Source, Source],
    expected: Dataset,
    *,
    num_samples: int | None = 256,
    progress: Progress = lambda split, done, total: None,
) -> list[str]:
    """Return the differences from the catalog, one sentence each.

    Args:
        sources: Training and validation samples.
        expected: The entry in the catalog.
        num_samples: Samples to read of each split, evenly spaced, if they have to be
            decoded; None reads all, and checks the checksums of packed files. Arrays in
            memory are always checked completely.
        progress: Called several times while samples are read.
    """
    splits = ("training", "validation")
    counts = (expected.num_training, expected.num_validation)
    return [
        difference
        for split, source, count in zip(splits, sources, counts, strict=True)
        for difference in _verify_split(
            split, source, count, expected, num_samples, progress
        )
    ]


def _verify_split(
    split: str,
    source: Source,
    count: int,
    expected: Dataset,
    num_samples: int | None,
    progress: Progress,
) -> Iterator[str]:
    if len(source) != count:
        yield f"{expected.name} has {len(source):,} {split} samples; expected {count:,}."
    differences: dict[str, None] = {}  # each sentence once, in order
    labels, done = [], 0
    total = min(len(source), num_samples or len(source))
    for batch in _batches(source, num_samples):
        done += len(next(iter(batch.values())))
        progress(split, min(done, total), total)
        differences |= dict.fromkeys(_verify_batch(split, batch, expected))
        labels.append(batch.get("label", np.empty(0, np.int32)))
    yield from differences
    label = np.concatenate([np.empty(0, np.int32), *labels])
    if label.size and (label.min() < 0 or label.max() >= expected.num_classes):
        yield (
            f"{split} labels range from {label.min()} to {label.max()}; expected 0 to "
            f"{expected.num_classes - 1}."
        )
    if isinstance(source, PackedImages) and num_samples is None:
        for path in source.damaged_files():
            yield f"{path} is damaged: its checksum does not match."
    if isinstance(source, ImageSource):
        for name, reason in source.corrupt.items():
            yield f"{name} cannot be read: {reason}."


def _batches(source: Source, num_samples: int | None) -> Iterator[dict[str, np.ndarray]]:
    if isinstance(source, ArraySource):
        yield source.arrays
        return
    chosen = np.arange(len(source))
    if num_samples is not None and num_samples < len(source):
        chosen = np.linspace(0, len(source) - 1, num_samples).round().astype(int)
    for first in range(0, len(chosen), _BATCH_SIZE):
        yield source[chosen[first : first + _BATCH_SIZE]]


def _verify_batch(
    split: str, batch: dict[str, np.ndarray], expected: Dataset
) -> Iterator[str]:
    for name, dtype in (("image", "uint8"), ("label", "int32")):
        if name not in batch:
            yield f"{split} samples have no {name}."
        elif batch[name].dtype != dtype:
            yield f"{split} {name}s are {batch[name].dtype}; expected {dtype}."
    if "image" in batch and batch["image"].shape[1:] != expected.image_shape:
        yield (
            f"{split} images have the shape {batch['image'].shape[1:]}; expected "
            f"{expected.image_shape}."
        )
