"""Training programs of a pipeline: on several devices, or with all stages on one."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from millrace.config import ConfigurationError
from millrace.nn.layers import Tree, apply_layers, check_names, layer_names
from millrace.nn.losses import LayeredLoss
from millrace.plan import Plan
from millrace.program.offload import offloaded_shardings
from millrace.program.optimizer_state import init_optimizer_state
from millrace.program.pipeline import SUMS, Clock, Pipeline, PipelineSums
from millrace.program.pipeline_stages import PipelineStages
from millrace.program.pipeline_update import PipelineUpdate, StreamedPipelineUpdate
from millrace.program.replicas import (
    pipeline_mesh,
    put_on_devices,
    replicated,
    stage_sharding,
)
from millrace.program.routes import plan_routes
from millrace.program.run_values import (
    check_values,
    find_hyperparameters,
    find_scalars,
)
from millrace.program.splitting import StagedModel, check_splits, split_model
from millrace.program.state_layout import (
    STATE,
    PackedOptimizerState,
    StateLayout,
    add_device_dim,
    as_row,
    build_state_layout,
    is_packed,
    own_row,
    pack_state,
    set_packed_values,
    unpack_state,
    without_optimizer,
)
from millrace.program.step import Step, TrainState
from millrace.program.training_loop import TrainingProgram
from millrace.program.update_loop import repeat_update
from millrace.schedule.table import Table, build_table, check_count
from millrace.schedule.timeline import Span

_Reading = tuple[int, int, int, bool, float]
"""Replica, device, tick, whether an action ended, and seconds."""


def build_pipeline_program(step: Step, devices: Sequence[Any] | None) -> TrainingProgram:
    """Return a program that trains in stages, on one device per replica or on several."""
    loss, plan = _check_loss(step), step.plan
    check_splits(loss, plan)
    count = plan.batching.gradient_accumulation_count
    check_count(plan.pipeline_schedule, plan.num_stages, count, training=True)
    if plan.devices_per_replica == 1:
        return SingleDevicePipeline(step, devices)
    return PipelineProgram(step, devices)


def _check_loss(step: Step) -> LayeredLoss:
    loss = step.loss_fn
    if not isinstance(loss, LayeredLoss):
        raise ConfigurationError(
            "pipeline_splits needs a loss whose layers are known: a LayeredLoss, not "
            f"{type(loss).__name__}."
        )
    check_names(loss.layers)
    return loss


class PipelineProgram(TrainingProgram):
    """A compiled loop of weight updates through a pipeline.

    Its state holds the values of each device in flat buffers. ``unpack_state`` and
    ``place_state`` convert to and from trees over the whole model.
    """

    _state_spec = STATE

    def __init__(self, step: Step, devices: Sequence[Any] | None) -> None:
        self._loss = _check_loss(step)
        self._state_layout: StateLayout | None = None
        self._whole: TrainState | None = None  # shapes of an unpacked state
        super().__init__(step, devices)

    def _make_mesh(self, devices: Sequence[Any] | None) -> Mesh:
        self._requested_devices = devices
        return pipeline_mesh(self.plan.num_replicas, self.plan.devices_per_replica, devices)

    # --- state ---

    def init(self, params: Any, model_state: Any = None, *, seed: int = 0) -> TrainState:
        """Split the model into stages and copy their weights to the devices."""
        first = self._init_without_optimizer(params, model_state or {}, seed)
        _check_layers(self._loss, "weights", first.params)
        _check_layers(self._loss, "model state", first.model_state)
        model = split_model(self._loss, self.plan, first.params, first.model_state)
        self._mesh = pipeline_mesh(
            self.plan.num_replicas, model.stages.num_devices, self._requested_devices
        )
        init_optimizer = jax.jit(lambda p: init_optimizer_state(self._step.optimizer, p))
        whole = first._replace(optimizer_state=init_optimizer(first.params))
        self._state_layout = build_state_layout(self._step, model, whole)
        self._whole = jax.eval_shape(lambda state: state, whole)
        return self.place_state(whole)

    @property
    def _layout(self) -> StateLayout:
        assert self._state_layout is not None, "init comes first"
        return self._state_layout

    def place_state(self, state: TrainState) -> TrainState:
        """Copy a state to the devices; pack a whole one first."""
        if not is_packed(state):
            state = pack_state(self._layout, state)
        return put_on_devices(state, self.state_sharding(state))

    def set_values(self, state: TrainState, **values: float) -> TrainState:
        """Return a state with new values for the next calls; nothing is compiled again."""
        state = self.validate_state(state)
        assert self._whole is not None, "init comes first"
        hyperparameters = find_hyperparameters(self._whole.optimizer_state)
        check_values(values, hyperparameters, find_scalars(self._whole.model_state))
        return set_packed_values(self._layout, state, hyperparameters, values)

    def validate_state(self, state: TrainState) -> TrainState:
        """Return a state that can be run: whole or packed, of JAX or NumPy arrays."""
        state = super().validate_state(state)
        return state if is_packed(state) else self.place_state(state)

    def unpack_state(self, state: TrainState) -> TrainState:
        """Return a state as trees over the whole model, in host memory."""
        if not is_packed(state):
            return state
        assert self._whole is not None, "init comes first"
        return unpack_state(self._layout, state, self._whole)

    def state_sharding(self, state: TrainState) -> TrainState:
        """Return the sharding of every leaf of a packed state."""
        rows, same = stage_sharding(self._mesh), replicated(self._mesh)
        buckets, shared = state.optimizer_state
        placed = jax.tree.map(lambda _: rows, buckets)
        if self._host_memory is not None:
            host = stage_sharding(self._mesh, self._host_memory)
            placed = offloaded_shardings(buckets, self.plan, host)
        optimizer = PackedOptimizerState(placed, jax.tree.map(lambda _: same, shared))
        return jax.tree.map(lambda _: same, state)._replace(
            params=jax.tree.map(lambda _: rows, state.params),
            model_state=jax.tree.map(lambda _: rows, state.model_state),
            optimizer_state=optimizer,
        )

    # --- programs ---

    @property
    def table(self) -> Table:
        """The schedule table of one update; available after ``init``."""
        stages = self._layout.model.stages
        return build_table(self.plan.pipeline_schedule, stages, self._accumulation_count)

    def _pipeline(self, state: TrainState, chunk: Any) -> Pipeline:
        size = self.plan.micro_batch_size
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((size, *x.shape[2:]), x.dtype), chunk
        )
        table = self.table
        stages = PipelineStages(
            self._step,
            self._layout,
            state,
            batch,
            self._mesh,
            splits_backward=table.splits_backward,
        )
        return Pipeline(stages, plan_routes(table))

    def _scan_updates(self, state: TrainState, chunk: Any) -> Callable[..., Any]:
        pipeline = self._pipeline(state, chunk)
        update = PipelineUpdate(self._step, self._layout)

        def one_update(state: TrainState, batches: Any) -> tuple[TrainState, Any]:
            return update.apply(state, pipeline.compute_gradients(state, batches))

        # Jitted, so that it is traced only once.
        one_update = jax.jit(one_update)

        def updates(
            state: TrainState, chunk: Any, *part: jax.Array
        ) -> tuple[TrainState, Any]:
            state, info = repeat_update(one_update, own_row(state), chunk, *part)
            return as_row(state), info

        return updates

    def _without_optimizer(self, state: TrainState) -> TrainState:
        return without_optimizer(state)

    def _make_stream(self, state: TrainState, result: Any) -> StreamedPipelineUpdate:
        update = PipelineUpdate(self._step, self._layout)
        return StreamedPipelineUpdate(update, self._mesh, state, result)

    def _compile_gradients(
        self, state: TrainState, chunk: Any, clock: Clock | None = None
    ) -> Any:
        pipeline = self._pipeline(state, chunk)

        def compute(state: TrainState, batches: Any) -> PipelineSums:
            sums = pipeline.compute_gradients(own_row(state), batches, clock)
            gradients, model_state = add_device_dim((sums.gradients, sums.model_state))
            return PipelineSums(gradients, model_state, sums.info)

        return self._compile_for_one_update(compute, state, chunk, SUMS)

    def measure_spans(self, state: TrainState, chunk: Any) -> list[Span]:
        """Run the forward and backward passes of one update and return when each ran.

        The weights do not change. Reading the clock twice per tick takes time of its own:
        use this to look at a pipeline, not to measure its speed.

        Args:
            state: It stays usable.
            chunk: The batches of one update, as for ``run``.
        """
        readings: list[_Reading] = []

        def clock(replica: int, device: int, tick: int, is_end: bool) -> None:
            readings.append((replica, device, tick, is_end, time.perf_counter()))

        program = self._compile_gradients(state, chunk, clock)
        resident = without_optimizer(state)
        for _ in range(2):  # the first run warms up
            readings.clear()
            jax.block_until_ready(program(resident, chunk, self._device_index(0)))
            jax.effects_barrier()
        return _to_spans(self.table, readings)


def _to_spans(table: Table, readings: Sequence[_Reading]) -> list[Span]:
    """Match the readings of the first replica with the actions of the schedule."""
    seconds = {reading[1:4]: reading[4] for reading in readings if reading[0] == 0}
    return [
        Span(device, seconds[device, tick, False], seconds[device, tick, True], *action)
        for tick, row in enumerate(table.ticks)
        for device, action in row.items()
    ]


def _check_layers(loss: LayeredLoss, what: str, tree: Any) -> None:
    is_dict = isinstance(tree, dict)
    unknown = set(tree) - set(layer_names(loss.layers)) if is_dict else set()
    if unknown or not is_dict:
        got = ", ".join(sorted(unknown)) or type(tree).__name__
        raise ConfigurationError(
            f"The {what} of a pipeline must be a dict keyed by layer name; got {got}."
        )


# --- all stages on one device ---


class SingleDevicePipeline(TrainingProgram):
    """A training program whose stages share one device per replica.

    Nothing can overlap there, so the stages run one after the other, whatever the
    schedule: the plain loop, with stages as the units of recomputation.
    """

    def __init__(self, step: Step, devices: Sequence[Any] | None) -> None:
        assert isinstance(step.loss_fn, LayeredLoss)
        self._staged = StagedLoss(step.loss_fn, step.plan)
        # StagedLoss recomputes per stage; the plain loop must not do so again.
        plan = dataclasses.replace(step.plan, recomputation=False)
        super().__init__(step._replace(loss_fn=self._staged, plan=plan), devices)

    def init(self, params: Any, model_state: Any = None, *, seed: int = 0) -> TrainState:
        """Split the model into stages and copy its weights to the devices."""
        self._staged.split(params, model_state := model_state or {})
        return super().init(params, model_state, seed=seed)


class StagedLoss:
    """A loss that runs stage by stage; with recomputation, it keeps only stage inputs."""

    def __init__(self, loss: LayeredLoss, plan: Plan) -> None:
        self._loss = loss
        self._plan = plan
        self._model: StagedModel | None = None

    def split(self, params: Tree, model_state: Tree) -> None:
        """Split the model; must come before any call."""
        self._model = split_model(self._loss, self._plan, params, model_state)

    def __call__(self, params: Tree, model_state: Tree, batch: Any, key: jax.Array) -> Any:
        """Return what the loss returns."""
        assert self._model is not None, "split comes first"
        x, new = self._loss.inputs(batch, key), dict(model_state)
        for group in self._model.stages.groups:
            outputs = []
            for stage in group:
                own = [self._model.select(stage, tree) for tree in (params, model_state)]
                y, changed = self._forward(self._model, stage)(*own, x, key)
                outputs.append(y)
                new |= changed
            x = tuple(outputs) if len(group) > 1 else outputs[0]
        value, info = self._loss.outputs(x, self._loss.targets(batch, key))
        return value, (new, info)

    def _forward(self, model: StagedModel, stage: int) -> Callable[..., Any]:
        def run(params: Tree, model_state: Tree, x: Any, key: jax.Array) -> Any:
            layers = model.layers[stage]
            return apply_layers(layers, params, model_state, x, training=True, key=key)

        return jax.checkpoint(run) if self._plan.recomputation else run
