"""Images for training and validation: loaded, preprocessed and fed to the devices.

Small images are arrays in memory. With accelerator_side_preprocess, the host only gathers
them, and the device scales, crops and flips them at the start of the compiled loop;
otherwise the host does all of it, in the same order. Larger images are decoded from files
by a pool of workers, which crop and flip them; they are sent as bytes and scaled on the
device.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn.arrays import ImageArrays, MissingArrays
from millrace.apps.cnn.augment import (
    Preprocessing,
    as_float,
    change_pixels,
    get_preprocessing,
)
from millrace.apps.cnn.auto_augment import random_erasing
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.data import DataOptions
from millrace.apps.cnn.models.spec import has_small_images
from millrace.commands.fetch import fetch_missing, may_fetch
from millrace.config import ConfigurationError
from millrace.data import augment, cifar, mnist
from millrace.data.catalog import (
    CATALOG,
    DatasetNotFound,
    find_downloaded,
    find_tfds_folder,
)
from millrace.data.decoding import Crop
from millrace.data.image_source import ImageSource, ImageStream, num_cores
from millrace.data.imagenet import load_imagenet, load_images
from millrace.data.layouts import find_tfds
from millrace.data.memory import find_held
from millrace.data.mnist import load_digits
from millrace.data.source import (
    PIXEL_MEAN,
    PIXEL_STD,
    PIXEL_TRUNCATION,
    ArraySource,
    SyntheticImages,
)
from millrace.data.stream import Annotate, ParallelStream, Stream
from millrace.data.tfds import load_tfds
from millrace.feeds.device import ResidentDataset, ResidentSamples
from millrace.feeds.infeed import Infeed
from millrace.numbers import format_bytes
from millrace.program.compiling import jit, memory_limit
from millrace.run.run import Run

T = TypeVar("T")

_ARRAYS: dict[str, Callable[[Any], tuple[ArraySource, ArraySource]]] = {
    "digits": lambda _: load_digits(),
    "mnist": mnist.load_mnist,
    "fashion-mnist": mnist.load_fashion_mnist,
    "cifar10": cifar.load_cifar10,
    "cifar100": cifar.load_cifar100,
}
_IMAGE_FILES: dict[str, Callable[..., Any]] = {
    "imagenet": load_imagenet,
    "imagefolder": load_images,
}
_MAX_NAMES_SHOWN = 3
_RESIDENT_SHARE = 0.5
"""Largest part of the memory of a device that resident images may take."""
_FLIP_STREAM = 2
"""Separates the random numbers of `flips_by_epoch` from those of `Stream`."""


class ImageData(NamedTuple):
    """A dataset, with its preprocessing on the host and on the device."""

    training: Any
    validation: Any
    """None if a folder has no validation split and none is needed."""
    num_classes: int
    image_shape: tuple[int, int, int]
    preprocess: Callable[[jax.Array, jax.Array | None], jax.Array]
    """Runs on the device: ``(images, key)``; the key is None in validation."""
    transform: Callable[[Any, np.random.Generator], Any] | None = None
    """Runs on the host, on each training batch of arrays."""
    scale: Callable[[np.ndarray], np.ndarray] | None = None
    """The part of `transform` that scales images."""
    folder: Path | None = None
    """The folder of the files, if there are any."""
    warning: str | None = None
    """A warning about incomplete files."""

    def stream(
        self, batch_size: int, num_parallel: int, **options: Any
    ) -> ParallelStream | ImageStream:
        """Return an endless stream of training batches, prepared ahead of time.

        Args:
            batch_size: Samples per batch.
            num_parallel: Batches prepared in parallel.
            options: Further arguments of `Stream`.
        """
        if isinstance(self.training, ImageSource):
            return self.training.stream(batch_size, min_ahead=2 * num_parallel, **options)
        stream = Stream(self.training, batch_size, transform=self.transform, **options)
        threads = min(num_parallel, max(2, num_cores()))
        return ParallelStream(stream, threads, 2 * num_parallel)

    @property
    def corrupt(self) -> dict[str, str]:
        """The samples found unreadable so far, with the reasons."""
        sources = (self.training, self.validation)
        found = [s.corrupt for s in sources if isinstance(s, ImageSource)]
        return functools.reduce(lambda some, more: some | more, found, {})


def load(config: CnnConfig) -> ImageData:
    """Load the dataset, or generate a synthetic one."""
    if config.data.synthetic:
        return _load_synthetic(config)
    name = config.resolved_dataset
    steps = _get_preprocessing(name, config)
    if config.data.arrays is not None:
        return _load_arrays(config, config.data.arrays, steps)
    if not has_small_images(name):
        return _load_files(config, steps)
    if name == "digits":
        _check_folder(config.data)
    (training, validation), folder = _find(name, config, _load_small(name))
    return _assemble(
        config,
        steps,
        training,
        validation,
        CATALOG[name].num_classes,
        CATALOG[name].image_shape,
        folder if CATALOG[name].files else None,
    )


def _check_folder(options: DataOptions) -> None:
    """Refuse to use the bundled digits instead of the folder that was given."""
    folder = options.dataset_path
    if folder == DataOptions().dataset_path:
        return
    problem = "has no images that are recognized" if folder.is_dir() else "is missing"
    raise ConfigurationError(
        f"The folder {folder} {problem}. Give one with a folder per class (train/CLASS, "
        "val/CLASS), TFRecord files or tar files, or name the --dataset that it has. The "
        "digits need no folder."
    )


def _load_small(name: str) -> Callable[[Path], tuple[ArraySource, ArraySource]]:
    """Return a loader of small images: as TensorFlow Datasets or as others store them."""

    def load_from(folder: Path) -> tuple[ArraySource, ArraySource]:
        if (version := find_tfds(folder, name)) is not None:
            return load_tfds(version, name)
        return _ARRAYS[name](folder)

    return load_from


def _load_arrays(
    config: CnnConfig, record: Mapping[str, Any], steps: Preprocessing
) -> ImageData:
    """Return arrays from Python; a trained model can be loaded without them."""
    held = find_held(record)
    training: Any = MissingArrays(record)
    validation: Any = training if "validation_image" in record["shapes"] else None
    if held is not None:
        arrays, classes = held.arrays, record.get("classes")
        training, validation = (
            ImageArrays({n: arrays[prefix + n] for n in ("image", "label")}, classes)
            if f"{prefix}image" in arrays
            else None
            for prefix in ("", "validation_")
        )
    if validation is None and config.workflow.validation:
        raise ConfigurationError(
            "There is no validation_data: pass it, or turn validation off."
        )
    shape = tuple(record["shapes"]["image"][1:])
    return _assemble(config, steps, training, validation, record["num_classes"], shape)


def _assemble(
    config: CnnConfig,
    steps: Preprocessing,
    training: Any,
    validation: Any,
    num_classes: int,
    image_shape: tuple[int, int, int],
    folder: Path | None = None,
) -> ImageData:
    """Return small images in memory, scaled on the host or on the device."""
    transform, scale = None, _host_scaling(steps, config)
    if scale is not None:
        on_device = config.data.accelerator_side_preprocess
        random_steps = () if on_device else steps.augment_on_host
        scale_batch = augment.by_sample(lambda images, _: scale(images))
        transform = augment.map_images(scale_batch, *random_steps)
        if validation is not None:
            validation = _ScaledSource(validation, scale)
    return ImageData(
        training,
        validation,
        num_classes,
        image_shape,
        _device_preprocessing(steps, config),
        transform,
        scale,
        folder=folder,
    )


def _get_preprocessing(dataset: str, config: CnnConfig) -> Preprocessing:
    return get_preprocessing(
        dataset,
        basics=config.basics,
        arrays=config.data.arrays,
        **config.data.scaling,
    )


def _find(name: str, config: CnnConfig, load_from: Callable[[Path], T]) -> tuple[T, Path]:
    """Load from dataset_path or, if the dataset is not there, from the cache."""
    given = config.data.dataset_path
    try:
        return load_from(given), given
    except DatasetNotFound as error:
        # Graphcore's commands give the parent of imagenet-data.
        inside = [given / "imagenet-data"] if name == "imagenet" else []
        for folder in (*inside, find_downloaded(name), find_tfds_folder()):
            with contextlib.suppress(DatasetNotFound):
                return load_from(folder), folder
        if not may_fetch(config.data.fetch):
            raise error
        folder = fetch_missing(name, error, quiet=config.run.quiet)
        return load_from(folder), folder


def _load_files(config: CnnConfig, steps: Preprocessing) -> ImageData:
    """Open image files; workers decode and crop them when they are read."""
    name, size = config.resolved_dataset, config.resolved_image_size
    load_from = functools.partial(
        _IMAGE_FILES[name],
        crop=_build_crop(config),
        num_workers=config.data.num_workers,
        max_corrupt=config.data.max_corrupt,
        needs_validation=config.workflow.validation,
    )
    found, folder = _find(name, config, load_from)
    if found.validation is not None and not config.data.no_dataset_cache:
        found.validation.keep_decoded(int(config.data.dataset_cache_gib * 2**30))
    return ImageData(
        found.training,
        found.validation,
        found.num_classes,
        (size, size, 3),
        _device_preprocessing(steps, config),
        folder=folder,
        warning=found.warning,
    )


def _build_crop(config: CnnConfig) -> Crop:
    """Return how workers crop and flip training images."""
    basics = config.basics
    return Crop(
        size=config.resolved_image_size,
        flip=basics.flip and not config.data.accelerator_side_preprocess,
        area=basics.area,
        aspect=basics.aspect,
        is_random=basics.crop,
    )


def _load_synthetic(config: CnnConfig) -> ImageData:
    """Return random samples, as many as the real dataset has."""
    small = has_small_images(config.resolved_dataset)
    known = CATALOG[config.resolved_dataset if small else "imagenet"]
    size, steps = config.resolved_image_size, _synthetic_preprocessing(config)
    shape = known.image_shape if small else (size, size, 3)
    training, validation = (
        SyntheticImages(
            count,
            shape,
            known.num_classes,
            prepare=_host_scaling(steps, config),
            seed=config.run.seed,
        )
        for count in (known.num_training, known.num_validation)
    )
    preprocess = _device_preprocessing(steps, config)
    return ImageData(training, validation, known.num_classes, shape, preprocess)


def _synthetic_preprocessing(config: CnnConfig) -> Preprocessing:
    """Return the preprocessing of random bytes; unlike those of digits, they go to 255."""
    dataset = config.resolved_dataset
    like = "mnist" if dataset == "digits" else dataset
    return _get_preprocessing(like, config)


def _host_scaling(
    steps: Preprocessing, config: CnnConfig
) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the scaling on the host; None if bytes are sent."""
    if config.sends_bytes:
        return None
    return as_float if config.scales_on_device else steps.scale_on_host


