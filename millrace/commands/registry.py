"""The commands of ``millrace``: one entry each, for the command line and for Python.

An entry names its modules as text, so that reading a command imports none of them.
"""

import importlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from millrace.config import configure


class Command(NamedTuple):
    """A command: where its configuration, its function and its named configurations are."""

    config: str
    """Its configuration dataclass, as ``module:name``."""
    function: str
    """Its function, as ``module:name``: ``(config, run)``, or ``(config)`` if it needs no
    run."""
    summary: str
    named_configs: str | None = None
    """The YAML file for ``--config``, as ``package:file``."""
    needs_run: bool = True
    """Whether it works in a run directory, or just answers."""

    def load_config_type(self) -> Any:
        """Import and return the configuration dataclass."""
        return _load(self.config)

    def load_function(self) -> Any:
        """Import and return the function."""
        return _load(self.function)

    def named_configs_path(self) -> Path | None:
        """Return the path of the file of named configurations."""
        if self.named_configs is None:
            return None
        package, name = self.named_configs.split(":")
        return Path(str(resources.files(package) / name))

    def configure(self, options: Mapping[str, Any]) -> Any:
        """Return the configuration for options by name."""
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
        "check a data set on disk for missing or damaged samples",
        needs_run=False,
    ),
    "cnn benchmark-dataset": Command(
        "millrace.apps.cnn.config.commands:BenchmarkDatasetConfig",
        "millrace.apps.cnn.datasets:benchmark_dataset",
        "measure how fast the host can read and preprocess a data set",
        needs_run=False,
    ),
    "vcd train": Command(
        "millrace.apps.vcd.config:VcdConfig",
        "millrace.apps.vcd.train:train",
        "train a VAE whose posterior is refined by Markov chains",
        named_configs="millrace.apps.vcd:runs.yml",
    ),
    "vcd evaluate": Command(
        "millrace.apps.vcd.config.commands:EvaluateConfig",
        "millrace.apps.vcd.evaluate:evaluate",
        "estimate the log-likelihood of a trained model",
    ),
    "vcd sample": Command(
        "millrace.apps.vcd.config.commands:SampleConfig",
        "millrace.apps.vcd.sample:sample",
        "draw images from a trained model",
    ),
    "autoencoder train": Command(
        "millrace.apps.autoencoder.config:AutoencoderConfig",
        "millrace.apps.autoencoder.train:train",
        "train a recommender on ratings",
        named_configs="millrace.apps.autoencoder:runs.yml",
    ),
    "autoencoder validate": Command(
        "millrace.apps.autoencoder.config.evaluate:ValidateConfig",
        "millrace.apps.autoencoder.evaluate:validate",
        "measure the rating errors and the ranking of a trained recommender",
    ),
    "autoencoder recommend": Command(
        "millrace.apps.autoencoder.config.recommend:RecommendConfig",
        "millrace.apps.autoencoder.recommend:recommend",
        "list the items that users are likely to rate highest",
        needs_run=False,
    ),
    "autoencoder sweep": Command(
        "millrace.apps.autoencoder.config.sweep:SweepConfig",
        "millrace.apps.autoencoder.sweep:sweep",
        "train one recommender per learning rate, all together",
        named_configs="millrace.apps.autoencoder:runs.yml",
    ),
    "autoencoder convert": Command(
        "millrace.apps.autoencoder.config.convert:ConvertConfig",
        "millrace.apps.autoencoder.convert:convert",
        "split ratings by time into training, validation and test files",
        needs_run=False,
    ),
    "data fetch": Command(
        "millrace.commands.fetch_options:FetchConfig",
        "millrace.commands.fetch:fetch_dataset",
        "download a data set",
        needs_run=False,
    ),
    "devices": Command(
        "millrace.commands.devices_options:DevicesConfig",
        "millrace.commands.devices:show_devices",
        "show the devices, their measured speed, and settings that suit them",
        needs_run=False,
    ),
    "report": Command(
        "millrace.commands.report_options:ReportConfig",
        "millrace.commands.report:report",
        "write the report of a run again, or compare several runs on one page",
        needs_run=False,
    ),
    "bench": Command(
        "millrace.bench.config:BenchConfig",
        "millrace.bench.command:bench",
        "run named benchmarks against the limits of this device and PyTorch",
        needs_run=False,
    ),
    "launch": Command(
        "millrace.distributed.options:LaunchConfig",
        "millrace.commands.launch:launch",
        "start several processes of a command as one run",
        needs_run=False,
    ),
    "schedule": Command(
        "millrace.commands.schedule_options:ScheduleConfig",
        "millrace.commands.schedule:show_schedule",
        "show the timeline of a pipeline, its duration and its memory",
        needs_run=False,
    ),
}


def _load(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)
