"""A weight update in parts that run on different devices, with the results of the whole.

The update of the whole tree is traced once, and each of its values is assigned a *part*.
What is computed from the weights of one part is computed there. What depends on no part (a
count, a learning rate) is *shared*: every device computes it. An operation that combines
several parts, such as the sum of their squared norms, is shared too, and the parts exchange
its operands, which must be small.

A value's *level* is the number of exchanges that come before it. Only exchanged values are
kept from one exchange to the next. Everything else is recomputed where it is needed, since
reading it from memory would take as long.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from millrace.config import ConfigurationError
from millrace.program import packing
from millrace.program.compiling import tree_bytes
from millrace.program.packing import Buffers
from millrace.program.update_graph import (
    Graph,
    Operation,
    evaluate_graph,
    find_operations,
    trace_graph,
)

_MAX_EXCHANGED_BYTES = 4096
"""Values up to this size are exchanged: norms and sums, but not weights."""


class UpdateLeaf(NamedTuple):
    """A flat input of the update, and the output that replaces it if there is one."""

    part: int | None
    """The part that has it; None if all have it."""
    layer: str = ""
    output: int | None = None
    """The position of its new value among the flat outputs."""
    is_state: bool = False
    """Whether it may move to the part that computes its new value."""


class PartitionedUpdate:
    """An update split into parts.

    Args:
        function: The update, a pure function of trees.
        arguments: Trees of arrays or shapes.
        leaves: A description of each flat input.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: Any, leaves: Sequence[UpdateLeaf]
    ) -> None:
        self._graph = trace_graph(
            function, *arguments, parts=[leaf.part for leaf in leaves]
        )
        self._leaves = list(leaves)
        self._assignment = _assign_parts(self._graph, self._leaves)
        exported = self._assignment.exported
        self.num_exchanges = max(exported.values(), default=-1) + 1
        self._exports = [
            [value for value, level in exported.items() if level == number]
            for number in range(self.num_exchanges)
        ]
        shapes = self._graph.shapes
        self._layouts = [
            packing.build_layout([_exchanged_shape(shapes[value]) for value in values])
            for values in self._exports
        ]
        self._unconditional = _unconditional_values(
            self._graph, self._assignment, self._shared_outputs()
        )

    def input_positions(self, part: int | None) -> list[int]:
        """Return the positions of the flat inputs of a part, or of the shared ones."""
        return [i for i, leaf in enumerate(self._leaves) if leaf.part == part]

    def output_positions(self, part: int | None) -> list[int]:
        """Return the positions of a part's flat outputs, in the order of its inputs."""
        outputs = (self._leaves[i].output for i in self.input_positions(part))
        return [output for output in outputs if output is not None]

    def compute_shared(
        self, shared: Sequence[Any], exchanged: Sequence[Buffers]
    ) -> dict[int, Any]:
        """Compute the values that all devices know after some exchanges.

        Call it outside of any branch: devices must agree on these values to the last bit,
        and XLA may compile the same operation differently in two branches.

        Args:
            shared: The values of the shared inputs.
            exchanged: The results of the exchanges so far.
        """
        known = dict(self._graph.constants)
        known |= self._input_values(None, shared)
        for values, layout, buffers in zip(
            self._exports, self._layouts, exchanged, strict=False
        ):
            for value, result in zip(values, packing.unpack(layout, buffers), strict=True):
                known[value] = result.astype(self._graph.shapes[value].dtype)
        levels = self._assignment.level
        ready = [value for value in self._unconditional if levels[value] <= len(exchanged)]
        return known | evaluate_graph(self._graph, ready, known)

    def contribution(
        self, number: int, part: int, known: Mapping[int, Any], own: Sequence[Any]
    ) -> Buffers:
        """Compute what a part contributes to an exchange, with zeros for other parts.

        Args:
            number: Which exchange.
            part: Which part.
            known: The shared values after the exchanges before this one.
            own: The values of the part's inputs; anything for those it does not read.
        """
        values, shapes = self._exports[number], self._graph.shapes
        mine = self._exported_by(number, part)
        available = {**known, **self._input_values(part, own)}
        computed = evaluate_graph(self._graph, mine, available)
        tree = [
            computed[value] if value in computed else jnp.zeros(shapes[value].shape)
            for value in values
        ]
        layout = self._layouts[number]
        return packing.pack(layout, tree, layout.sizes)

    def zero_contribution(self, number: int) -> Buffers:
        """Return zeros shaped like a contribution to an exchange."""
        return packing.zero_buffers(self._layouts[number].sizes)

    def contribution_inputs(self, number: int, part: int) -> set[int] | None:
        """Return the positions of the part's inputs that its contribution depends on.

        None if it contributes nothing to this exchange.
        """
        mine = self._exported_by(number, part)
        before = (value for values in self._exports[:number] for value in values)
        shared = (self._graph.inputs[i] for i in self.input_positions(None))
        known = {*self._graph.constants, *shared, *before}
        _, missing = find_operations(self._graph, mine, known)
        own = self.input_positions(part)
        return {i for i in own if self._graph.inputs[i] in missing} if mine else None

    def compute_outputs(
        self, part: int | None, known: Mapping[int, Any], own: Sequence[Any] = ()
    ) -> list[Any]:
        """Compute the outputs of a part, or the shared ones, after all exchanges.

        Args:
            part: Which part; None for the shared outputs.
            known: The shared values after all exchanges.
            own: The values of the part's inputs.
        """
        wanted = [self._graph.outputs[i] for i in self.output_positions(part)]
        if part is not None:
            known = {**known, **self._input_values(part, own)}
        computed = evaluate_graph(self._graph, wanted, known)
        return [computed[value] for value in wanted]

    def _exported_by(self, number: int, part: int) -> list[int]:
        parts = self._assignment.part
        return [value for value in self._exports[number] if parts[value] == part]

    def _input_values(self, part: int | None, values: Sequence[Any]) -> dict[int, Any]:
        numbers = [self._graph.inputs[i] for i in self.input_positions(part)]
        return dict(zip(numbers, values, strict=True))

    def _shared_outputs(self) -> list[int]:
        return [self._graph.outputs[i] for i in self.output_positions(None)]


