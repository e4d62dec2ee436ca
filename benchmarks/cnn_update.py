"""A small CNN's weight update on CPU: inside the compiled loop, outside one, and PyTorch's.

The network is ``cifar_resnet20`` in float32, with batch norm in training mode and momentum
SGD. Inside: a training program, several updates per call. Outside: the same update as a
plain ``jax.jit``, called once per update, with the same compiler options; once with this
project's convolutions and once with XLA's own. PyTorch is eager, in the faster of its two
layouts, in a process of its own.

Targets: inside no slower than outside, and at most 1.5 times PyTorch's time.
"""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from cnn_training import Training
from jax import lax
from reporting import (
    Result,
    add_sizes,
    interleave,
    paired_ratio,
    parser,
    publish,
    seconds,
    spread,
)
from torch_training import TorchTraining, add_torch_python

from millrace.program.compiling import compile_for
from millrace.program.replicas import replica_mesh
from millrace.run.process import tune_memory_allocation

_SIZES = {"batch": 128, "updates": 4, "per_call": 4}
_MODEL = {"model": "cifar_resnet20", "size": 32, "classes": 10, "precision": "32.32"}
_TORCH = {
    "PyTorch": {"compile": None, "channels_last": False},
    "PyTorch, channels last": {"compile": None, "channels_last": True},
}
_INSIDE, _OUTSIDE = "inside the loop", "outside, plain jit"
_XLAS_OWN = "outside, XLA's own convolutions"


def outside(training: Training, chunk: Any) -> Callable[[int], Any]:
    """Compile one update by itself; return what makes a number of them."""
    batch = jax.tree.map(lambda x: x[0], chunk)
    kept = [training.plain_state()]
    update = compile_for(
        replica_mesh(1), training.plain_update, kept[0], batch, donate=(0,)
    )

    def run(updates: int) -> Any:
        for _ in range(updates):
            kept[0], loss = update(kept[0], batch)
        return loss

    return run


def xlas_own(x: Any, kernel: Any, *, strides: Any, padding: Any, **_: Any) -> jax.Array:
    """Convolve without this project's lowering."""
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=layout)


def measure(sizes: dict[str, int], rounds: int, python: str) -> tuple[Any, str]:
    """Return seconds per update of every variant, and what PyTorch says of itself."""
    updates = sizes["updates"]
    training = Training(_MODEL, sizes["batch"])
    chunk = training.chunk(sizes["per_call"], jnp.float32)
    calls = updates // sizes["per_call"]
    ours = outside(training, chunk)
    with mock.patch("millrace.nn.layers.conv2d", xlas_own):
        theirs = outside(training, chunk)
    variants = {
        _INSIDE: lambda: seconds(training.calls, chunk, calls) / updates,
        _OUTSIDE: lambda: seconds(ours, updates) / updates,
        _XLAS_OWN: lambda: seconds(theirs, updates) / updates,
    }
    same = {name: _MODEL[name] for name in ("model", "size", "classes")}
    settings = {**same, "batch": sizes["batch"], "device": "cpu", "bfloat16": False}
    with TorchTraining(python, {**settings, "variants": _TORCH}) as torch:
        for name in torch.variants:
            variants[name] = functools.partial(
                lambda name: torch.seconds(name, updates) / updates, name
            )
        return interleave(variants, rounds), torch.facts


def row(name: str, times: dict[str, list[float]], fastest: str | None) -> dict[str, str]:
    """Write one line of the table."""
    ratios = ("n/a", "n/a")
    if fastest:
        lowest = min(times[name]) / min(times[fastest])
        ratios = (f"{lowest:.2f}", f"{paired_ratio(times[name], times[fastest]):.2f}")
    return {
        "update": name,
        "ms": spread(times[name], 1e3, 1),
        "lowest / PyTorch's lowest": ratios[0],
        "median of ratios": ratios[1],
    }


def main() -> None:
    """Measure and report."""
    options = parser(__doc__, rounds=15)
    add_torch_python(options)
    add_sizes(options, _SIZES)
    args = options.parse_args()
    tune_memory_allocation()
    sizes = {name: getattr(args, name) for name in _SIZES}
    times, facts = measure(sizes, args.rounds, args.torch_python)
    lowest = {name: min(values) for name, values in times.items()}
    fastest = min((n for n in times if n in _TORCH), key=lowest.__getitem__, default=None)
    gain = lowest[_OUTSIDE] / lowest[_INSIDE]
    paired = paired_ratio(times[_OUTSIDE], times[_INSIDE])
    result = Result(
        name="cnn_update",
        table=[row(name, times, fastest) for name in times],
        ratio_name="lowest time inside the loop / PyTorch's lowest",
        ratio=lowest[_INSIDE] / lowest[fastest] if fastest else None,
        target=1.5,
        at_least=False,
        explanation=(
            f"Batch {sizes['batch']}, {sizes['per_call']} updates per call. An update "
            f"outside any loop takes {gain:.2f} times what it takes inside (median of the "
            f"rounds' ratios {paired:.2f}; target: at least 1). The lowest times are "
            "compared because other work on the machine slows PyTorch most: its threads "
            f"wait for each other. {facts}."
        ),
        numbers={"sizes": sizes, "seconds_per_update": times, "outside_to_inside": gain},
    )
    publish(result, args)


if __name__ == "__main__":
    main()
