"""The second half of a pipeline's update, on one device: its weights are changed.

The optimizer's update of the whole model is split by bucket and device. Values that
combine several of these parts, such as the global norm, are exchanged between the
devices first; see ``SeparatedUpdate``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from millrace.program import packing
from millrace.program import step as steps
from millrace.program.packed_state import OptimizerRows
from millrace.program.packing import Buffers
from millrace.program.pipeline import Sums
from millrace.program.replicas import STAGE_AXIS
from millrace.program.state_layout import Arrangement, common_inputs
from millrace.program.step import Step, TrainState

Common = dict[int, Any]
"""What all devices know, see ``SeparatedUpdate.common``."""


class PipelineUpdate:
    """Runs the parts of an update; every method is for use inside the mapped program.

    States and buffers are a device's own rows.
    """

    def __init__(self, step: Step, arrangement: Arrangement) -> None:
        self._step = step
        self._arrangement = arrangement
        self._update = arrangement.update
        self.num_buckets = len(arrangement.buckets)
        self.num_exchanges = arrangement.update.num_exchanges

    def apply(self, state: TrainState, sums: Sums) -> tuple[TrainState, Any]:
        """Change the weights once; return the new state and the update's info."""
        params, buckets = state.params, list(state.optimizer_state.buckets)
        finite, loss = self.finite(sums.gradients), sums.info["loss"]
        exchanged: list[Buffers] = []
        for number in range(self.num_exchanges):
            common = self.common(state, finite, loss, exchanged)
            values = self._update.no_contribution(number)
            for bucket, rows in enumerate(buckets):
                given = (params, rows, sums.gradients)
                own = self._contribution(number, bucket, common, *given)
                values = jax.tree.map(jnp.add, values, own)
            exchanged.append(lax.psum(values, STAGE_AXIS))
        common = self.common(state, finite, loss, exchanged)
        for bucket, rows in enumerate(buckets):
            params, buckets[bucket] = self.update_bucket(
                bucket, common, params, rows, sums.gradients
            )
        optimizer = OptimizerRows(tuple(buckets), self.new_shared(common))
        new, info = self.next_state(state, sums, finite)
        return new._replace(params=params, optimizer_state=optimizer), info

    def finite(self, gradients: Buffers) -> jax.Array | None:
        """Tell whether the gradients of every stage are finite, where the plan asks."""
        own = steps.gradients_finite(self._step.plan, gradients)
        if own is None:
            return None
        return lax.pmin(own.astype(jnp.int32), STAGE_AXIS).astype(bool)

    def common(
        self,
        state: TrainState,
        finite: jax.Array | None,
        loss: jax.Array,
        exchanged: Sequence[Buffers],
    ) -> Common:
        """Compute what all devices know after some exchanges."""
        finite = jnp.bool_(True) if finite is None else finite
        rest = common_inputs(state, finite, loss)
        shared = [*state.optimizer_state.shared, *jax.tree.leaves(rest)]
        return self._update.common(shared, exchanged)

    def next_state(
        self, state: TrainState, sums: Sums, finite: jax.Array | None
    ) -> tuple[TrainState, Any]:
        """Move the model state and everything else that no optimizer changes."""
        rows, changed = self._arrangement.model_state, self._arrangement.changes
        plan = self._step.plan
        count = plan.batching.gradient_accumulation_count * plan.num_replicas

        def on_device(device: int) -> Callable[..., Any]:
            def move(old: Buffers, changes: Buffers) -> Buffers:
                layout = rows.layouts[device]
                tree = packing.unpack(layout, old)
                modes = steps.model_state_modes(self._step.model_state_reduction, tree)
                summed = packing.unpack(changed.layouts[device], changes)
                new = steps.combined(modes, tree, summed, count)
                return packing.pack(layout, new, rows.sizes)

            return move

        model_state = self._by_device(on_device, state.model_state, sums.model_state)
        return steps.next_state(self._step, state, model_state, sums.info, finite)

    def new_shared(self, common: Common) -> tuple[Any, ...]:
        """Update the state that belongs to no layer; `common` is after all exchanges."""
        return tuple(self._update.results(None, common))

    def contributors(self, number: int) -> list[tuple[int, bool]]:
        """Return the buckets that take part in an exchange, and whether with state."""
        found = []
        for bucket, rows in enumerate(self._arrangement.optimizer):
            takes_part, needs_state = False, False
            for device, layout in enumerate(rows.layouts):
                part = self._arrangement.part_of(bucket, device)
                reads = self._update.reads(number, part)
                inputs = self._update.inputs_of(part)
                state = inputs[len(inputs) - len(layout.entries) :]
                takes_part |= reads is not None
                needs_state |= not (reads or set()).isdisjoint(state)
            if takes_part:
                found.append((bucket, needs_state))
        return found

    def exchange(
        self,
        number: int,
        bucket: int,
        common: Common,
        params: Buffers,
        optimizer: Buffers | None,
        gradients: Buffers,
    ) -> Buffers:
        """Exchange what one bucket gives; zeros for the values of other buckets."""
        own = self._contribution(number, bucket, common, params, optimizer, gradients)
        return lax.psum(own, STAGE_AXIS)

    def update_bucket(
        self,
        bucket: int,
        common: Common,
        params: Buffers,
        optimizer: Buffers,
        gradients: Buffers,
    ) -> tuple[Buffers, Buffers]:
        """Update the weights of one bucket of this device's layers."""
        rows = self._arrangement.optimizer[bucket]

        def on_device(device: int) -> Callable[..., Any]:
            def update(params: Buffers, optimizer: Buffers, gradients: Buffers) -> Any:
                own = self._own(bucket, device, params, optimizer, gradients)
                part = self._arrangement.part_of(bucket, device)
                layout = self._layout("params", bucket, device)
                results = self._update.results(part, common, own)
                count = len(layout.entries)
                new_params = jax.tree.unflatten(layout.tree, results[:count])
                return (
                    packing.replaced(layout, params, new_params),
                    packing.pack(rows.layouts[device], results[count:], rows.sizes),
                )

            return update

        return self._by_device(on_device, params, optimizer, gradients)

    def _contribution(
        self,
        number: int,
        bucket: int,
        common: Common,
        params: Buffers,
        optimizer: Buffers | None,
        gradients: Buffers,
    ) -> Buffers:
        def on_device(device: int) -> Callable[..., Any]:
            def contribute(params: Buffers, optimizer: Any, gradients: Buffers) -> Any:
                own = self._own(bucket, device, params, optimizer, gradients)
                part = self._arrangement.part_of(bucket, device)
                return self._update.contribution(number, part, common, own)

            return contribute

        return self._by_device(on_device, params, optimizer, gradients)

    def _own(
        self,
        bucket: int,
        device: int,
        params: Buffers,
        optimizer: Buffers | None,
        gradients: Buffers,
    ) -> list[Any]:
        """Unpack the inputs of a part, in the order that the update takes them."""
        layout = self._arrangement.optimizer[bucket].layouts[device]
        state = [None] * len(layout.entries)  # not needed, and so not fetched
        if optimizer is not None:
            state = packing.unpack(layout, optimizer)
        return [
            *jax.tree.leaves(
                packing.unpack(self._layout("params", bucket, device), params)
            ),
            *jax.tree.leaves(
                packing.unpack(self._layout("gradients", bucket, device), gradients)
            ),
            *state,
        ]

    def _layout(self, kind: str, bucket: int, device: int) -> packing.Layout:
        names = self._arrangement.buckets[bucket][device]
        return packing.part(getattr(self._arrangement, kind).layouts[device], names)

    def _by_device(self, on_device: Callable[[int], Any], *operands: Any) -> Any:
        """Run the branch of this device."""
        devices = range(self._arrangement.model.stages.num_devices)
        branches = [on_device(device) for device in devices]
        return lax.switch(lax.axis_index(STAGE_AXIS), branches, *operands)
