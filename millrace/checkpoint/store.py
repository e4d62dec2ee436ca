"""Checkpoints: written beside the training, complete or not there at all.

A checkpoint is a folder ``update-<n>`` with the state, saved by orbax, and a manifest
that lists every file with its size and checksum. The folder gets its name only when all
of it is on the disk; a file that changed afterwards is noticed when it is read. Older
checkpoints are deleted only when the new name is on the disk too, so that a power cut at
any moment leaves a whole one.

Of several processes, each writes a part of the arrays, and the first one the manifest when
all parts are there. Any number of processes can read what any other has written.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.checkpoint.arrays import import_orbax, is_key, own_leaves
from millrace.checkpoint.find import checkpoint_name, checkpoints_in
from millrace.checkpoint.folder import (
    Restored,
    reason,
    restore,
    restore_part,
    write_checkpoint,
)
from millrace.checkpoint.manifest import (
    CheckpointError,
    Damaged,
    has_manifest,
    read_manifest,
)
from millrace.distributed import coordination
from millrace.durable import clear_leftovers, discard, finite_json, rename
from millrace.program.replicas import to_host

__all__ = [
    "NOT_OF_A_RUN",
    "CheckpointError",
    "Checkpoints",
    "Restored",
    "checkpoints_in",
    "read_manifest",
    "restore",
    "restore_part",
    "write_checkpoint",
]

_log = logging.getLogger("millrace")


NOT_OF_A_RUN = (KeyError, TypeError, ValueError, AttributeError)
"""What reading a manifest raises that lacks something, or has something else there."""


class _More(NamedTuple):
    """What a checkpoint is saved with, besides the state."""

    facts: dict[str, Any]
    later: Callable[[], dict[str, Any]] | None
    first: Callable[[], None] | None


class Checkpoints:
    """Writes checkpoints on a thread of its own and keeps the newest and the best.

    Args:
        path: The folder of checkpoints.
        keep: How many of the newest to keep.
        better: ``better(scores, other)`` tells whether a checkpoint's scores beat
            another's; the best one is then never deleted.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep: int = 3,
        better: Callable[[dict, dict], bool] | None = None,
    ) -> None:
        self._path = path
        self._keep = keep
        self._better = better
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="millrace-checkpoint")
        self._writing: Future[None] | None = None
        # Orbax takes a second to import; have that happen while the program compiles.
        self._writer.submit(import_orbax)

    def save(
        self,
        state: Any,
        update: int,
        *,
        later: Callable[[], dict[str, Any]] | None = None,
        first: Callable[[], None] | None = None,
        **facts: Any,
    ) -> None:
        """Start writing a checkpoint; waits for the one before, and raises its error.

        Args:
            state: Copied on its device before this returns; it may be donated after.
            update: The number of updates made.
            later: Returns more of them when all else is ready to be written; the
                checkpoint is not there before.
            first: Called before the checkpoint gets its name, to put on the disk what
                must not be older than it.
            **facts: JSON-able things to keep with it, such as the data position;
                ``scores`` are what the best checkpoint is chosen by.
        """
        self.wait()
        there = has_manifest(self._path / checkpoint_name(update))
        if coordination.broadcast("checkpoint-is-there", there):
            return  # the same updates give the same state
        # The writer fetches the copy while training goes on. Fetching it here took
        # 0.28 s for 305 MB on an H200, 13 % of an execution of two seconds.
        own = set(own_leaves(state))
        copy = [
            _snapshot(leaf) if place in own else _spec(leaf)
            for place, leaf in enumerate(jax.tree.leaves(state))
        ]
        structure = jax.tree.structure(state)
        facts = finite_json(facts)  # a copy: the caller's change while it is written
        more = _More(facts, later, first)
        self._writing = self._writer.submit(self._write, copy, structure, update, more)

    def wait(self) -> None:
        """Wait until the checkpoint under way is on the disk."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def settle(self) -> None:
        """Wait as ``wait`` does, but leave an error to whoever calls that next."""
        if self._writing is not None:
            wait([self._writing])

    def close(self) -> None:
        """Finish what is under way."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def saved(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return [path for path in checkpoints_in(self._path) if has_manifest(path)]

    def best(self) -> Path | None:
        """Return the checkpoint with the best metrics, if that is asked for."""
        if self._better is None:
            return None
        best: tuple[Path, dict] | None = None
        for path in self.saved():
            try:
                scores = read_manifest(path).get("scores") or {}
            except CheckpointError:
                continue  # dealt with when it is to be restored
            if not all(isinstance(value, int | float) for value in scores.values()):
                continue  # what is not finite is written as text
            if scores and (best is None or self._better(scores, best[1])):
                best = path, scores
        return best[0] if best else None

    def restore_newest(
        self, like: Any, *, check: Callable[[dict[str, Any]], Any] | None = None
    ) -> Restored | None:
        """Read the newest checkpoint that is whole; None if there has been none yet.

        Args:
            like: As ``restore`` takes it.
            check: Reads a manifest; one with which it raises an error of
                ``NOT_OF_A_RUN`` counts as damaged.
        """
        if coordination.num_processes() == 1:
            return self._restore_newest(like, check)
        # The first process chooses, and clears away; the others read what it has read.
        restored, found = None, {}
        if coordination.is_first():
            try:
                restored = self._restore_newest(like, check)
                found = {"update": restored and restored.manifest["update"]}
            except CheckpointError as error:
                found = {"error": str(error)}
        found = coordination.broadcast("restored", found)
        if "error" in found:
            raise CheckpointError(found["error"])
        if restored is None and found["update"] is not None:
            return restore(self._path / checkpoint_name(found["update"]), like)
        return restored

    def _restore_newest(
        self, like: Any, check: Callable[[dict[str, Any]], Any] | None
    ) -> Restored | None:
        clear_leftovers(self._path)
        # Not only saved(): a folder without its manifest is damaged too.
        for path in reversed(checkpoints_in(self._path)):
            try:
                restored = restore(path, like)
                _check_manifest(path, restored.manifest, check)
                return restored
            except Damaged as error:  # one that does not fit is nobody's damage
                _log.warning("%s It is set aside for an older one.", error)
                _set_aside(path)
        if any(self._path.glob("*.damaged")):
            raise CheckpointError(
                f"No checkpoint in {self._path} can be used: all of them are damaged. "
                "Start the run again in another --run-dir."
            )
        return None

    def _write(self, copy: list[Any], structure: Any, update: int, more: _More) -> None:
        for place, leaf in enumerate(copy):
            if not isinstance(leaf, jax.ShapeDtypeStruct) and not is_key(leaf):
                copy[place] = to_host(leaf)  # one by one: the device's copies go as well
        state = jax.tree.unflatten(structure, copy)
        facts = more.facts | (finite_json(more.later()) if more.later is not None else {})
        path = self._path / checkpoint_name(update)
        write_checkpoint(path, state, update, facts, first=more.first)
        if coordination.is_first():
            self._prune()

    def _prune(self) -> None:
        best = self.best()
        for path in self.saved()[: -self._keep]:
            if path != best:
                try:
                    discard(path)
                except OSError as error:
                    _log.warning(
                        "The old checkpoint %s could not be deleted: %s.",
                        *(path, reason(error)),
                    )


