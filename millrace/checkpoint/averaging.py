"""Averages of the checkpoints of a run, which often beat each single one.

They are computed after training, in float64, from the checkpoints on disk.
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
    """Return the moving average ``a <- decay a + (1 - decay) w`` over checkpoints.

    Args:
        paths: Checkpoints, oldest first; the average starts from the first one.
        like: A named tuple of the fields to average, as ``restore_part`` takes it.
        decay: A number between 0 and 1.
    """
    average = _load_float64(paths[0], like)
    for path in paths[1:]:
        average = jax.tree.map(
            lambda a, w: decay * a + (1 - decay) * w, average, _load_float64(path, like)
        )
    return _cast_like(average, like)


def uniform_average(paths: Sequence[Path], like: Any) -> Any:
    """Return the mean over checkpoints; see ``exponential_average``."""
    total = _load_float64(paths[0], like)
    for path in paths[1:]:
        total = jax.tree.map(np.add, total, _load_float64(path, like))
    return _cast_like(jax.tree.map(lambda t: t / len(paths), total), like)


def select_last_epochs(paths: Sequence[Path], num_epochs: float) -> list[Path]:
    """Return the checkpoints of the last `num_epochs` epochs of training."""
    epochs = {path: _read_number(path, "epoch") for path in paths}
    start = max(epochs.values()) - num_epochs
    return [path for path in paths if epochs[path] > start]


def save_average(path: Path, average: Any, made_of: Sequence[Path]) -> dict[str, Any]:
    """Save an average as a checkpoint; return the metadata in its manifest.

    Args:
        path: The checkpoint to write.
        average: The averaged fields.
        made_of: The checkpoints that were averaged; it takes the update of the last one.
    """
    newest = made_of[-1]
    update = _read_number(newest, "update")
    metadata: dict[str, Any] = {n: _read_number(newest, n) for n in ("epoch", "time")}
    metadata["made_of"] = [checkpoint.name for checkpoint in made_of]
    write_checkpoint(path, average, update, metadata)
    return {"update": update, **metadata}


def _read_number(path: Path, name: str) -> Any:
    """Return a number that a run saves with each of its checkpoints."""
    value = read_manifest(path).get(name)
    if not isinstance(value, int | float):
        raise CheckpointError(
            f"{path} does not say its {name}: it was not saved by a training run."
        )
    return value


def _load_float64(path: Path, like: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), restore_part(path, like).state)


def _cast_like(average: Any, like: Any) -> Any:
    return jax.tree.map(lambda a, x: a.astype(x.dtype), average, like)
