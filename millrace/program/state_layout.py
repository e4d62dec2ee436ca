"""The training state of a pipeline: where each value is in the buffers of each device.

Users and checkpoints see weights, model state and optimizer state as trees over the whole
model. The program of a pipeline holds them *packed*: as buffers (devices, numbers), each
device's row with the values of its stages. This module converts between the two.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from millrace.nn.layers import Tree
from millrace.plan import Plan
from millrace.program.accumulate import accumulator_dtypes, path_name, to_summable
from millrace.program.packing import (
    BufferLayout,
    Buffers,
    build_layout,
    build_sectioned_layout,
    is_slice,
    max_sizes,
    unpack,
    write_numpy,
)
from millrace.program.partitioned_update import PartitionedUpdate, UpdateLeaf
from millrace.program.replicas import STAGE_AXIS, put_on_devices, to_host
from millrace.program.run_values import RunValue, replace_scalar
from millrace.program.splitting import StagedModel
from millrace.program.step import Step, TrainState, update_weights

_BUCKET_BYTES = 64 << 20
"""Optimizer state streamed at a time if it is kept in host memory."""


# --- a packed state ---


class PackedOptimizerState(NamedTuple):
    """The optimizer state as the program of a pipeline holds it."""

    buckets: tuple[Buffers, ...]
    """(devices, numbers) each; several if the state is streamed, else one."""
    shared: tuple[Any, ...]
    """What belongs to no layer, such as counts; the same on every device."""


ROW, SAME = PartitionSpec(STAGE_AXIS), PartitionSpec()
_OPTIMIZER: Any = PackedOptimizerState._make((ROW, SAME))
STATE: Any = TrainState._make((SAME, ROW, ROW, _OPTIMIZER, SAME, SAME))
"""Partition specs of a packed state."""


def is_packed(state: TrainState) -> bool:
    """Whether a state is packed for a pipeline."""
    return isinstance(state.optimizer_state, PackedOptimizerState)


def without_optimizer(state: TrainState) -> TrainState:
    """Return a packed state without its optimizer state."""
    return state._replace(optimizer_state=PackedOptimizerState((), ()))


def without_buckets(state: TrainState) -> TrainState:
    """Return a packed state without what is updated in buckets."""
    shared = state.optimizer_state.shared
    return state._replace(params=None, optimizer_state=PackedOptimizerState((), shared))


def own_row(state: TrainState) -> TrainState:
    """Return a device's shard of a packed state without the dim of devices."""
    return _map_rows(drop_device_dim, state)


def as_row(state: TrainState) -> TrainState:
    """Return a device's values as its shard of a packed state."""
    return _map_rows(add_device_dim, state)


def drop_device_dim(tree: Any) -> Any:
    """Remove the leading dim of every leaf."""
    return jax.tree.map(lambda x: x[0], tree)


def add_device_dim(tree: Any) -> Any:
    """Add a leading dim to every leaf."""
    return jax.tree.map(lambda x: x[None], tree)


def _map_rows(function: Callable[[Any], Any], state: TrainState) -> TrainState:
    optimizer = state.optimizer_state
    params, model_state, buckets = function(
        (state.params, state.model_state, optimizer.buckets)
    )
    return state._replace(
        params=params,
        model_state=model_state,
        optimizer_state=optimizer._replace(buckets=buckets),
    )


# --- its layout ---


class RowLayouts(NamedTuple):
    """The layout of one kind of value on every device."""

    layouts: tuple[BufferLayout, ...]
    """By device."""
    sizes: dict[str, int]
    """Sizes of a row, large enough for the values of any device."""


class StateLayout(NamedTuple):
    """Layouts of all values of a model on the devices of a pipeline."""

    model: StagedModel
    params: RowLayouts
    model_state: RowLayouts
    contributions: RowLayouts
    """Sums of what micro-batches contribute to the model state."""
    gradients: RowLayouts
    optimizer: tuple[RowLayouts, ...]
    """By bucket; the leaves are in the order of the whole state."""
    buckets: tuple[tuple[tuple[str, ...], ...], ...]
    """The layers whose weights are updated, by bucket and device."""
    update: PartitionedUpdate
    """The weight update, with one part per bucket and device (``part_index``)."""

    def part_index(self, bucket: int, device: int) -> int:
        """Return the part of the update that a device makes with a bucket."""
        return bucket * self.model.stages.num_devices + device

    def state_positions(self, part: int | None) -> list[int]:
        """Return positions in the whole optimizer state of a part's (or shared) leaves."""
        num_params = sum(len(layout.slices) for layout in self.params.layouts)
        positions = (i - num_params for i in self.update.output_positions(part))
        return [position for position in positions if position >= 0]

    def bucket_positions(self, bucket: int) -> list[list[int]]:
        """Return, by device, the positions of the state leaves in a bucket."""
        return [
            self.state_positions(self.part_index(bucket, device))
            for device in range(self.model.stages.num_devices)
        ]


