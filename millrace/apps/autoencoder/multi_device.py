"""Several training programs, one per device, that run as one.

With several processes, each runs the programs on its own devices and knows only the shapes
of the other states.
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


class MultiDeviceState(NamedTuple):
    """The states of programs on several devices."""

    update: jax.Array
    parts: tuple[TrainState, ...]


def get_parts(state: Any) -> tuple[TrainState, ...]:
    """Return the state of each program, whether there is one or several."""
    return state.parts if isinstance(state, MultiDeviceState) else (state,)


class MultiDeviceProgram(TrainingProgram):
    """Training programs that each have a device and get the same batches.

    The runner sees one program: the devices work at the same time, and their infos are
    combined. Every program must report ``finite_models``, the number of models that its
    loss is the mean of.

    Args:
        programs: One per device; None for devices of other processes.
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
        """The sharding of a chunk: a full copy on every device of this process."""
        return replicated(self._mesh)

    def join(self, parts: Sequence[TrainState]) -> Any:
        """Combine the states of the programs."""
        own = next(part for _, part in self._own(parts))
        return MultiDeviceState(own.update, tuple(parts))

    def _own(self, parts: Sequence[Any]) -> list[tuple[TrainingProgram, Any]]:
        """Return the programs of this process with their parts."""
        pairs = zip(self._programs, parts, strict=True)
        return [(program, part) for program, part in pairs if program is not None]

    def _replace_own(self, parts: Sequence[Any], own: Iterable[Any]) -> list[Any]:
        """Replace the parts of this process."""
        new = iter(own)
        pairs = zip(self._programs, parts, strict=True)
        return [
            get_shapes(part) if program is None else next(new) for program, part in pairs
        ]

    def place_state(self, state: Any) -> Any:
        """Put every part of a state on its device."""
        placed = [program.place_state(part) for program, part in self._own(state.parts)]
        return self.join(self._replace_own(state.parts, placed))

    def compile(self, state: Any, chunk: Any) -> None:
        """Compile every program for a chunk of this shape."""
        own = self._own(state.parts)
        for program, part in own:
            program.compile(part, _with_sharding(chunk, program.chunk_sharding))
        self.compile_seconds = sum(program.compile_seconds for program, _ in own)

    @property
    def runs_parts(self) -> bool:
        """Whether the programs make any number of the updates of a chunk."""
        return all(program is None or program.runs_parts for program in self._programs)

    def run(
        self, state: Any, chunk: Any, part: tuple[int, int] | None = None
    ) -> tuple[Any, dict]:
        """Start the updates, or a part of them, on every device; `state` is donated."""
        results = [
            program.run(own, _get_local_copy(chunk, program), part)
            for program, own in self._own(state.parts)
        ]
        infos = [info for _, info in results]
        joined = {name: value for info in infos for name, value in info.items()}
        for name, reduce in _REDUCTIONS.items():
            if name in joined:
                joined[name] = _LazyArray(reduce, [info[name] for info in infos])
        joined["loss"] = _LazyMean(
            _combine_means, [(info["loss"], info["finite_models"]) for info in infos]
        )
        new = self._replace_own(state.parts, [state for state, _ in results])
        return self.join(new), joined


def _combine_means(
    values: np.ndarray,  # (programs, 2, updates): means, and the number of models in each
    axis: int,
) -> np.ndarray:  # (2, updates)
    """Combine means over different numbers of models."""
    means, counts = np.moveaxis(values, axis, 0).swapaxes(0, 1)
    count = counts.sum(0)
    total = np.where(counts > 0, means * counts, 0).sum(0)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return np.stack([mean, count]).astype(values.dtype)


_REDUCTIONS = {
    "finite_models": np.add.reduce,
    "lowest_rmse": np.fmin.reduce,  # ignores NaN
    "gradients_finite": np.minimum.reduce,
}
"""How to combine infos that all programs report under the same name."""


def get_shapes(tree: Any) -> Any:
    """Return shapes and dtypes, which stand in for arrays of another process."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


class _LazyArray:
    """Values of several devices that are combined when they are read.

    Combining them earlier would make the host wait for the devices. All processes must
    read them, in the same order, because reading communicates.
    """

    def __init__(self, reduce: Any, values: Sequence[Any]) -> None:
        self._reduce = reduce
        self._values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self._combined, dtype)

    @functools.cached_property
    def _combined(self) -> np.ndarray:
        own = self._reduce(np.stack(jax.device_get(self._values)), axis=0)
        if coordination.num_processes() == 1:
            return own
        gathered = coordination.gather("info of programs", own.tolist())
        return self._reduce(np.array(gathered, own.dtype), axis=0)


class _LazyMean(_LazyArray):
    """A lazy mean, which is combined together with the number of models in it."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self._combined[0], dtype)


def _with_sharding(chunk: Any, sharding: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), chunk
    )


def _get_local_copy(chunk: Any, program: TrainingProgram) -> Any:
    """Return the copy on the program's device of a chunk that is on all devices."""
    (device,) = program.devices

    def get_copy(leaf: jax.Array) -> jax.Array:
        (data,) = [s.data for s in leaf.addressable_shards if s.device == device]
        # Wraps the buffer; nothing is copied or moved.
        return jax.make_array_from_single_device_arrays(
            leaf.shape, program.chunk_sharding, [data]
        )

    return jax.tree.map(get_copy, chunk)
