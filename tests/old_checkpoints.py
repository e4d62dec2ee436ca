"""Write checkpoints as earlier versions did."""

import hashlib
import operator
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from millrace.checkpoint import manifest
from millrace.checkpoint.store import write_checkpoint


def write_format_1(path: Path, state: Any, update: int) -> None:
    """Write a checkpoint of format 1; one process wrote its arrays as today."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(manifest, "_FORMAT", 1)
        write_checkpoint(path, state, update, {})


def write_process_files(
    path: Path, state: Any, update: int, num_processes: int, *, version: int = 2
) -> None:
    """Write a checkpoint with one file of arrays for each process, as bytes."""
    (path / "state").mkdir(parents=True)
    leaves = jax.tree.leaves(state)
    files: list[dict[str, Any]] = []
    for process in range(num_processes):
        file = path / "state" / f"{process:05d}.npz"
        own = range(process, len(leaves), num_processes)
        with file.open("xb") as opened:
            np.savez(opened, **{str(index): _as_bytes(leaves[index]) for index in own})
        content = file.read_bytes()
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        files.append({f"state/{file.name}": [len(content), digest]})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(manifest, "_FORMAT", version)
        manifest.write_manifest(path, state, update, {}, reduce(operator.or_, files))


def _as_bytes(leaf: Any) -> np.ndarray:
    is_prng_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    raw = np.asarray(jax.random.key_data(leaf) if is_prng_key else leaf)
    return np.frombuffer(np.ascontiguousarray(raw).tobytes(), np.uint8)
