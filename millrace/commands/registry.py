"""The commands of ``millrace``, for the command line and for Python.

Modules are named as text, so that importing the registry imports none of them.
"""

import functools
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
    configs_of: str | None = None
    """The command whose named configurations this one shows."""
    predictor: str | None = None
    """Function that loads the model of a run, as ``module:name``."""
    best_by: str | None = None
    """Metric of the best checkpoint of a run, as ``module:name``."""

    def load_config_type(self) -> Any:
        """Import and return the configuration dataclass."""
        return _load(self.config)

    def load_function(self) -> Any:
        """Import and return the function."""
        function = _load(self.function)
        if self.configs_of is None:
            return function
        path = COMMANDS[self.configs_of].named_configs_path()
        return functools.partial(function, path=path, command=self.configs_of)

    def load_predictor(self) -> Any:
        """Import and return the function that loads the model of a run, if any."""
        return None if self.predictor is None else _load(self.predictor)

    def load_best_metric(self) -> Any:
        """Import and return the metric of the best checkpoint of a run, if any."""
        return None if self.best_by is None else _load(self.best_by)

    def named_configs_path(self) -> Path | None:
        """Return the path of the YAML file of named configurations."""
        if self.named_configs is None:
            return None
        package, name = self.named_configs.split(":")
        return Path(str(resources.files(package) / name))

    def configure(self, options: Mapping[str, Any], *, name: str) -> Any:
        """Build the configuration from options by name; `name` is that of the command."""
        config_type, path = self.load_config_type(), self.named_configs_path()
        return configure(config_type, options, path, command=name.replace(" ", "-"))[0]


COMMANDS = {
    "cnn train": Command(
        "millrace.apps.cnn.config:CnnConfig",
        "millrace.apps.cnn.train:train",
        "train an image classifier",
        named_configs="millrace.apps.cnn:runs.yml",
        predictor="millrace.apps.cnn.predictor:load_trained",
        best_by="millrace.apps.cnn.evaluate:BEST_BY",
    ),
    "cnn validate": Command(
        "millrace.apps.cnn.config.commands:ValidateConfig",
        "millrace.apps.cnn.inference.command:validate",
        "measure inference: throughput, latency and accuracy",
    ),
    "cnn predict": Command(
        "millrace.apps.cnn.config.commands:PredictConfig",
        "millrace.apps.cnn.predict:predict",
        "print the most likely classes of image files",
        needs_run=False,
    ),
    "cnn export": Command(
        "millrace.apps.cnn.config.commands:ExportConfig",
        "millrace.apps.cnn.export:export",
        "write a trained model for PyTorch, JAX or ONNX Runtime",
        needs_run=False,
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
    "cnn show-augmentation": Command(
        "millrace.apps.cnn.config.commands:ShowAugmentationConfig",
        "millrace.apps.cnn.preview:show_augmentation",
        "draw a grid of augmented training images",
        needs_run=False,
    ),
    "cnn configs": Command(
        "millrace.commands.configs:ConfigsConfig",
        "millrace.commands.configs:show_configs",
        "list the named configurations, or print one",
        needs_run=False,
        configs_of="cnn train",
    ),
    "vcd train": Command(
        "millrace.apps.vcd.config:VcdConfig",
        "millrace.apps.vcd.train:train",
        "train a VAE whose posterior is refined by Markov chains",
        named_configs="millrace.apps.vcd:runs.yml",
        predictor="millrace.apps.vcd.predictor:load_generator",
        best_by="millrace.apps.vcd.predictor:BEST_BY",
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
    "vcd configs": Command(
        "millrace.commands.configs:ConfigsConfig",
        "millrace.commands.configs:show_configs",
        "list the named configurations, or print one",
        needs_run=False,
        configs_of="vcd train",
    ),
    "autoencoder train": Command(
        "millrace.apps.autoencoder.config:AutoencoderConfig",
        "millrace.apps.autoencoder.train:train",
        "train a recommender on ratings",
        named_configs="millrace.apps.autoencoder:runs.yml",
        predictor="millrace.apps.autoencoder.predictor:load_recommender",
        best_by="millrace.apps.autoencoder.predictor:BEST_BY",
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
    "autoencoder export": Command(
        "millrace.apps.autoencoder.config.commands:ExportConfig",
        "millrace.apps.autoencoder.export:export",
        "write a trained recommender for use without millrace",
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
    "autoencoder configs": Command(
        "millrace.commands.configs:ConfigsConfig",
        "millrace.commands.configs:show_configs",
        "list the named configurations, or print one",
        needs_run=False,
        configs_of="autoencoder train",
    ),
    "data fetch": Command(
        "millrace.commands.fetch:FetchConfig",
        "millrace.commands.fetch:fetch_dataset",
        "download a dataset",
        needs_run=False,
    ),
    "data pack": Command(
        "millrace.commands.pack:PackConfig",
        "millrace.commands.pack:pack_dataset",
        "pack an image dataset into files made for fast training",
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
        "rewrite the report of a run, compare runs, or show a folder of them live",
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
    "shim": Command(
        "millrace.commands.shim:ShimConfig",
        "millrace.commands.shim:write_shims",
        "write programs named like Graphcore's, which run ours",
        needs_run=False,
    ),
    "schedule": Command(
        "millrace.commands.schedule:ScheduleConfig",
        "millrace.commands.schedule:show_schedule",
        "show the timeline, duration and memory of a pipeline",
        needs_run=False,
    ),
}


class Application(NamedTuple):
    """A first word that several commands share."""

    summary: str
    """What it is for, in one sentence."""
    examples: tuple[str, ...]
    """Command lines to start from."""


APPLICATIONS = {
    "cnn": Application(
        "Image classifiers: train, validate and use convolutional networks.",
        (
            "millrace cnn train                             # digits, seconds on any CPU",
            "millrace cnn train --dataset-path my_images    # your own images",
            "millrace cnn validate runs/first",
            "millrace cnn predict runs/first photo.jpg",
            "millrace cnn configs                           # ready-made configurations",
        ),
    ),
    "vcd": Application(
        "Generative models of binary images: VAEs refined by Markov chains.",
        (
            "millrace vcd train --config digits_demo        # minutes on any CPU",
            "millrace vcd sample runs/first",
            "millrace vcd evaluate runs/first",
            "millrace vcd configs                           # ready-made configurations",
        ),
    ),
    "autoencoder": Application(
        "Recommenders: learn ratings and predict the missing ones.",
        (
            "millrace autoencoder train                     # made-up ratings, a minute",
            "millrace autoencoder train --training-data-file ratings.csv",
            "millrace autoencoder recommend runs/first --user 1",
            "millrace autoencoder convert ratings.csv --fractions 0.8 0.1 0.1",
            "millrace autoencoder configs                   # ready-made configurations",
        ),
    ),
    "data": Application(
        "Datasets: download them, or pack images for fast training.",
        (
            "millrace data fetch cifar10",
            "millrace data pack my_images packed",
        ),
    ),
}
"""The applications, and the first word of other groups of commands."""


def _load(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)
