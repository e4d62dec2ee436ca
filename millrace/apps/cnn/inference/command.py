"""``millrace cnn validate``: the throughput, latency and accuracy of inference.

Throughput is measured with many batches per call, as training makes many updates per call;
latency with one call per batch, timed on the host until its logits are ready.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn import data
from millrace.apps.cnn.config.commands import ValidateConfig
from millrace.apps.cnn.data import ImageData
from millrace.apps.cnn.evaluate import BEST_BY, report_event
from millrace.apps.cnn.inference.feed import Feed, build_feed
from millrace.apps.cnn.inference.latency import (
    combine_rates,
    drop_unsupported,
    format_result,
    latency_figures,
    slowest,
)
from millrace.apps.cnn.inference.network import (
    Inference,
    Network,
    build_network,
    time_calls,
)
from millrace.apps.cnn.models.pretrained import fit_pretrained, read_pretrained
from millrace.apps.cnn.program import build_model
from millrace.checkpoint.store import read_manifest, restore_part
from millrace.config import ConfigurationError
from millrace.data.weights import find_weights
from millrace.distributed import coordination
from millrace.loop.activity import report_progress
from millrace.nn.layers import Layer, Tree, init_layers, init_shapes, num_parameters
from millrace.program.compiling import (
    compiling,
    describe_shortage,
    memory_limit,
    peak_bytes,
)
from millrace.program.step import Weights
from millrace.run.run import Run
from millrace.run.saved import announce, find_run

_DEFAULT_CALLS, _MAX_LATENCY_SECONDS = 1000, 30.0


def validate(config: ValidateConfig, run: Run) -> None:
    """Measure each batch size; results go to the run directory."""
    images = data.load(config.train_config)
    model = build_model(config.train_config, images)
    weights, origin = load_weights(config, images, model, run.console.line)
    network = build_network(config, images.image_shape, model, weights)
    _describe(config, run, images, weights.params, origin)
    started = time.perf_counter()
    run.summary["results"] = results = []
    with data.reporting_corrupt_samples(images, run):
        for size in config.batch_size:
            results.append(_measure(config, run, images, network, size, started))
    _report(run, results)


def load_weights(
    config: ValidateConfig,
    images: ImageData,
    model: list[Layer],
    announce: Callable[[str], Any] = announce,
) -> tuple[Weights, str]:
    """Return the weights, and a line about where they come from.

    Args:
        config: Names a run, a file of pretrained weights, or neither.
        images: The data, which has the shape of an image.
        model: The layers.
        announce: Called with a line about the checkpoint of a run.
    """
    example = np.zeros((1, *images.image_shape), np.float32)
    if config.checkpoint_dir is not None:
        saved = find_run(config.checkpoint_dir, command="cnn train")
        chosen = saved.choose(config.which, best_by=BEST_BY)
        announce(chosen.describe())
        shapes = _cast_to_stored(chosen.path, Weights(*init_shapes(model, example)))
        weights, _ = restore_part(chosen.path, shapes)
        return weights, f"{chosen.path}, {chosen.update} updates"
    params, model_state = init_layers(model, jax.random.key(config.run.seed), example)
    if config.model.pretrained is None:
        origin = "random: neither checkpoint_dir nor pretrained is given"
        return Weights(params, model_state), origin
    file = find_weights(config.model.pretrained, announce)
    params, model_state, notices = fit_pretrained(
        file.path, read_pretrained(file.path), params, model_state
    )
    return Weights(params, model_state), " ".join([file.source, *notices])


def _cast_to_stored(path: Path, shapes: Weights) -> Weights:
    """Give the weights the type that they have in a checkpoint."""
    arrays: dict[str, str] = read_manifest(path)["arrays"]
    stored = [spec for name, spec in arrays.items() if name.startswith(".params")]
    dtype = jnp.dtype(stored[0].split("[")[0]) if stored else jnp.dtype("float32")
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes.params)
    return shapes._replace(params=params)


def build_inference(
    config: ValidateConfig, images: ImageData, network: Network, feed: Feed
) -> Inference:
    """Return the network for the batches of a feed, not yet compiled."""
    return Inference(
        network,
        images.preprocess,
        feed.batch,
        num_replicas=config.num_replicas,
        compute=config.train_config.plan.types.compute,
    )


def _measure(
    config: ValidateConfig,
    run: Run,
    images: ImageData,
    network: Network,
    size: int,
    started: float,
) -> dict[str, Any]:
    """Return the results for one batch size."""
    run.console.status(f"compiling for batches of {size}")
    feed, inference, memory = _compile(config, images, network, size)
    _check_memory(config, images, network, size, memory)
    inference.place_weights()
    rates: list[list[float]] = []
    metrics: dict[str, float] = {}
    how = ""
    with feed:
        feed.start(inference)
        coordination.barrier("all measure at the same time")
        for _ in range(config.repeat):
            run.console.status(f"batches of {size}")
            measured = feed.run(inference)
            metrics, how = measured.metrics, measured.how
            rates.append(coordination.gather("rate", measured.samples_per_second))
            event = {"update": 0, "epoch": 0.0, "time": time.perf_counter() - started}
            event |= {"batch_size": size, "samples_per_second": sum(rates[-1]), **metrics}
            report_event(event, run)
        run.console.status(f"latency of batches of {size}")
        seconds = _time_latency(config, inference, feed)
        calls = min(coordination.gather("latency calls", len(seconds)))
        figures = drop_unsupported(latency_figures(seconds), calls)
        latency = coordination.gather("latency", figures)
    inference.release()
    return {
        "batch_size": size,
        "num_replicas": config.num_replicas,
        **combine_rates(rates),
        "measured": how,
        "latency_ms": slowest(latency),
        "latency_calls": calls,
        **metrics,
        "compile_seconds": inference.compile_seconds,
        "memory_bytes": memory,
    }


def _compile(
    config: ValidateConfig, images: ImageData, network: Network, size: int
) -> tuple[Feed, Inference, int]:
    """Return a feed, the network compiled for it, and the bytes it needs per device."""
    feed = build_feed(config, images, size)
    with compiling({}) as programs:
        inference = build_inference(config, images, network, feed)
        feed.compile(inference)
        if config.latency_calls != 0:
            inference.compile_one()
    return feed, inference, peak_bytes(programs)


def _check_memory(
    config: ValidateConfig, images: ImageData, network: Network, size: int, memory: int
) -> None:
    """Raise an error if a batch does not fit in memory, before it runs."""

    def needs(smaller: int) -> int:
        feed, _, needed = _compile(config, images, network, smaller)
        feed.close()
        return needed

    problem = describe_shortage(size, memory, memory_limit(jax.local_devices()[0]), needs)
    if problem is not None:
        raise ConfigurationError(f"{problem[0].upper()}{problem[1:]}.")


def _time_latency(config: ValidateConfig, inference: Inference, feed: Feed) -> list[float]:
    """Time the calls asked for or, by default, 1000 in at most 30 seconds."""
    asked = config.latency_calls
    calls = _DEFAULT_CALLS if asked is None else asked
    until = math.inf if asked is not None else time.perf_counter() + _MAX_LATENCY_SECONDS
    seconds = []
    for each in time_calls(inference, feed.several_batches(calls), calls):
        seconds.append(each)
        report_progress(len(seconds), calls)
        if time.perf_counter() > until:
            break
    return seconds


def _describe(
    config: ValidateConfig, run: Run, images: ImageData, params: Tree, origin: str
) -> None:
    train_config = config.train_config
    sizes = ", ".join(map(str, config.batch_size))
    processes = range(coordination.num_processes())
    of_each = f" in each of {len(processes)} processes" if len(processes) > 1 else ""
    own = slice(config.num_replicas)
    run.describe(
        [device for n in processes for device in jax.local_devices(n)[own]],
        train_config.plan,
        None,
        model=f"{train_config.model_title}, {num_parameters(params):,} parameters",
        weights=origin,
        dataset=data.describe(images, train_config),
        batch=f"{sizes} on each of {config.num_replicas} replicas{of_each}",
    )
    if images.warning is not None:
        run.console.warning(images.warning)
    for notice in config.notices():
        run.console.line(notice)


def _report(run: Run, results: list[dict[str, Any]]) -> None:
    """Report each batch size; the summary gets the figures of the last one."""
    for result in results:
        run.closing_notes[f"batch {result['batch_size']}"] = format_result(result)
    last = results[-1]
    names = ("accuracy", "top5_accuracy", "loss")
    metrics = {name: last[name] for name in names if name in last}
    run.summary |= {
        "status": "completed",
        "samples_per_second": float(np.median(last["samples_per_second"])),
        "compile_seconds": sum(result["compile_seconds"] for result in results),
        "metrics": {f"validation_{name}": value for name, value in metrics.items()},
    }
