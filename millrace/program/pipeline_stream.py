"""A pipeline's update whose optimizer state rests in host memory and streams through.

As without a pipeline (see ``offload``), each bucket of layers is a program of its own, and
the host keeps at most two buckets' state on the devices. What the optimizer exchanges
between layers is computed first; its state is fetched for that only if it is needed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from millrace.program.compiling import compile_for
from millrace.program.packed_state import (
    ROW,
    SAME,
    STATE,
    OptimizerRows,
    as_row,
    first_row,
    own_row,
    row,
    without_buckets,
)
from millrace.program.packing import Buffers
from millrace.program.pipeline import Sums
from millrace.program.pipeline_update import PipelineUpdate
from millrace.program.replicas import split_stages
from millrace.program.step import TrainState

_BUCKETS_IN_FLIGHT = 2

SUMS: Any = Sums._make((ROW, ROW, SAME))
"""How what an update gathers is split over the devices."""


class _Contribution(NamedTuple):
    """A bucket's part in an exchange."""

    bucket: int
    needs_state: bool
    program: Any


class StreamedPipelineUpdate:
    """Applies a weight update bucket by bucket.

    Args:
        update: The update on one device.
        mesh: The devices.
        mapped: Maps a function over the mesh: ``(function, in_specs, out_specs)``.
        state: A packed state.
        sums: What an update gathers, with rows, or its shapes.
    """

    def __init__(
        self,
        update: PipelineUpdate,
        mesh: Mesh,
        mapped: Callable[..., Any],
        state: TrainState,
        sums: Any,
    ) -> None:
        self._update, self._mesh, self._mapped = update, mesh, mapped
        self._given = (state.params, without_buckets(state), sums)
        self._fetched = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split_stages(mesh)),
            state.optimizer_state.buckets,
        )
        self._resting = jax.tree.map(lambda x: x.sharding, state.optimizer_state.buckets)
        self._exchanged: list[Any] = []  # shapes of what the exchanges bring
        self._exchanges: list[list[_Contribution]] = []
        for number in range(update.num_exchanges):
            given = [
                _Contribution(*each, self._compile_exchange(number, *each))
                for each in update.contributors(number)
            ]
            self._exchanges.append(given)
            self._exchanged.append(given[0].program.out_info)
        self._buckets = [self._compile_bucket(i) for i in range(update.num_buckets)]
        self._finish = self._compile_finish()

    def apply(self, state: TrainState, sums: Sums) -> tuple[TrainState, Any]:
        """Make one weight update; `state` is used up."""
        exchanged = self._exchange(state, sums)
        params, rows = state.params, list(state.optimizer_state.buckets)
        rest, leaving = without_buckets(state), []
        for number, program in enumerate(self._buckets):
            if len(leaving) == _BUCKETS_IN_FLIGHT:
                # Only what has left the devices makes room for what comes next.
                jax.block_until_ready(leaving.pop(0))
            fetched = self._fetch(rows[number])
            params, new = program(params, fetched, rest, sums, exchanged)
            rows[number] = jax.device_put(new, self._resting[number])
            leaving.append(rows[number])
        rest, info = self._finish(rest, sums, exchanged)
        optimizer = OptimizerRows(tuple(rows), rest.optimizer_state.shared)
        return rest._replace(params=params, optimizer_state=optimizer), info

    def _exchange(self, state: TrainState, sums: Sums) -> list[Buffers]:
        rest, exchanged = without_buckets(state), []
        for contributions in self._exchanges:
            given = []
            for bucket, needs_state, program in contributions:
                rows = state.optimizer_state.buckets[bucket]
                fetched = self._fetch(rows) if needs_state else None
                given.append(program(state.params, fetched, rest, sums, exchanged))
            # Each bucket gives zeros for the values of the others.
            exchanged.append(functools.reduce(_added, given))
        return exchanged

    def _fetch(self, rows: Buffers) -> Buffers:
        return jax.device_put(rows, split_stages(self._mesh))

    def _common(self, rest: TrainState, own: Sums, exchanged: Any) -> Any:
        finite = self._update.finite(own.gradients)
        return self._update.common(rest, finite, own.info["loss"], exchanged)

    def _compile_exchange(self, number: int, bucket: int, needs_state: bool) -> Any:
        def exchange(
            params: Any, optimizer: Any, rest: TrainState, sums: Sums, exchanged: Any
        ) -> Any:
            params, optimizer, own = _own(params, optimizer, sums)
            common = self._common(rest, own, exchanged)
            values = (params, optimizer, own.gradients)
            return self._update.exchange(number, bucket, common, *values)

        fetched = self._fetched[bucket] if needs_state else None
        return self._compile_part(exchange, fetched, SAME)

    def _compile_bucket(self, number: int) -> Any:
        def update(
            params: Any, optimizer: Any, rest: TrainState, sums: Sums, exchanged: Any
        ) -> Any:
            params, optimizer, own = _own(params, optimizer, sums)
            common = self._common(rest, own, exchanged)
            values = (params, optimizer, own.gradients)
            return row(self._update.update_bucket(number, common, *values))

        return self._compile_part(update, self._fetched[number], (ROW, ROW), donate=(0, 1))

    def _compile_part(
        self, function: Any, fetched: Any, out_specs: Any, donate: tuple[int, ...] = ()
    ) -> Any:
        params, rest, sums = self._given
        program = self._mapped(function, (ROW, ROW, STATE, SUMS, SAME), out_specs)
        given = (params, fetched, rest, sums, self._exchanged)
        return compile_for(self._mesh, program, *given, donate=donate)

    def _compile_finish(self) -> Any:
        def finish(rest: TrainState, sums: Sums, exchanged: Any) -> Any:
            _, _, own = _own(None, None, sums)
            finite = self._update.finite(own.gradients)
            new, info = self._update.next_state(own_row(rest), own, finite)
            common = self._update.common(rest, finite, own.info["loss"], exchanged)
            shared = self._update.new_shared(common)
            return as_row(new._replace(optimizer_state=OptimizerRows((), shared))), info

        program = self._mapped(finish, (STATE, SUMS, SAME), (STATE, SAME))
        _, rest, sums = self._given
        given = (rest, sums, self._exchanged)
        return compile_for(self._mesh, program, *given, donate=(0,))


def _own(params: Any, optimizer: Any, sums: Sums) -> tuple[Any, Any, Sums]:
    """Return a device's own rows."""
    params, optimizer, gradients, model_state = first_row(
        (params, optimizer, sums.gradients, sums.model_state)
    )
    return params, optimizer, Sums(gradients, model_state, sums.info)


def _added(one: Buffers, other: Buffers) -> Buffers:
    return jax.tree.map(jnp.add, one, other)
