"""One weight update through a pipeline: every device follows its row of the timetable.

All devices run one program. At each tick a device runs its branch of a switch (forward or
backward of one of its stages on one micro-batch, or nothing) and what it finished travels
to whoever needs it next. Gradients, model state and reports are summed in place.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec

from millrace.config import ConfigurationError
from millrace.nn.layers import Tree, apply_layers
from millrace.nn.losses import LayeredLoss
from millrace.program import packing
from millrace.program import step as steps
from millrace.program.accumulate import add_gradient
from millrace.program.packing import Buffers, Layout
from millrace.program.replicas import REPLICA_AXIS, STAGE_AXIS, sum_over_replicas
from millrace.program.routes import Routes
from millrace.program.state_layout import Arrangement
from millrace.program.step import Step, TrainState

Clock = Callable[[int, int, int, bool], None]


class Sums(NamedTuple):
    """What an update gathers on each device."""

    gradients: Buffers
    model_state: Buffers
    """Contributions to the model state."""
    info: dict[str, jax.Array]


class Residual(NamedTuple):
    """What a stage's forward keeps for its backward."""

    function: Any
    """The structure of the backward function, whose leaves it needs."""
    kept: tuple[int, ...]
    """Which leaves are stored."""
    given: Mapping[int, int]
    """Which leaves are among what the stage is given, and are looked up there again."""
    layout: Layout


