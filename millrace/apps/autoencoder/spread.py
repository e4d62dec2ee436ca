"""Several training programs, on a device each, run as one."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

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
    infos are joined.
    """

    def __init__(self, programs: Sequence[TrainingProgram]) -> None:
        self._programs = list(programs)
        self.plan = programs[0].plan
        self.watched = set().union(*(program.watched for program in programs))
        self.compile_seconds = 0.0
        devices = [device for program in programs for device in program.devices]
        self._mesh = replica_mesh(len(devices), devices)

    @property
    def chunk_sharding(self) -> Any:
        """Where a chunk of batches must lie: all of it on every device."""
        return replicated(self._mesh)

    def join(self, parts: Sequence[TrainState]) -> Any:
        """Make one state of the programs' own."""
        return SpreadState(parts[0].update, tuple(parts))

    def place(self, state: Any) -> Any:
        """Put every part of a state where it belongs."""
        parts = zip(self._programs, state.parts, strict=True)
        return self.join([program.place(part) for program, part in parts])

    def compile(self, state: Any, chunk: Any) -> None:
        """Compile every program for a chunk of this shape."""
        for program, part in zip(self._programs, state.parts, strict=True):
            program.compile(part, _spec(chunk, program.chunk_sharding))
        self.compile_seconds = sum(program.compile_seconds for program in self._programs)

    def run(self, state: Any, chunk: Any) -> tuple[Any, dict]:
        """Start the updates on every device; `state` is used up."""
        ran = [
            program.run(part, _share(chunk, program))
            for program, part in zip(self._programs, state.parts, strict=True)
        ]
        infos = [info for _, info in ran]
        joined = {name: value for info in infos for name, value in info.items()}
        for name, function in _OF_ALL.items():
            if name in joined:
                joined[name] = _Later(function, [info[name] for info in infos])
        return self.join([state for state, _ in ran]), joined


_OF_ALL = {
    "loss": np.add.reduce,
    "lowest_rmse": np.fmin.reduce,  # of those that are numbers
    "gradients_finite": np.minimum.reduce,
}
"""What the programs report under one name, and what becomes of it."""


class _Later:
    """Values of several devices made one when they are read; until then all may work."""

    def __init__(self, function: Any, values: Sequence[jax.Array]) -> None:
        self._function = function
        self._values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self._function(np.stack(self._values), axis=0), dtype)


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
