"""``millrace cnn verify-dataset``: what is there, and what is not as it should be."""

import dataclasses

from millrace.apps.cnn import data
from millrace.apps.cnn.config.datasets import VerifyDatasetConfig
from millrace.apps.cnn.data import ImageData
from millrace.data.catalog import CATALOG, Dataset
from millrace.data.source import DatasetError
from millrace.data.verify import verify


def verify_dataset(config: VerifyDatasetConfig) -> int:
    """Print every mismatch; return 1 if there are any."""
    training = config.training
    try:
        images = data.load(training)
        print(data.describe(images, training))
        expected = _expected(training.resolved_dataset, images)
        mismatches = [images.warning] if images.warning else []
        if images.num_classes != expected.num_classes:
            mismatches.append(
                f"{expected.name} has {images.num_classes} classes; expected "
                f"{expected.num_classes}."
            )
        mismatches += verify(
            (images.training, images.validation),
            expected,
            num_samples=config.num_samples or None,
        )
    except DatasetError as error:  # so wrong that the rest cannot be read
        mismatches = [str(error)]
    for mismatch in mismatches:
        print(f"mismatch: {mismatch}")
    if not mismatches:
        print("Everything is as it should be.")
    return 1 if mismatches else 0


def _expected(name: str, images: ImageData) -> Dataset:
    """Return the published sizes or, for anyone's own pictures, those that are there."""
    if name in CATALOG:
        return CATALOG[name]
    return dataclasses.replace(
        CATALOG["imagenet"],
        name=name,
        num_training=len(images.training),
        num_validation=len(images.validation),
        num_classes=images.num_classes,
    )
