"""First weights: a model's are all drawn by one program, not by one of each layer's own.

Drawing is much to compile: layer by layer that took 31 s for EfficientNet-B4 on two CPU
cores, and half a minute on a GPU.
"""

import zlib
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Kind = Literal["normal", "truncated_normal", "uniform"]

_BLOCK = 1024
"""Numbers that are drawn with one key."""
_STANDARD = {
    "normal": jax.random.normal,
    # Cut at two standard deviations, and widened to have one again.
    "truncated_normal": lambda key, shape: (
        jax.random.truncated_normal(key, -2, 2, shape) / 0.87962566
    ),
    "uniform": lambda key, shape: jax.random.uniform(key, shape, minval=-1, maxval=1),
}


@dataclass(frozen=True)
class Init:
    """A weight that is yet to be drawn; it stands for an array of this shape."""

    kind: Kind
    shape: tuple[int, ...]
    scale: float
    """The standard deviation, or how far a uniform one reaches to either side of 0."""
    dtype = jnp.float32

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return int(np.prod(self.shape))


def init_tree(tree: Any, key: jax.Array) -> Any:
    """Draw what is yet to be drawn; what a leaf becomes depends on its path alone."""
    places, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in places]
    for kind in _STANDARD:
        chosen = [n for n, leaf in enumerate(leaves) if _is(leaf, kind)]
        names = [_number(jax.tree_util.keystr(places[n][0])) for n in chosen]
        sizes = [leaves[n].size for n in chosen]
        for n, numbers in zip(chosen, _drawn(kind, key, names, sizes), strict=True):
            leaves[n] = leaves[n].scale * numbers.reshape(leaves[n].shape)
    return jax.tree.unflatten(structure, leaves)


def _is(leaf: Any, kind: str) -> bool:
    return isinstance(leaf, Init) and leaf.kind == kind


def _number(name: str) -> int:
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def _drawn(
    kind: str, key: jax.Array, names: list[int], sizes: list[int]
) -> list[jax.Array]:
    """Draw as many standard numbers as each is to have, all at once, block by block."""
    if not sizes:
        return []
    blocks = [-(-size // _BLOCK) for size in sizes]
    of_leaf = np.repeat(np.array(names, np.uint32), blocks)
    in_leaf = np.concatenate([np.arange(count, dtype=np.uint32) for count in blocks])
    fold = jax.random.fold_in
    keys = jax.vmap(lambda leaf, block: fold(fold(key, leaf), block))(of_leaf, in_leaf)
    numbers = jax.vmap(lambda one: _STANDARD[kind](one, (_BLOCK,)))(keys).ravel()
    starts = _BLOCK * (np.cumsum(blocks) - blocks)
    return [numbers[at : at + size] for at, size in zip(starts, sizes, strict=True)]
