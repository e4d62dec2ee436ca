"""The first half of a pipeline's update: every device follows its row of the schedule.

All devices run the same program (SPMD), so which stage a device runs cannot be compiled in.
Instead, the schedule is a table of numbers (``Routes``) that the program scans, tick by
tick. At each tick, a device looks up its own column and enters one branch of a switch: the
forward or the backward pass of one stage on one micro-batch, or nothing. What it finished
is then sent to the devices that need it next. Gradients, contributions to the model state
and info are summed in place.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import io_callback
from jaxtyping import Int

from millrace.program import packing
from millrace.program import step as steps
from millrace.program.accumulate import add_gradient, keep_first
from millrace.program.mixed_precision import narrow
from millrace.program.packing import BufferLayout, Buffers
from millrace.program.pipeline_stages import PipelineStages, StageOperands
from millrace.program.replicas import REPLICA_AXIS, STAGE_AXIS, sum_over_replicas
from millrace.program.routes import Routes
from millrace.program.state_layout import ROW, SAME
from millrace.program.step import TrainState

Clock = Callable[[int, int, int, bool], None]
"""``(replica, device, tick, is_end)``, called on the host around each action."""

_Row = Mapping[str, Array]
"""What one device does at one tick: the fields of ``Routes`` without ticks and devices."""


class PipelineSums(NamedTuple):
    """What one update accumulates on each device."""

    gradients: Buffers
    model_state: Buffers
    """Sums of contributions to the model state."""
    info: dict[str, Array]


SUMS: Any = PipelineSums._make((ROW, ROW, SAME))
"""Partition specs of the sums."""


class Pipeline:
    """The compiled forward and backward passes of an update.

    Args:
        stages: The stages as functions.
        routes: The schedule table as numbers.
    """

    def __init__(self, stages: PipelineStages, routes: Routes) -> None:
        self._functions = stages
        self._routes = routes
        self._plan = stages.step.plan
        self._stages = stages.layout.model.stages

    def compute_gradients(
        self, state: TrainState, batches: Any, clock: Clock | None = None
    ) -> PipelineSums:
        """Run the schedule for one update; runs inside the program, on one device.

        Args:
            state: The device's own part of a packed state.
            batches: The micro-batches of one replica; leaves are (micro-batches, ...).
            clock: Called on the host before and after each action.
        """
        routes, functions = self._routes, self._functions
        # One slot more than the schedule uses. All devices write at every tick, those
        # with nothing to keep into this one.
        start = (
            PipelineSums(
                packing.zero_buffers(functions.layout.gradients.sizes),
                packing.zero_buffers(functions.layout.contributions.sizes),
                {name: jnp.float32(0) for name in functions.info_names},
            ),
            packing.zero_buffers(functions.boundary_sizes, routes.num_receive_slots + 1),
            packing.zero_buffers(functions.residual_sizes, routes.num_residual_slots + 1),
            packing.zero_buffers(functions.deferred_sizes, routes.num_deferred_slots + 1),
        )
        branches = self._branches(state, batches)
        device = lax.axis_index(STAGE_AXIS)

        def tick(carry: Any, rows: Mapping[str, Array]) -> tuple[Any, None]:
            sums, received, stored, deferred = carry
            row = {name: values[device] for name, values in rows.items()}
            if clock is not None:
                row, received = _timed(clock, row["tick"], False, (row, received))
            sums, sent, residuals, chain = lax.switch(
                row["branch"], branches, sums, received, stored, deferred, row
            )
            if clock is not None:
                sums, sent = _timed(clock, row["tick"], True, (sums, sent))
            kind = (row["branch"] + self._stages.num_stages - 1) // self._stages.num_stages
            slot = jnp.where(kind == 1, row["residual_slot"], routes.num_residual_slots)
            stored = _write_slot(stored, slot, residuals)
            slot = jnp.where(kind == 2, row["deferred_slot"], routes.num_deferred_slots)
            deferred = _write_slot(deferred, slot, chain)
            # Outside of the switch: a collective must run on all devices at once.
            return (sums, self._exchange(received, sent, row), stored, deferred), None

        names = [n for n in Routes._fields if isinstance(getattr(routes, n), np.ndarray)]
        rows = {name: jnp.asarray(getattr(routes, name)) for name in names}
        if clock is not None:
            ticks = jnp.arange(routes.branch.shape[0])
            rows["tick"] = jnp.broadcast_to(ticks[:, None], routes.branch.shape)
        (sums, *_), _ = lax.scan(tick, start, rows)
        return self._reduce(sums)

    def _exchange(self, received: Buffers, sent: Buffers, row: _Row) -> Buffers:
        """Send what a tick finished, one channel after the other, into receive slots."""
        for channel, edges in enumerate(self._routes.channels):
            arrived = sent
            if any(source != target for source, target in edges):
                arrived = {
                    name: lax.ppermute(value, STAGE_AXIS, edges)
                    for name, value in sent.items()
                }
            slot = row["receive_slot"][channel]
            if self._routes.any_added:
                is_added = row["receive_add"][channel]
                there = _read_slot(received, slot)
                arrived = {
                    name: jnp.where(is_added, there[name] + value, value)
                    for name, value in arrived.items()
                }
            received = _write_slot(received, slot, arrived)
        return received

    def _reduce(self, sums: PipelineSums) -> PipelineSums:
        """Sum over replicas. Info is on one stage only, so sum it over all of them."""
        plan = self._plan
        gradients, model_state, info = sum_over_replicas(tuple(sums), plan.num_replicas)
        info = lax.psum(info, STAGE_AXIS)
        count = plan.batching.gradient_accumulation_count * plan.num_replicas
        info = {name: value / count for name, value in info.items()}
        gradients = {
            name: (value / plan.num_replicas).astype(sums.gradients[name].dtype)
            for name, value in gradients.items()
        }
        return PipelineSums(gradients, model_state, info)

    # --- the branches of the switch ---
    # All take and return the same types: (sums, received, stored, deferred, row) to (sums,
    # sent, residuals, chain). Hence the flat buffers, padded to the largest stage.

    def _branches(self, state: TrainState, batches: Any) -> list[Callable[..., Any]]:
        def idle(sums: PipelineSums, *_: Any) -> Any:
            return sums, *self._nothing()

        def operands(stage: int, received: Buffers, row: _Row) -> StageOperands:
            index = row["micro_batch"]
            batch = jax.tree.map(
                lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), batches
            )
            batch = narrow(batch, self._plan.types.compute)
            key = steps.micro_batch_key(self._plan, state, index)
            position = self._stages.position_of(stage)
            if position == 0:
                # Residuals are found by their place among the operands, which therefore
                # must be different arrays, also if the input has one of the batch twice.
                x = jax.tree.map(jnp.copy, self._functions.loss.inputs(batch, key))
            else:
                boundary = self._functions.boundaries[position - 1]
                x = packing.unpack(boundary, _read_slot(received, row["input_slot"]))
            params, model_state = self._functions.unpack_values(
                stage, state.params, state.model_state
            )
            params = steps.copy_params(self._plan, state, params)
            return StageOperands(params, model_state, x, batch, key)

        # In the order of Routes.branch.
        stages = range(self._stages.num_stages)
        branches = [
            idle,
            *(self._forward(stage, operands) for stage in stages),
            *(self._backward(stage, operands, state) for stage in stages),
        ]
        if self._functions.splits_backward:
            branches += [self._weight_gradients(stage, operands) for stage in stages]
        return branches

    def _nothing(self) -> tuple[Buffers, Buffers, Buffers]:
        functions = self._functions
        return (
            packing.zero_buffers(functions.boundary_sizes),
            packing.zero_buffers(functions.residual_sizes),
            packing.zero_buffers(functions.deferred_sizes),
        )

    def _forward(
        self, stage: int, get_operands: Callable[..., StageOperands]
    ) -> Callable[..., Any]:
        functions = self._functions
        is_last = stage == self._stages.num_stages - 1

        def forward(
            sums: PipelineSums, received: Buffers, stored: Any, deferred: Any, row: _Row
        ) -> Any:
            del stored, deferred
            operands = get_operands(stage, received, row)
            sent, residuals, chain = self._nothing()
            if functions.keeps_residuals:
                y, backward, (changes, info) = functions.differentiate(stage, operands)
                residuals = functions.pack_residuals(stage, backward)
            else:
                y, (changes, info) = functions.forward(stage)(*operands)
            if not is_last:
                sent = functions.pack_output(stage, y)
            changes = keep_first(functions.modes(stage), changes, row["micro_batch"])
            layout = functions.stage_layout("contributions", stage)
            model_state = _update_section(layout, sums.model_state, changes, jnp.add)
            if is_last:
                info = {name: sums.info[name] + info[name] for name in sums.info}
            else:
                info = sums.info
            sums = PipelineSums(sums.gradients, model_state, info)
            return sums, sent, residuals, chain

        return forward

    def _backward(
        self, stage: int, get_operands: Callable[..., StageOperands], state: TrainState
    ) -> Callable[..., Any]:
        plan, functions = self._plan, self._functions
        position = self._stages.position_of(stage)
        group = self._stages.groups[position]

        def output_gradient(received: Buffers, row: _Row) -> Any:
            if position == self._stages.num_positions - 1:
                return state.loss_scale.factor if plan.loss_scaling else jnp.float32(1)
            buffers = _read_slot(received, row["gradient_slot"])
            gradient = packing.unpack(functions.boundaries[position], buffers)
            return gradient[group.index(stage)] if len(group) > 1 else gradient

        def backward(
            sums: PipelineSums, received: Buffers, stored: Buffers, deferred: Any, row: _Row
        ) -> Any:
            del deferred
            operands = get_operands(stage, received, row)
            residuals = self._read_residuals(stage, stored, row)
            gradient = output_gradient(received, row)
            sent, nothing, chain = self._nothing()
            if functions.splits_backward:
                split = functions.backwards[stage]
                values = jax.tree.leaves((operands, residuals, gradient))
                input_gradient, needed = split.pass_on(values)
                chain = packing.pack(split.layout, needed, functions.deferred_sizes)
            else:
                run_backward = functions.restore_backward(stage, operands, residuals)
                params_gradient, *input_gradient = run_backward(gradient)
                sums = self._add_gradients(stage, sums, params_gradient, row)
            if position:
                boundary = functions.boundaries[position - 1]
                sent = packing.pack(boundary, input_gradient, functions.boundary_sizes)
            return sums, sent, nothing, chain

        return backward

    def _weight_gradients(
        self, stage: int, get_operands: Callable[..., StageOperands]
    ) -> Callable[..., Any]:
        split = self._functions.backwards[stage]

        def compute(
            sums: PipelineSums,
            received: Buffers,
            stored: Buffers,
            deferred: Buffers,
            row: _Row,
        ) -> Any:
            operands = get_operands(stage, received, row)
            residuals = self._read_residuals(stage, stored, row)
            values = jax.tree.leaves((operands, residuals))
            needed = packing.unpack(
                split.layout, _read_slot(deferred, row["deferred_slot"])
            )
            params_gradient = split.compute_weights(values, needed)
            sums = self._add_gradients(stage, sums, params_gradient, row)
            return sums, *self._nothing()

        return compute

    def _read_residuals(self, stage: int, stored: Buffers, row: _Row) -> list[Any]:
        if not self._functions.keeps_residuals:
            return []
        slot = _read_slot(stored, row["residual_slot"])
        return self._functions.unpack_residuals(stage, slot)

    def _add_gradients(
        self, stage: int, sums: PipelineSums, gradients: Any, row: _Row
    ) -> PipelineSums:
        """Accumulate the gradients of a stage for one micro-batch."""
        count = self._plan.batching.gradient_accumulation_count
        reduction = self._plan.gradient_accumulation_reduction

        def add(total: Array, gradient: Array) -> Array:
            return add_gradient(total, gradient, row["micro_batch"], count, reduction)

        layout = self._functions.stage_layout("gradients", stage)
        return sums._replace(
            gradients=_update_section(layout, sums.gradients, gradients, add)
        )


def _timed(clock: Clock, tick: Int[Array, ""], is_end: bool, values: Any) -> Any:
    """Read the clock once `values` are computed, and return them only after that."""

    def read(replica: Any, device: Any, tick: Any, first: Any) -> np.int32:
        del first
        clock(int(replica), int(device), int(tick), is_end)
        return np.int32(0)

    here = lax.axis_index(REPLICA_AXIS), lax.axis_index(STAGE_AXIS)
    # One element of every leaf makes the callback wait for all of them; the barrier makes
    # whatever comes next wait for the callback.
    first = [jnp.ravel(leaf)[0].astype(jnp.float32) for leaf in jax.tree.leaves(values)]
    token = io_callback(
        read, jax.ShapeDtypeStruct((), jnp.int32), *here, tick, jnp.stack(first)
    )
    return lax.optimization_barrier((values, token))[0]


def _update_section(
    layout: BufferLayout, buffers: Buffers, tree: Any, combine: Callable[..., Array]
) -> Buffers:
    """Combine a tree with its section of the buffers, in place."""
    flat, new = packing.pack_section(layout, tree), dict(buffers)
    for name, (start, length) in packing.section_bounds(layout).items():
        old = lax.slice(new[name], (start,), (start + length,))
        updated = combine(old, flat[name])
        new[name] = lax.dynamic_update_slice(new[name], updated, (start,))
    return new


def _read_slot(slots: Buffers, slot: Int[Array, ""]) -> Buffers:
    return {
        name: lax.dynamic_index_in_dim(values, slot, keepdims=False)
        for name, values in slots.items()
    }


def _write_slot(slots: Buffers, slot: Int[Array, ""], values: Buffers) -> Buffers:
    return {
        name: lax.dynamic_update_index_in_dim(slots[name], value, slot, 0)
        for name, value in values.items()
    }
