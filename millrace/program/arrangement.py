"""Where everything of a pipelined training state lies.

Users and checkpoints see weights, carried values and the optimiser's state as trees over
the whole model. A pipeline's program holds them as flat buffers (devices, numbers), each
device's row with the numbers of its stages. This module goes from one to the other.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from millrace.nn.layers import Tree
from millrace.plan import Plan
from millrace.program.accumulate import accumulator_types
from millrace.program.carried import addable
from millrace.program.optimizer_state import init_optimizer_state
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
from millrace.program.stages import StagedModel
from millrace.program.step import Step, TrainState

_BUCKET_BYTES = 64 << 20
"""Of optimiser state that is streamed at a time where it rests in host memory."""


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
    carried: Rows
    changes: Rows
    """What micro-batches contribute to the carried values, added up."""
    gradients: Rows
    optimiser: tuple[Rows, ...]
    """One or, where it is streamed, several buckets."""
    buckets: tuple[tuple[tuple[str, ...], ...], ...]
    """By bucket and device, the layers whose weights it updates."""


def arrange(step: Step, model: StagedModel, params: Tree, carried: Tree) -> Arrangement:
    """Lay the values of a model out, given as arrays or shapes."""
    plan = step.plan
    types = accumulator_types(params, plan.gradient_accumulation_dtype)
    gradients = jax.tree.map(lambda p, t: jax.ShapeDtypeStruct(p.shape, t), params, types)
    buckets = _buckets(plan, model, params)
    by_bucket = list(zip(*buckets, strict=True))
    by_stage = [
        [model.names(stage) for stage in model.stages_on(device)]
        for device in range(model.stages.num_devices)
    ]

    def state_of(names: Sequence[str]) -> Any:
        part = {name: params[name] for name in names}
        return jax.eval_shape(lambda p: init_optimizer_state(step.optimiser, p), part)

    return Arrangement(
        model,
        _rows(by_bucket, params),
        _rows(by_stage, carried),
        _rows(by_stage, jax.eval_shape(addable, carried)),
        _rows(by_stage, gradients),
        tuple(
            _as_rows([lay_out(state_of(names)) for names in bucket]) for bucket in buckets
        ),
        buckets,
    )


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
    params, carried = jax.device_get((state.params, state.carried))
    whole_state = dict(_by_path(jax.device_get(state.optimiser_state)))
    optimiser = []
    for rows in arrangement.optimiser:
        trees = [
            jax.tree.unflatten(layout.tree, [whole_state[p] for p in _paths(layout)])
            for layout in rows.layouts
        ]
        optimiser.append(_filled(rows, trees))
    return state._replace(
        params=_filled(arrangement.params, _parts(arrangement.params, params)),
        carried=_filled(arrangement.carried, _parts(arrangement.carried, carried)),
        optimiser_state=tuple(optimiser),
    )


def to_trees(arrangement: Arrangement, state: TrainState, like: TrainState) -> TrainState:
    """Unpack a pipeline's state; `like` is a whole state with the trees' structure."""
    buffers = jax.tree.map(fetch, (state.params, state.carried, state.optimiser_state))
    params = _merged(arrangement.params, buffers[0])
    carried = _merged(arrangement.carried, buffers[1])
    found: dict[str, Any] = {}
    for rows, bucket in zip(arrangement.optimiser, buffers[2], strict=True):
        for device, layout in enumerate(rows.layouts):
            tree = unpack(layout, {name: rows_[device] for name, rows_ in bucket.items()})
            for path, leaf in _by_path(tree):
                found.setdefault(path, leaf)
    leaves = [found[path] for path, _ in _by_path(like.optimiser_state)]
    structure = jax.tree.structure(like.optimiser_state)
    return state._replace(
        params={name: params[name] for name in like.params},
        carried={name: carried[name] for name in like.carried},
        optimiser_state=jax.tree.unflatten(structure, leaves),
    )


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


def _by_path(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def _paths(layout: Layout) -> list[str]:
    tree = jax.tree.unflatten(layout.tree, range(len(layout.entries)))
    return [path for path, _ in _by_path(tree)]
