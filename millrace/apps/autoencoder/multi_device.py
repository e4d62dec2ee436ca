"""Several training programs, on a device each, run as one.

Of several processes, each runs the programs on its own devices, and knows of the others'
states only their shapes.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from millrace.distributed import coordination
from millrace.program.replicas import replica_mesh, replicated
from millrace.program.step import TrainState
from millrace.program.training import TrainingProgram


class SpreadState(NamedTuple):
    """The states of programs on several devices."""

    update: jax.Array
    parts: tuple[TrainState, ...]


def parts_of(state: Any) -> tuple[TrainState, ...]:
    """Return the state of each program, be it one or several."""
    return state.parts if isinstance(state, SpreadState) else (state,)


class SpreadProgram(TrainingProgram):
    """Training programs on a device each, fed with the same batches.

    To whoever runs it, it is one program: the devices work at the same time, and their
    infos are joined. Each must report ``finite_models``, of which its loss is the mean.

    Args:
        programs: One for each device, None for those of other processes.
    """

    def __init__(self, programs: Sequence[TrainingProgram | None]) -> None:
        self._programs = list(programs)
        own = [program for program in programs if program is not None]
        self.plan = own[0].plan
        self.extra_info_names = set().union(*(program.extra_info_names for program in own))
        self.compile_seconds = 0.0
        devices = [device for program in own for device in program.devices]
        self._mesh = replica_mesh(len(devices), devices)

    @property
    def chunk_sharding(self) -> Any:
        """Where a chunk of batches must lie: all of it on every device of this process."""
        return replicated(self._mesh)

    def join(self, parts: Sequence[TrainState]) -> Any:
        """Make one state of the programs' own."""
        own = next(part for _, part in self._own(parts))
        return SpreadState(own.update, tuple(parts))

    def _own(self, parts: Sequence[Any]) -> list[tuple[TrainingProgram, Any]]:
        """Return the programs of this process with what belongs to each."""
        pairs = zip(self._programs, parts, strict=True)
        return [(program, part) for program, part in pairs if program is not None]

    def _changed(self, parts: Sequence[Any], own: Iterable[Any]) -> list[Any]:
        """Put new parts in the place of this process's own."""
        new = iter(own)
        pairs = zip(self._programs, parts, strict=True)
        return [shapes(part) if program is None else next(new) for program, part in pairs]

    def place_state(self, state: Any) -> Any:
        """Put every part of a state where it belongs."""
        placed = [program.place_state(part) for program, part in self._own(state.parts)]
        return self.join(self._changed(state.parts, placed))

    def compile(self, state: Any, chunk: Any) -> None:
        """Compile every program for a chunk of this shape."""
        own = self._own(state.parts)
        for program, part in own:
            program.compile(part, _spec(chunk, program.chunk_sharding))
        self.compile_seconds = sum(program.compile_seconds for program, _ in own)

    def run(self, state: Any, chunk: Any) -> tuple[Any, dict]:
        """Start the updates on every device; `state` is used up."""
        ran = [
            program.run(part, _share(chunk, program))
            for program, part in self._own(state.parts)
        ]
        infos = [info for _, info in ran]
        joined = {name: value for info in infos for name, value in info.items()}
        for name, function in _OF_ALL.items():
            if name in joined:
                joined[name] = _Later(function, [info[name] for info in infos])
        joined["loss"] = _LaterMean(
            _mean, [(info["loss"], info["finite_models"]) for info in infos]
        )
        new = self._changed(state.parts, [state for state, _ in ran])
        return self.join(new), joined


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Join means and how many models each is of: (programs, 2, updates) to (2, updates)."""
    means, counts = np.moveaxis(values, axis, 0).swapaxes(0, 1)
    count = counts.sum(0)
    total = np.where(counts > 0, means * counts, 0).sum(0)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return np.stack([mean, count]).astype(values.dtype)


_OF_ALL = {
    "finite_models": np.add.reduce,
    "lowest_rmse": np.fmin.reduce,  # of those that are numbers
    "gradients_finite": np.minimum.reduce,
}
"""What the programs report under one name, and what becomes of it."""


def shapes(tree: Any) -> Any:
    """Return what another process's arrays are like."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


class _Later:
    """Values of several devices made one when they are read; until then all may work.

    All processes read them, in the same order.
    """

    def __init__(self, function: Any, values: Sequence[Any]) -> None:
        self._function = function
        self._values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self._joined, dtype)

    @functools.cached_property
    def _joined(self) -> np.ndarray:
        own = self._function(np.stack(jax.device_get(self._values)), axis=0)
        if coordination.num_processes() == 1:
            return own
        each = coordination.gather("info of programs", own.tolist())
        return self._function(np.array(each, own.dtype), axis=0)


class _LaterMean(_Later):
    """The same for a mean, which is joined with the number of models it is of."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self._joined[0], dtype)


def _spec(chunk: Any, sharding: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), chunk
    )


def _share(chunk: Any, program: TrainingProgram) -> Any:
    """Return a device's own copy of a chunk that lies on all of them."""
    (device,) = program.devices

    def share(leaf: jax.Array) -> jax.Array:
        (data,) = [s.data for s in leaf.addressable_shards if s.device == device]
        return jax.make_array_from_single_device_arrays(
            leaf.shape, program.chunk_sharding, [data]
        )

    return jax.tree.map(share, chunk)
