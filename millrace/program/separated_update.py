"""A weight update whose parts run on different devices and give the whole's results.

The update of the whole tree is traced once. Its values are then given *places*: a value
computed from one part's weights is computed where these are; a value computed from
nothing of the kind (a count, a learning rate) is *shared* and computed everywhere alike.
An operation that combines several parts, such as the sum of their squared norms, is
shared too, and the parts exchange its operands, which must be small.

A value's *level* is how many exchanges come before it, one after the other. Between two
exchanges nothing is kept but what was exchanged: the rest is computed again where it is
needed, since reading it from memory would take as long.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from millrace.config import ConfigurationError
from millrace.program import packing
from millrace.program.packing import Buffers
from millrace.program.update_graph import (
    Graph,
    Operation,
    evaluate,
    needed,
    trace_graph,
)

_SMALL_BYTES = 4096
"""What a value that is exchanged may take up: norms and sums, not weights."""


class Leaf(NamedTuple):
    """A flat input of the update and, if it is a weight or state, the output for it."""

    part: int | None
    """Where it is; None if everywhere."""
    layer: str = ""
    output: int | None = None
    """The position of its new value among the flat outputs."""
    is_state: bool = False
    """Whether it may be moved to where its new value is computed."""


class SeparatedUpdate:
    """An update that is split into parts.

    Args:
        function: The update, a pure function of trees.
        arguments: Trees of arrays or shapes.
        leaves: What is known about each flat input.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: Any, leaves: Sequence[Leaf]
    ) -> None:
        self._graph = trace_graph(
            function, *arguments, parts=[leaf.part for leaf in leaves]
        )
        self._leaves = list(leaves)
        self._places = _settle(self._graph, self._leaves)
        exported = self._places.exported
        self.num_exchanges = max(exported.values(), default=-1) + 1
        self._exports = [
            [value for value, level in exported.items() if level == number]
            for number in range(self.num_exchanges)
        ]
        shapes = self._graph.shapes
        self._layouts = [
            packing.lay_out([_exchanged_shape(shapes[value]) for value in values])
            for values in self._exports
        ]
        self._outside = _outside(self._graph, self._places, self._shared_outputs())

    def inputs_of(self, part: int | None) -> list[int]:
        """Return the positions of a part's flat inputs, or of the shared ones."""
        return [i for i, leaf in enumerate(self._leaves) if leaf.part == part]

    def outputs_of(self, part: int | None) -> list[int]:
        """Return the positions of a part's flat outputs, in the order of the inputs."""
        found = (self._leaves[i].output for i in self.inputs_of(part))
        return [output for output in found if output is not None]

    def common(self, shared: Sequence[Any], exchanged: Sequence[Buffers]) -> dict[int, Any]:
        """Compute what all devices know after some exchanges.

        Run it outside any branch: devices must agree on these values to the last bit.

        Args:
            shared: The values of the shared inputs.
            exchanged: The results of the exchanges so far.
        """
        known = dict(self._graph.constants)
        known |= self._given(None, shared)
        for values, layout, buffers in zip(
            self._exports, self._layouts, exchanged, strict=False
        ):
            for value, result in zip(values, packing.unpack(layout, buffers), strict=True):
                known[value] = result.astype(self._graph.shapes[value].dtype)
        wanted = [
            value for value in self._outside if self._places.level[value] <= len(exchanged)
        ]
        return known | evaluate(self._graph, wanted, known)

    def contribution(
        self, number: int, part: int, common: Mapping[int, Any], own: Sequence[Any]
    ) -> Buffers:
        """Compute what a part gives to an exchange: its own values, zeros for the rest.

        Args:
            number: Which exchange.
            part: Which part.
            common: What is known after the exchanges before this one.
            own: The values of the part's inputs; of those it does not read, anything.
        """
        values, shapes = self._exports[number], self._graph.shapes
        mine = self._exported_by(number, part)
        found = evaluate(self._graph, mine, {**common, **self._given(part, own)})
        given = [
            found[value] if value in found else jnp.zeros(shapes[value].shape)
            for value in values
        ]
        layout = self._layouts[number]
        return packing.pack(layout, given, layout.sizes)

    def no_contribution(self, number: int) -> Buffers:
        """Return zeros like a part's contribution to an exchange."""
        return packing.empty(self._layouts[number].sizes)

    def reads(self, number: int, part: int) -> set[int] | None:
        """Return the positions of the part's inputs that its contribution is made from.

        None if it gives nothing to this exchange.
        """
        mine = self._exported_by(number, part)
        before = (value for values in self._exports[:number] for value in values)
        shared = (self._graph.inputs[i] for i in self.inputs_of(None))
        known = {*self._graph.constants, *shared, *before}
        _, missing = needed(self._graph, mine, known)
        own = self.inputs_of(part)
        return {i for i in own if self._graph.inputs[i] in missing} if mine else None

    def results(
        self, part: int | None, common: Mapping[int, Any], own: Sequence[Any] = ()
    ) -> list[Any]:
        """Compute a part's outputs, or the shared ones, after all exchanges.

        Args:
            part: Which part; None for the shared outputs.
            common: What is known after all exchanges.
            own: The values of the part's inputs.
        """
        wanted = [self._graph.outputs[i] for i in self.outputs_of(part)]
        known = dict(common) if part is None else {**common, **self._given(part, own)}
        found = evaluate(self._graph, wanted, known)
        return [found[value] for value in wanted]

    def _exported_by(self, number: int, part: int) -> list[int]:
        place = self._places.place
        return [value for value in self._exports[number] if place[value] == part]

    def _given(self, part: int | None, values: Sequence[Any]) -> dict[int, Any]:
        numbers = [self._graph.inputs[i] for i in self.inputs_of(part)]
        return dict(zip(numbers, values, strict=True))

    def _shared_outputs(self) -> list[int]:
        return [self._graph.outputs[i] for i in self.outputs_of(None)]


