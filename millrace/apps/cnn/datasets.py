"""``millrace cnn verify-dataset`` and ``millrace cnn benchmark-dataset``."""

import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from millrace.apps.cnn import data
from millrace.apps.cnn.config.commands import BenchmarkDatasetConfig, VerifyDatasetConfig
from millrace.apps.cnn.data import ImageData
from millrace.config import ConfigurationError
from millrace.data.benchmark import dataset_benchmark
from millrace.data.catalog import CATALOG, Dataset
from millrace.data.decoding import decoder_name
from millrace.data.image_source import ImageSource, num_cores
from millrace.data.source import DatasetError
from millrace.data.stream import EvaluationBatches
from millrace.data.verify import verify
from millrace.durable import write_atomically
from millrace.run.console import Console
from millrace.run.directory import open_run_directory
from millrace.run.process import tune_memory_allocation
from millrace.versions import versions

_BENCHMARK = "cnn-benchmark-dataset"
_MAX_WARMUP_EPOCHS = 2
_NUM_TIMINGS = 5


def verify_dataset(config: VerifyDatasetConfig) -> int:
    """Print every mismatch; return 1 if there are any."""
    train_config = config.train_config
    console = Console()

    def show(split: str, done: int, total: int) -> None:
        if console.live:
            console.status(f"reading {split} samples")
            console.progress(done, total)

    try:
        images = data.load(train_config)
        print(data.describe(images, train_config))
        expected = _expected(train_config.resolved_dataset, images)
        mismatches = [images.warning] if images.warning else []
        if images.num_classes != expected.num_classes:
            mismatches.append(
                f"{expected.name} has {images.num_classes} classes; expected "
                f"{expected.num_classes}."
            )
        mismatches += verify(
            (images.training, images.validation),
            expected,
            num_samples=config.num_samples or None,
            progress=show,
        )
    except DatasetError as error:  # too damaged to read the rest
        mismatches = [str(error)]
    finally:
        console.stop()
    for mismatch in mismatches:
        print(f"mismatch: {mismatch}")
    if not mismatches:
        print("No mismatches found.")
    return 1 if mismatches else 0


def _expected(name: str, images: ImageData) -> Dataset:
    """Return the published sizes or, for your own images, the actual ones."""
    if name in CATALOG:
        return CATALOG[name]
    return dataclasses.replace(
        CATALOG["imagenet"],
        name=name,
        num_training=len(images.training),
        num_validation=len(images.validation),
        num_classes=images.num_classes,
    )


def benchmark_dataset(config: BenchmarkDatasetConfig) -> None:
    """Measure the throughput of the host, print it and save the measurements."""
    tune_memory_allocation()  # as in training
    images = data.load(config.train_config)
    if config.precision is not None and not config.quiet:
        print(
            "--precision has no effect: the host prepares bytes or 32-bit numbers.",
            file=sys.stderr,
        )
    batches, batches_per_epoch = _batches(images, config)
    directory = None
    if config.run_dir is not None or not config.json:
        directory = open_run_directory(
            config.run_dir, config, command=_BENCHMARK, resume=False
        )
    report = json.loads(
        dataset_benchmark(
            batches,
            config.num_epochs,
            config.elements_per_epoch or batches_per_epoch,
            print_stats=not config.quiet,
        )
    )
    throughput = _throughput(report["epochs"]) * config.micro_batch_size
    source = images.training if config.split == "train" else images.validation
    if isinstance(source, ImageSource):
        report |= _profile(source, throughput, next(iter(batches)))
        if not config.quiet:
            for line in _profile_lines(report):
                print(line, file=sys.stderr)
    print(
        f"Throughput = {throughput:.2f} examples/sec",
        file=sys.stderr if config.json else sys.stdout,
    )
    if config.json:
        print(json.dumps(report))
    if directory is not None:
        _write(directory.path, config, report, throughput, images)


def _batches(
    images: ImageData, config: BenchmarkDatasetConfig
) -> tuple[Iterable[Any], int]:
    """Return an endless stream of batches, and the number of batches per epoch."""
    source = images.training if config.split == "train" else images.validation
    count = len(source) // config.micro_batch_size
    if count == 0:
        raise ConfigurationError(
            f"The {config.split} split has {len(source)} samples, fewer than one batch of "
            f"{config.micro_batch_size}. Choose a smaller micro_batch_size."
        )
    if config.split == "validation":
        batches = EvaluationBatches(source, config.micro_batch_size)
        passes = itertools.chain.from_iterable(itertools.repeat(batches))
        return (element["batch"] for element in passes), len(batches)
    num_parallel = config.data.parallel_batches(config.micro_batch_size)
    return images.stream(config.micro_batch_size, num_parallel, seed=config.seed), count


def _profile(source: ImageSource, throughput: float, batch: Any) -> dict[str, Any]:
    """Return the speed per core, and the time that each step takes per image."""
    cores = min(source.num_workers or num_cores(), num_cores())
    num_images = len(batch["label"])
    times = source.times._asdict()
    steps = {name: seconds / source.num_decoded for name, seconds in times.items()}
    steps["staging"] = _time(lambda: {k: x.copy() for k, x in batch.items()}) / num_images
    copy = functools.partial(jax.device_put, batch, jax.devices()[0])
    steps["copying"] = _time(lambda: jax.block_until_ready(copy())) / num_images
    return {
        "decoder": decoder_name(),
        "num_workers": source.num_workers,
        "images_per_core_second": throughput / cores,
        "microseconds_per_image": {n: round(1e6 * s, 1) for n, s in steps.items()},
    }


def _time(function: Callable[[], Any]) -> float:
    """Return the median of a few timings, after one for warmup."""
    seconds = []
    for _ in range(_NUM_TIMINGS + 1):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _profile_lines(report: dict[str, Any]) -> Iterator[str]:
    workers = report["num_workers"]
    where = f"{workers} worker process{'es' * (workers > 1)}" if workers else "threads"
    per_core = report["images_per_core_second"]
    yield f"{per_core:,.0f} images/s per core, {where}, decoded by {report['decoder']}"
    steps = report["microseconds_per_image"]
    total = sum(steps.values())
    shares = ", ".join(f"{name} {value / total:.0%}" for name, value in steps.items())
    yield f"{total / 1000:.2f} ms per image: {shares}"


def _throughput(epochs: list[dict[str, float]]) -> float:
    """Return the mean number of batches per second after the warmup epochs."""
    warmup = min(_MAX_WARMUP_EPOCHS, len(epochs) - 1)
    return statistics.fmean(epoch["elements_per_second"] for epoch in epochs[warmup:])


def _write(
    folder: Path,
    config: BenchmarkDatasetConfig,
    report: dict[str, Any],
    throughput: float,
    images: ImageData,
) -> None:
    summary = {
        "status": "completed",
        "error": None,
        "command": _BENCHMARK,
        "dataset": config.train_config.resolved_dataset,
        "samples_per_second": throughput,
        "corrupt_samples": images.corrupt,
        "versions": versions(),
    }
    write_atomically(folder / "dataset_benchmark.json", json.dumps(report, indent=2) + "\n")
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    if not config.quiet:
        print(f"results  {folder}", file=sys.stderr)
