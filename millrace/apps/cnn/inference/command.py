"""``millrace cnn validate``: how fast a network answers, and how often it is right.

Throughput is measured with many batches in a call, as training makes many updates in
one; latency with a call for each batch, timed on the host until it is done.
"""

import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn import data
from millrace.apps.cnn.config import ipu
from millrace.apps.cnn.config.inference import ValidateConfig
from millrace.apps.cnn.data import ImageData
from millrace.apps.cnn.evaluate import report_event
from millrace.apps.cnn.feeding import corrupt_samples_reported
from millrace.apps.cnn.inference.feed import Feed, feed_of
from millrace.apps.cnn.inference.latency import (
    latency_figures,
    said_of,
    slowest,
    speeds_of,
    supported_figures,
)
from millrace.apps.cnn.inference.network import Inference, Network, latencies, network_of
from millrace.apps.cnn.models.pretrained import fit_pretrained, read_pretrained
from millrace.apps.cnn.program import model_of
from millrace.checkpoint.store import read_manifest, restore_part
from millrace.config import ConfigurationError
from millrace.distributed import coordination
from millrace.nn.layers import Layer, Tree, init_layers, init_shapes, num_parameters
from millrace.program.compiling import compiling
from millrace.program.memory import describe_shortage, memory_limit, peak_bytes
from millrace.program.step import Weights
from millrace.run.run import Run
from millrace.run.saved import find_run

_USUAL_CALLS, _LATENCY_SECONDS = 1000, 30.0


def validate(config: ValidateConfig, run: Run) -> None:
    """Measure each batch size; results go to the run directory."""
    images = data.load(config.training)
    model = model_of(config.training, images)
    params, model_state, about = weights_of(config, images, model)
    network = narrowed(config, images, model, params, model_state)
    _describe(config, run, images, params, about)
    started = time.perf_counter()
    run.summary["results"] = found = []
    with corrupt_samples_reported(images, run):
        for size in config.batch_size:
            found.append(_measure(config, run, images, network, size, started))
    _conclude(run, found)


def weights_of(
    config: ValidateConfig, images: ImageData, model: list[Layer]
) -> tuple[Tree, Tree, str]:
    """Return weights and model state, and say where they are from."""
    example = np.zeros((1, *images.image_shape), np.float32)
    if (given := config.checkpoint_dir) is not None:
        path = find_run(given, command="cnn train").newest()
        shapes = _as_stored(path, Weights(*init_shapes(model, example)))
        weights, manifest = restore_part(path, shapes)
        return *weights, f"{path}, {manifest['update']} updates"
    params, model_state = init_layers(model, jax.random.key(config.seed), example)
    if (file := config.pretrained) is None:
        return params, model_state, "random: neither checkpoint_dir nor pretrained is given"
    params, model_state, notes = fit_pretrained(
        file, read_pretrained(file), params, model_state
    )
    return params, model_state, " ".join([str(file), *notes])


def _as_stored(path: Path, shapes: Weights) -> Weights:
    """Give the weights the type that a checkpoint has them in."""
    arrays: dict[str, str] = read_manifest(path)["arrays"]
    stored = [kind for name, kind in arrays.items() if name.startswith(".params")]
    kind = jnp.dtype(stored[0].split("[")[0]) if stored else jnp.dtype("float32")
    typed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, kind), shapes.params)
    return shapes._replace(params=typed)


def narrowed(
    config: ValidateConfig,
    images: ImageData,
    model: list[Layer],
    params: Tree,
    model_state: Tree,
) -> Network:
    """Return the network as it will be run."""
    return network_of(
        model,
        params,
        model_state,
        images.image_shape,
        folded=config.fold_batch_norm,
        compute=config.training.types.compute,
    )


def inference_of(
    config: ValidateConfig, images: ImageData, network: Network, feed: Feed
) -> Inference:
    """Return the network for the batches of a feed, not yet compiled."""
    return Inference(
        network,
        images.prepare,
        feed.batch,
        num_replicas=config.num_replicas,
        compute=config.training.types.compute,
    )