def _device_preprocessing(
    steps: Preprocessing, config: CnnConfig
) -> Callable[[jax.Array, jax.Array | None], jax.Array]:
    options, augment_images = config.augmentation, None
    if config.data.accelerator_side_preprocess:
        augment_images = steps.augment_on_device

    def preprocess(
        images: jax.Array,  # (batch, height, width, channels)
        key: jax.Array | None,
    ) -> jax.Array:
        if key is not None and options.changes_pixels:
            images = change_pixels(images, key, options, steps.max_pixel)
        if config.scales_on_device:
            images = steps.scale_on_device(images)
        if key is not None and augment_images is not None:
            images = augment_images(images, key)
        if key is not None and options.random_erasing > 0:
            images = random_erasing(images, key, options.random_erasing)
        if config.scales_on_device:
            images = images.astype(jnp.dtype(config.plan.types.compute))
        return images

    return preprocess


class _ScaledSource:
    """A source whose images are scaled when they are read."""

    def __init__(self, source: Any, scale: Callable[[np.ndarray], np.ndarray]) -> None:
        self._source = source
        self._scale = scale

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, indices: np.ndarray) -> Any:
        batch = self._source[indices]
        return batch | {"image": self._scale(batch["image"])}


def open_infeed(images: ImageData, config: CnnConfig, batches_per_epoch: int) -> Infeed:
    """Return an infeed of training batches."""
    samples = config.plan.batching.samples_per_step
    if config.data.synthetic == "device":
        generate = functools.partial(_generate, images, config, samples)
        return Infeed(ResidentDataset(generate))
    options: dict[str, Any] = {
        "batches_per_epoch": batches_per_epoch,
        "seed": config.run.seed,
        "shuffle": config.workflow.shuffle,
    }
    if config.augmentation.alternating_flip:
        options["annotate"] = flips_by_epoch(len(images.training), config.run.seed)
    if config.workflow.resident_data:
        stream = Stream(images.training, samples, **options)
        return Infeed(hold_on_devices(images.training, stream))
    stream = images.stream(samples, config.data.parallel_batches(samples), **options)
    return Infeed(stream, prefetch_depth=config.workflow.prefetch_depth)