class _Assignment:
    """The part and the level of every value of a graph."""

    def __init__(self, graph: Graph, leaves: Sequence[UpdateLeaf]) -> None:
        self.part: list[int | None] = [None] * len(graph.shapes)
        self.level = [0] * len(graph.shapes)
        self.exported: dict[int, int] = {}
        """The exchanged values, with the number of their exchange."""
        self._shapes = graph.shapes
        self._layer = [""] * len(graph.shapes)  # one that a value depends on, for errors
        for value, leaf in zip(graph.inputs, leaves, strict=True):
            self.part[value], self._layer[value] = leaf.part, leaf.layer
        for operation in graph.operations:
            self._visit(operation)

    def export(self, value: int) -> int:
        """Exchange a value; return the level at which all devices know it."""
        self.exported[value] = self.level[value]
        return self.level[value] + 1

    def can_export(self, value: int) -> bool:
        shape = self._shapes[value]
        return _is_small(shape) and not _is_key(shape)

    def layer(self, value: int) -> str:
        return self._layer[value]

    def _visit(self, operation: Operation) -> None:
        local = [v for v in operation.inputs if self.part[v] is not None]
        exported = self._choose_exports(operation, local)
        kept = [v for v in operation.inputs if v not in exported]
        levels = [self.level[v] for v in kept] + [self.export(v) for v in exported]
        part = next((self.part[v] for v in local if v not in exported), None)
        layer = next((self._layer[v] for v in local), "")
        for value in operation.outputs:
            self.part[value], self._layer[value] = part, layer
            self.level[value] = max(levels, default=0)

    def _choose_exports(self, operation: Operation, local: list[int]) -> set[int]:
        """Return the operands that must be exchanged for an operation."""
        parts = {self.part[v] for v in local}
        if not local or (len(parts) == 1 and not self._joins_sum(operation, local)):
            return set()
        homes = {self.part[v] for v in local if self._shapes[v].size > 1}
        # Arrays of one part with scalars of others: the result stays with the arrays.
        home = homes.pop() if len(homes) == 1 else None
        chosen = {v for v in local if self.part[v] != home}
        if not all(map(self.can_export, chosen)):
            first = local[0]
            other = next(v for v in local if self.part[v] != self.part[first])
            _raise_not_separable(operation.name, self._layer[first], self._layer[other])
        return chosen

    def _joins_sum(self, operation: Operation, local: list[int]) -> bool:
        """Whether an operation adds one more scalar to what was exchanged.

        A sum over layers is a chain of additions. Its first exchange can include all of
        the scalars; kept on their device, each would need another exchange.
        """
        operands = [*operation.inputs, *operation.outputs]
        if any(self._shapes[v].size != 1 for v in operands):
            return False
        shared = [self.level[v] for v in operation.inputs if v not in local]
        own = max(self.level[v] for v in local)
        return max(shared, default=0) > own and all(map(self.can_export, local))