class Pipeline:
    """The compiled part of a pipeline, for micro-batches of one shape.

    Args:
        step: What one update is made of; its loss is a ``LayeredLoss``.
        arrangement: Where each device's values lie.
        routes: The timetable, as numbers.
        state: A state of the pipeline's, or its shapes.
        batch: The shapes of a micro-batch of one replica.
        mesh: The devices, by replica and stage.
    """

    def __init__(
        self,
        step: Step,
        arrangement: Arrangement,
        routes: Routes,
        state: TrainState,
        batch: Any,
        mesh: Mesh,
    ) -> None:
        assert isinstance(step.loss_fn, LayeredLoss)
        self._step = step
        self._loss: LayeredLoss = step.loss_fn
        self._model = arrangement.model
        self._stages = arrangement.model.stages
        self._arrangement = arrangement
        self._routes = routes
        self._keeps = not step.plan.recomputation
        self._state = state
        self._batch = batch
        self._mesh = mesh
        self._find_shapes()

    # --- shapes ---------------------------------------------------------------

    def _find_shapes(self) -> None:
        """Follow one micro-batch through the stages."""
        self._boundaries: list[Layout] = []  # of what leaves each position
        self._info: dict[str, Any] = {}
        self._residuals: list[Residual] = []
        x: Any = self._shapes_of(self._loss.inputs, self._narrow_batch(), _key_shape())
        for group in self._stages.groups:
            outputs: list[Any] = []
            for stage in group:
                given = (*self._values_shape(stage), x, self._narrow_batch(), _key_shape())
                output, (_, self._info) = self._shapes_of(self._runner(stage), *given)
                self._residuals.append(self._find_residual(stage, given))
                outputs.append(output)
            x = tuple(outputs) if len(group) > 1 else outputs[0]
            ends = [self._model.layers[stage][-1].name for stage in group]
            _check_differentiable(x, " and ".join(ends))
            self._boundaries.append(packing.lay_out(x))
        self._mail_sizes = packing.largest(b.sizes for b in self._boundaries[:-1])
        self._residual_sizes = packing.largest(r.layout.sizes for r in self._residuals)

    def _shapes_of(self, function: Callable[..., Any], *given: Any) -> Any:
        """Return shapes of results, as on a device: a layer may reduce over replicas."""
        same = PartitionSpec()
        mapped = jax.shard_map(
            function, mesh=self._mesh, in_specs=same, out_specs=same, check_vma=False
        )
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(mapped, *given)
        )

    def _narrow_batch(self) -> Any:
        compute = self._step.plan.types.compute
        return jax.eval_shape(lambda b: steps.narrow(b, compute), self._batch)

    def _values_shape(self, stage: int) -> tuple[Tree, Tree]:
        state = self._state
        rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
            (state.params, state.model_state),
        )
        return jax.eval_shape(lambda *rows: self._values(stage, *rows), *rows)

    def _find_residual(self, stage: int, given: tuple[Any, ...]) -> Residual:
        found: list[Residual] = []

        def trace(*given: Any) -> None:
            _, backward, _ = self._differentiated(stage, given)
            leaves, structure = jax.tree.flatten(backward)
            # What the stage is given can be looked up again: it is not kept twice.
            places = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(given))}
            again = {
                i: places[id(leaf)] for i, leaf in enumerate(leaves) if id(leaf) in places
            }
            kept = tuple(i for i in range(len(leaves)) if i not in again)
            layout = packing.lay_out([jnp.asarray(leaves[i]) for i in kept])
            found.append(Residual(structure, kept, again, layout))

        self._shapes_of(trace, *given)
        return found[0] if self._keeps else found[0]._replace(layout=packing.lay_out([]))

    # --- one stage ------------------------------------------------------------

    def _values(
        self, stage: int, params: Buffers, model_state: Buffers
    ) -> tuple[Tree, Tree]:
        """Unpack a stage's weights and model state from a device's rows."""
        return (
            packing.unpack(self._layout("params", stage), params),
            packing.unpack(self._layout("model_state", stage), model_state),
        )

    def _layout(self, kind: str, stage: int) -> Layout:
        rows = getattr(self._arrangement, kind)
        layout = rows.layouts[self._stages.device_of[stage]]
        return packing.part(layout, self._model.names(stage))

    def _runner(self, stage: int) -> Callable[..., Any]:
        """The stage as ``(params, model_state, x, batch, key) -> (y, (changes, info))``."""
        step, plan = self._step, self._step.plan
        last = stage == self._stages.num_stages - 1
        modes = self._modes(stage)

        def run(params: Tree, model_state: Tree, x: Any, batch: Any, key: Any) -> Any:
            y, new = apply_layers(
                self._model.layers[stage],
                steps.narrow(params, plan.types.compute),
                model_state,
                x,
                training=True,
                key=key,
            )
            new = steps.checked_model_state(new, model_state)
            changes = steps.contribution(modes, model_state, new)
            if not last:
                return y, (changes, {})
            returned = self._loss.outputs(y, self._loss.targets(batch, key))
            loss, _, info = steps.unpacked(_regrouped(returned))
            info = steps.checked_info(info, step.watch) | {"loss": loss}
            return loss, (changes, info)

        return run

    def _modes(self, stage: int) -> Tree:
        model_state = jax.tree.unflatten(
            (layout := self._layout("model_state", stage)).tree,
            [jax.ShapeDtypeStruct(e.shape, e.dtype) for e in layout.entries],
        )
        return steps.model_state_modes(self._step.model_state_reduction, model_state)

    def _differentiated(self, stage: int, given: tuple[Any, ...]) -> Any:
        """Run a stage; return its output, its backward function and what it reports."""
        params, model_state, x, batch, key = given
        run = self._runner(stage)
        if self._keeps:
            run = jax.checkpoint(run, policy=steps.keep_products, prevent_cse=False)
        if self._stages.position_of(stage) == 0:  # no one wants the batch's gradient

            def of_params(params: Tree) -> Any:
                return run(params, model_state, x, batch, key)

            return jax.vjp(of_params, params, has_aux=True)

        def of_both(params: Tree, x: Any) -> Any:
            return run(params, model_state, x, batch, key)

        return jax.vjp(of_both, params, x, has_aux=True)

    # --- the ticks ------------------------------------------------------------

    def gather(self, state: TrainState, batches: Any, clock: Clock | None = None) -> Sums:
        """Follow the timetable through one update; leaves of `batches` are (M, ...).

        Args:
            state: A device's own part.
            batches: The micro-batches of one replica.
            clock: Called on the host before and after each action, as
                ``clock(replica, device, tick, is_end)``, to see where time goes.
        """
        routes = self._routes
        start = (
            Sums(
                packing.empty(self._arrangement.gradients.sizes),
                packing.empty(self._arrangement.changes.sizes),
                {name: jnp.float32(0) for name in self._info},
            ),
            packing.empty(self._mail_sizes, routes.num_mail_slots + 1),
            packing.empty(self._residual_sizes, routes.num_residual_slots + 1),
        )
        branches = self._branches(state, batches)
        device = lax.axis_index(STAGE_AXIS)

        def tick(carry: Any, rows: Mapping[str, jax.Array]) -> tuple[Any, None]:
            sums, mail, kept = carry
            row = {name: values[device] for name, values in rows.items()}
            if clock is not None:
                row, mail = _timed(clock, row["tick"], False, (row, mail))
            sums, sent, residual = lax.switch(
                row["branch"], branches, sums, mail, kept, row
            )
            if clock is not None:
                sums, sent = _timed(clock, row["tick"], True, (sums, sent))
            forward = (row["branch"] > 0) & (row["branch"] <= self._stages.num_stages)
            slot = jnp.where(forward, row["residual_slot"], routes.num_residual_slots)
            kept = _put(kept, slot, residual)
            return (sums, self._deliver(mail, sent, row), kept), None

        names = [n for n in Routes._fields if isinstance(getattr(routes, n), np.ndarray)]
        rows = {name: jnp.asarray(getattr(routes, name)) for name in names}
        if clock is not None:
            ticks = jnp.arange(routes.branch.shape[0])
            rows["tick"] = jnp.broadcast_to(ticks[:, None], routes.branch.shape)
        (sums, _, _), _ = lax.scan(tick, start, rows)
        return self._exchanged(sums)

    def _deliver(self, mail: Buffers, sent: Buffers, row: Mapping[str, Any]) -> Buffers:
        for channel, edges in enumerate(self._routes.channels):
            received = sent
            if any(source != target for source, target in edges):
                received = {
                    name: lax.ppermute(value, STAGE_AXIS, edges)
                    for name, value in sent.items()
                }
            slot = row["mail_slot"][channel]
            if self._routes.any_added:
                added = row["mail_add"][channel]
                there = _take(mail, slot)
                received = {
                    name: jnp.where(added, there[name] + value, value)
                    for name, value in received.items()
                }
            mail = _put(mail, slot, received)
        return mail

    def _exchanged(self, sums: Sums) -> Sums:
        """Sum over replicas; reports come from one stage, so they are summed over all."""
        plan = self._step.plan
        gradients, model_state, info = sum_over_replicas(tuple(sums), plan.num_replicas)
        info = lax.psum(info, STAGE_AXIS)
        count = plan.batching.gradient_accumulation_count * plan.num_replicas
        info = {name: value / count for name, value in info.items()}
        gradients = {
            name: (value / plan.num_replicas).astype(sums.gradients[name].dtype)
            for name, value in gradients.items()
        }
        return Sums(gradients, model_state, info)

    def _branches(self, state: TrainState, batches: Any) -> list[Callable[..., Any]]:
        def idle(sums: Sums, mail: Buffers, kept: Buffers, row: Any) -> Any:
            del mail, kept, row
            return sums, *self._nothing()

        def given(stage: int, mail: Buffers, row: Any) -> tuple[Any, ...]:
            index = row["micro_batch"]
            batch = jax.tree.map(
                lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), batches
            )
            batch = steps.narrow(batch, self._step.plan.types.compute)
            key = steps.micro_batch_key(self._step.plan, state, index)
            position = self._stages.position_of(stage)
            if position == 0:
                x = self._loss.inputs(batch, key)
            else:
                boundary = self._boundaries[position - 1]
                x = packing.unpack(boundary, _take(mail, row["input_slot"]))
            return *self._values(stage, state.params, state.model_state), x, batch, key

        stages = range(self._stages.num_stages)
        return [
            idle,
            *(self._forward(stage, given) for stage in stages),
            *(self._backward(stage, given, state) for stage in stages),
        ]

    def _nothing(self) -> tuple[Buffers, Buffers]:
        return packing.empty(self._mail_sizes), packing.empty(self._residual_sizes)

    def _forward(self, stage: int, given: Callable[..., Any]) -> Callable[..., Any]:
        last = stage == self._stages.num_stages - 1

        def forward(sums: Sums, mail: Buffers, kept: Buffers, row: Any) -> Any:
            del kept
            values = given(stage, mail, row)
            sent, residual = self._nothing()
            if self._keeps:
                y, backward, (changes, info) = self._differentiated(stage, values)
                needed = self._residuals[stage]
                leaves = jax.tree.leaves(backward)
                residual = packing.pack(
                    needed.layout, [leaves[i] for i in needed.kept], self._residual_sizes
                )
            else:
                y, (changes, info) = self._runner(stage)(*values)
            if not last:
                sent = self._packed_output(stage, y)
            changes = steps.from_first(self._modes(stage), changes, row["micro_batch"])
            layout = self._layout("changes", stage)
            model_state = _section_updated(layout, sums.model_state, changes, jnp.add)
            info = {n: sums.info[n] + info[n] if last else sums.info[n] for n in sums.info}
            return Sums(sums.gradients, model_state, info), sent, residual

        return forward

    def _packed_output(self, stage: int, y: Any) -> Buffers:
        """A stage's output as what leaves its position; zeros for the other branches'."""
        position = self._stages.position_of(stage)
        group, boundary = self._stages.groups[position], self._boundaries[position]
        if len(group) > 1:
            shapes = jax.tree.unflatten(boundary.tree, boundary.entries)
            y = tuple(
                y
                if other == stage
                else jax.tree.map(
                    lambda e: jnp.zeros(e.shape, e.dtype), shape, is_leaf=packing.is_entry
                )
                for other, shape in zip(group, shapes, strict=True)
            )
        return packing.pack(boundary, y, self._mail_sizes)

    def _backward(
        self, stage: int, given: Callable[..., Any], state: TrainState
    ) -> Callable[..., Any]:
        plan = self._step.plan
        position = self._stages.position_of(stage)
        group = self._stages.groups[position]

        def output_gradient(mail: Buffers, row: Any) -> Any:
            if position == self._stages.num_positions - 1:
                return state.loss_scale.factor if plan.loss_scaling else jnp.float32(1)
            received = _take(mail, row["gradient_slot"])
            gradient = packing.unpack(self._boundaries[position], received)
            return gradient[group.index(stage)] if len(group) > 1 else gradient

        def backward_function(values: tuple[Any, ...], kept: Buffers, row: Any) -> Any:
            if not self._keeps:
                return self._differentiated(stage, values)[1]
            needed = self._residuals[stage]
            stored = packing.unpack(needed.layout, _take(kept, row["residual_slot"]))
            leaves = dict(zip(needed.kept, stored, strict=True))
            flat = jax.tree.leaves(values)
            leaves |= {i: flat[place] for i, place in needed.given.items()}
            ordered = [leaves[i] for i in range(len(leaves))]
            return jax.tree.unflatten(needed.function, ordered)

        def backward(sums: Sums, mail: Buffers, kept: Buffers, row: Any) -> Any:
            values = given(stage, mail, row)
            run = backward_function(values, kept, row)
            found = run(output_gradient(mail, row))
            sent, residual = self._nothing()
            if position:
                sent = packing.pack(
                    self._boundaries[position - 1], found[1], self._mail_sizes
                )
            layout = self._layout("gradients", stage)

            def add(total: jax.Array, gradient: jax.Array) -> jax.Array:
                count = plan.batching.gradient_accumulation_count
                how = plan.gradient_accumulation_reduction
                return add_gradient(total, gradient, row["micro_batch"], count, how)

            gradients = _section_updated(layout, sums.gradients, found[0], add)
            return Sums(gradients, sums.model_state, sums.info), sent, residual

        return backward


