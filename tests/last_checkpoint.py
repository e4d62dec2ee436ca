"""Compare the results of runs of any application, by their last checkpoints."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launched import summary

from millrace.checkpoint.store import checkpoints_in, read_manifest, restore_part


class Weights(NamedTuple):
    params: Any


def weights(directory: Path) -> list[np.ndarray]:
    """The weights of the last checkpoint, whichever processes wrote it."""
    path = checkpoints_in(directory / "checkpoints")[-1]
    tree: dict[str, Any] = {}
    for name, about in read_manifest(path)["arrays"].items():
        if not name.startswith(".params"):
            continue
        inner, *keys = tree, *re.findall(r"\['([^']*)'\]", name)
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        kind, _, shape = about.partition("[")
        sizes = [int(word) for word in re.findall(r"\d+", shape)]
        inner[keys[-1]] = jax.ShapeDtypeStruct(tuple(sizes), jnp.dtype(kind))
    return jax.tree.leaves(restore_part(path, Weights(tree)).state)


def assert_same_results(directory: Path, expected: Path) -> None:
    """Check that two runs have the same weights and metrics, up to rounding."""
    pairs = list(zip(weights(directory), weights(expected), strict=True))
    assert len(pairs) > 2
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    ours, theirs = summary(directory)["metrics"], summary(expected)["metrics"]
    for name, value in theirs.items():
        assert float(ours[name]) == pytest.approx(float(value), rel=1e-4), name
