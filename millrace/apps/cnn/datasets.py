"""``millrace cnn verify-dataset`` and ``millrace cnn benchmark-dataset``."""

import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from millrace.apps.cnn import data
from millrace.apps.cnn.config.commands import BenchmarkDatasetConfig, VerifyDatasetConfig
from millrace.apps.cnn.data import ImageData
from millrace.config import ConfigurationError
from millrace.data.benchmark import dataset_benchmark
from millrace.data.catalog import CATALOG, Dataset
from millrace.data.source import DatasetError
from millrace.data.stream import EvaluationBatches, ParallelStream
from millrace.data.verify import verify
from millrace.durable import write_atomically
from millrace.run.directory import open_run_directory
from millrace.run.process import tune_memory_allocation
from millrace.versions import versions

_BENCHMARK = "cnn-benchmark-dataset"
_MAX_WARMUP_EPOCHS = 2


def verify_dataset(config: VerifyDatasetConfig) -> int:
    """Print every mismatch; return 1 if there are any."""
    train_config = config.train_config
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
        )
    except DatasetError as error:  # too damaged to read the rest
        mismatches = [str(error)]
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
    stream = images.stream(config.micro_batch_size, seed=config.seed)
    return ParallelStream(stream, config.data.pipeline_num_parallel), count


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
