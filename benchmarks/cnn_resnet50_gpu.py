"""Training speed of ResNet-50 in bfloat16, against PyTorch on the same GPU.

One run measures, in turn and round after round: a training program on batches that lie on
the device; the same fed with bytes from the host's memory, normalized and flipped on the
device; PyTorch, compiled and eager, on a batch that lies on the device (channels last,
autocast, momentum SGD in one kernel). Everything is compiled and warm before the first
round counts.

Target: at least 1.05 times the speed of torch.compile.
"""

import argparse
import functools
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import profiling
from cnn_training import Training
from jax import lax
from reporting import Result, interleave, on_gpu, paired_ratio, parser, publish, seconds
from torch_training import TorchTraining, add_torch_python

import millrace as mr
from millrace.data.stream import ParallelStream
from millrace.run.process import tune_memory_allocation

_FULL = {
    "model": "resnet50",
    "size": 224,
    "classes": 1000,
    "batch": 256,
    "large_batch": 512,
    "updates": 30,
    "per_call": 10,
    "images": 8192,
    "precision": "16.32",
}
_TINY = {
    "model": "resnet18",
    "size": 32,
    "classes": 10,
    "batch": 4,
    "large_batch": 8,
    "updates": 4,
    "per_call": 2,
    "images": 64,
    "precision": "16.32",
}
_MEAN, _STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
_WORKERS = 4


def prepare(images: jax.Array, key: jax.Array) -> jax.Array:
    """Flip half of the pictures and normalize all: bytes in, bfloat16 out."""
    flipped = jax.random.bernoulli(key, 0.5, (images.shape[0], 1, 1, 1))
    images = jnp.where(flipped, images[:, :, ::-1], images).astype(jnp.float32)
    images = (images - np.float32(_MEAN)) * (1 / np.float32(_STD))
    return images.astype(jnp.bfloat16)


def stream(sizes: dict[str, Any]) -> ParallelStream:
    """Bytes in the host's memory, shuffled; gathered into batches by threads."""
    shape = (sizes["images"], sizes["size"], sizes["size"], 3)
    rng = np.random.default_rng(0)
    source = mr.ArraySource(
        {
            "image": rng.integers(0, 256, shape, np.uint8),
            "label": rng.integers(0, sizes["classes"], sizes["images"], np.int32),
        }
    )
    return ParallelStream(mr.Stream(source, sizes["batch"]), _WORKERS)


def variants_of_ours(
    sizes: dict[str, Any], infeed: mr.Infeed, args: argparse.Namespace
) -> dict[str, Callable[[], float]]:
    """Return what measures images per second, by name."""
    updates, per_call, batch = sizes["updates"], sizes["per_call"], sizes["batch"]
    resident = Training(sizes, batch)
    chunk = resident.chunk(per_call, jnp.bfloat16)
    fed = Training(sizes, batch, prepare)
    one = fed.chunk(1, jnp.uint8)
    images = updates * batch
    calls = updates // per_call
    made = {
        "millrace, on the device": lambda: images / seconds(resident.calls, chunk, calls),
        "millrace, bytes on the device": lambda: images / seconds(fed.calls, one, updates),
        "millrace, bytes from the host": lambda: images / seconds(fed.fed, infeed, updates),
    }
    if not args.without_large:
        large = Training(sizes, sizes["large_batch"])
        large_chunk = large.chunk(per_call, jnp.bfloat16)
        many = updates * sizes["large_batch"]
        made[f"millrace, on the device, batch {sizes['large_batch']}"] = lambda: (
            many / seconds(large.calls, large_chunk, calls)
        )
    if args.plain:
        run = plain_jax(resident, chunk)
        made["plain JAX, on the device"] = lambda: images / seconds(run, calls)
    if args.profile:
        profile(resident, chunk, args.profile)
    return made


def plain_jax(training: Training, chunk: Any) -> Callable[[int], Any]:
    """The same network and updates in a bare ``jit`` of a ``scan``: what a plan costs."""
    loop = jax.jit(
        lambda state, chunk: lax.scan(training.plain_update, state, chunk),
        donate_argnums=0,
    )
    kept = [training.plain_state()]

    def run(calls: int) -> Any:
        for _ in range(calls):
            kept[0], losses = loop(kept[0], chunk)
        return losses

    return run


