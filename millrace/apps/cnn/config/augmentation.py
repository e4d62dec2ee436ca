"""Options of augmentation: what is changed at random in training images.

Imports nothing heavy.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from millrace.apps.cnn.models.spec import has_small_images

MAX_MAGNITUDE = 30
"""The largest magnitude of RandAugment, as in torchvision."""

_DEFAULT_OPS, _DEFAULT_MAGNITUDE = 2, 9
_SIDES = {"digits": 8, "mnist": 28, "fashion-mnist": 28, "cifar10": 32, "cifar100": 32}
"""Height and width of small images."""
_CROP_AREA, _CROP_ASPECT = (0.05, 1.0), (3 / 4, 4 / 3)


class Basics(NamedTuple):
    """Crops and flips of one dataset."""

    crop: bool
    """Whether images are cropped at random; large ones are cropped at the center if not."""
    flip: bool
    """Whether half of the images are mirrored."""
    padding: int
    """Pixels added around a small image before it is cropped to its size."""
    reflect: bool
    """Whether these pixels mirror the image at its edges; otherwise they are zeros."""
    alternates: bool
    """Whether an image is mirrored in every second epoch instead of at random."""
    area: tuple[float, float]
    """Share of the area that a random crop of a large image covers."""
    aspect: tuple[float, float]
    """Width over height of a random crop of a large image."""


@dataclass(frozen=True, kw_only=True)
class AugmentationOptions:
    """Augmentation options."""

    augment: Literal["none", "basic", "randaugment", "trivialaugment"] = field(
        default="basic", metadata={"aliases": ("--auto-augment", "--aa")}
    )
    """Augmentation of training images. basic: random crops and flips, where they are usual
    (cifar10, cifar100, imagenet, imagefolder). randaugment, trivialaugment: the same, and
    random operations such as rotations and changes of color, as in torchvision
    (TrivialAugmentWide). none: neither, unless random_crop or flip is given."""
    randaugment_ops: int | None = None
    """Operations that randaugment applies to each image (default: 2)."""
    randaugment_magnitude: int | None = None
    """Strength of the operations of randaugment, from 0 to 30 as in torchvision (default:
    9). The m9 of timm, whose scale ends at 10, is 27."""
    random_crop: bool | None = None
    """Crop training images at random: small ones after padding (see crop_padding), those of
    imagenet and imagefolder by crop_scale and crop_ratio (default: see augment). If False,
    small images are not cropped, and others are cropped at the center."""
    crop_padding: int | None = None
    """Zeros that are added on each side of a small image before it is cropped to its size
    (default: an eighth of the side, 4 pixels for cifar10)."""
    crop_reflect: bool = False
    """Mirror a small image at its edges for crop_padding, instead of adding zeros."""
    crop_scale: list[float] | None = None
    """Smallest and largest share of the area that a random crop of imagenet and imagefolder
    covers (default: 0.05 1.0; torchvision and timm: 0.08 1.0)."""
    crop_ratio: list[float] | None = None
    """Smallest and largest width over height of a random crop of imagenet and imagefolder
    (default: 3/4 4/3)."""
    flip: bool | None = field(default=None, metadata={"aliases": ("--random-flip",)})
    """Mirror half of the training images, left to right (default: see augment)."""
    alternating_flip: bool = False
    """Mirror each small image in every second epoch, not at random: half of the images,
    chosen at random, start with it."""
    color_jitter: float = 0.0
    """Change brightness, contrast and saturation, in random order, each by a factor between
    1 - this and 1 + this. Gray images have no saturation."""
    random_erasing: float = field(default=0.0, metadata={"aliases": ("--reprob",)})
    """Probability that a random rectangle of an image is erased: between 2 % and a third of
    its area, filled with zeros after scaling, which are the mean of normalized images."""
    mixup: float = 0.0
    """Mixup: blend each sample with the one before it in its micro-batch, with shares drawn
    from Beta(alpha, alpha), alpha being this number. With cutmix, each micro-batch gets one
    of the two at random."""
    cutmix: float = 0.0
    """CutMix: replace a box with that of another sample, the same box for all samples of a
    micro-batch. The share of the area that is kept is drawn from Beta(alpha, alpha)."""

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("randaugment_ops", "randaugment_magnitude"):
            if getattr(self, name) is not None and self.augment != "randaugment":
                raise ValueError(
                    f"{name} is for augment randaugment, but augment is {self.augment}."
                )
        if self.random_crop is False:
            for name in ("crop_padding", "crop_reflect", "crop_scale", "crop_ratio"):
                if getattr(self, name) not in (None, False):
                    raise ValueError(f"{name} is for random crops, but random_crop is off.")
        if self.alternating_flip and self.flip is False:
            raise ValueError("alternating_flip mirrors images, but flip is off.")

    def _check_numbers(self) -> None:
        for name in ("color_jitter", "mixup", "cutmix"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {value:g}.")
        if not 0 <= self.random_erasing <= 1:
            raise ValueError(
                "random_erasing is a probability and must be between 0 and 1, got "
                f"{self.random_erasing:g}."
            )
        if self.randaugment_ops is not None and self.randaugment_ops < 1:
            raise ValueError(
                f"randaugment_ops must be at least 1, got {self.randaugment_ops}."
            )
        if not 0 <= self.magnitude <= MAX_MAGNITUDE:
            raise ValueError(
                f"randaugment_magnitude must be between 0 and {MAX_MAGNITUDE}, got "
                f"{self.magnitude}."
            )
        _check_range("crop_scale", self.crop_scale, most=1.0)
        _check_range("crop_ratio", self.crop_ratio, most=math.inf)

    @property
    def num_ops(self) -> int:
        """Operations per image that are chosen at random."""
        if self.augment == "trivialaugment":
            return 1
        return (self.randaugment_ops or _DEFAULT_OPS) * (self.augment == "randaugment")

    @property
    def magnitude(self) -> int:
        """The magnitude of RandAugment."""
        given = self.randaugment_magnitude
        return _DEFAULT_MAGNITUDE if given is None else given

    @property
    def changes_pixels(self) -> bool:
        """Whether the device changes images before they are scaled."""
        return self.num_ops > 0 or self.color_jitter > 0

    @property
    def mixes_samples(self) -> bool:
        """Whether mixup or cutmix is on."""
        return self.mixup > 0 or self.cutmix > 0

    def basics(self, dataset: str, side: int | None = None) -> Basics:
        """Return the crops and flips of a dataset.

        Args:
            dataset: Its name.
            side: Height or width of its images, if they are arrays from Python.
        """
        usual = self.augment != "none" and dataset not in (
            *("digits", "mnist", "fashion-mnist", "arrays"),
        )
        padding = self.crop_padding
        if padding is None:
            padding = (side or _SIDES.get(dataset, 0)) // 8
        return Basics(
            usual if self.random_crop is None else self.random_crop,
            usual if self.flip is None else self.flip,
            padding,
            self.crop_reflect,
            self.alternating_flip,
            _as_pair(self.crop_scale, _CROP_AREA),
            _as_pair(self.crop_ratio, _CROP_ASPECT),
        )

    def check_dataset(self, dataset: str, side: int | None = None) -> None:
        """Raise an error if an option has no meaning for a dataset; see ``basics``."""
        basics = self.basics(dataset, side)
        if self.alternating_flip and not basics.flip:
            raise ValueError(
                f"alternating_flip changes how images are mirrored, which is off for "
                f"{dataset} with augment {self.augment}: give flip as well."
            )
        if not has_small_images(dataset):
            for name in ("crop_reflect", "alternating_flip"):
                if getattr(self, name):
                    raise ValueError(f"{name} is for small images, not for {dataset}.")
            if self.crop_padding is not None:
                raise ValueError(
                    f"crop_padding is for small images; those of {dataset} are cropped by "
                    "crop_scale and crop_ratio."
                )
            unused = ("crop_scale", "crop_ratio")
        else:
            for name in ("crop_scale", "crop_ratio"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} is for imagenet and imagefolder; images of {dataset} are "
                        "padded and cropped to their size (random_crop, crop_padding)."
                    )
            side, padding = side or _SIDES[dataset], self.crop_padding
            if padding is not None and not 1 <= padding < side:
                raise ValueError(
                    f"crop_padding must be between 1 and {side - 1} for {dataset}, whose "
                    f"images have {side} x {side} pixels; got {padding}."
                )
            unused = ("crop_padding", "crop_reflect")
        for name in unused:
            if getattr(self, name) not in (None, False) and not basics.crop:
                raise ValueError(
                    f"{name} is for random crops, which are off for {dataset} with augment "
                    f"{self.augment}: give random_crop as well."
                )


def _check_range(name: str, values: list[float] | None, most: float) -> None:
    if values is None:
        return
    if len(values) != 2 or not 0 < values[0] <= values[1] <= most or values[1] == math.inf:
        limit = f" and at most {most:g}" if most < math.inf else ""
        raise ValueError(
            f"{name} takes two numbers, the smallest and the largest, above 0{limit}; got "
            f"{' '.join(f'{value:g}' for value in values) or 'none'}."
        )


def _as_pair(
    given: list[float] | None, default: tuple[float, float]
) -> tuple[float, float]:
    return default if given is None else (given[0], given[1])


def expand_augmentation(values: dict[str, Any]) -> None:
    """Send bytes to the device if it has to change pixels; options given are kept."""
    changes = values.get("augment") in ("randaugment", "trivialaugment")
    changes |= (values.get("color_jitter") or 0) > 0
    changes |= bool(values.get("alternating_flip"))
    if changes and has_small_images(values.get("dataset")):
        values.setdefault("accelerator_side_preprocess", True)
        if values["accelerator_side_preprocess"]:
            values.setdefault("eight_bit_transfer", True)
