"""The cost of feeding: training from an infeed against training from resident batches.

The same program makes the same updates twice: from ``mr.Infeed`` over a shuffled stream
of samples in host memory, and from one chunk on the device. The speed of the stream alone
(``mr.dataset_benchmark``) is shown, too: feeding can be hidden only if the host produces
batches faster than the device consumes them.

Target: at least 95 % of the speed.
"""

import json
import statistics
from typing import Any

import jax
import numpy as np
import optax
from harness import (
    Result,
    add_sizes,
    build_mlp_stream,
    build_parser,
    format_spread,
    init_mlp,
    interleave,
    mlp_loss,
    on_gpu,
    paired_ratio,
    publish,
    time_call,
)

import millrace as mr

_CPU = {"micro_batch": 128, "features": 784, "width": 512, "depth": 2, "updates": 160}
_GPU = {"micro_batch": 2048, "features": 3072, "width": 8192, "depth": 3, "updates": 200}
_OUTPUTS = 16
_CALLS = 20
"""Calls per round; many, because the first chunks were staged before the round began."""


def measure(sizes: dict[str, int], rounds: int) -> dict[str, list[float]]:
    """Return seconds per update with and without feeding."""
    stream = build_mlp_stream(sizes["micro_batch"], sizes["features"], _OUTPUTS)
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
            jax.block_until_ready(before)  # two calls in flight, as in mr.train
            before = info
        return state

    def from_infeed(state: Any) -> Any:
        return mr.train(program, state, infeed=infeed, updates=updates)

    variants = {
        "device": lambda: time_call(from_device, program.init(weights)) / updates,
        "infeed": lambda: time_call(from_infeed, program.init(weights)) / updates,
    }
    with mr.Infeed(stream) as infeed:
        return interleave(variants, rounds)


def measure_host(sizes: dict[str, int]) -> list[float]:
    """Return three measurements of the seconds in which the host makes a batch."""
    stream = build_mlp_stream(sizes["micro_batch"], sizes["features"], _OUTPUTS)
    report = mr.dataset_benchmark(stream, 4, sizes["updates"], print_stats=False)
    return [1 / epoch["elements_per_second"] for epoch in json.loads(report)["epochs"][1:]]


def main() -> None:
    """Measure and report."""
    parser = build_parser(__doc__, rounds=15)
    add_sizes(parser, _GPU if on_gpu() else _CPU)
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in _GPU}
    measured = measure(sizes, args.rounds)
    host = measure_host(sizes)
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
                "ms per update": format_spread(values, 1e3),
                "updates per s": f"{1 / statistics.median(values):.1f}",
            }
            for label, values in labels.items()
        ],
        ratio_name="speed from the infeed / speed from the device",
        ratio=ratio,
        target=0.95,
        explanation=(
            f"The host makes batches {headroom:.1f} times as fast as the device consumes "
            "them, and stages the next chunks during training. The remaining cost is the "
            "use of cores, memory and link by the host."
        ),
        numbers={"sizes": sizes, "seconds_per_update": measured, "host_seconds": host},
    )
    publish(result, args)


if __name__ == "__main__":
    main()
