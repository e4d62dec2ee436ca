"""What feeding costs: training from an infeed against batches that are already there.

The same program makes the same updates twice: from ``mr.Infeed`` over a shuffled stream
of samples in the host's memory, and from one chunk that lies on the device. The stream's
own speed (``mr.dataset_benchmark``) is shown too: feeding can be hidden only where the
host supplies batches faster than the device uses them.

Target: at least 95 % of the speed.
"""

import json
import statistics
from typing import Any

import jax
import numpy as np
import optax
from reporting import (
    Result,
    add_sizes,
    init_mlp,
    interleave,
    mlp_loss,
    mlp_stream,
    on_gpu,
    paired_ratio,
    parser,
    publish,
    seconds,
    spread,
)

import millrace as mr

_CPU = {"micro_batch": 128, "features": 784, "width": 512, "depth": 2, "updates": 160}
_GPU = {"micro_batch": 2048, "features": 3072, "width": 8192, "depth": 3, "updates": 200}
_OUTPUTS = 16
_CALLS = 20
"""Calls a round makes: the chunks staged before it began must be a small part of it."""


def measure(sizes: dict[str, int], rounds: int) -> dict[str, list[float]]:
    """Return seconds per update with and without feeding."""
    stream = mlp_stream(sizes["micro_batch"], sizes["features"], _OUTPUTS)
    updates, per_call = sizes["updates"], sizes["updates"] // _CALLS
    plan = mr.Plan(micro_batch_size=sizes["micro_batch"], updates_per_execution=per_call)
    program = mr.training_program(mlp_loss, optax.sgd(1e-3), plan)
    weights = init_mlp([sizes["features"], *[sizes["width"]] * sizes["depth"], _OUTPUTS])
    batches = [stream.batch(position) for position in range(per_call)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
    chunk = jax.device_put(stacked, program.chunk_sharding)
    program.compile(program.init(weights), chunk)

    def from_device(state: Any) -> Any:
        before = None
        for _ in range(_CALLS):
            state, info = program.run(state, chunk)
            jax.block_until_ready(before)  # two calls under way, as mr.train has them
            before = info
        return state

    def from_infeed(state: Any) -> Any:
        return mr.train(program, state, infeed=infeed, updates=updates)

    variants = {
        "device": lambda: seconds(from_device, program.init(weights)) / updates,
        "infeed": lambda: seconds(from_infeed, program.init(weights)) / updates,
    }
    with mr.Infeed(stream) as infeed:
        return interleave(variants, rounds)


def supply(sizes: dict[str, int]) -> list[float]:
    """Return the seconds in which the host makes one batch, three times measured."""
    stream = mlp_stream(sizes["micro_batch"], sizes["features"], _OUTPUTS)
    found = mr.dataset_benchmark(stream, 4, sizes["updates"], print_stats=False)
    return [1 / epoch["elements_per_second"] for epoch in json.loads(found)["epochs"][1:]]


def main() -> None:
    """Measure and report."""
    options = parser(__doc__, rounds=15)
    add_sizes(options, _GPU if on_gpu() else _CPU)
    args = options.parse_args()
    sizes = {name: getattr(args, name) for name in _GPU}
    measured = measure(sizes, args.rounds)
    host = supply(sizes)
    ratio = paired_ratio(measured["device"], measured["infeed"])
    headroom = statistics.median(measured["device"]) / statistics.median(host)
    labels = {
        "a chunk on the device": measured["device"],
        "mr.Infeed": measured["infeed"],
        "the host alone, no training": host,
    }
    result = Result(
        name="feed_overlap",
        table=[
            {
                "fed from": label,
                "ms per update": spread(values, 1e3),
                "updates per s": f"{1 / statistics.median(values):.1f}",
            }
            for label, values in labels.items()
        ],
        ratio_name="speed from the infeed / speed from the device",
        ratio=ratio,
        target=0.95,
        explanation=(
            f"The host makes batches {headroom:.1f} times as fast as the device uses them, "
            "and stages the next chunks while the current one is trained on. What remains "
            "of the cost is the host's own use of cores, memory and link."
        ),
        numbers={"sizes": sizes, "seconds_per_update": measured, "host_seconds": host},
    )
    publish(result, args)


if __name__ == "__main__":
    main()
