"""Training speed of the autoencoder recommender, against PyTorch on the same device.

One run measures, in turn and round after round, for a small and a large model:

- training on batches that lie on the device;
- training end to end: users drawn, their ratings gathered by the host, moved and made
  dense on the device ("from the host"), or gathered on the device from all ratings, which
  lie there ("ratings on the device", what a GPU does by itself);
- sixteen learning rates at once, as ``autoencoder sweep`` trains them, and one of them
  alone; on a GPU in 16.16 as well, which is what the command does by itself;
- PyTorch, eager and compiled, on a dense batch that lies on the device.

All have the same network, batch, re-feeding and optimizer. Everything is compiled and warm
before the first round counts. The targets are at the end of the report.
"""

import argparse
import collections
import functools
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from reporting import Result, interleave, on_gpu, paired_ratio, parser, publish, seconds
from torch_autoencoder import TorchAutoencoder
from torch_training import add_torch_python

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.data import open_infeed
from millrace.apps.autoencoder.joint_training import build_trials_program, init_trials
from millrace.apps.autoencoder.program import (
    build_model,
    build_program,
    init_weights,
    plan_steps,
)
from millrace.config import build, replace_options
from millrace.data.ratings.generated import random_ratings
from millrace.data.ratings.matrix import Ratings
from millrace.data.ratings.source import active_users
from millrace.feeds.infeed import Infeed
from millrace.loop.staging import MAX_IN_FLIGHT, next_chunk
from millrace.program.training import TrainingProgram
from millrace.run.process import tune_memory_allocation


class Workload(NamedTuple):
    """A model and its batch, and how much of it to measure."""

    size: int
    batch: int
    per_call: int
    """Updates in a call."""
    calls: int
    num_trials: int

    @property
    def name(self) -> str:
        return f"size {self.size}, batch {self.batch}"

    @property
    def updates(self) -> int:
        return self.per_call * self.calls


# Netflix' three months have 17,736 items, and 44 ratings of a user.
_GPU = {"num_users": 131_072, "num_items": 17_736, "rated": 44}
_CPU = {"num_users": 16_384, "num_items": 17_736, "rated": 44}
_TINY = {"num_users": 512, "num_items": 500, "rated": 20}
_GPU_LOADS = (Workload(128, 64, 250, 8, 16), Workload(512, 1024, 50, 4, 0))
_CPU_LOADS = (Workload(128, 64, 8, 4, 2),)
_TINY_LOADS = (Workload(128, 16, 5, 2, 3), Workload(256, 32, 5, 1, 0))


class Training:
    """A training program with its state."""

    def __init__(self, program: TrainingProgram, params: Any, model_state: Any) -> None:
        self.program = program
        self.state = program.init(params, model_state)

    def on_device(self, chunk: Any, calls: int) -> Any:
        """Train on the same batches again and again."""
        for _ in range(calls):
            self.state, info = self.program.run(self.state, chunk)
        return info

    def fed(self, infeed: Infeed, per_call: int, calls: int) -> Any:
        """Train on batches as they come, a bounded number of calls ahead."""
        in_flight: collections.deque[Any] = collections.deque()
        for _ in range(calls):
            chunk = next_chunk(self.program, infeed, (per_call,))
            self.state, info = self.program.run(self.state, chunk)
            in_flight.append(info)
            if len(in_flight) >= MAX_IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
        return info


def config_of(load: Workload, args: argparse.Namespace) -> AutoencoderConfig:
    """Return the configuration of a workload, with as many epochs as can be needed."""
    return build(
        AutoencoderConfig,
        {
            "size": load.size,
            "batch_size": load.batch,
            "precision": args.precision,
            "half_type": "bfloat16",
            "batches_per_step": load.per_call,
            "epochs": 1000,
            "learning_rate": 1e-4,
            "loss_scaling": 1,
            "pipeline_num_parallel": 4,
        },
    )