class _Places:
    """Where the values of a graph are computed, and after how many exchanges."""

    def __init__(self, graph: Graph, leaves: Sequence[Leaf]) -> None:
        self.place: list[int | None] = [None] * len(graph.shapes)
        self.level = [0] * len(graph.shapes)
        self.exported: dict[int, int] = {}
        self._shapes = graph.shapes
        self._layer = [""] * len(graph.shapes)
        """A layer that each value is computed from, to name it."""
        for value, leaf in zip(graph.inputs, leaves, strict=True):
            self.place[value], self._layer[value] = leaf.part, leaf.layer
        for operation in graph.operations:
            self._visit(operation)

    def export(self, value: int) -> int:
        """Exchange a value; return the level at which everyone knows it."""
        self.exported[value] = self.level[value]
        return self.level[value] + 1

    def can_export(self, value: int) -> bool:
        shape = self._shapes[value]
        return _is_small(shape) and not _is_key(shape)

    def layer(self, value: int) -> str:
        return self._layer[value]

    def _visit(self, operation: Operation) -> None:
        local = [v for v in operation.inputs if self.place[v] is not None]
        exported = self._to_export(operation, local)
        kept = [v for v in operation.inputs if v not in exported]
        levels = [self.level[v] for v in kept] + [self.export(v) for v in exported]
        place = next((self.place[v] for v in local if v not in exported), None)
        layer = next((self._layer[v] for v in local), "")
        for value in operation.outputs:
            self.place[value], self._layer[value] = place, layer
            self.level[value] = max(levels, default=0)

    def _to_export(self, operation: Operation, local: list[int]) -> set[int]:
        """Choose the operands that have to be exchanged for an operation."""
        places = {self.place[v] for v in local}
        if not local or (len(places) == 1 and not self._joins(operation, local)):
            return set()
        homes = {self.place[v] for v in local if self._shapes[v].size > 1}
        # Arrays of one part and numbers of others: the result stays with the arrays.
        home = homes.pop() if len(homes) == 1 else None
        chosen = {v for v in local if self.place[v] != home}
        if not all(map(self.can_export, chosen)):
            self._refuse_operation(operation, local)
        return chosen

    def _joins(self, operation: Operation, local: list[int]) -> bool:
        """Tell whether an operation adds one more number to what was exchanged.

        A sum over layers is a chain of additions. Its first exchange may as well bring
        all of the numbers; kept on their device, each would need another one.
        """
        numbers = [*operation.inputs, *operation.outputs]
        if any(self._shapes[v].size != 1 for v in numbers):
            return False
        shared = [self.level[v] for v in operation.inputs if v not in local]
        own = max(self.level[v] for v in local)
        return max(shared, default=0) > own and all(map(self.can_export, local))

    def _refuse_operation(self, operation: Operation, local: list[int]) -> None:
        first = local[0]
        other = next(v for v in local if self.place[v] != self.place[first])
        _refuse(operation.name, self._layer[first], self._layer[other])


