"""Iterations per second of VCD training: millrace, and PyTorch in the same run.

An iteration is a batch of 100 binary pictures of 784 pixels, 8 HMC steps of 5 leapfrog
steps, and the update of 598,404 weights. millrace runs its application's own program on
pictures and orders that are drawn on the device. PyTorch runs the same iteration eagerly,
with autograd for the chains' gradient and with the gradient written out; on a GPU also
with its trajectories compiled. Rounds are interleaved.

On a GPU millrace is measured in 32 bits (tensorfloat32 products) and with 16-bit products.
``--xla NAME=VALUE`` adds compiler options. A variant that fails says why, and the others go
on.

Target: 1,000 iterations per second on an H200, 12 on two CPU cores.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import jax
import numpy as np
from profiling import describe
from reporting import Result, interleave, on_gpu, parser, publish, seconds, spread
from torch_training import TorchTraining, add_torch_python

from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.data import ShuffledIndices, binarize
from millrace.apps.vcd.program import build_program, init_state
from millrace.config import build
from millrace.feeds.infeed import Infeed
from millrace.program.compiling import compiling
from millrace.run.process import tune_memory_allocation

_FULL = {"batch": 100, "pixels": (28, 28), "hidden": 200, "samples": 50_000}
_TINY = {"batch": 20, "pixels": (8, 8), "hidden": 16, "samples": 200}
_CHAINS = {"z_dim": 10, "steps": 8, "leapfrogs": 5}

_MILLRACE = {"32 bits": {}}
_MILLRACE_ON_GPU = {
    "32 bits": {},
    "bfloat16": {"precision": "16.32"},
}
_TORCH = {
    "PyTorch eager": {"gradient": "autograd", "compile": None},
    "PyTorch eager, gradient written out": {"gradient": "written", "compile": None},
}
_TORCH_ON_GPU = _TORCH | {
    "PyTorch, trajectories compiled": {"gradient": "written", "compile": "default"},
}


class Training:
    """A variant of millrace's program with its state, which every call carries on from."""

    def __init__(
        self, sizes: dict[str, Any], updates: int, options: dict[str, Any]
    ) -> None:
        values = {
            "micro_batch_size": sizes["batch"],
            "num_hidden": sizes["hidden"],
            "z_dim": _CHAINS["z_dim"],
            "num_burn_in_steps": _CHAINS["steps"],
            "num_leapfrog_steps": _CHAINS["leapfrogs"],
            "independent_iterations": 0,
        }
        config = build(VcdConfig, values | options)
        rng = np.random.default_rng(0)
        drawn = rng.integers(0, 2, (sizes["samples"], *sizes["pixels"], 1), np.uint8)
        images = binarize(drawn, 0)
        self.updates = updates
        self.program = build_program(config, images, jax.devices())
        self.infeed = Infeed(ShuffledIndices(sizes["samples"], sizes["batch"], seed=0))
        self.state = self.program.init(*init_state(config, images))
        self.call()  # compiles

    def call(self) -> Any:
        """Make the updates of one call, on batches that were not used before."""
        chunk = self.infeed.chunk(self.updates, self.program.chunk_sharding)
        assert chunk is not None
        self.state, info = self.program.run(self.state, chunk.data)
        self.infeed.took(self.updates)
        return info


