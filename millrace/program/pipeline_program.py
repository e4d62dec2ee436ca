"""The training program of a pipeline: its state, and the updates it compiles to."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from millrace.config import ConfigurationError
from millrace.nn.layers import check_names, layer_names
from millrace.nn.losses import LayeredLoss
from millrace.program.compiling import compile_for
from millrace.program.offload import placement
from millrace.program.optimizer_state import init_optimizer_state
from millrace.program.packed_state import (
    SAME,
    STATE,
    OptimizerRows,
    as_row,
    is_packed,
    own_row,
    row,
    without_optimizer,
)
from millrace.program.pipeline import Clock, Pipeline, Sums
from millrace.program.pipeline_stream import SUMS, StreamedPipelineUpdate
from millrace.program.pipeline_update import PipelineUpdate
from millrace.program.replicas import (
    REPLICA_AXIS,
    pipeline_mesh,
    place,
    replicated,
    split_stages,
)
from millrace.program.routes import plan_routes
from millrace.program.single_device_pipeline import OneDeviceProgram
from millrace.program.stages import check_splits, split_model
from millrace.program.state_layout import (
    Arrangement,
    arrange,
    to_buffers,
    to_trees,
)
from millrace.program.step import Step, TrainState
from millrace.program.training import TrainingProgram
from millrace.schedule.table import Table, build_table, check_count
from millrace.schedule.timeline import Span

Reading = tuple[int, int, int, bool, float]
"""Replica, device, tick, whether an action ended, and the seconds of the clock."""

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

    def init(self, params: Any, model_state: Any = None, *, seed: int = 0) -> TrainState:
        """Cut the model into stages and place their weights; copies what is given."""
        first = self._first(params, model_state or {}, seed)
        _check_weights(self._loss, first.params)
        model = split_model(self._loss, self.plan, first.params, first.model_state)
        self._mesh = pipeline_mesh(
            self.plan.num_replicas, model.stages.num_devices, self._given_devices
        )
        start = jax.jit(lambda p: init_optimizer_state(self._step.optimizer, p))
        whole = first._replace(optimizer_state=start(first.params))
        self._arrangement = arrange(self._step, model, whole)
        self._like = jax.eval_shape(lambda state: state, whole)
        return self.place(whole)

    def place(self, state: TrainState) -> TrainState:
        """Put a state on the devices; a whole one is packed first."""
        assert self._arrangement is not None, "init comes first"
        if not is_packed(state):
            state = to_buffers(self._arrangement, state)
        return place(state, self.state_sharding(state))

    def validate_state(self, state: TrainState) -> TrainState:
        """Return a state that can be run: whole or packed, of JAX's or NumPy's arrays."""
        state = super().validate_state(state)
        return state if is_packed(state) else self.place(state)

    def unpack_state(self, state: TrainState) -> TrainState:
        """Return a state as trees over the whole model, in host memory."""
        assert self._arrangement is not None, "init comes first"
        assert self._like is not None
        if not is_packed(state):
            return state
        return to_trees(self._arrangement, state, self._like)

    def state_sharding(self, state: TrainState) -> TrainState:
        """Return the sharding of every leaf of a (packed) state."""
        rows, one = split_stages(self._mesh), replicated(self._mesh)
        buckets, shared = state.optimizer_state
        placed = jax.tree.map(lambda _: rows, buckets)
        if self._host_memory is not None:
            placed = placement(buckets, split_stages(self._mesh, self._host_memory))
        optimizer = OptimizerRows(placed, jax.tree.map(lambda _: one, shared))
        return jax.tree.map(lambda _: one, state)._replace(
            params=jax.tree.map(lambda _: rows, state.params),
            model_state=jax.tree.map(lambda _: rows, state.model_state),
            optimizer_state=optimizer,
        )

    @property
    def _count(self) -> int:
        return self.plan.batching.gradient_accumulation_count

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
            self._step,
            self._arrangement,
            plan_routes(self.table),
            state,
            batch,
            self._mesh,
        )

    def _resident(self, state: TrainState, chunk: Any) -> Callable[..., Any]:
        pipeline, update = self._pipeline(state, chunk), self._update

        def one_update(state: TrainState, batches: Any) -> tuple[TrainState, Any]:
            return update.apply(state, pipeline.gather(state, batches))

        def updates(state: TrainState, chunk: Any) -> tuple[TrainState, Any]:
            state, info = lax.scan(one_update, own_row(state), chunk)
            return as_row(state), info

        program = self._mapped(updates, (STATE, _BY_UPDATE), (STATE, SAME))

        def run(state: TrainState, chunk: Any) -> tuple[TrainState, Any]:
            return program(state, self._by_update(chunk))

        return compile_for(self._mesh, run, state, chunk, donate=(0,))

    @property
    def _update(self) -> PipelineUpdate:
        assert self._arrangement is not None, "init comes first"
        return PipelineUpdate(self._step, self._arrangement)

    def _streamed(self, state: TrainState, chunk: Any) -> Callable[..., Any]:
        """Updates one by one, the optimizer's state streamed through in buckets."""
        pipeline = self._pipeline(state, chunk)
        gather = self._compile_gather(pipeline, state, chunk)
        stream = StreamedPipelineUpdate(
            self._update, self._mesh, self._mapped, state, gather.out_info
        )
        updates = jax.tree.leaves(chunk)[0].shape[0] // self._count
        indices = [self._index(i) for i in range(updates)]

        def run(state: TrainState, chunk: Any) -> tuple[TrainState, Any]:
            infos = []
            for index in indices:
                sums = gather(without_optimizer(state), chunk, index)
                state, info = stream.apply(state, sums)
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
        resident = without_optimizer(state)
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
            sums = pipeline.gather(own_row(state), batches, clock)
            return Sums(row(sums.gradients), row(sums.model_state), sums.info)

        specs = (STATE, _BY_UPDATE, SAME)
        program = self._mapped(gather, specs, SUMS)
        return compile_for(
            self._mesh,
            lambda state, chunk, update: program(state, self._by_update(chunk), update),
            without_optimizer(state),
            chunk,
            self._index(0),
        )


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