def _check_manifest(
    path: Path, manifest: dict[str, Any], check: Callable[[dict[str, Any]], Any] | None
) -> None:
    if path.name != checkpoint_name(manifest["update"]):
        raise Damaged(
            f"{path} is damaged: what is in it was saved after update {manifest['update']}."
        )
    try:
        if check is not None:
            check(manifest)
    except NOT_OF_A_RUN as error:
        raise Damaged(
            f"{path} is damaged: its manifest does not say how far the run had come "
            f"({type(error).__name__}: {error})."
        ) from error


def _set_aside(path: Path) -> None:
    aside = path.with_name(f"{path.name}.damaged")
    try:
        discard(aside)
        rename(path, aside)
    except OSError as error:
        raise CheckpointError(f"{path} could not be set aside: {reason(error)}.") from error


def _spec(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)


def _snapshot(leaf: Any) -> Any:
    """A copy that outlives the donation of `leaf`, made where it lies.

    State that rests in host memory is never donated, so it needs no copy.
    """
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    if not leaf.is_fully_addressable:  # of many processes' copies, our own
        leaf = leaf.addressable_data(0) if leaf.is_fully_replicated else to_host(leaf)
        return _snapshot(leaf)
    if leaf.sharding.memory_kind not in (None, _device_memory(leaf)):
        return leaf
    return jnp.copy(leaf)


def _device_memory(leaf: jax.Array) -> str:
    (device, *_) = leaf.sharding.device_set
    return device.default_memory().kind
