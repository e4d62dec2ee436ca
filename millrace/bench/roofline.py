"""The cost of a workload, and its share of the measured roofline of the device.

The cost analysis of XLA counts the body of a loop once, and nothing of what XLA hands to
cuDNN or cuBLAS. So matrix products and convolutions are counted in the trace.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from millrace.program.roofline import measure_copy, measure_matmul

_COPIED_BYTES = 1 << 30
"""On an accelerator, large enough to make the launch of a copy negligible."""


class Cost(NamedTuple):
    """What matrix products and convolutions need; 0 if it is unknown."""

    flops: float
    """Floating-point operations."""
    num_bytes: float
    """Bytes of operands and results, each read or written once."""

    def scale(self, factor: float) -> "Cost":
        """Return the cost of `factor` repetitions."""
        return Cost(factor * self.flops, factor * self.num_bytes)


def count_cost(function: Callable[..., Any], *arguments: Any) -> Cost:
    """Count the cost of `function` for arguments of these shapes, without compiling."""
    return _count_trace(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count_trace(jaxpr: Any) -> Cost:
    return _sum(_count_equation(equation) for equation in jaxpr.eqns)


def _sum(parts: Iterable[Cost]) -> Cost:
    flops, num_bytes = zip((0.0, 0.0), *parts, strict=True)
    return Cost(sum(flops), sum(num_bytes))


def _count_equation(equation: Any) -> Cost:
    name = equation.primitive.name
    if name == "dot_general":
        return Cost(_dot_flops(equation), _operand_bytes(equation))
    if name == "conv_general_dilated":
        return Cost(_convolution_flops(equation), _operand_bytes(equation))
    inner = [_count_trace(jaxpr) for jaxpr in _inner_traces(equation.params)]
    if name == "scan":
        return _sum(inner).scale(equation.params["length"])
    if name == "cond":  # only one branch runs: assume the most expensive
        return max(inner, default=Cost(0.0, 0.0))
    return _sum(inner)


def _operand_bytes(equation: Any) -> float:
    arrays = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    return float(sum(array.size * array.dtype.itemsize for array in arrays))


def _dot_flops(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    outputs = math.prod(equation.outvars[0].aval.shape)
    return 2.0 * outputs * math.prod(left[dim] for dim in contracted)


def _convolution_flops(equation: Any) -> float:
    kernel = equation.invars[1].aval.shape
    feature_dim = equation.params["dimension_numbers"].rhs_spec[0]
    products = math.prod(kernel) // kernel[feature_dim]
    # The zeros that dilation inserts between input pixels are not multiplied.
    dilation = math.prod(equation.params["lhs_dilation"])
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * products / dilation


def _inner_traces(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if hasattr(part, "eqns"):
                yield part
            elif hasattr(part, "jaxpr") and hasattr(part.jaxpr, "eqns"):
                yield part.jaxpr


def measure_roofline(device: Any) -> dict[str, float]:
    """Measure the FLOP/s of plain matrix products and the bytes/s of plain copies."""
    on_cpu = device.platform == "cpu"
    dtypes = ("float32",) if on_cpu else ("bfloat16", "float32")
    limits = {
        f"flops_{dtype}": measure_matmul(device, dtype=dtype).flops_per_second
        for dtype in dtypes
    }
    copied = measure_copy(device, num_bytes=None if on_cpu else _COPIED_BYTES)
    return limits | {"bytes": copied.on_device}


def roofline_shares(figures: dict[str, Any], limits: dict[str, float]) -> dict[str, Any]:
    """Return the shares of the limits that an entry reached; None if unknown."""
    matmul, copy = _matmul_limit(limits, figures["compute"]), limits.get("bytes")
    flops, num_bytes = figures["flops_per_second"], figures["bytes_per_second"]
    return {
        "of_matmul_limit": flops / matmul if flops and matmul else None,
        "of_copy_limit": num_bytes / copy if num_bytes and copy else None,
    }


def _matmul_limit(limits: dict[str, float], compute: str) -> float | None:
    """Return the limit of a compute type; float16 has that of bfloat16."""
    dtypes = ["float32"] if compute == "float32" else ["bfloat16", "float32"]
    return next((limits[f"flops_{d}"] for d in dtypes if f"flops_{d}" in limits), None)