def hold_on_devices(source: ArraySource, stream: Stream) -> ResidentSamples:
    """Return the batches of a stream, gathered on the devices from all of its samples."""
    resident = ResidentSamples(source.arrays, stream)
    limit = memory_limit(jax.local_devices()[0])
    if resident.num_bytes > _RESIDENT_SHARE * limit:
        raise ConfigurationError(
            f"resident_data keeps {format_bytes(resident.num_bytes)} of images on each "
            f"device, more than half of its {format_bytes(limit)}. Turn it off: batches "
            "are then sent as they are needed."
        )
    return resident


def flips_by_epoch(num_samples: int, seed: int) -> Annotate:
    """Return which samples of a batch are mirrored in an epoch: each in every second one.

    Args:
        num_samples: Samples of the dataset.
        seed: Decides which half of them are mirrored in the first epoch.
    """
    starts = np.random.default_rng([seed, _FLIP_STREAM]).random(num_samples) < 0.5
    return lambda indices, epoch: {"mirrored": starts[indices] ^ (epoch % 2 == 1)}


def scaled_samples(images: ImageData, count: int) -> jax.Array:
    """Return the first training images, scaled but not changed at random."""
    image = images.training[np.arange(min(count, len(images.training)))]["image"]
    if images.scale is not None:
        image = images.scale(image)
    return jit(images.preprocess)(jax.device_put(image), None)