def profile(training: Training, chunk: Any, folder: Path) -> None:
    """Write what the program is made of and where its time goes."""
    compiled = training.program._runner(training.state, chunk)
    training.calls(chunk, 1)
    report = profiling.describe(compiled)
    report["slowest"] = profiling.slowest(lambda: training.calls(chunk, 1), folder)
    (folder / "profile.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "program.txt").write_text(compiled.as_text())
    for row in report.pop("slowest"):
        print(f"{row['milliseconds']:9.3f} ms in {row['times']:4} of {row['operation']}")
    print(json.dumps(report), flush=True)


def torch_settings(sizes: dict[str, Any], modes: list[str]) -> dict[str, Any]:
    """Say what PyTorch should train, and how."""
    variants = {"PyTorch, eager": {"compile": None, "channels_last": True}}
    for mode in modes:
        name = "torch.compile" if mode == "default" else f"torch.compile, {mode}"
        variants[name] = {"compile": mode, "channels_last": True}
    same = {name: sizes[name] for name in ("model", "size", "classes", "batch")}
    device = "cuda" if on_gpu() else "cpu"
    return {**same, "device": device, "bfloat16": on_gpu(), "variants": variants}


def report(
    speeds: dict[str, list[float]], sizes: dict[str, Any], facts: str, host: float
) -> Result:
    """Compare with the fastest torch.compile."""
    compiled = [name for name in speeds if name.startswith("torch.compile")]
    best = max(compiled, key=lambda name: statistics.median(speeds[name]), default=None)
    ours = speeds["millrace, on the device"]
    fed = speeds["millrace, bytes from the host"]
    kept = paired_ratio(fed, speeds["millrace, bytes on the device"])
    return Result(
        name="cnn_resnet50_gpu",
        table=[
            {
                "variant": name,
                "images per s": f"{statistics.median(values):,.0f}",
                "lowest to highest": f"{min(values):,.0f} to {max(values):,.0f}",
                "of torch.compile": (
                    f"{paired_ratio(values, speeds[best]):.2f}" if best else "n/a"
                ),
            }
            for name, values in speeds.items()
        ],
        ratio_name="millrace / torch.compile, both on the device",
        ratio=paired_ratio(ours, speeds[best]) if best else None,
        target=1.05,
        explanation=(
            f"{sizes['model']}, {sizes['size']} x {sizes['size']}, batch {sizes['batch']}, "
            f"bfloat16 with float32 weights. The training program makes "
            f"{sizes['per_call']} updates per call on the device, as many as fit 64 MiB of "
            f"batches when fed. Fed from the host it keeps {kept:.3f} of its speed on the "
            f"same bytes on the device; the host alone gathers {host:,.0f} images/s. "
            f"{facts}."
        ),
        numbers={"sizes": sizes, "images_per_second": speeds, "torch": facts},
    )


def arguments() -> argparse.Namespace:
    """Read the command line."""
    options = parser(__doc__, rounds=5)
    add_torch_python(options)
    options.add_argument("--tiny", action="store_true", help="a trial run for a CPU")
    options.add_argument("--without-large", action="store_true", help="leave out batch 512")
    options.add_argument("--plain", action="store_true", help="measure plain JAX as well")
    options.add_argument(
        "--torch-modes", nargs="*", default=["default"], help="(default: default)"
    )
    options.add_argument("--profile", type=Path, help="write a profile into this folder")
    return options.parse_args()


def main() -> None:
    """Measure and report."""
    # The rest of the device's memory is PyTorch's.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.55")
    tune_memory_allocation()
    args = arguments()
    sizes = _TINY if args.tiny else _FULL
    batches = stream(sizes)
    found = json.loads(
        mr.dataset_benchmark(batches, 3, sizes["updates"], print_stats=False)
    )
    speed = [epoch["elements_per_second"] for epoch in found["epochs"][1:]]
    host = statistics.median(speed) * sizes["batch"]
    print(f"the host gathers {host:,.0f} images/s", flush=True)
    with (
        mr.Infeed(batches) as infeed,
        TorchTraining(args.torch_python, torch_settings(sizes, args.torch_modes)) as torch,
    ):
        print(torch.facts, flush=True)
        variants = variants_of_ours(sizes, infeed, args)
        images = sizes["updates"] * sizes["batch"]
        for name in torch.variants:
            variants[name] = functools.partial(
                lambda name: images / torch.seconds(name, sizes["updates"]), name
            )
        speeds = interleave(variants, args.rounds)
    publish(report(speeds, sizes, torch.facts, host), args)


if __name__ == "__main__":
    main()
