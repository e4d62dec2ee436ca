"""Small states, and damage to their checkpoints."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from millrace.checkpoint.store import (
    Checkpoints,
)


def small_state(number: float = 1.0) -> dict:
    return {"weights": np.full((4, 3), number, np.float32), "update": np.int32(number)}


def value(restored) -> float:
    return float(restored.state["weights"][0, 0])


def newest_file(checkpoints: Checkpoints) -> Path:
    """Return the largest file of the newest checkpoint, which contains an array."""
    files = (path for path in checkpoints.saved()[-1].glob("state/**/*") if path.is_file())
    return max(files, key=lambda path: path.stat().st_size)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x01
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def updates(checkpoints: Checkpoints) -> list[int]:
    return [int(path.name.removeprefix("update-")) for path in checkpoints.saved()]


DAMAGES = pytest.mark.parametrize("damage", [truncate, Path.unlink, flip_a_byte])


class Params(NamedTuple):
    """The part of a state that has the weights."""

    params: Any