def variants_of_ours(
    load: Workload, ratings: Ratings, args: argparse.Namespace
) -> dict[str, Callable[[], float]]:
    """Return what measures users per second, by name."""
    config, device = config_of(load, args), jax.devices()[0]
    model = build_model(config, ratings.num_items)
    # As many batches as are taken: the capacity is that of the fullest.
    num_users = len(active_users(ratings))
    needed = (args.rounds + 3) * load.updates
    steps = plan_steps(config, num_users)._replace(total=needed // load.per_call + 1)
    weights = init_weights(config, model)
    users = load.updates * load.batch
    made: dict[str, Callable[[], float]] = {}

    def infeed(on_device: bool) -> Infeed:
        placed = replace_options(config, data_on_device=on_device)
        return open_infeed(ratings, placed, steps, device)

    alone = Training(build_program(config, model, steps, device), *weights)
    chunk = next_chunk(alone.program, infeed(True), (load.per_call,))
    made["on the device"] = lambda: users / seconds(alone.on_device, chunk, load.calls)
    for name, on_device in (("from the host", False), ("ratings on the device", True)):
        run = functools.partial(alone.fed, infeed(on_device), load.per_call, load.calls)
        made[name] = functools.partial(lambda run: users / seconds(run), run)
    if load.num_trials:
        for precision in sweep_precisions(args):
            own = replace_options(config, precision=precision)
            one = Training(build_program(own, model, steps, device), *weights)
            counts = {f"one in {precision}": (one, 1)}
            many = sweep_of(load, own, model, steps, weights)
            counts[sweep_name(load, precision)] = many, load.num_trials
            for name, (training, count) in counts.items():
                made[name] = functools.partial(
                    lambda training, count: (
                        count * users / seconds(training.on_device, chunk, load.calls)
                    ),
                    training,
                    count,
                )
    return {f"millrace, {load.name}, {name}": run for name, run in made.items()}


def sweep_precisions(args: argparse.Namespace) -> list[str]:
    """Return the precisions in which many models are trained at once."""
    return list(dict.fromkeys([args.precision, *(["16.16"] if on_gpu() else [])]))


def sweep_name(load: Workload, precision: str) -> str:
    """Name the training of many models in a precision."""
    return f"{load.num_trials} learning rates at once in {precision}"


def sweep_of(load: Workload, config: Any, model: Any, steps: Any, weights: Any) -> Training:
    """Return the training of many models together."""
    exponents = [-20.0 - number / 2 for number in range(load.num_trials)]
    program = build_trials_program(config, model, steps, exponents, jax.devices()[0])
    return Training(program, *init_trials(weights, load.num_trials))


def torch_settings(
    sizes: dict[str, int], loads: tuple[Workload, ...], args: argparse.Namespace
) -> dict[str, Any]:
    """Say what PyTorch should train, and how."""
    variants = {}
    for load in loads:
        common = {"size": load.size, "batch": load.batch}
        variants[f"PyTorch eager, {load.name}"] = {**common, "compile": None}
        for mode in args.torch_modes:
            variants[f"torch.compile {mode}, {load.name}"] = {**common, "compile": mode}
    return {
        "num_items": sizes["num_items"],
        "rated": sizes["rated"],
        "device": "cuda" if on_gpu() else "cpu",
        "bfloat16": args.precision != "32.32",
        "variants": variants,
    }


def ratios_of(
    loads: tuple[Workload, ...],
    speeds: dict[str, list[float]],
    precisions: Sequence[str],
) -> dict[str, tuple[float, float | None]]:
    """Return the ratios by name, each with its target where there is one."""
    found: dict[str, tuple[float, float | None]] = {}
    compiled_targets = {128: 10.0, 512: 2.0} if on_gpu() else {}
    for load in loads:
        ours = speeds[f"millrace, {load.name}, on the device"]
        compiled = [n for n in speeds if n.startswith("torch.c") and n.endswith(load.name)]
        if compiled:
            best = max(compiled, key=lambda name: statistics.median(speeds[name]))
            ratio = paired_ratio(ours, speeds[best])
            target = compiled_targets.get(load.size)
            found[f"{load.name}: millrace / torch.compile"] = ratio, target
        if (eager := f"PyTorch eager, {load.name}") in speeds:
            ratio = paired_ratio(ours, speeds[eager])
            found[f"{load.name}: millrace / eager"] = ratio, None if on_gpu() else 2.0
        for way in ("ratings on the device", "from the host"):
            fed = speeds[f"millrace, {load.name}, {way}"]
            # One of the two ways is the one that a run takes by itself.
            usual = (way == "ratings on the device") == on_gpu()
            target = 0.8 if usual else None
            found[f"{load.name}: end to end, {way}"] = paired_ratio(fed, ours), target
        for precision in precisions if load.num_trials else ():
            name = sweep_name(load, precision)
            many, one = (
                speeds[f"millrace, {load.name}, {variant}"]
                for variant in (name, f"one in {precision}")
            )
            target = 6.0 if on_gpu() else None
            found[f"{load.name}: {name} / one"] = paired_ratio(many, one), target
    return found


def report(
    loads: tuple[Workload, ...],
    speeds: dict[str, list[float]],
    sizes: dict[str, int],
    facts: str,
    args: argparse.Namespace,
) -> Result:
    """Lay the speeds and their ratios out."""
    ratios = ratios_of(loads, speeds, sweep_precisions(args))
    against = "torch.compile" if on_gpu() else "eager"
    main = f"{loads[0].name}: millrace / {against}"
    ratio, target = ratios.get(main, (None, None))
    lines = [
        f"{name} {value:.2f}" + (f" (target {wanted:g})" if wanted else "")
        for name, (value, wanted) in ratios.items()
    ]
    return Result(
        name="autoencoder_speed",
        table=[
            {
                "variant": name,
                "users per s": f"{statistics.median(values):,.0f}",
                "lowest to highest": f"{min(values):,.0f} to {max(values):,.0f}",
            }
            for name, values in speeds.items()
        ],
        ratio_name=main,
        ratio=ratio,
        target=target or (10.0 if on_gpu() else 2.0),
        explanation=(
            f"{sizes['num_items']:,} items, {sizes['rated']} ratings of a user, joint "
            f"re-feeding, precision {args.precision} (bfloat16). {facts}.\n\n"
            + "\n".join(f"- {line}" for line in lines)
        ),
        numbers={
            "sizes": sizes,
            "users_per_second": speeds,
            "ratios": {name: value for name, (value, _) in ratios.items()},
            "torch": facts,
        },
    )


def arguments() -> argparse.Namespace:
    """Read the command line."""
    options = parser(__doc__, rounds=5)
    add_torch_python(options)
    options.add_argument("--tiny", action="store_true", help="a trial run for a CPU")
    options.add_argument("--precision", help="(default: 16.32 on GPU, 32.32 on CPU)")
    options.add_argument(
        "--torch-modes", nargs="*", default=["default"], help="(default: default)"
    )
    args = options.parse_args()
    args.precision = args.precision or ("16.32" if on_gpu() else "32.32")
    return args


def main() -> None:
    """Measure and report."""
    # The rest of the device's memory is PyTorch's.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    tune_memory_allocation()
    args = arguments()
    sizes, loads = (_GPU, _GPU_LOADS) if on_gpu() else (_CPU, _CPU_LOADS)
    if args.tiny:
        sizes, loads = _TINY, _TINY_LOADS
    ratings = random_ratings(
        sizes["num_users"], sizes["num_items"], sizes["num_users"] * sizes["rated"]
    )
    settings = torch_settings(sizes, loads, args)
    with TorchAutoencoder(args.torch_python, settings) as torch:
        print(torch.facts, flush=True)
        variants: dict[str, Callable[[], float]] = {}
        for load in loads:
            variants |= variants_of_ours(load, ratings, args)
            for name in torch.variants:
                if name.endswith(load.name):
                    # It takes up to ten times as long for an update.
                    updates = max(load.updates // 4, 1)
                    variants[name] = functools.partial(
                        lambda name, users, updates: users / torch.seconds(name, updates),
                        name,
                        updates * load.batch,
                        updates,
                    )
        speeds = interleave(variants, args.rounds)
    publish(report(loads, speeds, sizes, torch.facts, args), args)


if __name__ == "__main__":
    main()
