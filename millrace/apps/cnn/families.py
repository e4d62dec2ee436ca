"""Networks that come in sizes: which sizes there are, for small pictures and large ones.

Those of Graphcore's TensorFlow 1 application. Imports nothing heavy.
"""

from typing import NamedTuple

from millrace.config import ConfigurationError, did_you_mean

FAMILIES = ("resnet", "resnext", "efficientnet")

SINGLE_MODELS = (
    "digits_cnn",
    "toy_model",
    *(f"cifar_resnet{6 * blocks + 2}" for blocks in (1, 3, 5, 7, 9)),
    *("resnet18", "resnet34", "resnet50"),
)
"""Those that have one size only."""

LARGE_PICTURES = ("imagenet", "gc-imagenet", "imagefolder")
"""Data sets whose pictures are cropped to any size; those of the others are small."""

_IMAGENET_SIZE = 224


class Residual(NamedTuple):
    """A residual network: blocks in each stack, of three convolutions or of two."""

    blocks: tuple[int, ...]
    bottleneck: bool


class Scaled(NamedTuple):
    """An EfficientNet: how much wider and deeper than B0, and what it was made for."""

    width: float
    depth: float
    dropout: float
    image_size: int


_BASIC = {
    "10": Residual((1, 1, 1, 1), False),
    "18": Residual((2, 2, 2, 2), False),
    "34": Residual((3, 4, 6, 3), False),
}
_BOTTLENECK = {
    "14": Residual((1, 1, 1, 1), True),
    "26": Residual((2, 2, 2, 2), True),
    "50": Residual((3, 4, 6, 3), True),
    "101": Residual((3, 4, 23, 3), True),
    "152": Residual((3, 8, 36, 3), True),
}
_SMALL_BASIC = {str(6 * n + 2): Residual((n, n, n), False) for n in (1, 2, 3, 5, 7, 9, 18)}
_SMALL_BOTTLENECK = {str(9 * n + 2): Residual((n, n, n), True) for n in (1, 3, 4, 5, 6, 7)}
_EFFICIENTNETS = {
    "B0": Scaled(1.0, 1.0, 0.2, 224),
    "B1": Scaled(1.0, 1.1, 0.2, 240),
    "B2": Scaled(1.1, 1.2, 0.3, 260),
    "B3": Scaled(1.2, 1.4, 0.3, 300),
    "B4": Scaled(1.4, 1.8, 0.4, 380),
    "B5": Scaled(1.6, 2.2, 0.4, 456),
    "B6": Scaled(1.8, 2.6, 0.5, 528),
    "B7": Scaled(2.0, 3.1, 0.5, 600),
    "cifar": Scaled(0.5, 1.0, 0.0, 32),
}

_SIZES: dict[str, dict[bool, dict[str, Residual | Scaled]]] = {
    # By whether pictures are small. Of the two of size 56 the bottleneck is meant.
    "resnet": {
        False: {**_BASIC, **_BOTTLENECK},
        True: {**_SMALL_BASIC, **_SMALL_BOTTLENECK},
    },
    "resnext": {False: {**_BOTTLENECK}, True: {**_SMALL_BOTTLENECK}},
    "efficientnet": {False: {**_EFFICIENTNETS}, True: {**_EFFICIENTNETS}},
}
_DEFAULT_SIZE = {
    "resnet": {False: "18", True: "20"},
    "resnext": {False: "14", True: "11"},
    "efficientnet": {False: "B0", True: "cifar"},
}


class Size(NamedTuple):
    """A size of a family."""

    name: str
    shape: Residual | Scaled

    @property
    def image_size(self) -> int:
        """The side of the pictures it was made for, where they are large."""
        return self.shape.image_size if isinstance(self.shape, Scaled) else _IMAGENET_SIZE


def check_model_name(name: str) -> None:
    """Raise unless there is such a model."""
    if name not in (*SINGLE_MODELS, *FAMILIES):
        raise ConfigurationError(
            f"--model-name: there is no model {name!r}."
            f"{did_you_mean(name, (*FAMILIES, *SINGLE_MODELS))} There is: "
            f"{', '.join(SINGLE_MODELS)}; and with --model-size: {', '.join(FAMILIES)}."
        )


def find_size(family: str, given: str | None, *, small: bool) -> Size:
    """Return a size of a family by name, 4 or B4 say, or the usual one."""
    sizes = _SIZES[family][small]
    name = given or _DEFAULT_SIZE[family][small]
    known = {size.lower(): size for size in sizes}
    found = known.get(name.lower()) or known.get(f"b{name}")
    if found is None:
        for_small = " for pictures this small" if small and family != "efficientnet" else ""
        raise ConfigurationError(
            f"model_size: there is no {family} of size {given}{for_small}. There is: "
            f"{', '.join(sizes)}.{did_you_mean(name, sizes)}"
        )
    return Size(found, sizes[found])
