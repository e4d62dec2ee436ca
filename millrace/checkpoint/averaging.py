"""Averages of a run's checkpoints, which often do better than any one of them.

Made when training is over, from what is on the disk, in float64.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from millrace.checkpoint.store import (
    CheckpointError,
    read_manifest,
    restore_part,
    write_checkpoint,
)


def exponential_average(paths: Sequence[Path], like: Any, decay: float) -> Any:
    """Return ``a <- decay a + (1 - decay) w`` over checkpoints, from the first one on.

    Args:
        paths: Checkpoints, oldest first.
        like: A named tuple of the fields to average, as ``restore_part`` takes it.
        decay: Between 0 and 1.
    """
    average = _wide(paths[0], like)
    for path in paths[1:]:
        average = jax.tree.map(
            lambda a, w: decay * a + (1 - decay) * w, average, _wide(path, like)
        )
    return _narrow(average, like)


def mean_of(paths: Sequence[Path], like: Any) -> Any:
    """Return the mean over checkpoints; see ``exponential_average``."""
    total = _wide(paths[0], like)
    for path in paths[1:]:
        total = jax.tree.map(np.add, total, _wide(path, like))
    return _narrow(jax.tree.map(lambda t: t / len(paths), total), like)


def of_last_epochs(paths: Sequence[Path], num_epochs: float) -> list[Path]:
    """Return the checkpoints that were made in the last so many epochs of training."""
    epochs = {path: _fact(path, "epoch") for path in paths}
    start = max(epochs.values()) - num_epochs
    return [path for path in paths if epochs[path] > start]


def save_average(path: Path, average: Any, made_of: Sequence[Path]) -> dict[str, Any]:
    """Save an average as a checkpoint and return what its manifest says of it."""
    update = _fact(made_of[-1], "update")
    facts: dict[str, Any] = {name: _fact(made_of[-1], name) for name in ("epoch", "time")}
    facts["made_of"] = [checkpoint.name for checkpoint in made_of]
    write_checkpoint(path, average, update, facts)
    return {"update": update, **facts}


def _fact(path: Path, name: str) -> Any:
    """Return a number that a run keeps with each of its checkpoints."""
    found = read_manifest(path).get(name)
    if not isinstance(found, int | float):
        raise CheckpointError(
            f"{path} does not say its {name}: it was not saved by a training run."
        )
    return found


def _wide(path: Path, like: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), restore_part(path, like).state)


def _narrow(average: Any, like: Any) -> Any:
    return jax.tree.map(lambda a, x: a.astype(x.dtype), average, like)
