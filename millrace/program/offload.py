"""Optimizer state that rests in host memory and streams through the device.

One program that copies the state in, updates and copies it out does not lower the
device's peak: XLA drops the barriers that would order the copies and fetches everything
at once (measured on an H200: 4,232 MiB against 4,296 resident). So the update is split
into buckets of variables, each its own small program, and the host keeps at most two
buckets' state on the device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

from millrace.program import step as steps
from millrace.program.compiling import compile_for
from millrace.program.replicas import replicated
from millrace.program.step import GradientResult, Step, TrainState

_SMALL_BYTES = 4096
"""State below this (counters, scalars) stays on the device: it saves nothing."""

_BUCKET_BYTES = 64 << 20
"""State moved at once: long enough for full link speed, short enough to save memory."""

_BUCKETS_IN_FLIGHT = 2


def host_memory_kind(device: Any) -> str | None:
    """Return the host memory that programs on `device` can keep arrays in, if any."""
    kind = "pinned_host"
    try:
        if kind not in {memory.kind for memory in device.addressable_memories()}:
            return None
        resting = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        fetched = jax.sharding.SingleDeviceSharding(device)
        there = jax.device_put(np.ones(1, np.float32), resting)
        jax.device_put(there, fetched).block_until_ready()
    except (ValueError, jax.errors.JaxRuntimeError):
        return None
    return kind


def placement(optimizer_state: Any, host: NamedSharding) -> Any:
    """Return each leaf's sharding: large ones in host memory, small ones not."""
    resident = host.with_memory_kind("device")
    return jax.tree.map(lambda x: host if _is_large(x) else resident, optimizer_state)


def init_streamed(
    init: Callable[[Any], Any], params: Any, mesh: Mesh, host: NamedSharding
) -> Any:
    """Make the optimizer's state and move it out, one bucket after the other."""
    jaxpr, spec = jax.make_jaxpr(init, return_shape=True)(params)
    function, inputs = jaxpr_as_fun(jaxpr), jax.tree.leaves(params)
    places = jax.tree.leaves(placement(spec, host))
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec)]
    outputs: list[Any] = [None] * len(places)
    for made in _packed([([i], size) for i, size in enumerate(sizes)]):
        chosen = functools.partial(_chosen, function, made)
        results = compile_for(mesh, chosen, *inputs)(*inputs)
        for position, result in zip(made, results, strict=True):
            # A leaf may be an argument handed back; a copy of our own can be donated.
            outputs[position] = jax.device_put(jnp.copy(result), places[position])
        jax.block_until_ready([outputs[position] for position in made])
    return jax.tree.unflatten(jax.tree.structure(spec), outputs)


def _chosen(function: Any, made: list[int], *inputs: jax.Array) -> list[jax.Array]:
    results = function(*inputs)
    return [results[position] for position in made]


