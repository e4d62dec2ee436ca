"""Images for training and validation, and where they are prepared.

With accelerator-side preprocessing the host only gathers samples, and the device scales,
crops and flips them as the first thing in the compiled loop; otherwise the host does it
all, in the same order.
"""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.preprocessing import Preparation, as_float, preparation
from millrace.data import augment, cifar, mnist
from millrace.data.catalog import CATALOG, DatasetNotFound, download_folder
from millrace.data.image_source import ImageSource
from millrace.data.imagenet import ImageSplits, load_image_folder, load_imagenet
from millrace.data.source import ArraySource, SyntheticImages
from millrace.data.stream import Stream

T = TypeVar("T")

_ARRAYS: dict[str, Callable[[Any], tuple[ArraySource, ArraySource]]] = {
    "digits": lambda _: mnist.load_digits(),
    "mnist": mnist.load_mnist,
    "fashion-mnist": mnist.load_fashion_mnist,
    "cifar10": cifar.load_cifar10,
    "cifar100": cifar.load_cifar100,
}
_PICTURES: dict[str, Callable[..., ImageSplits]] = {
    "imagenet": load_imagenet,
    "imagefolder": load_image_folder,
}


class ImageData(NamedTuple):
    """A data set, and what is done to its images on either side of the infeed."""

    training: Any
    validation: Any
    """None where a folder has none and none is needed."""
    num_classes: int
    image_shape: tuple[int, int, int]
    transform: Callable[[Any, np.random.Generator], Any] | None
    """On the host, for each training batch; None where it has nothing to do."""
    prepare: Callable[[jax.Array, jax.Array | None], jax.Array]
    """On the device: ``(images, key)``; the key is None in validation."""
    folder: Path | None = None
    """Where the files were found, if there are any."""
    warning: str | None = None
    """What is odd about the files, if anything."""

    def stream(self, batch_size: int, **options: Any) -> Stream:
        """Return training batches without end; `options` are those of `Stream`."""
        if isinstance(self.training, ImageSource):
            return self.training.stream(batch_size, **options)
        return Stream(self.training, batch_size, transform=self.transform, **options)

    @property
    def corrupt(self) -> dict[str, str]:
        """The samples found unreadable so far, by name, with what is wrong."""
        sources = (self.training, self.validation)
        found = [s.corrupt for s in sources if isinstance(s, ImageSource)]
        return functools.reduce(lambda some, more: some | more, found, {})


def load(config: CnnConfig) -> ImageData:
    """Load the data set that the configuration names, or make it up."""
    name = config.resolved_dataset
    if config.synthetic:
        return _synthetic(name, config)
    steps = preparation(name, normalize=config.normalize_input)
    if name in _PICTURES:
        return _pictures(name, config, steps)
    (training, validation), folder = _find(name, config, _ARRAYS[name])
    loaded = ImageData(
        training,
        validation,
        CATALOG[name].num_classes,
        CATALOG[name].image_shape,
        None,
        _on_device(steps, config),
        folder if CATALOG[name].files else None,
    )
    if config.eight_bit_transfer:
        return loaded
    travels = _on_wire(steps, config)
    at_random = () if config.accelerator_side_preprocess else steps.augment_on_host
    return loaded._replace(
        validation=_Prepared(validation, travels),
        transform=augment.map_images(
            augment.by_sample(lambda image, _: travels(image)), *at_random
        ),
    )


def _find(name: str, config: CnnConfig, load_from: Callable[[Path], T]) -> tuple[T, Path]:
    """Load from the folder given or, where it has no such data set, from the cache."""
    given = config.dataset_path
    try:
        return load_from(given), given
    except DatasetNotFound as error:
        # The references keep imagenet-data among other data sets.
        inside = [given / "imagenet-data"] if name == "imagenet" else []
        for folder in (*inside, download_folder(name)):
            with contextlib.suppress(DatasetNotFound):
                return load_from(folder), folder
        raise error


def _pictures(name: str, config: CnnConfig, steps: Preparation) -> ImageData:
    """Return pictures, each decoded, cropped and scaled in the thread that reads it."""
    size = config.resolved_image_size
    on_device = config.accelerator_side_preprocess
    travels = _on_wire(steps, config)

    def prepare(image: Any, generator: np.random.Generator | None) -> np.ndarray:
        pixels = augment.prepare_image(image, generator, size=size, flip=not on_device)
        return pixels if config.eight_bit_transfer else travels(pixels)

    options = {
        "prepare": prepare,
        "max_corrupt": config.max_corrupt,
        "needs_validation": config.validation,
    }
    found, folder = _find(name, config, functools.partial(_PICTURES[name], **options))
    return ImageData(
        found.training,
        found.validation,
        found.num_classes,
        (size, size, 3),
        None,
        _on_device(steps, config),
        folder,
        found.warning,
    )


def _synthetic(name: str, config: CnnConfig) -> ImageData:
    """Return random samples in the form that travels, as many as the real set has."""
    known = CATALOG["imagenet" if name in _PICTURES else name]
    steps = synthetic_preparation(config)
    shape = known.image_shape
    if name in _PICTURES:
        shape = (config.resolved_image_size, config.resolved_image_size, 3)
    training, validation = (
        SyntheticImages(
            count,
            shape,
            known.num_classes,
            prepare=None if config.eight_bit_transfer else _on_wire(steps, config),
            seed=config.seed,
        )
        for count in (known.num_training, known.num_validation)
    )
    device = _on_device(steps, config)
    return ImageData(training, validation, known.num_classes, shape, None, device)


def describe(images: ImageData, config: CnnConfig) -> str:
    """Name the data set and its sizes in a line."""
    about = f" (synthetic, made on the {config.synthetic})" if config.synthetic else ""
    if images.folder is not None:
        about = f" from {images.folder.resolve()}"
    held_out = 0 if images.validation is None else len(images.validation)
    return (
        f"{config.resolved_dataset}{about}, {len(images.training):,} training and "
        f"{held_out:,} validation samples, {images.num_classes} classes"
    )


def synthetic_preparation(config: CnnConfig) -> Preparation:
    """Return what is done to random bytes; those of real digits end at 16."""
    dataset = config.resolved_dataset
    like = "mnist" if dataset == "digits" else dataset
    return preparation(like, normalize=config.normalize_input)


def _on_wire(steps: Preparation, config: CnnConfig) -> Callable[[np.ndarray], np.ndarray]:
    return as_float if config.accelerator_side_preprocess else steps.scale_on_host


def _on_device(
    steps: Preparation, config: CnnConfig
) -> Callable[[jax.Array, jax.Array | None], jax.Array]:
    def prepare(image: jax.Array, key: jax.Array | None) -> jax.Array:
        if not config.accelerator_side_preprocess:
            return image
        image = steps.scale_on_device(image)
        if key is not None and steps.augment_on_device is not None:
            image = steps.augment_on_device(image, key)
        return image.astype(jnp.dtype(config.types.compute))

    return prepare


class _Prepared:
    """A source whose images are brought into the form that travels."""

    def __init__(self, source: Any, function: Callable[[np.ndarray], np.ndarray]) -> None:
        self._source = source
        self._function = function

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, indices: np.ndarray) -> Any:
        batch = self._source[indices]
        return batch | {"image": self._function(batch["image"])}
