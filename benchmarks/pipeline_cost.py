"""The cost of a pipeline relative to plain accumulation of the same micro-batches.

On a CPU, the stages are on virtual devices of one machine and cannot overlap, so the ratio
is the cost of the schedule table and of the exchange between devices. The plain program
keeps all activations or, with recomputation, only the results of matrix products; the
pipeline keeps those (stored) or the inputs of its stages (recomputed).

On a GPU, two stages share the one device, and a plan runs them as a plain loop.

The overhead of a tick is measured with a network that has almost no work; on a GPU, that
pipeline is forced to follow its schedule table as if each stage had its own device.

Target: on a CPU at most 1.4 times the plain program, both recomputed; on a GPU at most 1.05
times for two stages on it, both stored.
"""

import os
import statistics
import sys
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from harness import (
    Result,
    add_sizes,
    build_parser,
    format_spread,
    interleave,
    on_gpu,
    paired_ratio,
    publish,
    time_call,
)

import millrace as mr
from millrace.apps.cnn.models import catalog
from millrace.nn.layers import init_layers
from millrace.nn.losses import LayeredLoss, cross_entropy
from millrace.nn.norms import batch_norm
from millrace.program.pipeline_program import PipelineProgram
from millrace.program.step import Step
from millrace.schedule.stages import place_stages
from millrace.schedule.table import build_table

_SCHEDULES = ("grouped", "interleaved", "sequential")
_CPU = {"micro_batch": 16, "pixels": 32, "accumulation": 8, "updates": 1}
_GPU = {"micro_batch": 64, "pixels": 224, "accumulation": 4, "updates": 4}


def build_loss(model_name: str) -> LayeredLoss:
    """Return the loss of a classifier whose images are sent as bytes."""

    def inputs(batch: Any, key: Any) -> Any:
        del key
        image = batch["image"].astype(np.float32) / 127 - 1
        return image.astype(jax.numpy.bfloat16 if on_gpu() else np.float32)

    def outputs(logits: Any, batch: Any) -> Any:
        return cross_entropy(logits, batch["label"]).mean(), {}

    return LayeredLoss(catalog.build_layers(model_name, 10, batch_norm), inputs, outputs)


class Variant:
    """The program of a plan, with its state and a chunk of batches."""

    def __init__(
        self,
        loss: LayeredLoss,
        sizes: dict[str, int],
        *,
        forced: bool = False,
        **plan: Any,
    ) -> None:
        half = {"precision": "16.32"} if on_gpu() else {}
        self._plan = mr.Plan(
            micro_batch_size=sizes["micro_batch"],
            gradient_accumulation_count=sizes["accumulation"],
            **half,
            **plan,
        )
        optimizer = optax.sgd(0.01, momentum=0.9)
        self._program = (
            PipelineProgram(Step(loss, optimizer, self._plan), None)
            if forced  # follow the schedule table even if all stages share a device
            else mr.training_program(loss, optimizer, self._plan)
        )
        pixels, batch = sizes["pixels"], sizes["micro_batch"]
        example = np.zeros((1, pixels, pixels, 3), np.float32)
        params, model_state = init_layers(loss.layers, jax.random.key(0), example)
        self._state = self._program.init(params, model_state)
        rng = np.random.default_rng(0)
        elements = sizes["updates"] * sizes["accumulation"]
        self._chunk = jax.device_put(
            {
                "image": rng.integers(
                    0, 256, (elements, batch, pixels, pixels, 3), np.uint8
                ),
                "label": rng.integers(0, 10, (elements, batch), np.int32),
            },
            self._program.chunk_sharding,
        )
        self._updates = sizes["updates"]

    def seconds_per_update(self) -> float:
        """Make the updates of the chunk once and return the seconds per update."""

        def run() -> Any:
            self._state, info = self._program.run(self._state, self._chunk)
            return info

        return time_call(run) / self._updates

    def memory(self) -> int:
        """Return the bytes that the program needs on a device besides its arguments."""
        (compiled,) = self._program._compiled.values()
        return compiled.memory_analysis().temp_size_in_bytes