def _settle(graph: Graph, leaves: list[Leaf]) -> _Places:
    """Find places such that every new value is where the old one is.

    Optimizer state is moved: to the part that computes its new value, or, if this is
    another part than the one it belongs to, everywhere. `leaves` is changed to say so.
    """
    moved: set[int] = set()
    while True:
        places, is_settled = _Places(graph, leaves), True
        for i, leaf in enumerate(leaves):
            if leaf.output is None:
                continue
            value = graph.outputs[leaf.output]
            place = places.place[value]
            if place is None or place == leaf.part:
                continue
            if leaf.is_state and i not in moved and leaf.part is None:
                leaves[i] = leaf._replace(part=place, layer=places.layer(value))
                is_settled = False
            elif not places.can_export(value):
                _refuse("", leaf.layer, places.layer(value))
            elif leaf.is_state and leaf.part is not None:
                leaves[i] = leaf._replace(part=None)
                is_settled = False
            else:
                places.export(value)
            moved.add(i)
        if is_settled:
            return places


def _refuse(name: str, layer: str, other: str) -> None:
    """Say that two layers cannot be updated on different devices."""
    how = f" (in an operation {name})" if name else ""
    raise ConfigurationError(
        f"This optimizer's update combines whole arrays of the layers {layer} and {other}"
        f"{how}, which a pipeline keeps and updates apart. Only values of up to "
        f"{_SMALL_BYTES // 1024} KiB, such as norms, are exchanged between its devices. "
        "Keep both layers on one device (device_mapping) without "
        "optimizer_state_offloading, or choose another optimizer."
    )


def _outside(graph: Graph, places: _Places, outputs: Sequence[int]) -> list[int]:
    """Return the shared values to compute outside of any branch.

    Large ones that only a branch needs (random numbers for each weight, say) are made
    inside it, so that no device makes those of all others.
    """
    wanted = set(outputs)
    for operation in graph.operations:
        is_shared = all(
            places.place[v] is None and _is_small(graph.shapes[v])
            for v in operation.outputs
        )
        if not is_shared:
            wanted.update(operation.inputs)
    return [
        v
        for v in sorted(wanted)
        if places.place[v] is None and (v in outputs or _is_small(graph.shapes[v]))
    ]


def _is_small(shape: Any) -> bool:
    return shape.size * shape.dtype.itemsize <= _SMALL_BYTES


def _is_key(shape: Any) -> bool:
    return jnp.issubdtype(shape.dtype, jax.dtypes.extended)


def _exchanged_shape(shape: Any) -> Any:
    """Truth values travel as integers, which can be added."""
    dtype = jnp.int32 if shape.dtype == jnp.bool_ else shape.dtype
    return jax.ShapeDtypeStruct(shape.shape, dtype)