def _generate(images: ImageData, config: CnnConfig, samples: int, count: int) -> Any:
    """Generate random batches on the device, distributed like `SyntheticImages`.

    This happens once, before the loop, so that only the model is measured.
    """
    pixel_key, label_key = jax.random.split(jax.random.key(config.run.seed))
    shape = (count, samples)
    limit = PIXEL_TRUNCATION
    image = jax.random.truncated_normal(
        pixel_key, -limit, limit, (*shape, *images.image_shape)
    )
    image = PIXEL_MEAN + PIXEL_STD * image
    label = jax.random.randint(label_key, shape, 0, images.num_classes)
    sent_as = images.training[np.arange(1)]["image"].dtype
    if not config.scales_on_device:
        scale = _synthetic_preprocessing(config).scale_on_device
        image = scale(image.reshape(-1, *images.image_shape)).reshape(image.shape)
    batch = {"image": image.astype(sent_as), "label": label}
    if config.augmentation.alternating_flip:
        flip_key = jax.random.fold_in(label_key, _FLIP_STREAM)
        batch["mirrored"] = jax.random.bernoulli(flip_key, shape=shape)
    return batch


def describe(images: ImageData, config: CnnConfig) -> str:
    """Return the name of the dataset, its source and its sizes, in one line."""
    where = config.data.synthetic
    source = f" (synthetic, generated on the {where})" if where else ""
    if images.folder is not None:
        source = f" from {images.folder.resolve()}"
    if config.workflow.resident_data:
        source += " (kept on the device)"
    num_validation = 0 if images.validation is None else len(images.validation)
    return (
        f"{config.resolved_dataset}{source}, {len(images.training):,} training and "
        f"{num_validation:,} validation samples, {images.num_classes} classes"
    )


def describe_augmentation(config: CnnConfig) -> str:
    """Return what is changed at random in training images, in one line."""
    options, recipe = config.augmentation, config.recipe
    parts = _describe_basics(config)
    if options.augment == "randaugment":
        ops = "1 op" if options.num_ops == 1 else f"{options.num_ops} ops"
        parts.append(f"RandAugment ({ops}, magnitude {options.magnitude})")
    if options.augment == "trivialaugment":
        parts.append("TrivialAugment (wide)")
    if options.color_jitter > 0:
        parts.append(f"color jitter {options.color_jitter:g}")
    if options.random_erasing > 0:
        parts.append(f"erasing {100 * options.random_erasing:g} %")
    blends = {"mixup": options.mixup, "cutmix": options.cutmix}
    if on := [f"{name} {alpha:g}" for name, alpha in blends.items() if alpha > 0]:
        parts.append(" or ".join(on))
    if recipe.mixup_alpha > 0:
        parts.append(f"mixup_alpha {recipe.mixup_alpha:g}")
    if recipe.cutmix_lambda < 1:
        parts.append(f"cutmix_lambda {recipe.cutmix_lambda:g}")
    return ", ".join(parts) or "none"


def _describe_basics(config: CnnConfig) -> list[str]:
    """Return what crops and flips do; the host has none for synthetic images."""
    basics, small = config.basics, has_small_images(config.resolved_dataset)
    on_device = config.data.accelerator_side_preprocess
    parts = []
    if basics.crop and small and (on_device or not config.data.synthetic):
        pixels = "1 pixel" if basics.padding == 1 else f"{basics.padding} pixels"
        kind = "reflection" if basics.reflect else "padding"
        parts.append(f"random crop ({pixels} of {kind})")
    if basics.crop and not small and not config.data.synthetic:
        low, high = (f"{100 * share:g}" for share in basics.area)
        parts.append(f"random crop ({low} to {high} % of the area)")
    if basics.flip and (on_device or not config.data.synthetic):
        parts.append("flip in every second epoch" if basics.alternates else "flip")
    return parts


@contextlib.contextmanager
def reporting_corrupt_samples(images: ImageData, run: Run) -> Iterator[None]:
    """Report unreadable samples at the end, also after an error."""
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
                f"{len(names)} samples could not be read and were replaced by others: "
                f"{shown}{f' and {more} more (see summary.json)' if more > 0 else ''}."
            )
