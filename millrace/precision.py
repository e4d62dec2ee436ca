"""Precisions: the dtypes of computation and of stored weights."""

from typing import Literal, NamedTuple, get_args

PrecisionName = Literal["16.16", "16.32", "32.32"]
HalfType = Literal["bfloat16", "float16"]


class Precision(NamedTuple):
    """The dtypes of computation (activations, gradients) and of stored weights."""

    compute: str
    weights: str


def resolve_precision(
    name: PrecisionName | str, half_type: HalfType | str = "bfloat16"
) -> Precision:
    """Return the dtypes of ``16.16``, ``16.32`` or ``32.32`` (compute.weights).

    >>> resolve_precision("16.32", "float16")
    Precision(compute='float16', weights='float32')
    """
    if name not in get_args(PrecisionName):
        raise ValueError(
            f"precision must be one of {', '.join(get_args(PrecisionName))} "
            f"(compute.weights), got {name!r}."
        )
    if half_type not in get_args(HalfType):
        raise ValueError(
            f"half_type must be one of {', '.join(get_args(HalfType))}, got {half_type!r}."
        )
    dtypes = {"16": str(half_type), "32": "float32"}
    compute, weights = name.split(".")
    return Precision(dtypes[compute], dtypes[weights])
