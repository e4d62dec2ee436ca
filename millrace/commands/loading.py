"""``mr.load``: the weights of any run, with its options and metrics."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.commands.registry import COMMANDS
from millrace.run.options import Which
from millrace.run.saved import SavedRun, announce, find_run, read_weights
from millrace.storage.address import display


@dataclass(frozen=True, repr=False)
class LoadedRun:
    """A checkpoint of a run: its weights, and what is known about them."""

    path: Path
    """The checkpoint."""
    params: Any
    """The weights as they were saved, as NumPy arrays."""
    model_state: Any
    """What the loss keeps besides weights, such as moving averages."""
    config: dict[str, Any]
    """The options of the run by name, as in its ``config.yml``."""
    update: int
    """The number of updates that the weights were trained for."""
    epoch: float | None
    """The number of passes over the data."""
    metrics: dict[str, float]
    """The metrics when the checkpoint was saved."""
    title: str
    """One line about the checkpoint."""
    saved: SavedRun
    """The run on disk."""

    @property
    def command(self) -> str:
        """The command of the run, such as ``cnn train``."""
        return str(self.config.get("command", "")).replace("-", " ", 1)

    @functools.cached_property
    def typed_config(self) -> Any:
        """The configuration dataclass of a built-in application; None for your own."""
        command = COMMANDS.get(self.command)
        if command is None:
            return None
        return self.saved.build_config(command.load_config_type())

    @functools.cached_property
    def predictor(self) -> Any:
        """The model of a built-in application, ready to use; None for your own.

        ``cnn train`` has a classifier, ``autoencoder train`` a recommender, and ``vcd
        train`` a generator: what ``mr.cnn.load``, ``mr.autoencoder.load`` and
        ``mr.vcd.load`` return.
        """
        command = COMMANDS.get(self.command)
        if command is None or command.predictor is None:
            return None
        load_model = command.load_predictor()
        if self.saved.path == self.path:  # one checkpoint was given
            return load_model(self.path, announce=lambda _: None)
        return load_model(self.saved.path, self.update, announce=lambda _: None)

    def __repr__(self) -> str:
        import jax

        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return (
            f"LoadedRun({display(self.saved.path)!r}, {self.command or 'unknown command'}: "
            f"{self.title}; {count:,} parameters)"
        )


def load(run: Path | str, which: Which = "best", *, like: Any = None) -> LoadedRun:
    """Load a checkpoint of any run, including those of your own application.

    Args:
        run: A run directory, its folder of checkpoints, or one checkpoint, on this machine
            or in object storage, such as ``s3://bucket/run``.
        which: The best checkpoint, the last, or that after this number of updates. In a run
            without validation, the last one is the best.
        like: Weights of the structure that was saved, or a training state. It is needed
            only if they have classes that a checkpoint cannot rebuild: dictionaries, lists
            and tuples can be.
    """
    saved = find_run(run)
    command = COMMANDS.get(str(saved.options.get("command")).replace("-", " ", 1))
    best_by = None if command is None else command.load_best_metric()
    chosen = saved.choose(which, best_by=best_by)
    announce(chosen.describe())
    params, model_state = read_weights(chosen.path, like)
    return LoadedRun(
        chosen.path,
        params,
        model_state,
        dict(saved.options),
        chosen.update,
        chosen.epoch,
        chosen.metrics,
        chosen.describe().removeprefix("using "),
        saved,
    )