def _timed(clock: Clock, tick: jax.Array, is_end: bool, values: Any) -> Any:
    """Read the clock when `values` are there, and hand them on only after that."""

    def read(replica: Any, device: Any, tick: Any, first: Any) -> np.int32:
        del first
        clock(int(replica), int(device), int(tick), is_end)
        return np.int32(0)

    place = lax.axis_index(REPLICA_AXIS), lax.axis_index(STAGE_AXIS)
    there = [jnp.ravel(leaf)[0].astype(jnp.float32) for leaf in jax.tree.leaves(values)]
    token = io_callback(
        read, jax.ShapeDtypeStruct((), jnp.int32), *place, tick, jnp.stack(there)
    )
    return lax.optimization_barrier((values, token))[0]


def _section_updated(
    layout: Layout, buffers: Buffers, tree: Any, combine: Callable[..., jax.Array]
) -> Buffers:
    """Combine a tree with what is at its place in the buffers."""
    where = packing.section(layout)
    flat = packing.pack(layout, tree, {name: length for name, (_, length) in where.items()})
    new = dict(buffers)
    for name, (start, length) in where.items():
        old = lax.slice(new[name], (start,), (start + length,))
        updated = combine(old, flat[name])
        new[name] = lax.dynamic_update_slice(new[name], updated, (start,))
    return new


def _take(slots: Buffers, slot: jax.Array) -> Buffers:
    return {
        name: lax.dynamic_index_in_dim(values, slot, keepdims=False)
        for name, values in slots.items()
    }


def _put(slots: Buffers, slot: jax.Array, values: Buffers) -> Buffers:
    return {
        name: lax.dynamic_update_index_in_dim(slots[name], value, slot, 0)
        for name, value in values.items()
    }


def _regrouped(returned: Any) -> Any:
    """As a loss function would return it, to be checked alike."""
    try:
        loss, info = returned
    except (TypeError, ValueError) as error:
        raise TypeError(
            "LayeredLoss.outputs must return (loss, info): a scalar and a dict of scalars."
        ) from error
    return loss, (None, info)


def _key_shape() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


def _check_differentiable(boundary: Any, layer: str) -> None:
    for leaf in jax.tree.leaves(boundary):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigurationError(
                f"What layer {layer} passes on has {leaf.dtype} values, which have no "
                "gradient and cannot cross from one pipeline stage to the next. Split "
                "elsewhere, or keep them in the batch."
            )