def build_state_layout(step: Step, model: StagedModel, whole: TrainState) -> StateLayout:
    """Lay out the values of a model; `whole` is an unpacked state, or its shapes."""
    plan, params, model_state = step.plan, whole.params, whole.model_state
    dtypes = accumulator_dtypes(params, plan.gradient_accumulation_dtype)
    gradients = jax.tree.map(lambda p, t: jax.ShapeDtypeStruct(p.shape, t), params, dtypes)
    buckets = _assign_buckets(plan, model, params)
    # A section is what one program reads or writes at once: weights are updated by
    # bucket, everything else is computed by stage.
    by_bucket = list(zip(*buckets, strict=True))
    by_stage = [
        [model.names(stage) for stage in model.stages_on(device)]
        for device in range(model.stages.num_devices)
    ]
    layout = StateLayout(
        model=model,
        params=_sectioned_rows(by_bucket, params),
        model_state=_sectioned_rows(by_stage, model_state),
        contributions=_sectioned_rows(by_stage, jax.eval_shape(to_summable, model_state)),
        gradients=_sectioned_rows(by_stage, gradients),
        optimizer=(),
        buckets=buckets,
        update=_partition_update(step, whole, gradients, buckets),
    )
    leaves = jax.tree.leaves(whole.optimizer_state)
    return layout._replace(
        optimizer=tuple(
            _make_rows(
                [
                    build_layout([leaves[i] for i in positions])
                    for positions in layout.bucket_positions(bucket)
                ]
            )
            for bucket in range(len(buckets))
        )
    )


def _partition_update(
    step: Step,
    whole: TrainState,
    gradients: Tree,
    buckets: Sequence[Sequence[Sequence[str]]],
) -> PartitionedUpdate:
    """Partition the update of the whole model by bucket and device."""
    parts = [names for bucket in buckets for names in bucket]
    part_of = {name: part for part, names in enumerate(parts) for name in names}
    layers = {path: path[0].key for path in _paths(whole.params)}
    own = [
        UpdateLeaf(part_of[layer], layer, output)
        for output, layer in enumerate(layers.values())
    ]
    leaves = [*own, *(leaf._replace(output=None) for leaf in own)]
    for output, path in enumerate(_paths(whole.optimizer_state), len(own)):
        # Optax keeps what belongs to a weight under the weight's own path.
        suffixes = (path[start:] for start in range(len(path)))
        layer = next((layers[end] for end in suffixes if end in layers), "")
        leaves.append(UpdateLeaf(part_of.get(layer), layer, output, is_state=True))
    rest = shared_inputs(
        whole, jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((), jnp.float32)
    )
    leaves += [UpdateLeaf(None)] * len(jax.tree.leaves(rest))

    def update(params: Tree, gradients: Tree, optimizer: Any, rest: Any) -> Any:
        state, finite, loss = rest
        state = state._replace(params=params, optimizer_state=optimizer)
        return update_weights(step, state, gradients, finite, loss)

    arguments = (whole.params, gradients, whole.optimizer_state, rest)
    shapes = jax.eval_shape(lambda *trees: trees, *arguments)
    return PartitionedUpdate(update, shapes, leaves)


def shared_inputs(state: TrainState, finite: Any, loss: Any) -> Any:
    """Return the inputs of an update that every device has, besides optimizer state.

    Args:
        state: A state, packed or not.
        finite: Whether all gradients are finite.
        loss: The mean over micro-batches and replicas.
    """
    rest = state._replace(params=None, model_state=None, optimizer_state=None)
    return rest, finite, loss


def _sectioned_rows(devices: Sequence[Sequence[Sequence[str]]], tree: Tree) -> RowLayouts:
    """Lay out layers of a tree by device, in contiguous sections of layer names."""
    return _make_rows(
        [
            build_sectioned_layout(
                [{name: tree[name] for name in names if name in tree} for names in sections]
            )
            for sections in devices
        ]
    )


def _make_rows(layouts: Sequence[BufferLayout]) -> RowLayouts:
    return RowLayouts(tuple(layouts), max_sizes(layout.sizes for layout in layouts))