def _packed(groups: Sequence[tuple[list[int], int]]) -> list[list[int]]:
    """Join groups of positions, each with its bytes, into buckets of 64 MiB or one.

    Small groups come first: scattered between large ones they would be buckets of
    their own, and leave the link idle.
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


def _is_large(leaf: Any) -> bool:
    return leaf.size * leaf.dtype.itemsize > _SMALL_BYTES


class Bucket(NamedTuple):
    """A part of the update that needs no weights or large state of any other part."""

    used: list[int]
    """Positions of the flat inputs it reads, in the order its program takes them."""
    made: list[int]
    """Positions of the flat outputs it makes."""
    program: Callable[..., Any]


class StreamedUpdate:
    """Applies a weight update bucket by bucket."""

    def __init__(
        self, step: Step, mesh: Mesh, state: TrainState, gathered: GradientResult
    ) -> None:
        self._resident = replicated(mesh)
        self._shardings = [leaf.sharding for leaf in jax.tree.leaves(state)]
        spec = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._resident),
            (state, gathered),
        )
        jaxpr, outputs = jax.make_jaxpr(
            functools.partial(steps.apply_update, step), return_shape=True
        )(*spec)
        self._out_tree = jax.tree.structure(outputs)
        owned, needs = _owned_positions(state), needed_inputs(jaxpr)
        specs = jax.tree.leaves(spec)
        self.buckets = [
            _compile_bucket(mesh, jaxpr, specs, owned, needs, made)
            for made in _split(needs, owned)
        ]

    def apply(self, state: TrainState, gathered: GradientResult) -> tuple[TrainState, Any]:
        """Make one weight update; `state` is used up."""
        inputs = jax.tree.leaves((state, gathered))
        outputs: list[Any] = [None] * self._out_tree.num_leaves
        leaving: list[list[jax.Array]] = []
        for bucket in self.buckets:
            if len(leaving) == _BUCKETS_IN_FLIGHT:
                # Only what has left the device makes room for what comes next.
                jax.block_until_ready(leaving.pop(0))
            leaving.append(self._apply_bucket(bucket, inputs, outputs))
        return jax.tree.unflatten(self._out_tree, outputs)

    def _apply_bucket(
        self, bucket: Bucket, inputs: list[Any], outputs: list[Any]
    ) -> list[jax.Array]:
        fetched = [jax.device_put(inputs[i], self._resident) for i in bucket.used]
        results = bucket.program(*fetched)
        out = []
        for position, result in zip(bucket.made, results, strict=True):
            if position < len(self._shardings):
                result = jax.device_put(result, self._shardings[position])
            outputs[position] = result
            out.append(result)
        return out


def _owned_positions(state: TrainState) -> dict[int, int]:
    """Positions of weights and large state, with the bytes that each streams."""
    flat = jax.tree_util.tree_leaves_with_path(state)
    owned = {}
    for position, (path, leaf) in enumerate(flat):
        field = getattr(path[0], "name", "")
        if field == "params":
            owned[position] = 0
        elif field == "optimizer_state" and _is_large(leaf):
            owned[position] = leaf.size * leaf.dtype.itemsize
    return owned


def _split(needs: list[set[int]], owned: dict[int, int]) -> list[list[int]]:
    """Group the outputs into buckets that own disjoint weights and large state.

    An optimizer that works variable by variable falls apart into one group per
    variable. One whose update of a variable depends on another's state (clipping by
    the global norm of Adam's updates, say) stays in one piece: right, but no smaller.
    """
    groups = _Groups()
    for output, inputs in enumerate(needs):
        for position in inputs & owned.keys():
            groups.join(output, position)
    return _packed(
        [
            (members, sum(owned.get(member, 0) for member in members))
            for members in groups.of(range(len(needs)))
        ]
    )


def needed_inputs(jaxpr: Any) -> list[set[int]]:
    """For every output, the positions of the inputs it is computed from."""
    return _origins(jaxpr.jaxpr, [{i} for i in range(len(jaxpr.jaxpr.invars))])


def _origins(jaxpr: Any, inputs: Sequence[set[int]]) -> list[set[int]]:
    origin: dict[Any, set[int]] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(variable: Any) -> set[int]:
        return set() if isinstance(variable, Literal) else origin.get(variable, set())

    for equation in jaxpr.eqns:
        given = [of(variable) for variable in equation.invars]
        inner = equation.params.get("jaxpr")
        if equation.primitive.name in ("jit", "pjit") and inner is not None:
            # Optax may jit a function of the whole tree: look which leaf goes where.
            made = _origins(inner.jaxpr, given)
        else:
            made = [set().union(*given)] * len(equation.outvars)
        origin.update(zip(equation.outvars, made, strict=True))
    return [of(variable) for variable in jaxpr.outvars]


class _Groups:
    """Which positions must be updated together (a union-find)."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def _root(self, item: int) -> int:
        while (parent := self._parent.get(item, item)) != item:
            item = parent
        return item

    def join(self, one: int, other: int) -> None:
        first, second = sorted((self._root(one), self._root(other)))
        self._parent[second] = first

    def of(self, items: Sequence[int]) -> list[list[int]]:
        groups: dict[int, list[int]] = {}
        for item in items:
            groups.setdefault(self._root(item), []).append(item)
        return list(groups.values())


def _compile_bucket(
    mesh: Mesh,
    jaxpr: Any,
    specs: list[Any],
    owned: dict[int, int],
    needs: list[set[int]],
    made: list[int],
) -> Bucket:
    used = sorted(set().union(*(needs[output] for output in made)))
    function = jaxpr_as_fun(jaxpr)

    def bucket(*arguments: jax.Array) -> list[jax.Array]:
        given = dict(zip(used, arguments, strict=True))
        # What the bucket does not need is computed from zeros, and XLA drops it.
        every = [
            given[i] if i in given else jnp.zeros(spec.shape, spec.dtype)
            for i, spec in enumerate(specs)
        ]
        results = function(*every)
        return [results[output] for output in made]

    donate = tuple(place for place, i in enumerate(used) if i in owned and i in made)
    program = compile_for(mesh, bucket, *[specs[i] for i in used], donate=donate)
    return Bucket(used, made, program)