def measure(
    model: str, splits: list[str], mapping: list[int] | None, sizes: dict, rounds: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Time plain accumulation and every schedule, stored and recomputed, in turn."""
    loss = build_loss(model)
    # On a GPU, measure only the defaults of a plan: each program compiles for a minute.
    modes = {"stored": False} if on_gpu() else {"stored": False, "recomputed": True}
    variants = {
        f"plain, {how}": Variant(loss, sizes, recomputation=again)
        for how, again in modes.items()
    }
    for how, again in modes.items():
        for schedule in ["grouped"] if on_gpu() else _SCHEDULES:
            variants[f"{schedule}, {how}"] = Variant(
                loss,
                sizes,
                recomputation=again,
                pipeline_splits=splits,
                device_mapping=mapping,
                pipeline_schedule=schedule,
            )
    for name, variant in variants.items():
        took = time_call(variant.seconds_per_update)
        print(f"{name}: compiled and run in {took:.0f} s", file=sys.stderr, flush=True)
    times = interleave({n: v.seconds_per_update for n, v in variants.items()}, rounds)
    return times, {name: variant.memory() for name, variant in variants.items()}


def measure_tick(mapping: list[int] | None, rounds: int) -> float:
    """Return the overhead per tick of a network with almost no work, in seconds."""
    sizes = {"micro_batch": 1, "pixels": 32, "accumulation": 32, "updates": 4}
    splits = ["conv2d_1"]
    loss = build_loss("toy_model")
    variants = {
        "plain": Variant(loss, sizes, recomputation=True),
        "pipeline": Variant(
            loss,
            sizes,
            forced=True,
            recomputation=True,
            pipeline_splits=splits,
            device_mapping=mapping,
            pipeline_schedule="interleaved",
        ),
    }
    times = interleave({n: v.seconds_per_update for n, v in variants.items()}, rounds)
    ticks = len(build_table("interleaved", place_stages([1, 1], mapping), 32).ticks)
    extra = statistics.median(times["pipeline"]) - statistics.median(times["plain"])
    return extra / ticks


def main() -> None:
    """Measure and report."""
    parser = build_parser(__doc__, rounds=5)
    parser.add_argument("--model", default="resnet50" if on_gpu() else "cifar_resnet20")
    parser.add_argument("--splits", nargs="+")
    parser.add_argument("--device-mapping", type=int, nargs="+")
    add_sizes(parser, _GPU if on_gpu() else _CPU)
    args = parser.parse_args()
    splits = args.splits or (
        ["conv4_block1_out"]
        if "cifar" not in args.model
        else [f"conv{s}_block{b}_post_addition_relu" for s, b in ((2, 2), (3, 1), (3, 3))]
    )
    mapping = args.device_mapping or ([0] * (len(splits) + 1) if on_gpu() else None)
    sizes = {name: getattr(args, name) for name in _CPU}
    times, memory = measure(args.model, splits, mapping, sizes, args.rounds)
    tick = measure_tick([0, 0] if on_gpu() else None, args.rounds)
    plain = [n for n in times if n.startswith("plain")]
    rows = [
        {
            "program": name,
            "ms per update": format_spread(values, 1e3, 1),
            **{f"/ {n}": f"{paired_ratio(values, times[n]):.3f}" for n in plain},
            "temporary MiB per device": f"{memory[name] / 2**20:,.1f}",
        }
        for name, values in times.items()
    ]
    compared = (
        ("grouped, stored", "plain, stored")
        if on_gpu()
        else max(
            ((f"{schedule}, recomputed", "plain, recomputed") for schedule in _SCHEDULES),
            key=lambda pair: paired_ratio(times[pair[0]], times[pair[1]]),
        )
    )
    publish(
        Result(
            name="pipeline_cost",
            table=rows,
            ratio_name=" / ".join(compared),
            ratio=paired_ratio(times[compared[0]], times[compared[1]]),
            target=1.05 if on_gpu() else 1.4,
            at_least=False,
            explanation=f"A tick costs {1e6 * tick:.0f} us more than its stages "
            f"(toy_model, two stages, interleaved). {args.model}, stages at "
            f"{', '.join(splits)}, mapping {mapping or 'one device each'}, {sizes}.",
            numbers={"seconds": times, "temporary_bytes": memory, "tick_seconds": tick},
        ),
        args,
    )


if __name__ == "__main__":
    main()