def _assign_parts(graph: Graph, leaves: list[UpdateLeaf]) -> _Assignment:
    """Find an assignment in which every new value is where the old one was.

    Optimizer state moves to the part that computes its new value. State that already
    belongs to another part becomes shared. `leaves` is changed accordingly.
    """
    moved: set[int] = set()
    while True:
        assignment, is_settled = _Assignment(graph, leaves), True
        for i, leaf in enumerate(leaves):
            if leaf.output is None:
                continue
            value = graph.outputs[leaf.output]
            part = assignment.part[value]
            if part is None or part == leaf.part:
                continue
            if leaf.is_state and i not in moved and leaf.part is None:
                leaves[i] = leaf._replace(part=part, layer=assignment.layer(value))
                is_settled = False
            elif not assignment.can_export(value):
                _raise_not_separable("", leaf.layer, assignment.layer(value))
            elif leaf.is_state and leaf.part is not None:
                leaves[i] = leaf._replace(part=None)
                is_settled = False
            else:
                assignment.export(value)
            moved.add(i)
        if is_settled:
            return assignment


def _raise_not_separable(name: str, layer: str, other: str) -> None:
    how = f" (in an operation {name})" if name else ""
    raise ConfigurationError(
        f"This optimizer's update combines whole arrays of the layers {layer} and {other}"
        f"{how}, which a pipeline stores and updates separately. Its devices exchange "
        f"only values of up to {_MAX_EXCHANGED_BYTES // 1024} KiB, such as norms. "
        "Keep both layers on one device (device_mapping) without "
        "optimizer_state_offloading, or choose another optimizer."
    )


def _unconditional_values(
    graph: Graph, assignment: _Assignment, outputs: Sequence[int]
) -> list[int]:
    """Return the shared values to compute outside of any branch.

    Large ones that only a branch needs (random numbers per weight, for example) are
    computed inside it, so that no device computes those of all others.
    """
    wanted = set(outputs)
    for operation in graph.operations:
        is_shared = all(
            assignment.part[v] is None and _is_small(graph.shapes[v])
            for v in operation.outputs
        )
        if not is_shared:
            wanted.update(operation.inputs)
    return [
        v
        for v in sorted(wanted)
        if assignment.part[v] is None and (v in outputs or _is_small(graph.shapes[v]))
    ]


def _is_small(shape: Any) -> bool:
    return tree_bytes(shape) <= _MAX_EXCHANGED_BYTES


def _is_key(shape: Any) -> bool:
    return jnp.issubdtype(shape.dtype, jax.dtypes.extended)


def _exchanged_shape(shape: Any) -> Any:
    # Contributions are summed: booleans travel as integers.
    dtype = jnp.int32 if shape.dtype == jnp.bool_ else shape.dtype
    return jax.ShapeDtypeStruct(shape.shape, dtype)