def floating_point_operations(sizes: dict[str, Any]) -> float:
    """Count the operations of an iteration that must be done."""
    hidden, z_dim = sizes["hidden"], _CHAINS["z_dim"]
    pixels = sizes["pixels"][0] * sizes["pixels"][1]
    products = z_dim * hidden + hidden * hidden + hidden * pixels
    evaluations = 1 + _CHAINS["steps"] * _CHAINS["leapfrogs"]
    # A product forwards and one backwards; weights' gradients need a third. Encoders do
    # not go back to the pixels.
    chains = 2 * 2 * products * evaluations
    decoder = 3 * 2 * products
    encoders = 2 * (3 * 2 * products - 2 * pixels * hidden)
    return sizes["batch"] * float(chains + decoder + encoders)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return seconds per iteration of every variant, and what is known besides."""
    sizes = _TINY if args.tiny else _FULL
    variants, notes = {}, []
    options = dict(word.split("=", 1) for word in args.xla)
    kernels = None
    for name, own in (_MILLRACE_ON_GPU if on_gpu() else _MILLRACE).items():
        try:
            with compiling({jax.default_backend(): options}) as programs:
                training = Training(sizes, args.updates, own)
            if kernels is None:
                kernels = describe(programs[0])
            variants[f"millrace, {name}"] = training
        except Exception as error:  # the others can still be measured
            notes.append(f"{name} failed: {type(error).__name__}: {str(error)[:300]}")
    settings = {
        **_CHAINS,
        "batch": sizes["batch"],
        "hidden": sizes["hidden"],
        "samples": sizes["samples"],
        "pixels": sizes["pixels"][0] * sizes["pixels"][1],
        "device": "cuda" if on_gpu() else "cpu",
        "variants": _TORCH_ON_GPU if on_gpu() else _TORCH,
    }
    script = str(Path(__file__).with_name("torch_vcd.py"))
    with TorchTraining(args.torch_python, settings, script) as torch:
        notes.append(torch.facts)
        timed = {
            name: lambda t=t: seconds(t.call) / args.updates for name, t in variants.items()
        }
        timed |= {
            name: lambda n=name: torch.seconds(n, args.torch_updates) / args.torch_updates
            for name in torch.variants
        }
        measured = interleave(timed, args.rounds)
    return {
        "seconds": measured,
        "operations": floating_point_operations(sizes),
        "compiled": kernels or {},
        "notes": notes,
    }


def explain(found: dict[str, Any], best: float) -> str:
    """Say where the time goes, and what the limit is."""
    gigaflop = found["operations"] / 1e9
    counted = found["compiled"].get("operations", {})
    kernels = sum(
        count
        for kind, count in counted.items()
        if kind in ("fusion", "dot", "reduce", "sort", "scatter", "gather", "copy")
        or kind.startswith("custom-call")
    )
    words = [
        f"An iteration is {gigaflop:.2f} GFLOP: the best variant does "
        f"{gigaflop / best / 1e3:.2f} TFLOP/s.",
    ]
    if on_gpu():
        words.append(
            f"XLA's program has {kernels} kernels, almost all of them in the loop, for "
            f"{1e6 * best:.0f} us: the limit is the start of kernels that are too small to "
            "fill the device, not arithmetic (at 400 TFLOP/s in tensorfloat32 it would "
            f"take {gigaflop / 400e3 * 1e6:.0f} us)."
        )
    else:
        words.append("On a CPU nearly all of the time is in the decoder's products.")
    return " ".join(words + found["notes"])


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--tiny", action="store_true", help="small sizes, to try it out")
    options.add_argument("--updates", type=int, default=2000 if on_gpu() else 20)
    options.add_argument("--torch-updates", type=int, default=50 if on_gpu() else 10)
    options.add_argument(
        "--xla", metavar="NAME=VALUE", action="append", default=[], help="compiler option"
    )
    add_torch_python(options)
    args = options.parse_args()
    tune_memory_allocation()
    found = measure(args)
    measured = found["seconds"]
    ours = [name for name in measured if name.startswith("millrace")]
    first = statistics.median(measured[ours[0]])
    table = [
        {
            "variant": name,
            "iterations/s": spread([1 / s for s in values], digits=1),
            "us": f"{1e6 * statistics.median(values):.0f}",
            "against the first": f"{first / statistics.median(values):.3g}",
        }
        for name, values in measured.items()
    ]
    best = min(statistics.median(measured[name]) for name in ours)
    publish(
        Result(
            name="vcd_speed",
            table=table,
            ratio_name="iterations per second, the best of millrace's variants",
            ratio=1 / best,
            target=1000.0 if on_gpu() else 12.0,
            explanation=explain(found, best),
            numbers=found,
        ),
        args,
    )


if __name__ == "__main__":
    main()
