"""Where everything of a pipelined training state lies.

Users and checkpoints see weights, model state and the optimizer's state as trees over
the whole model. A pipeline's program holds them as flat buffers (devices, numbers), each
device's row with the numbers of its stages. This module goes from one to the other.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.nn.layers import Tree
from millrace.plan import Plan
from millrace.program.accumulate import accumulator_types
from millrace.program.model_state import addable
from millrace.program.packed_state import OptimizerRows
from millrace.program.packing import (
    Buffers,
    Layout,
    largest,
    lay_out,
    lay_out_in_pieces,
    unpack,
    write_numpy,
)
from millrace.program.replicas import fetch
from millrace.program.separated_update import Leaf, SeparatedUpdate
from millrace.program.stages import StagedModel
from millrace.program.step import Step, TrainState, new_weights

_BUCKET_BYTES = 64 << 20
"""Of optimizer state that is streamed at a time where it rests in host memory."""


class Rows(NamedTuple):
    """A kind of value, laid out on every device."""

    layouts: tuple[Layout, ...]
    """By device."""
    sizes: dict[str, int]
    """Of a row, long enough for any device's values."""


class Arrangement(NamedTuple):
    """Layouts of a model's values on the devices of a pipeline."""

    model: StagedModel
    params: Rows
    model_state: Rows
    changes: Rows
    """What micro-batches contribute to the model state, added up."""
    gradients: Rows
    optimizer: tuple[Rows, ...]
    """By bucket, with leaves in the order of the whole state's."""
    buckets: tuple[tuple[tuple[str, ...], ...], ...]
    """By bucket and device, the layers whose weights it updates."""
    update: SeparatedUpdate
    """The optimizer's update, with a part for every bucket and device (``part_of``)."""

    def part_of(self, bucket: int, device: int) -> int:
        """Number the part of the update that a device makes with a bucket."""
        return bucket * self.model.stages.num_devices + device

    def state_positions(self, part: int | None) -> list[int]:
        """Positions of a part's (or the shared) leaves in the optimizer's whole state."""
        num_params = sum(len(layout.entries) for layout in self.params.layouts)
        found = (i - num_params for i in self.update.outputs_of(part))
        return [position for position in found if position >= 0]


def arrange(step: Step, model: StagedModel, whole: TrainState) -> Arrangement:
    """Lay the values of a model out; `whole` is a whole state, or its shapes."""
    plan, params, model_state = step.plan, whole.params, whole.model_state
    types = accumulator_types(params, plan.gradient_accumulation_dtype)
    gradients = jax.tree.map(lambda p, t: jax.ShapeDtypeStruct(p.shape, t), params, types)
    buckets = _buckets(plan, model, params)
    by_bucket = list(zip(*buckets, strict=True))
    by_stage = [
        [model.names(stage) for stage in model.stages_on(device)]
        for device in range(model.stages.num_devices)
    ]
    arrangement = Arrangement(
        model,
        _rows(by_bucket, params),
        _rows(by_stage, model_state),
        _rows(by_stage, jax.eval_shape(addable, model_state)),
        _rows(by_stage, gradients),
        (),
        buckets,
        _separated(step, whole, gradients, buckets),
    )
    leaves = jax.tree.leaves(whole.optimizer_state)
    return arrangement._replace(
        optimizer=tuple(
            _as_rows(
                [
                    lay_out([leaves[i] for i in positions])
                    for positions in _positions(arrangement, bucket)
                ]
            )
            for bucket in range(len(buckets))
        )
    )


def _positions(arrangement: Arrangement, bucket: int) -> list[list[int]]:
    """By device, the positions of the state's leaves that a bucket holds."""
    return [
        arrangement.state_positions(arrangement.part_of(bucket, device))
        for device in range(arrangement.model.stages.num_devices)
    ]


def _separated(
    step: Step,
    whole: TrainState,
    gradients: Tree,
    buckets: Sequence[Sequence[Sequence[str]]],
) -> SeparatedUpdate:
    """Split the update of the whole model into that of each bucket on each device."""
    parts = [names for bucket in buckets for names in bucket]
    part_of = {name: part for part, names in enumerate(parts) for name in names}
    layers = {path: path[0].key for path in _paths(whole.params)}
    own = [
        Leaf(part_of[layer], layer, output) for output, layer in enumerate(layers.values())
    ]
    leaves = [*own, *(leaf._replace(output=None) for leaf in own)]
    for output, path in enumerate(_paths(whole.optimizer_state), len(own)):
        # Optax keeps what belongs to a weight under the weight's own path.
        ends = (path[start:] for start in range(len(path)))
        layer = next((layers[end] for end in ends if end in layers), "")
        leaves.append(Leaf(part_of.get(layer), layer, output, is_state=True))
    rest = common_inputs(
        whole, jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((), jnp.float32)
    )
    leaves += [Leaf(None)] * len(jax.tree.leaves(rest))

    def update(params: Tree, gradients: Tree, optimizer: Any, rest: Any) -> Any:
        state, finite, loss = rest
        state = state._replace(params=params, optimizer_state=optimizer)
        return new_weights(step, state, gradients, finite, loss)

    arguments = (whole.params, gradients, whole.optimizer_state, rest)
    shapes = jax.eval_shape(lambda *trees: trees, *arguments)
    return SeparatedUpdate(update, shapes, leaves)


