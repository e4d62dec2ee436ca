"""Models of a search at once, against one model alone: rows per second, summed over models.

Known ratings only, float32 and every setting different, as in the first rung of
``autoencoder train --search 16``. Both forms of the loss are measured: sparse (a row of
weights is read for each known rating; on a CPU one model after the other) and dense (all
ratings are computed). The program of
one model always uses the sparse form. The default sizes are those of MovieLens-1M with rows
of items; ``--columns 17770 --known 44 --batch 256`` are those of Netflix.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from harness import Result, add_sizes, build_parser, interleave, on_gpu, publish

from millrace.apps.autoencoder import joint_training
from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.search import draw_trials
from millrace.apps.autoencoder.loss import build_loss
from millrace.apps.autoencoder.program import (
    build_model,
    build_program,
    init_weights,
    plan_steps,
)
from millrace.config import build


def build_variant(options: argparse.Namespace, form: str | None) -> Callable[[], float]:
    """Return a function that measures rows per second; without a form, of one model."""
    values = {"data": "random", "num_users": 4096, "num_items": options.columns}
    values |= {"num_ratings": 4096, "size": 128, "batch_size": options.batch}
    values |= {"precision": "32.32", "loss_scaling": 1.0, "untied_decoder": True}
    values |= {"no_dense_refeeding": True, "dropout_rate": 0.5, "learning_rate": 0.02}
    config = build(AutoencoderConfig, values | {"input_dropout_rate": 0.5})
    model, device = build_model(config, options.columns), jax.devices()[0]
    steps = plan_steps(config, 4096)._replace(batches_per_step=options.updates)
    count, weights = 1, init_weights(config, model)
    if form is None:
        program = build_program(config, model, steps, device)
    else:
        count = options.models
        first = joint_training.get_settings(config, model)._replace(learning_rate=0.02)
        trials = draw_trials(first, count, 0)
        program = _build_trials(config, model, steps, trials, device, form)
        weights = joint_training.init_trials(weights, count)
    chunk = jax.device_put(_make_chunk(options), program.chunk_sharding)
    states = [program.init(*weights)]

    def measure() -> float:
        started = time.perf_counter()
        state, info = program.run(states.pop(), chunk)
        jax.block_until_ready(info)
        states.append(state)
        seconds = time.perf_counter() - started
        return options.updates * options.batch * count / seconds

    return measure


def _build_trials(
    config: Any, model: Any, steps: Any, trials: Any, device: Any, form: str
) -> Any:
    """Return the program of all trials with one form of the loss."""
    platform = {"sparse": "cpu", "dense": "gpu"}[form]
    chosen, one_by_one = joint_training._choose_loss, joint_training._prefers_one_by_one

    def choose(*_: Any) -> Any:
        return lambda model: build_loss(
            model, "none", platform=platform, num_models=len(trials)
        )

    joint_training._choose_loss = choose
    if form == "dense":
        joint_training._prefers_one_by_one = lambda *_: False
    try:
        return joint_training.build_trials_program(config, model, steps, trials, device)
    finally:
        joint_training._choose_loss = chosen
        joint_training._prefers_one_by_one = one_by_one


def _make_chunk(options: argparse.Namespace) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shape = (options.updates, options.batch, options.known)
    rows = np.broadcast_to(np.arange(options.batch)[:, None], shape)
    return {
        "user": np.tile(np.arange(options.batch), (options.updates, 1)),
        "row": np.ascontiguousarray(rows),
        "item": random.integers(0, options.columns, shape),
        "value": random.standard_normal(shape).astype(np.float32),
    }


def main() -> None:
    """Measure all variants and print the ratio."""
    parser = build_parser(__doc__)
    sizes = {"columns": 6040, "known": 243, "batch": 64, "models": 16, "updates": 50}
    add_sizes(parser, sizes)
    options = parser.parse_args()
    variants = {
        "one model": build_variant(options, None),
        **{
            f"{options.models} models, {form}": build_variant(options, form)
            for form in ("sparse", "dense")
        },
    }
    speeds = interleave(variants, options.rounds)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    one = medians["one model"]
    table = [
        {"variant": name, "rows/s": f"{speed:,.0f}", "/ one": f"{speed / one:.2f}"}
        for name, speed in medians.items()
    ]
    form = "dense" if on_gpu() else "sparse"
    result = Result(
        name="search_speed",
        table=table,
        ratio_name=f"{options.models} models of a search / one",
        ratio=medians[f"{options.models} models, {form}"] / one,
        target=5.0,
        explanation=f"{options.columns:,} columns, {options.known} known ratings of a row, "
        f"batch {options.batch}, size 128, float32. The search uses the {form} form here.",
        numbers={"rows_per_second": speeds},
    )
    publish(result, options)


if __name__ == "__main__":
    main()
