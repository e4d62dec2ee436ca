"""Loss scaling: keep small float16 gradients from vanishing, and large ones finite."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

_INITIAL = 2.0**15
_SMALLEST, _LARGEST = 1.0, 2.0**24
_GOOD_UPDATES_BEFORE_GROWTH = 2000  # as in torch.amp and NVIDIA's examples


class LossScale(NamedTuple):
    """The factor on the loss and how many updates in a row it has served."""

    factor: jax.Array
    good_updates: jax.Array
    skipped: jax.Array
    """Updates that overflowed and changed nothing, in all."""


def initial_loss_scale(setting: float | Literal["dynamic"]) -> LossScale:
    """Start from the plan's setting; 0 means no scaling, a factor of 1."""
    factor = _INITIAL if setting == "dynamic" else setting or 1.0
    return LossScale(jnp.float32(factor), jnp.int32(0), jnp.int32(0))


def adjust(scale: LossScale, finite: jax.Array) -> LossScale:
    """Halve the factor after an overflow; double it after 2,000 updates without one."""
    good = jnp.where(finite, scale.good_updates + 1, 0)
    grow = good >= _GOOD_UPDATES_BEFORE_GROWTH
    factor = jnp.where(finite, scale.factor, scale.factor / 2)
    factor = jnp.where(grow, factor * 2, factor)
    return LossScale(
        jnp.clip(factor, _SMALLEST, _LARGEST),
        jnp.where(grow, 0, good),
        jnp.where(finite, scale.skipped, scale.skipped + 1),
    )


def all_finite(tree: Any) -> jax.Array:
    """Tell whether every number in the tree is finite."""
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return jnp.stack(leaves).all() if leaves else jnp.bool_(True)
