"""The training program: many weight updates in one compiled call."""

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from millrace.plan import Plan
from millrace.program import offload
from millrace.program import step as steps
from millrace.program.accumulate import path_name
from millrace.program.compiling import Options, compile_for
from millrace.program.loss_scale import initial_loss_scale
from millrace.program.optimizer_state import check_optimizer, init_optimizer_state
from millrace.program.replicas import (
    REPLICA_AXIS,
    place,
    replica_mesh,
    replicated,
    split_batch,
)
from millrace.program.step import LossFn, ModelStateReduction, Step, TrainState

_log = logging.getLogger("millrace")

_STAGED_BYTES = 64 << 20
"""Batches staged on the devices for one call: enough to hide a call's 0.1 ms."""


def training_program(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    *,
    model_state_reduction: ModelStateReduction = None,
    watch: Mapping[str, Callable[[jax.Array], Any]] | None = None,
    devices: Sequence[Any] | None = None,
    compiler_options: Mapping[str, Options] | None = None,
) -> "TrainingProgram":
    """Turn a loss, an optimizer and a plan into a compiled training loop.

    Args:
        loss_fn: ``(params, model_state, batch, key) -> (loss, (model_state, info))``,
            pure. The loss is a mean over the samples of `batch`; `info` a flat dict
            of scalars.
        optimizer: An optax transformation of gradients, weights and, if it takes
            ``value``, the loss (the mean over micro-batches and replicas, unscaled).
        plan: How the work is replicated, accumulated, rounded and offloaded.
        model_state_reduction: How the model state of the micro-batches of an update
            become one: "mean" of the values (batch-norm statistics), "sum" of the
            changes (a table of which each sample owns a row), "once" for the value of
            replica 0's first micro-batch (a counter of updates, a flag, a random key),
            or a function of path and value that returns one of these. If not given, or
            where the function returns None, floats are averaged and everything else
            changes once per update. Every micro-batch of an update is given the same
            old values.
        watch: Functions of the update's number whose values are reported with its
            info, such as a learning-rate schedule.
        devices: Where to run; by default the first `plan.num_replicas` devices.
        compiler_options: XLA's options that suit the loss, by platform ("cpu", "gpu"); a
            pipeline has the usual ones.
    """
    step = Step(loss_fn, optimizer, plan, model_state_reduction, dict(watch or {}))
    if plan.num_stages > 1:
        from millrace.program.pipeline_program import pipeline_program

        return pipeline_program(step, devices)
    return TrainingProgram(step, devices, compiler_options)


