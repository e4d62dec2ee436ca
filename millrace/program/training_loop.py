"""The compiled training loop: many weight updates in one call."""

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from millrace.card import Card, with_card
from millrace.program import offload
from millrace.program import step as steps
from millrace.program.accumulate import path_name
from millrace.program.compiling import Options, compile_for
from millrace.program.mixed_precision import init_loss_scale
from millrace.program.optimizer_state import check_optimizer, init_optimizer_state
from millrace.program.replicas import (
    REPLICA_AXIS,
    batch_sharding,
    map_over_mesh,
    put_on_devices,
    replica_mesh,
    replicated,
)
from millrace.program.run_values import (
    check_values,
    find_hyperparameters,
    find_scalars,
    replace_values,
)
from millrace.program.step import LossFn, Step, TrainState
from millrace.program.update_loop import repeat_update

_log = logging.getLogger("millrace")

_STAGED_BYTES = 64 << 20
"""Batches staged on the devices at once: enough to hide the overhead of a call, 0.1 ms."""

_BY_UPDATE = PartitionSpec(None, None, REPLICA_AXIS)
"""A chunk as (updates, micro-batches, samples, ...)."""

_MAX_PART_UPDATES = 2048
_MAX_CACHED_PARTS = 4096


@with_card
class TrainingProgram:
    """A compiled loop of weight updates, built by ``training_program``."""

    _state_spec: Any = PartitionSpec()
    """How a state is partitioned over the mesh: every replica has all of it."""

    def __init__(
        self,
        step: Step,
        devices: Sequence[Any] | None,
        compiler_options: Mapping[str, Options] | None = None,
    ) -> None:
        self.plan = step.plan
        self._compiler_options = compiler_options
        self.compile_seconds = 0.0
        self.extra_info_names = {*step.extra_info, "loss_scale"}
        self._step = step
        self._mesh = self._make_mesh(devices)
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._parts: dict[tuple[int, int], jax.Array] = {}
        self._host_memory = self._find_host_memory()

    def card(self) -> Card:
        """Return what a terminal or a notebook shows."""
        rows = {
            "loss_fn": getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__),
            "plan": self.plan,
            "devices": f"{len(self.devices)} x {self.devices[0].device_kind}",
            "compile_seconds": f"{self.compile_seconds:.1f}",
        }
        return Card(type(self).__name__, rows)

    def _make_mesh(self, devices: Sequence[Any] | None) -> Mesh:
        mesh = replica_mesh(self.plan.num_replicas, devices)
        if self.plan.recomputation and mesh.devices.flat[0].platform == "cpu":
            _log.warning(
                "recomputation saves no memory on CPU: XLA recognizes the recomputed "
                "values as equal to the first ones and keeps those."
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
                "optimizer_state_offloading is off: programs on this device cannot use "
                "host memory."
            )
        elif own.platform == "cpu":
            _log.warning(
                "optimizer_state_offloading saves no memory on CPU, where host and device "
                "memory are the same; updates run as they would on a GPU."
            )
        return kind

    @property
    def loss_fn(self) -> LossFn:
        """The loss that is minimized."""
        return self._step.loss_fn

    @property
    def chunk_sharding(self) -> NamedSharding:
        """The sharding that a chunk of batches must have: samples over the replicas."""
        return batch_sharding(self._mesh)

    @property
    def devices(self) -> list[Any]:
        """The devices this program runs on."""
        return list(self._mesh.devices.flat)

    # --- state ---

    def init(self, params: Any, model_state: Any = None, *, seed: int = 0) -> TrainState:
        """Copy weights to the devices and initialize the optimizer."""
        state = self._init_without_optimizer(params, model_state, seed)
        state = put_on_devices(state, replicated(self._mesh))
        return state._replace(optimizer_state=self._init_optimizer(state.params))

    def _init_without_optimizer(
        self, params: Any, model_state: Any, seed: int
    ) -> TrainState:
        weights = jnp.dtype(self.plan.types.weights)
        # Copied, because the state will be donated and the caller may keep the originals.
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
            loss_scale=init_loss_scale(self.plan.loss_scaling),
            key=jax.random.key_data(jax.random.key(seed)),
        )

    def _init_optimizer(self, params: Any) -> Any:
        init = functools.partial(init_optimizer_state, self._step.optimizer)
        if self._host_memory is None:
            return jax.jit(init, out_shardings=replicated(self._mesh))(params)
        host = replicated(self._mesh, self._host_memory)
        return offload.init_offloaded(init, params, self.plan, self._mesh, host)

    def place_state(self, state: TrainState) -> TrainState:
        """Copy a whole state, such as a restored one, to where the program needs it."""
        return put_on_devices(state, self.state_sharding(state))

    def unpack_state(self, state: TrainState) -> TrainState:
        """Return a state as trees over the whole model, whatever the plan."""
        return state

    def set_values(self, state: TrainState, **values: float) -> TrainState:
        """Return a state with new values for the next calls; nothing is compiled again.

        A pipeline passes them to every stage that uses them.

        Args:
            state: It stays usable.
            **values: By name: hyperparameters of ``optax.inject_hyperparams``, such as the
                learning rate, and scalars of the model state. A model state that holds
                one should be reduced with "once".
        """
        state = self.validate_state(state)
        hyperparameters = find_hyperparameters(state.optimizer_state)
        scalars = find_scalars(state.model_state)
        check_values(values, hyperparameters, scalars)
        return state._replace(
            optimizer_state=replace_values(state.optimizer_state, hyperparameters, values),
            model_state=replace_values(state.model_state, scalars, values),
        )

    def validate_state(self, state: TrainState) -> TrainState:
        """Return a state that can be run; place NumPy arrays, refuse a used-up state.

        Args:
            state: From ``init``, a call, or ``jax.device_get`` of one of these.
        """
        leaves = jax.tree.leaves((state.update, state.params))[:2]
        if not all(isinstance(leaf, jax.Array) for leaf in leaves):
            return self.place_state(state)
        if any(leaf.is_deleted() for leaf in leaves):
            raise ValueError(
                "This state was used up by an earlier call. Continue with the state that "
                "the call returned."
            )
        return state

    def state_sharding(self, state: TrainState) -> TrainState:
        """Return the sharding of every leaf of a state."""
        resident = jax.tree.map(lambda _: replicated(self._mesh), state)
        if self._host_memory is None:
            return resident
        host = replicated(self._mesh, self._host_memory)
        return resident._replace(
            optimizer_state=offload.offloaded_shardings(
                state.optimizer_state, self.plan, host
            )
        )

    # --- calls ---

    @property
    def runs_parts(self) -> bool:
        """Whether one compiled program makes any number of the updates of a chunk.

        On a GPU it does not: a loop whose length is unknown to the compiler returns to the
        host before every update.
        """
        return self._mesh.devices.flat[0].platform == "cpu" or self._is_streamed

    @property
    def _is_streamed(self) -> bool:
        return self._host_memory is not None

    def updates_per_chunk(self, updates: int, bytes_per_element: int) -> int:
        """Choose how many updates have their batches staged at once, for calls of parts.

        Fewer than the limit allows, so that the first call need not wait for long.
        """
        per_update = bytes_per_element * self._accumulation_count
        limit = _STAGED_BYTES // 4 // max(1, per_update)
        return max(1, min(updates, limit, _MAX_PART_UPDATES))

    def updates_per_call(
        self, execution: int, bytes_per_element: int, at_most: int | None = None
    ) -> int:
        """Choose how many updates one call makes, from the size of their batches.

        The largest divisor of the execution whose batches take at most 64 MiB, so that
        all calls have the same compiled length. If divisors are sparse (a prime number of
        updates), the limit itself; the last call of an execution is then shorter.
        """
        per_update = bytes_per_element * self._accumulation_count
        limit = max(1, min(execution, _STAGED_BYTES // max(1, per_update)))
        limit = min(limit, at_most or limit)
        best = max(n for n in range(1, limit + 1) if execution % n == 0)
        return best if best * 2 > limit else limit

    def compile(self, state: Any, chunk: Any) -> None:
        """Compile for a chunk of this shape, unless that has been done."""
        self._runner(state, chunk)

    def run(
        self, state: TrainState, chunk: Any, part: tuple[int, int] | None = None
    ) -> tuple[TrainState, dict]:
        """Make the updates of a chunk; `state` is donated and cannot be used again.

        Args:
            state: From ``init`` or the previous call.
            chunk: Batches on the devices, sharded as `chunk_sharding`. Leaves are
                (updates x accumulation count, samples of all replicas, ...).
            part: The first update to make and how many; by default all. Only a program
                with `runs_parts` accepts it.

        Returns:
            The new state, and info with one value per update in each leaf. With a part,
            the leaves may be longer; what follows the updates of the part is undefined.
        """
        assert part is None or self.runs_parts
        state = self.validate_state(state)
        runner = self._runner(state, chunk)
        first, count = part or (0, self._num_updates(chunk))
        arguments: tuple[Any, ...] = (state, chunk)
        if self._is_streamed:
            arguments = (state, chunk, range(first, first + count))
        elif self.runs_parts:
            arguments = (state, chunk, self._place_part(first, count))
        # An implicit copy between host and device is slow and silent: make it an error.
        with jax.transfer_guard("disallow"):
            return runner(*arguments)

    def _num_updates(self, chunk: Any) -> int:
        return jax.tree.leaves(chunk)[0].shape[0] // self._accumulation_count

    def _place_part(self, first: int, count: int) -> jax.Array:
        """Return a part on the devices; most parts come again and again."""
        if (first, count) not in self._parts:
            if len(self._parts) >= _MAX_CACHED_PARTS:
                self._parts.clear()
            self._parts[first, count] = put_on_devices(
                np.array([first, count], np.int32), replicated(self._mesh)
            )
        return self._parts[first, count]

    @property
    def _accumulation_count(self) -> int:
        return self.plan.batching.gradient_accumulation_count

    def _runner(self, state: TrainState, chunk: Any) -> Callable[..., Any]:
        shapes = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(chunk))
        key = (shapes, jax.tree.structure(chunk), jax.tree.structure(state))
        if key not in self._compiled:
            self._check_chunk(chunk)
            started = time.perf_counter()
            build = self._build_streamed if self._is_streamed else self._build_resident
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

    # --- programs ---

    def _build_resident(self, state: TrainState, chunk: Any) -> Callable[..., Any]:
        """Compile all updates of a call into one program."""
        part = (self._place_part(0, self._num_updates(chunk)),) if self.runs_parts else ()
        program = map_over_mesh(
            self._mesh,
            self._scan_updates(state, chunk),
            (self._state_spec, _BY_UPDATE, *[PartitionSpec() for _ in part]),
            (self._state_spec, PartitionSpec()),
        )

        def run(state: TrainState, chunk: Any, *part: jax.Array) -> tuple[TrainState, Any]:
            return program(state, self._group_by_update(chunk), *part)

        # Donated, or the old and the new state would both be in memory.
        return self._compile(run, state, chunk, *part, donate=(0,))

    def _scan_updates(self, state: TrainState, chunk: Any) -> Callable[..., Any]:
        """Return a function that makes the updates of a chunk on one device.

        Its arguments are a state, a chunk and, if the program runs parts, the part.
        """
        del state, chunk
        return functools.partial(repeat_update, self._one_update)

    @functools.cached_property
    def _one_update(self) -> Callable[..., Any]:
        # Jitted, so that programs for different chunks trace the loss only once.
        def one_update(state: TrainState, batches: Any) -> tuple[TrainState, Any]:
            return steps.apply_update(
                self._step, state, steps.compute_gradients(self._step, state, batches)
            )

        return jax.jit(one_update)

    def _build_streamed(self, state: TrainState, chunk: Any) -> Callable[..., Any]:
        """Make updates one by one, with the optimizer state streamed through in buckets.

        Gradients and weight update are separate programs: the host has to move state
        between buckets, and gradients are computed without any optimizer state.
        """
        compute_gradients = self._compile_gradients(state, chunk)
        stream = self._make_stream(state, compute_gradients.out_info)
        indices = [self._device_index(i) for i in range(self._num_updates(chunk))]

        def run(state: TrainState, chunk: Any, updates: range) -> tuple[TrainState, Any]:
            infos = []
            for index in indices[updates.start : updates.stop]:
                result = compute_gradients(self._without_optimizer(state), chunk, index)
                state, info = stream.apply(state, result)
                del result  # free the gradients before the next ones are computed
                infos.append(info)
            return state, jax.tree.map(lambda *values: jnp.stack(values), *infos)

        return run

    def _without_optimizer(self, state: TrainState) -> TrainState:
        return state._replace(optimizer_state=None)

    def _make_stream(self, state: TrainState, result: Any) -> Any:
        return offload.StreamedUpdate(self._step, self._mesh, state, result)

    def _compile_gradients(self, state: TrainState, chunk: Any) -> Any:
        return self._compile_for_one_update(
            self._gradients, state, chunk, out_specs=PartitionSpec()
        )

    @functools.cached_property
    def _gradients(self) -> Callable[..., Any]:
        return jax.jit(functools.partial(steps.compute_gradients, self._step))

    def _compile_for_one_update(
        self, function: Callable[..., Any], state: TrainState, chunk: Any, out_specs: Any
    ) -> Any:
        """Compile ``function(state, batches)`` as ``(state, chunk, update)``.

        The update is an index into the chunk, so that one program serves all of them.
        """

        def select(state: TrainState, chunk: Any, update: jax.Array) -> Any:
            batches = jax.tree.map(
                lambda x: lax.dynamic_index_in_dim(x, update, keepdims=False), chunk
            )
            return function(state, batches)

        in_specs = (self._state_spec, _BY_UPDATE, PartitionSpec())
        program = map_over_mesh(self._mesh, select, in_specs, out_specs)

        def run(state: TrainState, chunk: Any, update: jax.Array) -> Any:
            return program(state, self._group_by_update(chunk), update)

        resident = self._without_optimizer(state)
        return self._compile(run, resident, chunk, self._device_index(0))

    def _compile(
        self, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
    ) -> Any:
        options = self._compiler_options
        return compile_for(
            self._mesh, function, *arguments, donate=donate, preferred=options
        )

    def _group_by_update(self, chunk: Any) -> Any:
        count = self._accumulation_count
        return jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), chunk)

    def _device_index(self, value: int) -> jax.Array:
        return put_on_devices(np.int32(value), replicated(self._mesh))
