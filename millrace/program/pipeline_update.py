"""The second half of a pipeline's update, on one device: its weights change.

The optimizer's update of the whole model is partitioned by bucket and device. Values that
combine several parts, such as the global norm, are exchanged between the devices first; see
``PartitionedUpdate``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float32

from millrace.program import packing
from millrace.program import step as steps
from millrace.program.accumulate import combine_contributions, reduction_modes
from millrace.program.packing import BufferLayout, Buffers
from millrace.program.pipeline import PipelineSums
from millrace.program.replicas import STAGE_AXIS
from millrace.program.state_layout import (
    PackedOptimizerState,
    StateLayout,
    shared_inputs,
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
