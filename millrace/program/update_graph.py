"""A weight update as a flat list of operations, so that its parts can run elsewhere.

Optax transformations are written for the whole tree of weights. The operations that they
are traced to show what each result is computed from, which is what a pipeline needs to
know to let every device run its own part.
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
"""Primitives that only call a function, by the parameter that holds it."""


class Operation(NamedTuple):
    """A primitive applied to values, which are known by number."""

    name: str
    run: Callable[..., Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Graph(NamedTuple):
    """What a function computes; values are numbered."""

    operations: tuple[Operation, ...]
    shapes: tuple[Any, ...]
    """Shape and type of every value."""
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
    selection between the results of its branches, since the branches compute every part
    separately where the conditional as a whole does not.

    Args:
        function: A pure function.
        arguments: Trees of arrays or shapes.
        parts: The part that each flat input belongs to; None if it belongs to all.
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


def needed(
    graph: Graph, wanted: Sequence[int], known: Collection[int]
) -> tuple[list[Operation], set[int]]:
    """Return the operations that lead to some values, and the inputs that they read."""
    missing = {value for value in wanted if value not in known}
    operations: list[Operation] = []
    for operation in reversed(graph.operations):
        if missing.intersection(operation.outputs):
            operations.append(operation)
            missing.difference_update(operation.outputs)
            missing.update(value for value in operation.inputs if value not in known)
    return operations[::-1], missing


def evaluate(
    graph: Graph, wanted: Sequence[int], known: Mapping[int, Any]
) -> dict[int, Any]:
    """Compute some values from others, and only what they need."""
    operations, missing = needed(graph, wanted, known)
    assert not missing, "an input was not given"
    values = dict(known)
    for operation in operations:
        results = operation.run(*(values[value] for value in operation.inputs))
        for value, result in zip(operation.outputs, results, strict=True):
            values.setdefault(value, result)
    return {value: values[value] for value in wanted}


class _Builder:
    """Collects operations while it walks through nested jaxprs."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.shapes: list[Any] = []
        self.constants: dict[int, Any] = {}
        self._parts: list[frozenset[int]] = []

    def new(self, shape: Any, parts: frozenset[int] = frozenset()) -> int:
        self.shapes.append(shape)
        self._parts.append(parts)
        return len(self.shapes) - 1

    def inline(self, jaxpr: Any, constants: Sequence[Any], given: list[int]) -> list[int]:
        """Add the operations of a jaxpr; return the numbers of its results."""
        number: dict[Any, int] = dict(zip(jaxpr.invars, given, strict=True))
        for variable, value in zip(jaxpr.constvars, constants, strict=True):
            number[variable] = self._constant(variable.aval, value)

        def read(atom: Any) -> int:
            if isinstance(atom, Literal):
                shape: Any = atom.aval
                return self._constant(shape, np.asarray(atom.val, shape.dtype))
            return number[atom]

        for equation in jaxpr.eqns:
            results = self._equation(equation, [read(atom) for atom in equation.invars])
            number.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _constant(self, shape: Any, value: Any) -> int:
        number = self.new(shape)
        self.constants[number] = value
        return number

    def _equation(self, equation: Any, given: list[int]) -> list[int]:
        name = equation.primitive.name
        if name in _CALLS:
            inner = equation.params[_CALLS[name]]
            return self.inline(*_opened(inner), given)
        if name == "cond" and len(self._touched(given)) > 1:
            return self._selection(equation, given)
        return self._add(name, _runner(equation), given, equation.outvars)

    def _selection(self, equation: Any, given: list[int]) -> list[int]:
        index, *operands = given
        branches = [
            self.inline(*_opened(branch), list(operands))
            for branch in equation.params["branches"]
        ]
        return [
            self._add("select_n", _select, [index, *cases], [variable])[0]
            for variable, *cases in zip(equation.outvars, *branches, strict=True)
        ]

    def _add(
        self, name: str, run: Callable[..., Any], given: list[int], variables: Sequence[Any]
    ) -> list[int]:
        parts = self._touched(given)
        made = [self.new(variable.aval, parts) for variable in variables]
        self.operations.append(Operation(name, run, tuple(given), tuple(made)))
        return made

    def _touched(self, given: Sequence[int]) -> frozenset[int]:
        return frozenset().union(*(self._parts[value] for value in given))


def _opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Return a jaxpr, closed or not, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def _runner(equation: Any) -> Callable[..., Sequence[Any]]:
    primitive, params = equation.primitive, equation.params

    def run(*values: Any) -> Sequence[Any]:
        results = primitive.bind(*values, **params)
        return results if primitive.multiple_results else [results]

    return run


def _select(index: jax.Array, *cases: jax.Array) -> Sequence[jax.Array]:
    """Choose as ``lax.switch`` does, which takes the last branch for larger numbers."""
    index = jnp.clip(jnp.asarray(index, jnp.int32), 0, len(cases) - 1)
    return [lax.select_n(index, *cases)]