class TrainingProgram:
    """A compiled loop of weight updates. Made by ``training_program``."""

    def __init__(
        self,
        step: Step,
        devices: Sequence[Any] | None,
        compiler_options: Mapping[str, Options] | None = None,
    ) -> None:
        self.plan = step.plan
        self._compiler_options = compiler_options
        self.compile_seconds = 0.0
        self.watched = {*step.watch, "loss_scale"}
        self._step = step
        self._mesh = self._make_mesh(devices)
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._host_memory = self._find_host_memory()

    def _make_mesh(self, devices: Sequence[Any] | None) -> Mesh:
        mesh = replica_mesh(self.plan.num_replicas, devices)
        if self.plan.recomputation and mesh.devices.flat[0].platform == "cpu":
            _log.warning(
                "recomputation saves no memory on CPU: XLA finds the values computed "
                "again equal to the first ones, and keeps those."
            )
        return mesh

    def _find_host_memory(self) -> str | None:
        if not self.plan.optimizer_state_offloading:
            return None
        here = jax.process_index()
        own = next(d for d in self.devices if d.process_index == here)
        kind = offload.host_memory_kind(own)
        if kind is None:
            _log.warning(
                "optimizer_state_offloading is off: this device offers no host memory "
                "to programs."
            )
        return kind

    @property
    def loss_fn(self) -> LossFn:
        """What is minimized."""
        return self._step.loss_fn

    @property
    def chunk_sharding(self) -> NamedSharding:
        """Where a chunk of batches must lie: its samples split over the replicas."""
        return split_batch(self._mesh)

    @property
    def devices(self) -> list[Any]:
        """The devices this program runs on."""
        return list(self._mesh.devices.flat)

    def init(self, params: Any, model_state: Any = None, *, seed: int = 0) -> TrainState:
        """Place weights on the devices and start the optimizer; copies what is given."""
        state = place(self._first(params, model_state, seed), replicated(self._mesh))
        return state._replace(optimizer_state=self._init_optimizer(state.params))

    def _first(self, params: Any, model_state: Any, seed: int) -> TrainState:
        """The state before the first update, without the optimizer's."""
        weights = jnp.dtype(self.plan.types.weights)
        # Copied: the state is donated, and what the caller gave must stay usable.
        params, model_state = jax.tree.map(jnp.array, (params, model_state))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(
                    f"The parameter {path_name(path)} is {leaf.dtype}, which has no "
                    "gradient. Keep it in the model state or in the loss function."
                )
        params = jax.tree.map(
            lambda p: p.astype(weights) if p.dtype.itemsize <= 4 else p, params
        )
        check_optimizer(self._step.optimizer, params, self.plan)
        return TrainState(
            update=jnp.int32(0),
            params=params,
            model_state=model_state,
            optimizer_state=None,
            loss_scale=initial_loss_scale(self.plan.loss_scaling),
            key=jax.random.key_data(jax.random.key(seed)),
        )

    def _init_optimizer(self, params: Any) -> Any:
        def init(params: Any) -> Any:
            return init_optimizer_state(self._step.optimizer, params)

        if self._host_memory is None:
            return jax.jit(init, out_shardings=replicated(self._mesh))(params)
        host = replicated(self._mesh, self._host_memory)
        return offload.init_streamed(init, params, self._mesh, host)

    def place(self, state: TrainState) -> TrainState:
        """Put every part of a whole state, from a checkpoint say, where it belongs."""
        return place(state, self.state_sharding(state))

    def unpack_state(self, state: TrainState) -> TrainState:
        """Return a state as trees over the whole model, whatever the plan."""
        return state

    def state_sharding(self, state: TrainState) -> TrainState:
        """Return the sharding of every leaf of a state."""
        resident = jax.tree.map(lambda _: replicated(self._mesh), state)
        if self._host_memory is None:
            return resident
        host = replicated(self._mesh, self._host_memory)
        return resident._replace(
            optimizer_state=offload.placement(state.optimizer_state, host)
        )

    def updates_per_call(self, execution: int, bytes_per_element: int) -> int:
        """Choose how many updates one call makes from what their batches take up.

        The largest divisor of the execution that stages at most 64 MiB, so that one
        compiled length serves; when the divisors are sparse (a prime number of
        updates), the limit itself, and the last call of an execution is shorter.
        """
        per_update = bytes_per_element * self.plan.batching.gradient_accumulation_count
        limit = max(1, min(execution, _STAGED_BYTES // max(1, per_update)))
        best = max(n for n in range(1, limit + 1) if execution % n == 0)
        return best if best * 2 > limit else limit

    def compile(self, state: Any, chunk: Any) -> None:
        """Compile for a chunk of this shape, if that has not been done."""
        self._runner(state, chunk)

    def run(self, state: TrainState, chunk: Any) -> tuple[TrainState, dict]:
        """Make the updates for which `chunk` holds batches; `state` is used up.

        Args:
            state: From ``init`` or the last call.
            chunk: Leaves are (updates x accumulation count, samples of all replicas,
                ...), on the devices, laid out as `chunk_sharding` says.

        Returns:
            The new state, and info whose leaves have one value per update.
        """
        state = self.validate_state(state)
        runner = self._runner(state, chunk)
        with no_silent_copies():
            return runner(state, chunk)

    def validate_state(self, state: TrainState) -> TrainState:
        """Return a state that can be run; place one of NumPy arrays, refuse a used one.

        Args:
            state: From ``init``, a call, or ``jax.device_get`` of one of these.
        """
        some = jax.tree.leaves((state.update, state.params))[:2]
        if not all(isinstance(leaf, jax.Array) for leaf in some):
            return self.place(state)
        if any(leaf.is_deleted() for leaf in some):
            raise ValueError(
                "This state was used up by an earlier call. Go on with the state that "
                "the call returned."
            )
        return state

    def _runner(self, state: TrainState, chunk: Any) -> Callable[..., Any]:
        shapes = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(chunk))
        key = (shapes, jax.tree.structure(chunk), jax.tree.structure(state))
        if key not in self._compiled:
            self._check_chunk(chunk)
            started = time.perf_counter()
            build = self._streamed if self._host_memory else self._resident
            self._compiled[key] = build(state, chunk)
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[key]

    def _check_chunk(self, chunk: Any) -> None:
        batching = self.plan.batching
        for leaf in jax.tree.leaves(chunk):
            elements, samples = leaf.shape[:2]
            if samples != batching.samples_per_step:
                raise ValueError(
                    f"An element of the infeed has {samples} samples; this plan needs "
                    f"{batching.samples_per_step} (micro batch "
                    f"{batching.micro_batch_size} x replicas {batching.num_replicas})."
                )
            if elements % batching.gradient_accumulation_count:
                raise ValueError(
                    f"A chunk of {elements} elements is not a whole number of updates "
                    f"of {batching.gradient_accumulation_count} micro-batches."
                )

    @functools.cached_property
    def _one_update(self) -> Callable[..., Any]:
        """One update on one replica; its own jit, so that it is traced only once."""

        def one_update(state: TrainState, batches: Any) -> tuple[TrainState, Any]:
            return steps.apply_update(
                self._step, state, steps.compute_gradients(self._step, state, batches)
            )

        return jax.jit(one_update)

    @functools.cached_property
    def _gather(self) -> Callable[..., Any]:
        """The first half of an update, likewise traced only once."""
        return jax.jit(functools.partial(steps.compute_gradients, self._step))

    def _resident(self, state: TrainState, chunk: Any) -> Callable[..., Any]:
        def updates(state: TrainState, chunk: Any) -> tuple[TrainState, Any]:
            return lax.scan(self._one_update, state, chunk)

        program = self._mapped(updates, (PartitionSpec(), _BY_UPDATE), PartitionSpec())

        def run(state: TrainState, chunk: Any) -> tuple[TrainState, Any]:
            return program(state, self._by_update(chunk))

        return compile_for(
            self._mesh, run, state, chunk, donate=(0,), preferred=self._compiler_options
        )

    def _streamed(self, state: TrainState, chunk: Any) -> Callable[..., Any]:
        """Updates one by one, the optimizer's state streamed through in buckets."""
        resident = state._replace(optimizer_state=None)

        def gather(
            state: TrainState, chunk: Any, update: jax.Array
        ) -> steps.GradientResult:
            batches = jax.tree.map(
                lambda x: lax.dynamic_index_in_dim(x, update, keepdims=False), chunk
            )
            return self._gather(state, batches)

        program = self._mapped(
            gather, (PartitionSpec(), _BY_UPDATE, PartitionSpec()), PartitionSpec()
        )
        gather_program = compile_for(
            self._mesh,
            lambda state, chunk, update: program(state, self._by_update(chunk), update),
            resident,
            chunk,
            self._index(0),
            preferred=self._compiler_options,
        )
        stream = offload.StreamedUpdate(
            self._step, self._mesh, state, gather_program.out_info
        )
        count = self.plan.batching.gradient_accumulation_count
        indices = [
            self._index(i) for i in range(jax.tree.leaves(chunk)[0].shape[0] // count)
        ]

        def run(state: TrainState, chunk: Any) -> tuple[TrainState, Any]:
            infos = []
            for index in indices:
                resident = state._replace(optimizer_state=None)
                gathered = gather_program(resident, chunk, index)
                state, info = stream.apply(state, gathered)
                del gathered  # before the next ones are made
                infos.append(info)
            return state, jax.tree.map(lambda *values: jnp.stack(values), *infos)

        return run

    def _mapped(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        # Replication is not checked: with it on, JAX exchanges gradients inside the
        # loop over micro-batches, and batch norm over replica groups is refused.
        return jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def _by_update(self, chunk: Any) -> Any:
        count = self.plan.batching.gradient_accumulation_count
        return jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), chunk)

    def _index(self, value: int) -> jax.Array:
        return place(np.int32(value), replicated(self._mesh))


_BY_UPDATE = PartitionSpec(None, None, REPLICA_AXIS)


@contextlib.contextmanager
def no_silent_copies() -> Iterator[None]:
    """Make an implicit copy between host and device an error."""
    with jax.transfer_guard("disallow"):
        yield


def element_bytes(chunk_element: Any) -> int:
    """Count the bytes of one element of the infeed."""
    return sum(
        math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(chunk_element)
    )
