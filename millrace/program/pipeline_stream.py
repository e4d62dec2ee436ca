"""A pipeline's update with optimizer state in host memory, streamed through the devices.

As without a pipeline (see ``offload``), each bucket of layers is a program of its own, and
the host keeps the state of at most two buckets on the devices. Values that the optimizer
exchanges between layers are computed first; state is fetched for that only if they depend
on it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from millrace.program.compiling import compile_for
from millrace.program.offload import MAX_BUCKETS_IN_FLIGHT
from millrace.program.packing import Buffers
from millrace.program.pipeline import SUMS, PipelineSums
from millrace.program.pipeline_update import PipelineUpdate
from millrace.program.replicas import STAGE_AXIS, map_over_mesh, stage_sharding
from millrace.program.state_layout import (
    ROW,
    SAME,
    STATE,
    PackedOptimizerState,
    add_device_dim,
    as_row,
    drop_device_dim,
    own_row,
    without_buckets,
)
from millrace.program.step import TrainState


class _Contribution(NamedTuple):
    """The part of one bucket in an exchange."""

    bucket: int
    needs_state: bool
    program: Any


class StreamedPipelineUpdate:
    """Applies a weight update bucket by bucket.

    Args:
        update: The update on one device.
        mesh: The devices.
        state: A packed state.
        sums: What an update accumulates, with a dim of devices, or its shapes.
    """

    def __init__(
        self, update: PipelineUpdate, mesh: Mesh, state: TrainState, sums: Any
    ) -> None:
        self._update, self._mesh = update, mesh
        self._arguments = (state.params, without_buckets(state), sums)
        self._on_device = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=stage_sharding(mesh)),
            state.optimizer_state.buckets,
        )
        self._on_host = jax.tree.map(lambda x: x.sharding, state.optimizer_state.buckets)
        self._exchanged_shapes: list[Any] = []
        self._exchanges: list[list[_Contribution]] = []
        for number in range(update.num_exchanges):
            contributions = [
                _Contribution(*each, self._compile_exchange(number, *each))
                for each in update.contributors(number)
            ]
            self._exchanges.append(contributions)
            self._exchanged_shapes.append(contributions[0].program.out_info)
        self._buckets = [self._compile_bucket(i) for i in range(update.num_buckets)]
        self._finish = self._compile_finish()

    def apply(self, state: TrainState, sums: PipelineSums) -> tuple[TrainState, Any]:
        """Make one weight update; `state` is donated."""
        exchanged = self._exchange(state, sums)
        params, rows = state.params, list(state.optimizer_state.buckets)
        rest, in_flight = without_buckets(state), []
        for number, program in enumerate(self._buckets):
            if len(in_flight) == MAX_BUCKETS_IN_FLIGHT:
                # Device memory is free again only when a bucket is back on the host.
                jax.block_until_ready(in_flight.pop(0))
            fetched = self._fetch(rows[number])
            params, new = program(params, fetched, rest, sums, exchanged)
            rows[number] = jax.device_put(new, self._on_host[number])
            in_flight.append(rows[number])
        rest, info = self._finish(rest, sums, exchanged)
        optimizer = PackedOptimizerState(tuple(rows), rest.optimizer_state.shared)
        return rest._replace(params=params, optimizer_state=optimizer), info

    def _exchange(self, state: TrainState, sums: PipelineSums) -> list[Buffers]:
        rest, exchanged = without_buckets(state), []
        for contributions in self._exchanges:
            results = []
            for bucket, needs_state, program in contributions:
                rows = state.optimizer_state.buckets[bucket]
                fetched = self._fetch(rows) if needs_state else None
                results.append(program(state.params, fetched, rest, sums, exchanged))
            # Each bucket has zeros in place of the values of the others.
            exchanged.append(functools.reduce(_add, results))
        return exchanged

    def _fetch(self, rows: Buffers) -> Buffers:
        return jax.device_put(rows, stage_sharding(self._mesh))

    def _compile_exchange(self, number: int, bucket: int, needs_state: bool) -> Any:
        def exchange(*operands: Any) -> Buffers:
            own = self._update.contribution(number, bucket, *operands)
            return lax.psum(own, STAGE_AXIS)

        fetched = self._on_device[bucket] if needs_state else None
        return self._compile_part(exchange, fetched, SAME)

    def _compile_bucket(self, number: int) -> Any:
        def update(*operands: Any) -> tuple[Buffers, Buffers]:
            return add_device_dim(self._update.update_bucket(number, *operands))

        fetched = self._on_device[number]
        return self._compile_part(update, fetched, (ROW, ROW), donate=(0, 1))

    def _compile_part(
        self,
        function: Callable[..., Any],
        fetched: Any,
        out_specs: Any,
        donate: tuple[int, ...] = (),
    ) -> Any:
        """Compile a function of the shared values and the device's own buffers."""

        def part(
            params: Any, optimizer: Any, rest: TrainState, sums: Any, exchanged: Any
        ) -> Any:
            params, optimizer, own = _own_rows(params, optimizer, sums)
            finite, loss = self._update.check_finite(own.gradients), own.info["loss"]
            known = self._update.compute_shared(rest, finite, loss, exchanged)
            return function(known, params, optimizer, own.gradients)

        params, rest, sums = self._arguments
        in_specs = (ROW, ROW, STATE, SUMS, SAME)
        program = map_over_mesh(self._mesh, part, in_specs, out_specs)
        arguments = (params, fetched, rest, sums, self._exchanged_shapes)
        return compile_for(self._mesh, program, *arguments, donate=donate)

    def _compile_finish(self) -> Any:
        def finish(rest: TrainState, sums: PipelineSums, exchanged: Any) -> Any:
            _, _, own = _own_rows(None, None, sums)
            finite, loss = self._update.check_finite(own.gradients), own.info["loss"]
            new, info = self._update.advance_state(own_row(rest), own, finite)
            known = self._update.compute_shared(rest, finite, loss, exchanged)
            shared = self._update.update_shared(known)
            new = new._replace(optimizer_state=PackedOptimizerState((), shared))
            return as_row(new), info

        program = map_over_mesh(self._mesh, finish, (STATE, SUMS, SAME), (STATE, SAME))
        _, rest, sums = self._arguments
        arguments = (rest, sums, self._exchanged_shapes)
        return compile_for(self._mesh, program, *arguments, donate=(0,))


def _own_rows(
    params: Any, optimizer: Any, sums: PipelineSums
) -> tuple[Any, Any, PipelineSums]:
    """Return a device's shards without the dim of devices."""
    params, optimizer, gradients, model_state = drop_device_dim(
        (params, optimizer, sums.gradients, sums.model_state)
    )
    return params, optimizer, PipelineSums(gradients, model_state, sums.info)


def _add(one: Buffers, other: Buffers) -> Buffers:
    return jax.tree.map(jnp.add, one, other)
