"""Precision pairs compute.update: which numbers are 16 bits wide, and in what type."""

from typing import Literal, NamedTuple, get_args

PrecisionName = Literal["16.16", "16.32", "32.32"]
HalfType = Literal["bfloat16", "float16"]


class Precision(NamedTuple):
    """The type of computation (activations, gradients) and of the stored weights."""

    compute: str
    weights: str


def resolve_precision(
    name: PrecisionName | str, half_type: HalfType | str = "bfloat16"
) -> Precision:
    """Return the types behind ``16.16``, ``16.32`` or ``32.32``.

    >>> resolve_precision("16.32", "float16")
    Precision(compute='float16', weights='float32')
    """
    if name not in get_args(PrecisionName):
        raise ValueError(
            f"precision must be one of {', '.join(get_args(PrecisionName))} "
            f"(compute.update), got {name!r}."
        )
    if half_type not in get_args(HalfType):
        raise ValueError(
            f"half_type must be one of {', '.join(get_args(HalfType))}, got {half_type!r}."
        )
    types = {"16": str(half_type), "32": "float32"}
    compute, weights = name.split(".")
    return Precision(types[compute], types[weights])
