"""The second half of a pipeline's update, on one device: its weights change.

The optimizer's update of the whole model is partitioned by bucket and device. Values that
combine several parts, such as the global norm, are exchanged between the devices first; see
``PartitionedUpdate``.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jaxtyping import Bool, Float32

from millrace.program import packing
from millrace.program import step as steps
from millrace.program.accumulate import combine_contributions, reduction_modes
from millrace.program.compiling import compile_for
from millrace.program.offload import MAX_BUCKETS_IN_FLIGHT
from millrace.program.packing import BufferLayout, Buffers
from millrace.program.pipeline import SUMS, PipelineSums
from millrace.program.replicas import STAGE_AXIS, map_over_mesh, stage_sharding
from millrace.program.state_layout import (
    ROW,
    SAME,
    STATE,
    PackedOptimizerState,
    StateLayout,
    add_device_dim,
    as_row,
    drop_device_dim,
    own_row,
    shared_inputs,
    without_buckets,
)
from millrace.program.step import Step, TrainState

SharedValues = dict[int, Any]
"""What all devices know, see ``PartitionedUpdate.compute_shared``."""


class PipelineUpdate:
    """The parts of an update. All methods run inside the program, on one device.

    States and buffers are the device's own rows.
    """

    def __init__(self, step: Step, layout: StateLayout) -> None:
        self._step = step
        self._layout = layout
        self._update = layout.update
        self.num_buckets = len(layout.buckets)
        self.num_exchanges = layout.update.num_exchanges

    def apply(self, state: TrainState, sums: PipelineSums) -> tuple[TrainState, Any]:
        """Change the weights once; return the new state and the update's info."""
        params, buckets = state.params, list(state.optimizer_state.buckets)
        finite, loss = self.check_finite(sums.gradients), sums.info["loss"]
        exchanged: list[Buffers] = []
        for number in range(self.num_exchanges):
            known = self.compute_shared(state, finite, loss, exchanged)
            total = self._update.zero_contribution(number)
            for bucket, rows in enumerate(buckets):
                operands = (params, rows, sums.gradients)
                own = self.contribution(number, bucket, known, *operands)
                total = jax.tree.map(jnp.add, total, own)
            exchanged.append(lax.psum(total, STAGE_AXIS))
        known = self.compute_shared(state, finite, loss, exchanged)
        for bucket, rows in enumerate(buckets):
            params, buckets[bucket] = self.update_bucket(
                bucket, known, params, rows, sums.gradients
            )
        optimizer = PackedOptimizerState(tuple(buckets), self.update_shared(known))
        new, info = self.advance_state(state, sums, finite)
        return new._replace(params=params, optimizer_state=optimizer), info

    def check_finite(self, gradients: Buffers) -> Bool[Array, ""] | None:
        """Return whether the gradients of all stages are finite, if the plan asks."""
        own = steps.check_finite(self._step.plan, gradients)
        if own is None:
            return None
        return lax.pmin(own.astype(jnp.int32), STAGE_AXIS).astype(bool)

    def compute_shared(
        self,
        state: TrainState,
        finite: Bool[Array, ""] | None,
        loss: Float32[Array, ""],
        exchanged: Sequence[Buffers],
    ) -> SharedValues:
        """Compute what all devices know after some exchanges."""
        finite = jnp.bool_(True) if finite is None else finite
        rest = shared_inputs(state, finite, loss)
        shared = [*state.optimizer_state.shared, *jax.tree.leaves(rest)]
        return self._update.compute_shared(shared, exchanged)

    def advance_state(
        self, state: TrainState, sums: PipelineSums, finite: Bool[Array, ""] | None
    ) -> tuple[TrainState, Any]:
        """Update the model state and everything else that no optimizer changes."""
        rows, totals = self._layout.model_state, self._layout.contributions
        plan = self._step.plan
        count = plan.batching.gradient_accumulation_count * plan.num_replicas

        def on_device(device: int) -> Callable[..., Any]:
            def combine(old: Buffers, summed: Buffers) -> Buffers:
                layout = rows.layouts[device]
                tree = packing.unpack(layout, old)
                modes = reduction_modes(self._step.model_state_reduction, tree)
                total = packing.unpack(totals.layouts[device], summed)
                new = combine_contributions(modes, tree, total, count)
                return packing.pack(layout, new, rows.sizes)

            return combine

        model_state = self._switch_device(on_device, state.model_state, sums.model_state)
        return steps.advance_state(self._step, state, model_state, sums.info, finite)

    def update_shared(self, known: SharedValues) -> tuple[Any, ...]:
        """Update the state that belongs to no layer, after all exchanges."""
        return tuple(self._update.compute_outputs(None, known))

    def contributors(self, number: int) -> list[tuple[int, bool]]:
        """Return the buckets that take part in an exchange, and whether with state."""
        buckets = []
        for bucket, rows in enumerate(self._layout.optimizer):
            takes_part, needs_state = False, False
            for device, layout in enumerate(rows.layouts):
                part = self._layout.part_index(bucket, device)
                reads = self._update.contribution_inputs(number, part)
                inputs = self._update.input_positions(part)
                state = inputs[len(inputs) - len(layout.slices) :]
                takes_part |= reads is not None
                needs_state |= not (reads or set()).isdisjoint(state)
            if takes_part:
                buckets.append((bucket, needs_state))
        return buckets

    def update_bucket(
        self,
        bucket: int,
        known: SharedValues,
        params: Buffers,
        optimizer: Buffers,
        gradients: Buffers,
    ) -> tuple[Buffers, Buffers]:
        """Update the weights of one bucket of this device's layers."""
        rows = self._layout.optimizer[bucket]

        def on_device(device: int) -> Callable[..., Any]:
            def update(params: Buffers, optimizer: Buffers, gradients: Buffers) -> Any:
                own = self._unpack_inputs(bucket, device, params, optimizer, gradients)
                part = self._layout.part_index(bucket, device)
                layout = self._bucket_layout("params", bucket, device)
                results = self._update.compute_outputs(part, known, own)
                count = len(layout.slices)
                new_params = jax.tree.unflatten(layout.tree, results[:count])
                return (
                    packing.replace_section(layout, params, new_params),
                    packing.pack(rows.layouts[device], results[count:], rows.sizes),
                )

            return update

        return self._switch_device(on_device, params, optimizer, gradients)

    def contribution(
        self,
        number: int,
        bucket: int,
        known: SharedValues,
        params: Buffers,
        optimizer: Buffers | None,
        gradients: Buffers,
    ) -> Buffers:
        """Compute what one bucket contributes to an exchange, with zeros for others.

        All devices sum it up. The state can be None if it is not read.
        """

        def on_device(device: int) -> Callable[..., Any]:
            def contribute(params: Buffers, optimizer: Any, gradients: Buffers) -> Any:
                own = self._unpack_inputs(bucket, device, params, optimizer, gradients)
                part = self._layout.part_index(bucket, device)
                return self._update.contribution(number, part, known, own)

            return contribute

        return self._switch_device(on_device, params, optimizer, gradients)

    def _unpack_inputs(
        self,
        bucket: int,
        device: int,
        params: Buffers,
        optimizer: Buffers | None,
        gradients: Buffers,
    ) -> list[Any]:
        """Unpack the inputs of a part, in the order that the update takes them."""
        layout = self._layout.optimizer[bucket].layouts[device]
        state = [None] * len(layout.slices)  # not read, and so not fetched
        if optimizer is not None:
            state = packing.unpack(layout, optimizer)
        kinds = {"params": params, "gradients": gradients}
        trees = [
            packing.unpack(self._bucket_layout(kind, bucket, device), buffers)
            for kind, buffers in kinds.items()
        ]
        return [*jax.tree.leaves(trees), *state]

    def _bucket_layout(self, kind: str, bucket: int, device: int) -> BufferLayout:
        names = self._layout.buckets[bucket][device]
        return packing.select(getattr(self._layout, kind).layouts[device], names)

    def _switch_device(self, on_device: Callable[[int], Any], *operands: Any) -> Any:
        """Run this device's branch: all devices run one program but differ in layout."""
        devices = range(self._layout.model.stages.num_devices)
        branches = [on_device(device) for device in devices]
        return lax.switch(lax.axis_index(STAGE_AXIS), branches, *operands)


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
