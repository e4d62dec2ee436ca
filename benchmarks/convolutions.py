"""Convolutions in a compiled loop on a CPU: ``conv2d`` of millrace against plain XLA.

Each kind runs forward and backward, two steps in a ``scan`` and one outside of loops, with
the compiler options of a training program.

Target: every kind is at least 5 times as fast as plain XLA in the loop.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from harness import (
    Result,
    build_parser,
    format_spread,
    interleave,
    paired_ratio,
    publish,
    time_call,
)
from jax import lax

from millrace.nn.convolution import conv2d
from millrace.program.compiling import compile_for
from millrace.program.replicas import replica_mesh
from millrace.run.process import tune_memory_allocation

_SAMPLES, _STEPS = 4, 2


class Kind(NamedTuple):
    """A convolution that occurs in networks."""

    size: int
    channels: int
    features: int
    kernel: int
    strides: int = 1
    groups: int = 1


_KINDS = {
    "3x3": Kind(28, 64, 64, 3),
    "1x1": Kind(28, 64, 256, 1),
    "3x3, stride 2": Kind(28, 64, 128, 3, 2),
    "3x3 in 16 groups": Kind(28, 128, 128, 3, 1, 16),
    "depthwise 3x3": Kind(28, 96, 96, 3, 1, 96),
    "depthwise 5x5, stride 2": Kind(28, 96, 96, 5, 2, 96),
}


def plain_conv2d(x: Any, kernel: Any, *, strides: Any, groups: int) -> jax.Array:
    """Convolve without the lowering of millrace."""
    return lax.conv_general_dilated(
        x,
        kernel,
        strides,
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def build_timer(kind: Kind, convolve: Callable[..., jax.Array], steps: int) -> Any:
    """Compile gradient descent on x and kernel; return a function that times a step."""
    rng = np.random.default_rng(0)
    shapes = (
        (_SAMPLES, kind.size, kind.size, kind.channels),
        (kind.kernel, kind.kernel, kind.channels // kind.groups, kind.features),
    )
    start = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]

    def loss(arrays: Any) -> jax.Array:
        strides = (kind.strides, kind.strides)
        return (convolve(*arrays, strides=strides, groups=kind.groups) ** 2).mean()

    def step(arrays: Any, _: Any) -> Any:
        return jax.tree.map(lambda a, g: a - g, arrays, jax.grad(loss)(arrays)), None

    def run(arrays: Any) -> Any:
        if steps == 1:
            return step(arrays, None)[0]
        return lax.scan(step, arrays, None, length=steps)[0]

    compiled = compile_for(replica_mesh(1), run, start)
    return lambda: time_call(compiled, start) / steps


def main() -> None:
    """Measure and report."""
    args = build_parser(__doc__, rounds=5).parse_args()
    tune_memory_allocation()
    rows, numbers, gains = [], {}, []
    for name, kind in _KINDS.items():
        variants = {
            "inside": build_timer(kind, conv2d, _STEPS),
            "outside": build_timer(kind, conv2d, 1),
            "plain XLA": build_timer(kind, plain_conv2d, _STEPS),
        }
        times = numbers[name] = interleave(variants, args.rounds)
        gains.append(paired_ratio(times["plain XLA"], times["inside"]))
        rows.append(
            {
                "forward and backward": name,
                "ms in a loop": format_spread(times["inside"], 1e3),
                "ms outside": format_spread(times["outside"], 1e3),
                "ms, plain XLA in a loop": format_spread(times["plain XLA"], 1e3),
                "gain": f"{gains[-1]:.1f}",
            }
        )
    result = Result(
        name="convolutions",
        table=rows,
        ratio_name="time of plain XLA / of millrace, in a loop, smallest gain",
        ratio=min(gains),
        target=5,
        explanation=(
            f"{_SAMPLES} samples of 28 x 28. XLA:CPU uses its fast layout only outside of "
            "loops, and has no fast path for gradients of grouped convolutions."
        ),
        numbers={"seconds": numbers},
    )
    publish(result, args)


if __name__ == "__main__":
    main()
