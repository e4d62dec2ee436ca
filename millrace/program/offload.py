"""Optimizer state that is kept in host memory and streamed through the device.

A single program that copies the state in, updates it and copies it out does not lower the
peak on the device: XLA drops the barriers that would order the copies and fetches all state
at once (on an H200: 4,232 MiB, 4,296 without offloading). So the update is its own step,
split into buckets of variables. Each bucket is a small program, and the host keeps the
state of at most two buckets on the device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

from millrace.plan import Plan
from millrace.program import step as steps
from millrace.program.compiling import compile_for, tree_bytes
from millrace.program.replicas import replicated
from millrace.program.step import GradientResult, Step, TrainState

_SMALL_BYTES = 4096
"""By default, smaller arrays stay on the device: moving them saves nothing."""

_BUCKET_BYTES = 64 << 20
"""State moved at once: enough for full bandwidth, little enough to save memory."""

MAX_BUCKETS_IN_FLIGHT = 2
"""One bucket computes while another is copied."""


def host_memory_kind(device: Any) -> str | None:
    """Return the host memory that programs on `device` can use, if any."""
    kind = "pinned_host"
    try:
        if kind not in {memory.kind for memory in device.addressable_memories()}:
            return None
        # Some platforms list the memory but cannot copy from it: try.
        on_host = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        on_device = jax.sharding.SingleDeviceSharding(device)
        copied = jax.device_put(np.ones(1, np.float32), on_host)
        jax.device_put(copied, on_device).block_until_ready()
    except (ValueError, jax.errors.JaxRuntimeError):
        return None
    return kind


def offloaded_shardings(optimizer_state: Any, plan: Plan, host: NamedSharding) -> Any:
    """Return the sharding of each leaf: large ones in host memory, small ones not."""
    resident = host.with_memory_kind("device")
    return jax.tree.map(lambda x: host if _is_large(x, plan) else resident, optimizer_state)


def init_offloaded(
    init: Callable[[Any], Any], params: Any, plan: Plan, mesh: Mesh, host: NamedSharding
) -> Any:
    """Initialize the optimizer state and move it to the host, bucket by bucket."""
    jaxpr, spec = jax.make_jaxpr(init, return_shape=True)(params)
    function, inputs = jaxpr_as_fun(jaxpr), jax.tree.leaves(params)
    shardings = jax.tree.leaves(offloaded_shardings(spec, plan, host))
    sizes = [tree_bytes(leaf) for leaf in jax.tree.leaves(spec)]
    outputs: list[Any] = [None] * len(shardings)
    for bucket in _pack_buckets([([i], size) for i, size in enumerate(sizes)]):
        select = functools.partial(_select_outputs, function, bucket)
        results = compile_for(mesh, select, *inputs)(*inputs)
        for position, result in zip(bucket, results, strict=True):
            # A result may be an argument handed back. The state is donated later, so it
            # needs a copy of its own.
            outputs[position] = jax.device_put(jnp.copy(result), shardings[position])
        jax.block_until_ready([outputs[position] for position in bucket])
    return jax.tree.unflatten(jax.tree.structure(spec), outputs)


def _select_outputs(
    function: Any, positions: list[int], *inputs: jax.Array
) -> list[jax.Array]:
    results = function(*inputs)
    return [results[position] for position in positions]


def _pack_buckets(groups: Sequence[tuple[list[int], int]]) -> list[list[int]]:
    """Join groups of positions, given with their bytes, into buckets of up to 64 MiB.

    Small groups come first: scattered between large ones, they would become buckets of
    their own and leave the link idle.
    """
    buckets: list[list[int]] = []
    room = 0
    for members, size in sorted(groups, key=lambda group: group[1]):
        if not buckets or size > room:
            buckets.append([])
            room = _BUCKET_BYTES
        buckets[-1] += members
        room -= size
    return buckets


def _is_large(leaf: Any, plan: Plan) -> bool:
    smallest = plan.min_remote_tensor_size
    smallest = _SMALL_BYTES if smallest is None else smallest
    # Counters and other scalars are read by every bucket.
    return bool(leaf.ndim) and tree_bytes(leaf) >= smallest


class Bucket(NamedTuple):
    """A part of the update that needs no weights or large state of any other part."""

    inputs: list[int]
    """Positions of the flat inputs it reads, in the order its program takes them."""
    outputs: list[int]
    """Positions of the flat outputs it computes."""
    program: Callable[..., Any]


class StreamedUpdate:
    """Applies a weight update bucket by bucket."""

    def __init__(
        self, step: Step, mesh: Mesh, state: TrainState, result: GradientResult
    ) -> None:
        self._resident = replicated(mesh)
        self._shardings = [leaf.sharding for leaf in jax.tree.leaves(state)]
        spec = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._resident),
            (state, result),
        )
        jaxpr, outputs = jax.make_jaxpr(
            functools.partial(steps.apply_update, step), return_shape=True
        )(*spec)
        self._out_tree = jax.tree.structure(outputs)
        owned = _owned_positions(state, step.plan)
        dependencies = input_dependencies(jaxpr)
        specs = jax.tree.leaves(spec)
        self.buckets = [
            _compile_bucket(mesh, jaxpr, specs, owned, dependencies, positions)
            for positions in _split_outputs(dependencies, owned)
        ]

    def apply(self, state: TrainState, result: GradientResult) -> tuple[TrainState, Any]:
        """Make one weight update; `state` is donated."""
        inputs = jax.tree.leaves((state, result))
        outputs: list[Any] = [None] * self._out_tree.num_leaves
        in_flight: list[list[jax.Array]] = []
        for bucket in self.buckets:
            if len(in_flight) == MAX_BUCKETS_IN_FLIGHT:
                # Device memory is free again only when a bucket is back on the host.
                jax.block_until_ready(in_flight.pop(0))
            in_flight.append(self._apply_bucket(bucket, inputs, outputs))
        return jax.tree.unflatten(self._out_tree, outputs)

    def _apply_bucket(
        self, bucket: Bucket, inputs: list[Any], outputs: list[Any]
    ) -> list[jax.Array]:
        on_device = [jax.device_put(inputs[i], self._resident) for i in bucket.inputs]
        results = bucket.program(*on_device)
        moved = []
        for position, result in zip(bucket.outputs, results, strict=True):
            # The state comes first in the outputs; what follows, info, stays.
            if position < len(self._shardings):
                result = jax.device_put(result, self._shardings[position])
            outputs[position] = result
            moved.append(result)
        return moved


def _owned_positions(state: TrainState, plan: Plan) -> dict[int, int]:
    """Return the positions of weights and large state, with the bytes they stream."""
    flat = jax.tree_util.tree_leaves_with_path(state)
    owned = {}
    for position, (path, leaf) in enumerate(flat):
        field = getattr(path[0], "name", "")
        if field == "params":
            owned[position] = 0
        elif field == "optimizer_state" and _is_large(leaf, plan):
            owned[position] = tree_bytes(leaf)
    return owned


def _split_outputs(dependencies: list[set[int]], owned: dict[int, int]) -> list[list[int]]:
    """Group the outputs into buckets that own disjoint weights and large state.

    An optimizer that treats variables one by one splits into one group per variable. If
    the update of a variable depends on the state of another (clipping by the global norm
    of Adam's updates, for example), it stays in one piece: correct, but no smaller.
    """
    groups = _UnionFind()
    for output, inputs in enumerate(dependencies):
        for position in inputs & owned.keys():
            # An output of the state has the position of the input that it replaces.
            groups.join(output, position)
    return _pack_buckets(
        [
            (members, sum(owned.get(member, 0) for member in members))
            for members in groups.group(range(len(dependencies)))
        ]
    )


def input_dependencies(jaxpr: Any) -> list[set[int]]:
    """Return, for every output, the positions of the inputs it is computed from."""
    return _trace_origins(jaxpr.jaxpr, [{i} for i in range(len(jaxpr.jaxpr.invars))])


def _trace_origins(jaxpr: Any, inputs: Sequence[set[int]]) -> list[set[int]]:
    origins: dict[Any, set[int]] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(variable: Any) -> set[int]:
        return set() if isinstance(variable, Literal) else origins.get(variable, set())

    for equation in jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        inner = equation.params.get("jaxpr")
        if equation.primitive.name in ("jit", "pjit") and inner is not None:
            # Optax may jit a function of the whole tree: follow its leaves one by one.
            results = _trace_origins(inner.jaxpr, operands)
        else:
            results = [set().union(*operands)] * len(equation.outvars)
        origins.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


class _UnionFind:
    """Positions that must be updated together."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def _root(self, item: int) -> int:
        while (parent := self._parent.get(item, item)) != item:
            item = parent
        return item

    def join(self, one: int, other: int) -> None:
        first, second = sorted((self._root(one), self._root(other)))
        self._parent[second] = first

    def group(self, items: Sequence[int]) -> list[list[int]]:
        groups: dict[int, list[int]] = {}
        for item in items:
            groups.setdefault(self._root(item), []).append(item)
        return list(groups.values())


def _compile_bucket(
    mesh: Mesh,
    jaxpr: Any,
    specs: list[Any],
    owned: dict[int, int],
    dependencies: list[set[int]],
    outputs: list[int],
) -> Bucket:
    inputs = sorted(set().union(*(dependencies[output] for output in outputs)))
    function = jaxpr_as_fun(jaxpr)

    def update(*arguments: jax.Array) -> list[jax.Array]:
        own = dict(zip(inputs, arguments, strict=True))
        # Results of other buckets are computed from zeros, and XLA removes them.
        every = [
            own[i] if i in own else jnp.zeros(spec.shape, spec.dtype)
            for i, spec in enumerate(specs)
        ]
        results = function(*every)
        return [results[output] for output in outputs]

    # Only what the bucket replaces: later buckets may read its other inputs.
    donate = tuple(n for n, i in enumerate(inputs) if i in owned and i in outputs)
    program = compile_for(mesh, update, *[specs[i] for i in inputs], donate=donate)
    return Bucket(inputs, outputs, program)
