"""Trees as flat buffers, one for each type of number.

Every device of a pipeline runs the same program on arrays of the same shapes, but each
holds other weights. So what differs from device to device is packed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.config import ConfigurationError
from millrace.program.accumulate import path_name

Buffers = dict[str, Any]
"""One-dimensional arrays by the name of their type."""


class Entry(NamedTuple):
    """Where one leaf lies."""

    dtype: str
    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


class Layout(NamedTuple):
    """Where the leaves of a tree lie in buffers that they may share with other trees."""

    tree: Any
    """The tree's structure."""
    entries: tuple[Entry, ...]
    sizes: Mapping[str, int]
    """Of the buffers up to the end of this tree."""


def lay_out(tree: Any, start: Mapping[str, int] | None = None) -> Layout:
    """Place a tree's leaves one after the other, from `start` on."""
    sizes = dict(start or {})
    named, structure = jax.tree_util.tree_flatten_with_path(tree)
    entries = []
    for path, leaf in named:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ConfigurationError(
                f"{path_name(path)} is a random key, which a pipeline cannot pack with its "
                "numbers. Keep its words, jax.random.key_data(key), and make the key from "
                "them with jax.random.wrap_key_data."
            )
        name = str(leaf.dtype)
        entry = Entry(name, sizes.get(name, 0), tuple(leaf.shape))
        sizes[name] = entry.offset + entry.size
        entries.append(entry)
    return Layout(structure, tuple(entries), sizes)


def lay_out_in_pieces(pieces: Sequence[Mapping[str, Any]]) -> Layout:
    """Lay out a dictionary given in pieces, so that each piece lies in one section."""
    sizes: Mapping[str, int] = {}
    entries: dict[str, Any] = {}
    for piece in pieces:
        layout = lay_out(piece, sizes)
        sizes = layout.sizes
        entries |= jax.tree.unflatten(layout.tree, layout.entries)
    leaves, structure = jax.tree.flatten(entries, is_leaf=is_entry)
    return Layout(structure, tuple(leaves), sizes)


def is_entry(x: Any) -> bool:
    """Tell an entry from the trees of entries that it is a leaf of."""
    return isinstance(x, Entry)


def largest(sizes: Any) -> dict[str, int]:
    """Return buffer sizes that hold any one of several sets of buffers."""
    largest: dict[str, int] = {}
    for each in sizes:
        for name, size in each.items():
            largest[name] = max(largest.get(name, 0), size)
    return largest


def empty(sizes: Mapping[str, int], *dims: int) -> Buffers:
    """Make buffers of zeros."""
    return {name: jnp.zeros((*dims, size), name) for name, size in sizes.items()}


def pack(layout: Layout, tree: Any, sizes: Mapping[str, int]) -> Buffers:
    """Write a tree's leaves one after the other into new buffers, zeros behind them."""
    parts: dict[str, list[Any]] = {name: [] for name in sizes}
    for entry, leaf in zip(layout.entries, jax.tree.leaves(tree), strict=True):
        parts[entry.dtype].append(jnp.ravel(leaf).astype(entry.dtype))
    buffers = {}
    for name, size in sizes.items():
        rest = size - sum(part.size for part in parts[name])
        filled = [*parts[name], jnp.zeros(rest, name)] if rest else parts[name]
        buffers[name] = jnp.concatenate(filled) if len(filled) != 1 else filled[0]
    return buffers


def unpack(layout: Layout, buffers: Mapping[str, Any]) -> Any:
    """Read a tree from buffers (NumPy's or JAX's)."""
    leaves = [
        buffers[e.dtype][e.offset : e.offset + e.size].reshape(e.shape)
        for e in layout.entries
    ]
    return jax.tree.unflatten(layout.tree, leaves)


def part(layout: Layout, names: Any) -> Layout:
    """Return the layout of some of a dictionary's values."""
    entries = jax.tree.unflatten(layout.tree, layout.entries)
    chosen = {name: entries[name] for name in names if name in entries}
    leaves, structure = jax.tree.flatten(chosen, is_leaf=is_entry)
    return Layout(structure, tuple(leaves), layout.sizes)


def section(layout: Layout) -> dict[str, tuple[int, int]]:
    """Return start and length of what a tree takes up of each buffer, without gaps."""
    found: dict[str, tuple[int, int]] = {}
    for entry in layout.entries:
        start, length = found.get(entry.dtype, (entry.offset, 0))
        assert entry.offset == start + length, "a tree must lie in one piece"
        found[entry.dtype] = (start, length + entry.size)
    return found


def replaced(layout: Layout, buffers: Buffers, tree: Any) -> Buffers:
    """Return the buffers with a tree, which lies in one piece, written at its place."""
    where = section(layout)
    flat = pack(layout, tree, {name: length for name, (_, length) in where.items()})
    new = dict(buffers)
    for name, (start, _) in where.items():
        new[name] = jax.lax.dynamic_update_slice(new[name], flat[name], (start,))
    return new


def write_numpy(layout: Layout, buffers: Mapping[str, np.ndarray], tree: Any) -> None:
    """Write a tree into NumPy buffers, in place."""
    for e, leaf in zip(layout.entries, jax.tree.leaves(tree), strict=True):
        buffers[e.dtype][e.offset : e.offset + e.size] = np.asarray(leaf).ravel()