def _measure(
    config: ValidateConfig,
    run: Run,
    images: ImageData,
    network: Network,
    size: int,
    started: float,
) -> dict[str, Any]:
    """Measure one batch size."""
    run.console.status(f"compiling for batches of {size}")
    feed, inference, memory = _compiled(config, images, network, size)
    _check_memory(config, images, network, size, memory)
    inference.place_weights()
    rates: list[list[float]] = []
    metrics: dict[str, float] = {}
    with feed:
        feed.start(inference)
        coordination.barrier("all measure at the same time")
        for _ in range(config.repeat):
            run.console.status(f"batches of {size}")
            seconds, metrics = feed.run(inference)
            rates.append(coordination.gather("rate", feed.num_samples / seconds))
            event = {"update": 0, "epoch": 0.0, "time": time.perf_counter() - started}
            event |= {"batch_size": size, "samples_per_second": sum(rates[-1]), **metrics}
            report_event(event, run)
        seconds = _latencies(config, inference, feed)
        calls = min(coordination.gather("latency calls", len(seconds)))
        figures = supported_figures(latency_figures(seconds), calls)
        latency = coordination.gather("latency", figures)
    inference.release()
    return {
        "batch_size": size,
        "num_replicas": config.num_replicas,
        **speeds_of(rates),
        "latency_ms": slowest(latency),
        "latency_calls": calls,
        **metrics,
        "compile_seconds": inference.compile_seconds,
        "memory_bytes": memory,
    }


def _compiled(
    config: ValidateConfig, images: ImageData, network: Network, size: int
) -> tuple[Feed, Inference, int]:
    """Return the batches, what takes them, and the bytes that takes on each device."""
    feed = feed_of(config, images, size)
    with compiling({}) as programs:
        inference = inference_of(config, images, network, feed)
        feed.compile(inference)
        if config.latency_calls != 0:
            inference.compile_one()
    return feed, inference, peak_bytes(programs)


def _check_memory(
    config: ValidateConfig, images: ImageData, network: Network, size: int, memory: int
) -> None:
    """Refuse a batch that cannot fit, before it is run."""

    def needs(smaller: int) -> int:
        feed, _, needed = _compiled(config, images, network, smaller)
        feed.close()
        return needed

    said = describe_shortage(size, memory, memory_limit(jax.local_devices()[0]), needs)
    if said is not None:
        raise ConfigurationError(f"{said[0].upper()}{said[1:]}.")


def _latencies(config: ValidateConfig, inference: Inference, feed: Feed) -> list[float]:
    """Time as many calls as asked for, or as many as there is time for."""
    asked = config.latency_calls
    calls = _USUAL_CALLS if asked is None else asked
    until = math.inf if asked is not None else time.perf_counter() + _LATENCY_SECONDS
    seconds = []
    for each in latencies(inference, feed.several_batches(calls), calls):
        seconds.append(each)
        if time.perf_counter() > until:
            break
    return seconds


def _describe(
    config: ValidateConfig, run: Run, images: ImageData, params: Tree, about: str
) -> None:
    sizes = ", ".join(map(str, config.batch_size))
    processes = range(coordination.num_processes())
    of_each = f" in each of {len(processes)} processes" if len(processes) > 1 else ""
    own = slice(config.num_replicas)
    run.describe(
        [device for n in processes for device in jax.local_devices(n)[own]],
        config.training,
        None,
        model=f"{config.training.model_title}, {num_parameters(params):,} parameters",
        weights=about,
        dataset=data.describe(images, config.training),
        batch=f"{sizes} on each of {config.num_replicas} replicas{of_each}",
    )
    if images.warning is not None:
        run.console.warning(images.warning)
    for line in [*ipu.lines_about(config), *config.lines_about()]:
        run.console.line(line)


def _conclude(run: Run, found: list[dict[str, Any]]) -> None:
    """Say the figures of each batch size, and put the last one's into the summary."""
    for result in found:
        run.closing_facts[f"batch {result['batch_size']}"] = said_of(result)
    last = found[-1]
    named = {name: last[name] for name in ("accuracy", "loss") if name in last}
    run.summary |= {
        "status": "completed",
        "samples_per_second": float(np.median(last["samples_per_second"])),
        "compile_seconds": sum(result["compile_seconds"] for result in found),
        "metrics": {f"validation_{name}": value for name, value in named.items()},
    }
