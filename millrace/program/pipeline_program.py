"""The training program of a pipeline: its state, and the updates it compiles to."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from millrace.config import ConfigurationError
from millrace.nn.layered_loss import LayeredLoss
from millrace.nn.layers import check_names, layer_names
from millrace.program import loss_scale, packing
from millrace.program import step as steps
from millrace.program.arrangement import Arrangement, Rows, arrange, to_buffers, to_trees
from millrace.program.compiling import compile_for
from millrace.program.offload import needed_inputs, placement
from millrace.program.optimizer_state import init_optimizer_state
from millrace.program.packing import Buffers
from millrace.program.pipeline import Clock, Pipeline, Sums
from millrace.program.replicas import (
    REPLICA_AXIS,
    STAGE_AXIS,
    pipeline_mesh,
    place,
    replicated,
    split_stages,
)
from millrace.program.routes import plan_routes
from millrace.program.staged_loss import OneDeviceProgram
from millrace.program.stages import check_splits, split_model
from millrace.program.step import Step, TrainState
from millrace.program.training import TrainingProgram
from millrace.schedule.table import Table, build_table, check_count
from millrace.schedule.timeline import Span

_BUCKETS_IN_FLIGHT = 2

Reading = tuple[int, int, int, bool, float]
"""Replica, device, tick, whether an action ended, and the seconds of the clock."""

_ROW, _SAME = PartitionSpec(STAGE_AXIS), PartitionSpec()
_STATE: Any = TrainState._make((_SAME, _ROW, _ROW, _ROW, _SAME, _SAME))
_SUMS: Any = Sums._make((_ROW, _ROW, _SAME))
_BY_UPDATE = PartitionSpec(None, None, REPLICA_AXIS)


def pipeline_program(step: Step, devices: Sequence[Any] | None) -> TrainingProgram:
    """Return a program that trains in stages, on one device or on several."""
    loss = _checked_loss(step)
    plan = step.plan
    check_splits(loss, plan)
    count = plan.batching.gradient_accumulation_count
    check_count(plan.pipeline_schedule, plan.num_stages, count, training=True)
    if _num_devices(plan) == 1:
        return OneDeviceProgram(step, devices)
    return PipelineProgram(step, devices)


def _checked_loss(step: Step) -> LayeredLoss:
    loss = step.loss_fn
    if not isinstance(loss, LayeredLoss):
        raise ConfigurationError(
            "pipeline_splits needs a loss whose layers are known: give "
            f"training_program a LayeredLoss, not {type(loss).__name__}."
        )
    check_names(loss.layers)
    return loss


class PipelineProgram(TrainingProgram):
    """A compiled loop of weight updates through a pipeline.

    Its state holds each device's part in flat buffers; ``whole`` and ``place`` go between
    that and trees over the whole model.
    """

    def __init__(self, step: Step, devices: Sequence[Any] | None) -> None:
        self._loss = _checked_loss(step)
        self._arrangement: Arrangement | None = None
        self._like: TrainState | None = None
        super().__init__(step, devices)

    def _make_mesh(self, devices: Sequence[Any] | None) -> Mesh:
        self._given_devices = devices
        count = _num_devices(self.plan)
        return pipeline_mesh(self.plan.num_replicas, count, devices)

    # --- the state --------------------------------------------------------------

    def init(self, params: Any, carried: Any = None, *, seed: int = 0) -> TrainState:
        """Cut the model into stages and place their weights; copies what is given."""
        first = self._first(params, carried or {}, seed)
        _check_weights(self._loss, first.params)
        model = split_model(self._loss, self.plan, first.params, first.carried)
        self._mesh = pipeline_mesh(
            self.plan.num_replicas, model.stages.num_devices, self._given_devices
        )
        self._arrangement = arrange(self._step, model, first.params, first.carried)
        start = jax.jit(lambda p: init_optimizer_state(self._step.optimiser, p))
        whole = first._replace(optimiser_state=start(first.params))
        self._check_separable(whole)
        self._like = jax.eval_shape(lambda state: state, whole)
        return self.place(whole)

    def place(self, state: TrainState) -> TrainState:
        """Pack a whole state for the devices."""
        assert self._arrangement is not None, "init comes first"
        packed = to_buffers(self._arrangement, state)
        return place(packed, self.state_sharding(packed))

    def whole(self, state: TrainState) -> TrainState:
        """Return a state as trees over the whole model, in host memory."""
        assert self._arrangement is not None, "init comes first"
        assert self._like is not None
        return to_trees(self._arrangement, state, self._like)

    def state_sharding(self, state: TrainState) -> TrainState:
        """Return the sharding of every leaf of a (packed) state."""
        rows, one = split_stages(self._mesh), replicated(self._mesh)
        optimiser = jax.tree.map(lambda _: rows, state.optimiser_state)
        if self._host_memory is not None:
            host = split_stages(self._mesh, self._host_memory)
            optimiser = placement(state.optimiser_state, host)
        return jax.tree.map(lambda _: one, state)._replace(
            params=jax.tree.map(lambda _: rows, state.params),
            carried=jax.tree.map(lambda _: rows, state.carried),
            optimiser_state=optimiser,
        )

    @property
    def _count(self) -> int:
        return self.plan.batching.gradient_accumulation_count

    def _check_separable(self, whole: TrainState) -> None:
        """Each device runs the optimiser on its own weights: it must not mix layers."""

        def update(params: Any, gradients: Any, state: Any) -> Any:
            state = whole._replace(params=params, optimiser_state=state)
            return steps.new_weights(self._step, state, gradients, jnp.bool_(True))[0]

        params, state = whole.params, whole.optimiser_state
        jaxpr = jax.make_jaxpr(update)(params, params, state)
        paths = jax.tree_util.tree_leaves_with_path(params)
        layers = [path[0].key for path, _ in paths]
        for layer, needs in zip(layers, needed_inputs(jaxpr), strict=True):
            others = {layers[i % len(layers)] for i in needs if i < 2 * len(layers)}
            if others - {layer}:
                other = sorted(others - {layer})[0]
                raise ConfigurationError(
                    f"This optimiser's update of layer {layer} depends on layer {other} "
                    "(clipping by the global norm does that); in a pipeline, layers are "
                    "on different devices and are updated one by one."
                )

    # --- the updates ------------------------------------------------------------

    def _pipeline(self, state: TrainState, chunk: Any) -> Pipeline:
        assert self._arrangement is not None, "init comes first"
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (self.plan.micro_batch_size, *x.shape[2:]), x.dtype
            ),
            chunk,
        )
        return Pipeline(
            self._step, self._arrangement, plan_routes(self.table), state, batch
        )

    def _resident(self, state: TrainState, chunk: Any) -> Callable[..., Any]:
        pipeline = self._pipeline(state, chunk)

        def one_update(state: TrainState, batches: Any) -> tuple[TrainState, Any]:
            sums = pipeline.gather(state, batches)
            finite = self._finite(sums)
            params, optimiser = self._update_bucket(
                0, state, state.params, state.optimiser_state[0], sums.gradients, finite
            )
            state, info = self._next(state, sums, finite)
            return state._replace(params=params, optimiser_state=(optimiser,)), info

        def updates(state: TrainState, chunk: Any) -> tuple[TrainState, Any]:
            state, info = lax.scan(one_update, _own_row(state), chunk)
            return _as_row(state), info

        program = self._mapped(updates, (_STATE, _BY_UPDATE), (_STATE, _SAME))

        def run(state: TrainState, chunk: Any) -> tuple[TrainState, Any]:
            return program(state, self._by_update(chunk))

        return compile_for(self._mesh, run, state, chunk, donate=(0,))

    def _streamed(self, state: TrainState, chunk: Any) -> Callable[..., Any]:
        """Updates one by one, the optimiser's state streamed through in buckets."""
        pipeline = self._pipeline(state, chunk)
        gather = self._compile_gather(pipeline, state, chunk)
        sums = gather.out_info
        buckets = [
            self._compile_bucket(i, state, sums) for i in range(len(state.optimiser_state))
        ]
        finish = self._compile_finish(state, sums)
        sharding = self.state_sharding(state).optimiser_state
        updates = jax.tree.leaves(chunk)[0].shape[0] // self._count
        indices = [self._index(i) for i in range(updates)]

        def one_update(state: TrainState, sums: Sums) -> tuple[TrainState, Any]:
            params, optimiser = state.params, list(state.optimiser_state)
            rest = state._replace(params=None, optimiser_state=None)
            leaving: list[Any] = []
            for number, program in enumerate(buckets):
                if len(leaving) == _BUCKETS_IN_FLIGHT:
                    jax.block_until_ready(leaving.pop(0))
                fetched = jax.device_put(optimiser[number], split_stages(self._mesh))
                params, new = program(params, fetched, rest, sums)
                optimiser[number] = jax.device_put(new, sharding[number])
                leaving.append(optimiser[number])
            rest, info = finish(rest, sums)
            return rest._replace(params=params, optimiser_state=tuple(optimiser)), info

        def run(state: TrainState, chunk: Any) -> tuple[TrainState, Any]:
            infos = []
            for index in indices:
                sums = gather(state._replace(optimiser_state=None), chunk, index)
                state, info = one_update(state, sums)
                del sums  # before the next ones are made
                infos.append(info)
            return state, jax.tree.map(lambda *values: jnp.stack(values), *infos)

        return run

    @property
    def table(self) -> Table:
        """The timetable of an update; there after ``init``."""
        assert self._arrangement is not None, "init comes first"
        stages = self._arrangement.model.stages
        return build_table(self.plan.pipeline_schedule, stages, self._count)

    def measured(self, state: TrainState, chunk: Any) -> list[Span]:
        """Run one update's forward and backward passes, and say when each was.

        The weights stay as they are. Reading the clock twice at every tick takes time
        of its own, so use this to see a pipeline, not to measure its speed.

        Args:
            state: It stays usable.
            chunk: The batches of one update, as ``run`` takes them.
        """
        readings: list[Reading] = []

        def clock(replica: int, device: int, tick: int, is_end: bool) -> None:
            readings.append((replica, device, tick, is_end, time.perf_counter()))

        pipeline = self._pipeline(state, chunk)
        program = self._compile_gather(pipeline, state, chunk, clock)
        resident = state._replace(optimiser_state=None)
        for _ in range(2):  # once to warm up
            readings.clear()
            jax.block_until_ready(program(resident, chunk, self._index(0)))
            jax.effects_barrier()
        return _spans(self.table, readings)

    def _compile_gather(
        self,
        pipeline: Pipeline,
        state: TrainState,
        chunk: Any,
        clock: Clock | None = None,
    ) -> Any:
        def gather(state: TrainState, chunk: Any, update: jax.Array) -> Sums:
            batches = jax.tree.map(
                lambda x: lax.dynamic_index_in_dim(x, update, keepdims=False), chunk
            )
            sums = pipeline.gather(_own_row(state), batches, clock)
            return Sums(_row(sums.gradients), _row(sums.carried), sums.info)

        specs = (_STATE, _BY_UPDATE, _SAME)
        program = self._mapped(gather, specs, _SUMS)
        return compile_for(
            self._mesh,
            lambda state, chunk, update: program(state, self._by_update(chunk), update),
            state._replace(optimiser_state=None),
            chunk,
            self._index(0),
        )

    def _compile_bucket(self, number: int, state: TrainState, sums: Any) -> Any:
        def update(params: Any, optimiser: Any, rest: TrainState, sums: Sums) -> Any:
            params, optimiser, gradients = _first_row((params, optimiser, sums.gradients))
            own = Sums(gradients, {}, {})
            new = self._update_bucket(
                number, rest, params, optimiser, gradients, self._finite(own)
            )
            return _row(new[0]), _row(new[1])

        program = self._mapped(update, (_ROW, _ROW, _STATE, _SUMS), (_ROW, _ROW))
        fetched = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=split_stages(self._mesh)
            ),
            state.optimiser_state[number],
        )
        rest = state._replace(params=None, optimiser_state=None)
        return compile_for(
            self._mesh, program, state.params, fetched, rest, sums, donate=(0, 1)
        )

    def _compile_finish(self, state: TrainState, sums: Any) -> Any:
        def finish(rest: TrainState, sums: Sums) -> Any:
            gradients, carried = _first_row((sums.gradients, sums.carried))
            own = Sums(gradients, carried, sums.info)
            new, info = self._next(_own_row(rest), own, self._finite(own))
            return _as_row(new), info

        program = self._mapped(finish, (_STATE, _SUMS), (_STATE, _SAME))
        rest = state._replace(params=None, optimiser_state=None)
        return compile_for(self._mesh, program, rest, sums, donate=(0,))

    # --- on one device ------------------------------------------------------------

    def _finite(self, sums: Sums) -> jax.Array | None:
        """Whether the gradients of every stage are finite, where the plan asks."""
        if not (self.plan.fp_exceptions or self.plan.loss_scaling == "dynamic"):
            return None
        own = loss_scale.all_finite(sums.gradients)
        return lax.pmin(own.astype(jnp.int32), STAGE_AXIS).astype(bool)

    def _update_bucket(
        self,
        number: int,
        state: TrainState,
        params: Buffers,
        optimiser: Buffers,
        gradients: Buffers,
        finite: jax.Array | None,
    ) -> tuple[Buffers, Buffers]:
        """Update the weights of one bucket of this device's layers."""
        assert self._arrangement is not None
        bucket, rows = (
            self._arrangement.buckets[number],
            self._arrangement.optimiser[number],
        )

        def on_device(device: int) -> Callable[..., Any]:
            def update(params: Buffers, optimiser: Buffers, gradients: Buffers) -> Any:
                if not bucket[device]:
                    return params, optimiser
                layout = self._part("params", device, bucket[device])
                tree = state._replace(
                    params=packing.unpack(layout, params),
                    optimiser_state=packing.unpack(rows.layouts[device], optimiser),
                )
                at = self._part("gradients", device, bucket[device])
                new_params, new_state = steps.new_weights(
                    self._step, tree, packing.unpack(at, gradients), finite
                )
                return (
                    packing.replaced(layout, params, new_params),
                    packing.pack(rows.layouts[device], new_state, rows.sizes),
                )

            return update

        return self._by_device(on_device, params, optimiser, gradients)

    def _next(
        self, state: TrainState, sums: Sums, finite: jax.Array | None
    ) -> tuple[TrainState, Any]:
        """Move the carried values and everything else that is not a weight."""
        assert self._arrangement is not None
        rows: Rows = self._arrangement.carried
        changed: Rows = self._arrangement.changes
        micro_batches = self._count * self.plan.num_replicas

        def on_device(device: int) -> Callable[..., Any]:
            def move(old: Buffers, changes: Buffers) -> Buffers:
                layout = rows.layouts[device]
                tree = packing.unpack(layout, old)
                modes = steps.carried_modes(self._step.carried_reduction, tree)
                summed = packing.unpack(changed.layouts[device], changes)
                new = steps.combined(modes, tree, summed, micro_batches)
                return packing.pack(layout, new, rows.sizes)

            return move

        carried = self._by_device(on_device, state.carried, sums.carried)
        return steps.next_state(self._step, state, carried, sums.info, finite)

    def _part(self, kind: str, device: int, names: Sequence[str]) -> packing.Layout:
        return packing.part(getattr(self._arrangement, kind).layouts[device], names)

    def _by_device(self, on_device: Callable[..., Any], *operands: Any) -> Any:
        """Run the branch of this device."""
        branches = [on_device(device) for device in range(self._mesh.shape[STAGE_AXIS])]
        return lax.switch(lax.axis_index(STAGE_AXIS), branches, *operands)


