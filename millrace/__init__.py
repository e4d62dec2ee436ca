"""Whole training loops on the device, fed by queues; see README.md.

The names below load their modules when first used, so that ``millrace --help`` answers
before JAX has been imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.feeds.infeed import DatasetEnded as DatasetEnded
    from millrace.feeds.infeed import ElementError as ElementError
    from millrace.feeds.infeed import Infeed as Infeed
    from millrace.feeds.outfeed import Outfeed as Outfeed
    from millrace.feeds.outfeed import OutfeedFull as OutfeedFull
    from millrace.host.loops import repeat as repeat
    from millrace.host.loops import while_loop as while_loop
    from millrace.plan import Plan as Plan
    from millrace.program.training import TrainingProgram as TrainingProgram
    from millrace.program.training import training_program as training_program

__version__ = "0.1.0"

_HOME = {
    "DatasetEnded": "feeds.infeed",
    "ElementError": "feeds.infeed",
    "Infeed": "feeds.infeed",
    "Outfeed": "feeds.outfeed",
    "OutfeedFull": "feeds.outfeed",
    "Plan": "plan",
    "TrainingProgram": "program.training",
    "repeat": "host.loops",
    "training_program": "program.training",
    "while_loop": "host.loops",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"millrace.{_HOME[name]}"), name)
    raise AttributeError(f"module 'millrace' has no attribute {name!r}")
