"""Train with JAX: the whole loop is one compiled program, fed by queues.

The public names below import their modules on first use, so that ``millrace --help`` does
not import JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.adapters.equinox import from_equinox
    from millrace.adapters.functional import from_haiku, from_linen
    from millrace.adapters.model import AdaptedModel
    from millrace.adapters.nnx import from_nnx
    from millrace.adapters.sequential import sequential
    from millrace.apps.autoencoder import api as autoencoder
    from millrace.apps.cnn import api as cnn
    from millrace.apps.vcd import api as vcd
    from millrace.commands.calling import run_as_command
    from millrace.commands.loading import load
    from millrace.data.benchmark import dataset_benchmark
    from millrace.data.loaders import from_tf_data, from_torch_loader
    from millrace.data.source import ArraySource
    from millrace.data.stream import Stream
    from millrace.exports.folder import export
    from millrace.feeds.infeed import DatasetEnded, Infeed
    from millrace.feeds.outfeed import Outfeed, OutfeedFull
    from millrace.feeds.stager import ElementError
    from millrace.loop.callbacks import Callback
    from millrace.loop.evaluate import evaluate
    from millrace.loop.event_schedule import schedule_events
    from millrace.loop.progress import Writer
    from millrace.loop.repeat import infeed_benchmark, repeat, while_loop
    from millrace.loop.runner import Runner
    from millrace.loop.train import train
    from millrace.nn import layers
    from millrace.nn.losses import LayeredLoss
    from millrace.plan import Plan
    from millrace.program.compiling import deterministic
    from millrace.program.evaluate import EvaluationProgram
    from millrace.program.step import TrainState
    from millrace.program.training import training_program
    from millrace.program.training_loop import TrainingProgram
    from millrace.report import plots
    from millrace.run.options import RunOptions
    from millrace.run.process import join_processes

__version__ = "0.2.0"

__all__ = [
    "AdaptedModel",
    "ArraySource",
    "Callback",
    "DatasetEnded",
    "ElementError",
    "EvaluationProgram",
    "Infeed",
    "LayeredLoss",
    "Outfeed",
    "OutfeedFull",
    "Plan",
    "RunOptions",
    "Runner",
    "Stream",
    "TrainState",
    "TrainingProgram",
    "Writer",
    "autoencoder",
    "cnn",
    "dataset_benchmark",
    "deterministic",
    "evaluate",
    "export",
    "from_equinox",
    "from_haiku",
    "from_linen",
    "from_nnx",
    "from_tf_data",
    "from_torch_loader",
    "infeed_benchmark",
    "join_processes",
    "layers",
    "load",
    "plots",
    "repeat",
    "run_as_command",
    "schedule_events",
    "sequential",
    "train",
    "training_program",
    "vcd",
    "while_loop",
]

_HOME = {
    "AdaptedModel": "adapters.model",
    "ArraySource": "data.source",
    "Callback": "loop.callbacks",
    "DatasetEnded": "feeds.infeed",
    "ElementError": "feeds.stager",
    "EvaluationProgram": "program.evaluate",
    "Infeed": "feeds.infeed",
    "LayeredLoss": "nn.losses",
    "Outfeed": "feeds.outfeed",
    "OutfeedFull": "feeds.outfeed",
    "Plan": "plan",
    "RunOptions": "run.options",
    "Runner": "loop.runner",
    "Stream": "data.stream",
    "TrainState": "program.step",
    "TrainingProgram": "program.training_loop",
    "Writer": "loop.progress",
    "autoencoder": "apps.autoencoder.api",
    "cnn": "apps.cnn.api",
    "dataset_benchmark": "data.benchmark",
    "deterministic": "program.compiling",
    "evaluate": "loop.evaluate",
    "export": "exports.folder",
    "from_equinox": "adapters.equinox",
    "from_haiku": "adapters.functional",
    "from_linen": "adapters.functional",
    "from_nnx": "adapters.nnx",
    "from_tf_data": "data.loaders",
    "from_torch_loader": "data.loaders",
    "infeed_benchmark": "loop.repeat",
    "join_processes": "run.process",
    "layers": "nn.layers",
    "load": "commands.loading",
    "plots": "report.plots",
    "repeat": "loop.repeat",
    "run_as_command": "commands.calling",
    "schedule_events": "loop.event_schedule",
    "sequential": "adapters.sequential",
    "train": "loop.train",
    "training_program": "program.training",
    "vcd": "apps.vcd.api",
    "while_loop": "loop.repeat",
}
_MODULES = {"autoencoder", "cnn", "layers", "plots", "vcd"}
"""Public names that are modules."""


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        module = importlib.import_module(f"millrace.{_HOME[name]}")
        return module if name in _MODULES else getattr(module, name)
    raise AttributeError(f"module 'millrace' has no attribute {name!r}")
