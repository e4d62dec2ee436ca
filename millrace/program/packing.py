"""Pytrees packed into flat buffers, one per dtype.

All devices of a pipeline run the same program on arrays of the same shapes, but hold
different weights. Flat buffers, padded to the longest, hide the difference: whatever
differs between devices is packed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.config import ConfigurationError
from millrace.program.accumulate import path_name

Buffers = dict[str, Any]
"""One-dimensional arrays, or stacks of them, by the name of their dtype."""


class BufferSlice(NamedTuple):
    """The place of one leaf."""

    dtype: str
    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class BufferLayout(NamedTuple):
    """The places of a tree's leaves in buffers that may also hold other trees."""

    tree: Any
    """The tree's structure."""
    slices: tuple[BufferSlice, ...]
    sizes: Mapping[str, int]
    """Sizes of the buffers up to the end of this tree, by dtype."""


def build_layout(tree: Any, start: Mapping[str, int] | None = None) -> BufferLayout:
    """Place the leaves of a tree one after the other, beginning at `start`."""
    sizes = dict(start or {})
    named, structure = jax.tree_util.tree_flatten_with_path(tree)
    slices = []
    for path, leaf in named:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ConfigurationError(
                f"{path_name(path)} is a random key, which a pipeline cannot pack. Store "
                "its words, jax.random.key_data(key), and restore the key with "
                "jax.random.wrap_key_data."
            )
        name = str(leaf.dtype)
        place = BufferSlice(name, sizes.get(name, 0), tuple(leaf.shape))
        sizes[name] = place.offset + place.size
        slices.append(place)
    return BufferLayout(structure, tuple(slices), sizes)


def build_sectioned_layout(sections: Sequence[Mapping[str, Any]]) -> BufferLayout:
    """Lay out a dictionary given in sections, each contiguous in every buffer."""
    sizes: Mapping[str, int] = {}
    slices: dict[str, Any] = {}
    for section in sections:
        layout = build_layout(section, sizes)
        sizes = layout.sizes
        slices |= jax.tree.unflatten(layout.tree, layout.slices)
    leaves, structure = jax.tree.flatten(slices, is_leaf=is_slice)
    return BufferLayout(structure, tuple(leaves), sizes)


def is_slice(x: Any) -> bool:
    """Whether `x` is a leaf in a tree of slices; a NamedTuple is a pytree otherwise."""
    return isinstance(x, BufferSlice)


def max_sizes(sizes: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return buffer sizes that are large enough for each of several sets of buffers."""
    largest: dict[str, int] = {}
    for each in sizes:
        for name, size in each.items():
            largest[name] = max(largest.get(name, 0), size)
    return largest


def zero_buffers(sizes: Mapping[str, int], *dims: int) -> Buffers:
    """Return buffers of zeros, with leading `dims`."""
    return {name: jnp.zeros((*dims, size), name) for name, size in sizes.items()}


def pack(layout: BufferLayout, tree: Any, sizes: Mapping[str, int]) -> Buffers:
    """Concatenate the leaves of a tree into new buffers, padded with zeros."""
    parts: dict[str, list[Any]] = {name: [] for name in sizes}
    for place, leaf in zip(layout.slices, jax.tree.leaves(tree), strict=True):
        parts[place.dtype].append(jnp.ravel(leaf).astype(place.dtype))
    buffers = {}
    for name, size in sizes.items():
        rest = size - sum(part.size for part in parts[name])
        filled = [*parts[name], jnp.zeros(rest, name)] if rest else parts[name]
        buffers[name] = jnp.concatenate(filled) if len(filled) != 1 else filled[0]
    return buffers


def unpack(layout: BufferLayout, buffers: Mapping[str, Any]) -> Any:
    """Read a tree from buffers of NumPy or JAX arrays."""
    leaves = [
        buffers[s.dtype][s.offset : s.offset + s.size].reshape(s.shape)
        for s in layout.slices
    ]
    return jax.tree.unflatten(layout.tree, leaves)


def select(layout: BufferLayout, names: Iterable[str]) -> BufferLayout:
    """Return the layout of some values of a dictionary."""
    slices = jax.tree.unflatten(layout.tree, layout.slices)
    chosen = {name: slices[name] for name in names if name in slices}
    leaves, structure = jax.tree.flatten(chosen, is_leaf=is_slice)
    return BufferLayout(structure, tuple(leaves), layout.sizes)


def section_bounds(layout: BufferLayout) -> dict[str, tuple[int, int]]:
    """Return start and length of a contiguous tree in each buffer."""
    bounds: dict[str, tuple[int, int]] = {}
    for place in layout.slices:
        start, length = bounds.get(place.dtype, (place.offset, 0))
        assert place.offset == start + length, "a section must be contiguous"
        bounds[place.dtype] = (start, length + place.size)
    return bounds


def pack_section(layout: BufferLayout, tree: Any) -> Buffers:
    """Pack a contiguous tree into buffers of exactly its size."""
    bounds = section_bounds(layout)
    return pack(layout, tree, {name: length for name, (_, length) in bounds.items()})


def replace_section(layout: BufferLayout, buffers: Buffers, tree: Any) -> Buffers:
    """Return the buffers with a contiguous tree written to its place."""
    flat, new = pack_section(layout, tree), dict(buffers)
    for name, (start, _) in section_bounds(layout).items():
        new[name] = jax.lax.dynamic_update_slice(new[name], flat[name], (start,))
    return new


def write_numpy(layout: BufferLayout, buffers: Mapping[str, np.ndarray], tree: Any) -> None:
    """Write a tree into NumPy buffers, in place."""
    for s, leaf in zip(layout.slices, jax.tree.leaves(tree), strict=True):
        buffers[s.dtype][s.offset : s.offset + s.size] = np.asarray(leaf).ravel()
