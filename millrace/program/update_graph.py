"""A weight update as a flat list of operations.

Optax transformations are written for the whole tree of weights. Traced to operations, they
show what each result depends on, so that a pipeline can run only a part on each device.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
"""Primitives that only call a function, with the parameter that holds it."""


class Operation(NamedTuple):
    """A primitive applied to numbered values."""

    name: str
    run: Callable[..., Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Graph(NamedTuple):
    """The computation of a function; values are numbered."""

    operations: tuple[Operation, ...]
    shapes: tuple[Any, ...]
    """Shape and dtype of every value."""
    constants: Mapping[int, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def trace_graph(
    function: Callable[..., Any],
    *arguments: Any,
    parts: Sequence[int | None],
) -> Graph:
    """Trace a function of trees to a graph of its flat inputs and outputs.

    Calls are inlined. A conditional whose operands belong to several parts becomes a
    selection between the results of its branches: a branch may treat the parts
    separately, while the conditional as a whole combines them.

    Args:
        function: A pure function.
        *arguments: Trees of arrays or shapes.
        parts: The part of each flat input; None if all parts have it.
    """
    jaxpr = jax.make_jaxpr(function)(*arguments)
    builder = _Builder()
    inputs = [
        builder.new(variable.aval, frozenset() if part is None else frozenset({part}))
        for variable, part in zip(jaxpr.jaxpr.invars, parts, strict=True)
    ]
    outputs = builder.inline(jaxpr.jaxpr, jaxpr.consts, inputs)
    return Graph(
        tuple(builder.operations),
        tuple(builder.shapes),
        builder.constants,
        tuple(inputs),
        tuple(outputs),
    )


def find_operations(
    graph: Graph, wanted: Sequence[int], known: Collection[int]
) -> tuple[list[Operation], set[int]]:
    """Return the operations that compute `wanted` from `known`, and the missing inputs."""
    missing = {value for value in wanted if value not in known}
    operations: list[Operation] = []
    for operation in reversed(graph.operations):
        if missing.intersection(operation.outputs):
            operations.append(operation)
            missing.difference_update(operation.outputs)
            missing.update(value for value in operation.inputs if value not in known)
    return operations[::-1], missing


def evaluate_graph(
    graph: Graph, wanted: Sequence[int], known: Mapping[int, Any]
) -> dict[int, Any]:
    """Compute `wanted` from `known`, and nothing else."""
    operations, missing = find_operations(graph, wanted, known)
    assert not missing, "an input is missing"
    values = dict(known)
    for operation in operations:
        results = operation.run(*(values[value] for value in operation.inputs))
        for value, result in zip(operation.outputs, results, strict=True):
            values.setdefault(value, result)
    return {value: values[value] for value in wanted}


class _Builder:
    """Collects operations while walking through nested jaxprs."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.shapes: list[Any] = []
        self.constants: dict[int, Any] = {}
        self._parts: list[frozenset[int]] = []

    def new(self, shape: Any, parts: frozenset[int] = frozenset()) -> int:
        self.shapes.append(shape)
        self._parts.append(parts)
        return len(self.shapes) - 1

    def inline(self, jaxpr: Any, constants: Sequence[Any], inputs: list[int]) -> list[int]:
        """Add the operations of a jaxpr; return the numbers of its results."""
        number: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.constvars, constants, strict=True):
            number[variable] = self._add_constant(variable.aval, value)

        def read(atom: Any) -> int:
            if isinstance(atom, Literal):
                shape: Any = atom.aval
                return self._add_constant(shape, np.asarray(atom.val, shape.dtype))
            return number[atom]

        for equation in jaxpr.eqns:
            results = self._add_equation(equation, [read(atom) for atom in equation.invars])
            number.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _add_constant(self, shape: Any, value: Any) -> int:
        number = self.new(shape)
        self.constants[number] = value
        return number

    def _add_equation(self, equation: Any, inputs: list[int]) -> list[int]:
        name = equation.primitive.name
        if name in _CALLS:
            inner = equation.params[_CALLS[name]]
            return self.inline(*_open_jaxpr(inner), inputs)
        if name == "cond" and len(self._joined_parts(inputs)) > 1:
            return self._add_selection(equation, inputs)
        return self._add(name, _runner(equation), inputs, equation.outvars)

    def _add_selection(self, equation: Any, inputs: list[int]) -> list[int]:
        index, *operands = inputs
        branches = [
            self.inline(*_open_jaxpr(branch), list(operands))
            for branch in equation.params["branches"]
        ]
        return [
            self._add("select_n", _select, [index, *cases], [variable])[0]
            for variable, *cases in zip(equation.outvars, *branches, strict=True)
        ]

    def _add(
        self,
        name: str,
        run: Callable[..., Any],
        inputs: list[int],
        variables: Sequence[Any],
    ) -> list[int]:
        parts = self._joined_parts(inputs)
        outputs = [self.new(variable.aval, parts) for variable in variables]
        self.operations.append(Operation(name, run, tuple(inputs), tuple(outputs)))
        return outputs

    def _joined_parts(self, inputs: Sequence[int]) -> frozenset[int]:
        return frozenset().union(*(self._parts[value] for value in inputs))


def _open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Return a jaxpr and its constants, whether it is closed or not."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def _runner(equation: Any) -> Callable[..., Sequence[Any]]:
    primitive, params = equation.primitive, equation.params

    def run(*values: Any) -> Sequence[Any]:
        results = primitive.bind(*values, **params)
        return results if primitive.multiple_results else [results]

    return run


def _select(index: jax.Array, *cases: jax.Array) -> Sequence[jax.Array]:
    """Select like ``lax.switch``, which clamps the index."""
    index = jnp.clip(jnp.asarray(index, jnp.int32), 0, len(cases) - 1)
    return [lax.select_n(index, *cases)]
