"""How training batches reach the devices, and which samples could not be read."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.data import ImageData, synthetic_preparation
from millrace.data.parallel import ParallelStream
from millrace.data.source import PIXEL_MEAN, PIXEL_STD, PIXEL_TRUNCATION
from millrace.feeds.device import ResidentDataset
from millrace.feeds.infeed import Infeed
from millrace.run.run import Run

_MAX_NAMES_SHOWN = 3


def open_infeed(images: ImageData, config: CnnConfig, batches_per_epoch: int) -> Infeed:
    """Return the training batches, on their way to the devices or there already."""
    samples = config.batching.samples_per_step
    if config.synthetic == "device":
        generate = functools.partial(_generate, images, config, samples)
        return Infeed(ResidentDataset(generate))
    stream = images.stream(
        samples,
        batches_per_epoch=batches_per_epoch,
        seed=config.seed,
        shuffle=config.shuffle,
    )
    return Infeed(
        ParallelStream(stream, config.pipeline_num_parallel),
        prefetch_depth=config.prefetch_depth,
    )


def _generate(images: ImageData, config: CnnConfig, samples: int, count: int) -> Any:
    """Make batches of random samples on the device, as `SyntheticImages` on the host.

    They are made once, before the loop: what is measured is the network and not the
    generator.
    """
    pixel_key, label_key = jax.random.split(jax.random.key(config.seed))
    shape = (count, samples)
    limit = PIXEL_TRUNCATION
    image = jax.random.truncated_normal(
        pixel_key, -limit, limit, (*shape, *images.image_shape)
    )
    image = PIXEL_MEAN + PIXEL_STD * image
    label = jax.random.randint(label_key, shape, 0, images.num_classes)
    wire = images.training[np.arange(1)]["image"].dtype
    if not config.accelerator_side_preprocess:
        scale = synthetic_preparation(config).scale_on_device
        image = scale(image.reshape(-1, *images.image_shape)).reshape(image.shape)
    return {"image": image.astype(wire), "label": label}


def announce(images: ImageData, config: CnnConfig, run: Run) -> None:
    """Say what a user should know of the data before training starts."""
    if images.warning is not None:
        run.console.warning(images.warning)
    if config.skips_validation:
        run.console.line(
            "Validation is skipped: the pictures are random. --validation True validates "
            "all the same."
        )


@contextlib.contextmanager
def corrupt_samples_reported(images: ImageData, run: Run) -> Iterator[None]:
    """At the end, whatever it is, say which samples could not be read."""
    run.summary["corrupt_samples"] = {}
    try:
        yield
    finally:
        run.summary["corrupt_samples"] = corrupt = images.corrupt
        if corrupt:
            names = list(corrupt)
            shown = ", ".join(names[:_MAX_NAMES_SHOWN])
            more = len(names) - _MAX_NAMES_SHOWN
            run.console.warning(
                f"{len(names)} samples could not be read, and others took their place: "
                f"{shown}{f' and {more} more (see summary.json)' if more > 0 else ''}."
            )