def _spans(
    table: Table, readings: Sequence[tuple[int, int, int, bool, float]]
) -> list[Span]:
    """Join the clock's readings on the first replica to spans of the timetable."""
    at = {reading[1:4]: reading[4] for reading in readings if reading[0] == 0}
    return [
        Span(device, at[device, tick, False], at[device, tick, True], *action)
        for tick, row in enumerate(table.ticks)
        for device, action in row.items()
    ]


def _num_devices(plan: Any) -> int:
    """Devices that a plan's pipeline uses, as far as the plan can tell."""
    if plan.device_mapping is None:
        return plan.num_stages
    flat = [d for e in plan.device_mapping for d in (e if isinstance(e, list) else [e])]
    return max(flat) + 1


def _check_weights(loss: LayeredLoss, params: Any) -> None:
    known = isinstance(params, dict)
    unknown = set(params) - set(layer_names(loss.layers)) if known else set()
    if unknown or not known:
        found = ", ".join(sorted(unknown)) or type(params).__name__
        raise ConfigurationError(
            f"A pipeline's weights are a dict keyed by layer name; got {found}."
        )


def _own_row(state: TrainState) -> TrainState:
    """A device's own part of a state, without the dim of devices."""
    params, carried, optimiser = _first_row(
        (state.params, state.carried, state.optimiser_state)
    )
    return state._replace(params=params, carried=carried, optimiser_state=optimiser)


def _as_row(state: TrainState) -> TrainState:
    return state._replace(
        params=_row(state.params),
        carried=_row(state.carried),
        optimiser_state=_row(state.optimiser_state),
    )


def _first_row(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _row(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)
