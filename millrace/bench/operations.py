"""Floating-point operations of the products and convolutions in a traced function.

XLA's own count takes the body of a loop once, and knows nothing of what it has handed to
cuDNN. Here the trace is counted, loops as often as they run.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax


def operations(function: Callable[..., Any], *arguments: Any) -> float:
    """Count what `function` does to arguments of these shapes."""
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr: Any) -> float:
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: Any) -> float:
    name = equation.primitive.name
    if name == "dot_general":
        return _dot(equation)
    if name == "conv_general_dilated":
        return _convolution(equation)
    inner = [_count(jaxpr) for jaxpr in _inner(equation.params)]
    if name == "scan":
        return equation.params["length"] * sum(inner)
    if name == "cond":  # one branch is taken
        return max(inner, default=0.0)
    return sum(inner)


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
