"""The commands of ``millrace``, for the command line and for Python.

Modules are named as text, so that importing the registry imports none of them.
"""

import importlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from millrace.config import configure


class Command(NamedTuple):
    """One command of ``millrace``."""

    config: str
    """Configuration dataclass, as ``module:name``."""
    function: str
    """Function, as ``module:name``. Called with ``(config, run)``, or with ``(config)`` if
    the command needs no run."""
    summary: str
    """One line for ``millrace --help``."""
    named_configs: str | None = None
    """YAML file of named configurations for ``--config``, as ``package:file``."""
    needs_run: bool = True
    """Whether the command works in a run directory."""

    def load_config_type(self) -> Any:
        """Import and return the configuration dataclass."""
        return _load(self.config)

    def load_function(self) -> Any:
        """Import and return the function."""
        return _load(self.function)

    def named_configs_path(self) -> Path | None:
        """Return the path of the YAML file of named configurations."""
        if self.named_configs is None:
            return None
        package, name = self.named_configs.split(":")
        return Path(str(resources.files(package) / name))

    def configure(self, options: Mapping[str, Any]) -> Any:
        """Build the configuration from options by name."""
        config_type, path = self.load_config_type(), self.named_configs_path()
        return configure(config_type, options, path)[0]


COMMANDS = {
    "cnn train": Command(
        "millrace.apps.cnn.config:CnnConfig",
        "millrace.apps.cnn.train:train",
        "train an image classifier",
        named_configs="millrace.apps.cnn:runs.yml",
    ),
    "cnn validate": Command(
        "millrace.apps.cnn.config.commands:ValidateConfig",
        "millrace.apps.cnn.inference.command:validate",
        "measure inference: throughput, latency and accuracy",
    ),
    "cnn verify-dataset": Command(
        "millrace.apps.cnn.config.commands:VerifyDatasetConfig",
        "millrace.apps.cnn.datasets:verify_dataset",
        "check a dataset on disk for missing or damaged samples",
        needs_run=False,
    ),
    "cnn benchmark-dataset": Command(
        "millrace.apps.cnn.config.commands:BenchmarkDatasetConfig",
        "millrace.apps.cnn.datasets:benchmark_dataset",
        "measure how fast the host can read and preprocess a dataset",
        needs_run=False,
    ),
    "vcd train": Command(
        "millrace.apps.vcd.config:VcdConfig",
        "millrace.apps.vcd.train:train",
        "train a VAE whose posterior is refined by Markov chains",
        named_configs="millrace.apps.vcd:runs.yml",
    ),
    "vcd evaluate": Command(
        "millrace.apps.vcd.config:EvaluateConfig",
        "millrace.apps.vcd.evaluate:evaluate",
        "estimate the log-likelihood of a trained model",
    ),
    "vcd sample": Command(
        "millrace.apps.vcd.config:SampleConfig",
        "millrace.apps.vcd.images:sample",
        "draw images from a trained model",
    ),
    "autoencoder train": Command(
        "millrace.apps.autoencoder.config:AutoencoderConfig",
        "millrace.apps.autoencoder.train:train",
        "train a recommender on ratings",
        named_configs="millrace.apps.autoencoder:runs.yml",
    ),
    "autoencoder validate": Command(
        "millrace.apps.autoencoder.config.commands:ValidateConfig",
        "millrace.apps.autoencoder.evaluate:validate",
        "measure rating errors and ranking of a trained recommender",
    ),
    "autoencoder recommend": Command(
        "millrace.apps.autoencoder.config.commands:RecommendConfig",
        "millrace.apps.autoencoder.recommend:recommend",
        "list the items that users would rate highest",
        needs_run=False,
    ),
    "autoencoder sweep": Command(
        "millrace.apps.autoencoder.config.commands:SweepConfig",
        "millrace.apps.autoencoder.sweep:sweep",
        "train one recommender per learning rate, all at once",
        named_configs="millrace.apps.autoencoder:runs.yml",
    ),
    "autoencoder convert": Command(
        "millrace.apps.autoencoder.config.commands:ConvertConfig",
        "millrace.apps.autoencoder.convert:convert",
        "split ratings by time into training, validation and test files",
        needs_run=False,
    ),
    "data fetch": Command(
        "millrace.commands.fetch:FetchConfig",
        "millrace.commands.fetch:fetch_dataset",
        "download a dataset",
        needs_run=False,
    ),
    "devices": Command(
        "millrace.commands.devices:DevicesConfig",
        "millrace.commands.devices:show_devices",
        "show devices, their measured speed and suggested options",
        needs_run=False,
    ),
    "report": Command(
        "millrace.commands.report:ReportConfig",
        "millrace.commands.report:report",
        "rewrite the report of a run, or compare several runs",
        needs_run=False,
    ),
    "bench": Command(
        "millrace.bench.config:BenchConfig",
        "millrace.bench.command:bench",
        "run named benchmarks; compare with the roofline and PyTorch",
        needs_run=False,
    ),
    "launch": Command(
        "millrace.distributed.options:LaunchConfig",
        "millrace.distributed.launcher:launch",
        "start several processes of a command as one run",
        needs_run=False,
    ),
    "schedule": Command(
        "millrace.commands.schedule:ScheduleConfig",
        "millrace.commands.schedule:show_schedule",
        "show the timeline, duration and memory of a pipeline",
        needs_run=False,
    ),
}


def _load(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)
