"""Operations and bytes of the products and convolutions in a traced function.

XLA's own count takes the body of a loop once, and knows nothing of what it has handed to
cuDNN. Here the trace is counted, loops as often as they run.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax


class Counted(NamedTuple):
    """What products and convolutions do."""

    operations: float
    """Floating-point operations."""
    num_bytes: float
    """Bytes of their operands and results, each read or written once."""

    def times(self, factor: float) -> "Counted":
        """Return what so many of them do."""
        return Counted(factor * self.operations, factor * self.num_bytes)


def count(function: Callable[..., Any], *arguments: Any) -> Counted:
    """Count what `function` does to arguments of these shapes."""
    return _of_trace(jax.make_jaxpr(function)(*arguments).jaxpr)


def _of_trace(jaxpr: Any) -> Counted:
    return _sum(_of_equation(equation) for equation in jaxpr.eqns)


def _sum(parts: Iterable[Counted]) -> Counted:
    operations, num_bytes = zip((0.0, 0.0), *parts, strict=True)
    return Counted(sum(operations), sum(num_bytes))


def _of_equation(equation: Any) -> Counted:
    name = equation.primitive.name
    if name == "dot_general":
        return Counted(_dot(equation), _bytes(equation))
    if name == "conv_general_dilated":
        return Counted(_convolution(equation), _bytes(equation))
    inner = [_of_trace(jaxpr) for jaxpr in _inner(equation.params)]
    if name == "scan":
        return _sum(inner).times(equation.params["length"])
    if name == "cond":  # one branch is taken
        return max(inner, default=Counted(0.0, 0.0))
    return _sum(inner)


def _bytes(equation: Any) -> float:
    arrays = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    return float(sum(array.size * array.dtype.itemsize for array in arrays))


def _dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return (
        2.0
        * math.prod(equation.outvars[0].aval.shape)
        * math.prod(left[dim] for dim in contracted)
    )


def _convolution(equation: Any) -> float:
    kernel = equation.invars[1].aval.shape
    feature_dim = equation.params["dimension_numbers"].rhs_spec[0]
    products = math.prod(kernel) // kernel[feature_dim]
    # Zeros put between the pixels of the input are not multiplied with.
    dilation = math.prod(equation.params["lhs_dilation"])
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * products / dilation


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if hasattr(part, "eqns"):
                yield part
            elif hasattr(part, "jaxpr") and hasattr(part.jaxpr, "eqns"):
                yield part.jaxpr