def _assign_buckets(
    plan: Plan, model: StagedModel, params: Tree
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Divide the layers of each device into buckets; one if the state is not offloaded."""
    limit = _BUCKET_BYTES if plan.optimizer_state_offloading else float("inf")
    devices: list[list[list[str]]] = []
    for device in range(model.stages.num_devices):
        buckets, room = [[]], limit
        for name in (name for name in model.layers_on(device) if name in params):
            # As if the state were one float32 array per weight.
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


def _paths(tree: Any) -> list[tuple[Any, ...]]:
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


# --- packing and unpacking ---


def pack_state(layout: StateLayout, state: TrainState) -> TrainState:
    """Pack a whole state into NumPy buffers."""
    params, model_state = jax.device_get((state.params, state.model_state))
    leaves = jax.tree.leaves(state.optimizer_state)
    buckets = []
    for number, rows in enumerate(layout.optimizer):
        trees = [
            jax.device_get([leaves[i] for i in positions])
            for positions in layout.bucket_positions(number)
        ]
        buckets.append(_fill_rows(rows, trees))
    shared = tuple(leaves[i] for i in layout.state_positions(None))
    return state._replace(
        params=_fill_rows(layout.params, _split_tree(layout.params, params)),
        model_state=_fill_rows(
            layout.model_state, _split_tree(layout.model_state, model_state)
        ),
        optimizer_state=PackedOptimizerState(tuple(buckets), shared),
    )


def unpack_state(layout: StateLayout, state: TrainState, like: TrainState) -> TrainState:
    """Unpack a state; `like` is a whole state with the structure of the trees."""
    params, model_state, buckets = jax.tree.map(
        to_host, (state.params, state.model_state, state.optimizer_state.buckets)
    )
    params = _merge_rows(layout.params, params)
    model_state = _merge_rows(layout.model_state, model_state)
    structure = jax.tree.structure(like.optimizer_state)
    leaves: list[Any] = [None] * structure.num_leaves
    for i, leaf in zip(
        layout.state_positions(None), state.optimizer_state.shared, strict=True
    ):
        # NumPy has no random keys.
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        leaves[i] = leaf if is_key else to_host(leaf)
    for number, (rows, bucket) in enumerate(zip(layout.optimizer, buckets, strict=True)):
        for device, positions in enumerate(layout.bucket_positions(number)):
            own = {name: values[device] for name, values in bucket.items()}
            for i, leaf in zip(positions, unpack(rows.layouts[device], own), strict=True):
                leaves[i] = leaf
    return state._replace(
        params={name: params[name] for name in like.params},
        model_state={name: model_state[name] for name in like.model_state},
        optimizer_state=jax.tree.unflatten(structure, leaves),
    )


def set_packed_values(
    layout: StateLayout,
    state: TrainState,
    hyperparameters: Sequence[RunValue],
    values: Mapping[str, Any],
) -> TrainState:
    """Return a packed state with new scalars, wherever they are in its buffers.

    Args:
        layout: The layout of the state.
        state: A packed state.
        hyperparameters: Positions of hyperparameters in the whole optimizer state.
        values: The new values, by name.
    """
    shared = list(state.optimizer_state.shared)
    places = {position: i for i, position in enumerate(layout.state_positions(None))}
    for name, position in hyperparameters:
        if name in values:
            # No weight owns a hyperparameter, so all devices have it.
            place = places[position]
            shared[place] = replace_scalar(shared[place], values[name])
    buffers = dict(state.model_state)
    for device, own in enumerate(layout.model_state.layouts):
        slices = jax.tree.unflatten(own.tree, own.slices)
        flat = jax.tree_util.tree_leaves_with_path(slices, is_leaf=is_slice)
        for path, place in flat:
            if not place.shape and (name := path_name(path[-1:])) in values:
                row = buffers[place.dtype]
                index = (device, place.offset)
                buffers[place.dtype] = _set_element(row, index, values[name])
    return state._replace(
        model_state=buffers,
        optimizer_state=state.optimizer_state._replace(shared=tuple(shared)),
    )


def _set_element(rows: jax.Array, index: tuple[int, int], value: Any) -> jax.Array:
    """Return packed buffers with one element replaced."""
    changed = np.array(to_host(rows))
    changed[index] = value
    return put_on_devices(changed, rows.sharding)


def _split_tree(rows: RowLayouts, tree: Tree) -> list[Tree]:
    names = [jax.tree.unflatten(each.tree, each.slices) for each in rows.layouts]
    return [{name: tree[name] for name in own} for own in names]


def _fill_rows(rows: RowLayouts, trees: Sequence[Any]) -> Buffers:
    buffers = {
        name: np.zeros((len(trees), size), name) for name, size in rows.sizes.items()
    }
    for device, (layout, tree) in enumerate(zip(rows.layouts, trees, strict=True)):
        write_numpy(layout, {name: b[device] for name, b in buffers.items()}, tree)
    return buffers


def _merge_rows(rows: RowLayouts, buffers: Buffers) -> Tree:
    merged: Tree = {}
    for device, layout in enumerate(rows.layouts):
        merged |= unpack(layout, {name: b[device] for name, b in buffers.items()})
    return merged
