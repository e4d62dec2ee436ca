"""``millrace cnn benchmark-dataset``: how fast the host reads and prepares samples."""

import itertools
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from millrace.apps.cnn import data
from millrace.apps.cnn.config.datasets import BenchmarkDatasetConfig
from millrace.apps.cnn.data import ImageData
from millrace.config import ConfigurationError
from millrace.data.benchmark import dataset_benchmark
from millrace.data.parallel import ParallelStream
from millrace.data.stream import EvaluationBatches
from millrace.durable import write_atomically
from millrace.run.directory import open_run_directory
from millrace.run.process import tune_memory_allocation
from millrace.versions import versions

_COMMAND = "cnn-benchmark-dataset"
_MAX_WARM_UP_EPOCHS = 2


def benchmark_dataset(config: BenchmarkDatasetConfig) -> None:
    """Measure, print the throughput, and keep the figures."""
    tune_memory_allocation()  # as in training
    images = data.load(config.training)
    if config.precision is not None and not config.quiet:
        print(
            "--precision changes nothing here: the host prepares bytes or 32-bit numbers.",
            file=sys.stderr,
        )
    batches, count = _batches(images, config)
    directory = None
    if config.run_dir is not None or not config.json:
        directory = open_run_directory(
            config.run_dir, config, command=_COMMAND, resume=False
        )
    report = json.loads(
        dataset_benchmark(
            batches,
            config.num_epochs,
            config.elements_per_epoch or count,
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
    """Return batches without end, and how many there are in the data set."""
    source = images.training if config.split == "train" else images.validation
    count = len(source) // config.micro_batch_size
    if count == 0:
        raise ConfigurationError(
            f"The {config.split} split has {len(source)} samples, not one batch of "
            f"{config.micro_batch_size}. Choose a smaller micro_batch_size."
        )
    if config.split == "validation":
        batches = EvaluationBatches(source, config.micro_batch_size)
        passes = itertools.chain.from_iterable(itertools.repeat(batches))
        return (element["batch"] for element in passes), len(batches)
    stream = images.stream(config.micro_batch_size, seed=config.seed)
    return ParallelStream(stream, config.pipeline_num_parallel), count


def _throughput(epochs: list[dict[str, float]]) -> float:
    """Return the mean elements per second, once all is warm."""
    warm_up = min(_MAX_WARM_UP_EPOCHS, len(epochs) - 1)
    return statistics.fmean(epoch["elements_per_second"] for epoch in epochs[warm_up:])


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
        "command": _COMMAND,
        "dataset": config.training.resolved_dataset,
        "samples_per_second": throughput,
        "corrupt_samples": images.corrupt,
        "versions": versions(),
    }
    write_atomically(folder / "dataset_benchmark.json", json.dumps(report, indent=2) + "\n")
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    if not config.quiet:
        print(f"results  {folder}", file=sys.stderr)