def common_inputs(state: TrainState, finite: Any, loss: Any) -> Any:
    """Return what an update needs that every device has, apart from optimizer state.

    Args:
        state: A state, in any form.
        finite: Whether all gradients are finite.
        loss: The mean over micro-batches and replicas.
    """
    rest = state._replace(params=None, model_state=None, optimizer_state=None)
    return rest, finite, loss


def _rows(devices: Sequence[Sequence[Sequence[str]]], tree: Tree) -> Rows:
    """Lay a tree's layers out: by device, in pieces that are given as layer names."""
    return _as_rows(
        [
            lay_out_in_pieces(
                [{name: tree[name] for name in names if name in tree} for names in pieces]
            )
            for pieces in devices
        ]
    )


def _as_rows(layouts: Sequence[Layout]) -> Rows:
    return Rows(tuple(layouts), largest(layout.sizes for layout in layouts))


def _buckets(
    plan: Plan, model: StagedModel, params: Tree
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Share each device's layers out over buckets; one, where the state stays."""
    limit = _BUCKET_BYTES if plan.optimizer_state_offloading else float("inf")
    devices: list[list[list[str]]] = []
    for device in range(model.stages.num_devices):
        buckets, room = [[]], limit
        for name in (name for name in model.layers_on(device) if name in params):
            size = sum(4 * leaf.size for leaf in jax.tree.leaves(params[name]))
            if size > room and buckets[-1]:
                buckets.append([])
                room = limit
            buckets[-1].append(name)
            room -= size
        devices.append(buckets)
    count = max(map(len, devices))
    return tuple(
        tuple(tuple(b[i]) if i < len(b) else () for b in devices) for i in range(count)
    )


def to_buffers(arrangement: Arrangement, state: TrainState) -> TrainState:
    """Pack the trees of a whole state (as NumPy arrays) for the pipeline's program."""
    params, model_state = jax.device_get((state.params, state.model_state))
    leaves = jax.tree.leaves(state.optimizer_state)
    buckets = []
    for number, rows in enumerate(arrangement.optimizer):
        trees = [
            jax.device_get([leaves[i] for i in positions])
            for positions in _positions(arrangement, number)
        ]
        buckets.append(_filled(rows, trees))
    shared = tuple(leaves[i] for i in arrangement.state_positions(None))
    return state._replace(
        params=_filled(arrangement.params, _parts(arrangement.params, params)),
        model_state=_filled(
            arrangement.model_state, _parts(arrangement.model_state, model_state)
        ),
        optimizer_state=OptimizerRows(tuple(buckets), shared),
    )


def to_trees(arrangement: Arrangement, state: TrainState, like: TrainState) -> TrainState:
    """Unpack a pipeline's state; `like` is a whole state with the trees' structure."""
    buffers = jax.tree.map(
        fetch, (state.params, state.model_state, state.optimizer_state.buckets)
    )
    params = _merged(arrangement.params, buffers[0])
    model_state = _merged(arrangement.model_state, buffers[1])
    structure = jax.tree.structure(like.optimizer_state)
    leaves: list[Any] = [None] * structure.num_leaves
    for i, leaf in zip(
        arrangement.state_positions(None), state.optimizer_state.shared, strict=True
    ):
        leaves[i] = _fetched(leaf)
    for number, (rows, bucket) in enumerate(
        zip(arrangement.optimizer, buffers[2], strict=True)
    ):
        for device, positions in enumerate(_positions(arrangement, number)):
            own = {name: rows_[device] for name, rows_ in bucket.items()}
            for i, leaf in zip(positions, unpack(rows.layouts[device], own), strict=True):
                leaves[i] = leaf
    return state._replace(
        params={name: params[name] for name in like.params},
        model_state={name: model_state[name] for name in like.model_state},
        optimizer_state=jax.tree.unflatten(structure, leaves),
    )


def _fetched(leaf: Any) -> Any:
    """Return a shared leaf in host memory; a random key, which NumPy has not, as it is."""
    return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else fetch(leaf)


def _parts(rows: Rows, tree: Tree) -> list[Tree]:
    names = [_names(layout) for layout in rows.layouts]
    return [{name: tree[name] for name in own} for own in names]


def _names(layout: Layout) -> list[str]:
    return list(jax.tree.unflatten(layout.tree, layout.entries))


def _filled(rows: Rows, trees: Sequence[Any]) -> Buffers:
    buffers = {
        name: np.zeros((len(trees), size), name) for name, size in rows.sizes.items()
    }
    for device, (layout, tree) in enumerate(zip(rows.layouts, trees, strict=True)):
        write_numpy(layout, {name: b[device] for name, b in buffers.items()}, tree)
    return buffers


def _merged(rows: Rows, buffers: Buffers) -> Tree:
    merged: Tree = {}
    for device, layout in enumerate(rows.layouts):
        merged |= unpack(layout, {name: b[device] for name, b in buffers.items()})
    return merged


def _paths(tree: Any) -> list[tuple[Any, ...]]:
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
