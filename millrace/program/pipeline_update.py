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
from millrace.program.arrangement import Arrangement, OptimizerRows, common_inputs
from millrace.program.packing import Buffers
from millrace.program.replicas import STAGE_AXIS
from millrace.program.step import TrainState

Common = dict[int, Any]
"""What all devices know, see ``SeparatedUpdate.common``."""


class PipelineUpdate:
    """Runs the parts of an update; every method is for use inside the mapped program.

    States and buffers are a device's own rows.
    """

    def __init__(self, arrangement: Arrangement) -> None:
        self._arrangement = arrangement
        self._update = arrangement.update
        self.num_buckets = len(arrangement.buckets)
        self.num_exchanges = arrangement.update.num_exchanges

    def new_weights(
        self, state: TrainState, gradients: Buffers, finite: jax.Array | None
    ) -> tuple[Buffers, OptimizerRows]:
        """Update everything; return the weights and the optimizer's state."""
        params, buckets = state.params, list(state.optimiser_state.buckets)
        exchanged: list[Buffers] = []
        for number in range(self.num_exchanges):
            common = self.common(state, finite, exchanged)
            values = self._update.no_contribution(number)
            for bucket, rows in enumerate(buckets):
                own = self._contribution(number, bucket, common, params, rows, gradients)
                values = jax.tree.map(jnp.add, values, own)
            exchanged.append(lax.psum(values, STAGE_AXIS))
        common = self.common(state, finite, exchanged)
        for bucket, rows in enumerate(buckets):
            params, buckets[bucket] = self.update_bucket(
                bucket, common, params, rows, gradients
            )
        return params, OptimizerRows(tuple(buckets), self.new_shared(common))

    def common(
        self, state: TrainState, finite: jax.Array | None, exchanged: Sequence[Buffers]
    ) -> Common:
        """Compute what all devices know after some exchanges."""
        rest = common_inputs(state, jnp.bool_(True) if finite is None else finite)
        shared = [*state.optimiser_state.shared, *jax.tree.leaves(rest)]
        return self._update.common(shared, exchanged)

    def new_shared(self, common: Common) -> tuple[Any, ...]:
        """Update the state that belongs to no layer; `common` is after all exchanges."""
        return tuple(self._update.results(None, common))

    def contributors(self, number: int) -> list[tuple[int, bool]]:
        """Return the buckets that take part in an exchange, and whether with state."""
        found = []
        for bucket, rows in enumerate(self._arrangement.optimiser):
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
        optimiser: Buffers | None,
        gradients: Buffers,
    ) -> Buffers:
        """Exchange what one bucket gives; zeros for the values of other buckets."""
        own = self._contribution(number, bucket, common, params, optimiser, gradients)
        return lax.psum(own, STAGE_AXIS)

    def update_bucket(
        self,
        bucket: int,
        common: Common,
        params: Buffers,
        optimiser: Buffers,
        gradients: Buffers,
    ) -> tuple[Buffers, Buffers]:
        """Update the weights of one bucket of this device's layers."""
        rows = self._arrangement.optimiser[bucket]

        def on_device(device: int) -> Callable[..., Any]:
            def update(params: Buffers, optimiser: Buffers, gradients: Buffers) -> Any:
                own = self._own(bucket, device, params, optimiser, gradients)
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

        return by_device(self._num_devices, on_device, params, optimiser, gradients)

    def _contribution(
        self,
        number: int,
        bucket: int,
        common: Common,
        params: Buffers,
        optimiser: Buffers | None,
        gradients: Buffers,
    ) -> Buffers:
        def on_device(device: int) -> Callable[..., Any]:
            def contribute(params: Buffers, optimiser: Any, gradients: Buffers) -> Any:
                own = self._own(bucket, device, params, optimiser, gradients)
                part = self._arrangement.part_of(bucket, device)
                return self._update.contribution(number, part, common, own)

            return contribute

        return by_device(self._num_devices, on_device, params, optimiser, gradients)

    def _own(
        self,
        bucket: int,
        device: int,
        params: Buffers,
        optimiser: Buffers | None,
        gradients: Buffers,
    ) -> list[Any]:
        """Unpack the inputs of a part, in the order that the update takes them."""
        layout = self._arrangement.optimiser[bucket].layouts[device]
        state = [None] * len(layout.entries)  # not needed, and so not fetched
        if optimiser is not None:
            state = packing.unpack(layout, optimiser)
        return [
            *jax.tree.leaves(
                packing.unpack(self._layout("params", bucket, device), params)
            ),
            *jax.tree.leaves(
                packing.unpack(self._layout("gradients", bucket, device), gradients)
            ),
            *state,
        ]

    @property
    def _num_devices(self) -> int:
        return self._arrangement.model.stages.num_devices

    def _layout(self, kind: str, bucket: int, device: int) -> packing.Layout:
        names = self._arrangement.buckets[bucket][device]
        return packing.part(getattr(self._arrangement, kind).layouts[device], names)


def by_device(
    num_devices: int, on_device: Callable[[int], Callable[..., Any]], *operands: Any
) -> Any:
    """Run the branch of this device."""
    branches = [on_device(device) for device in range(num_devices)]
    return lax.switch(lax.axis_index(STAGE_AXIS), branches, *operands)
