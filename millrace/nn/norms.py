"""Batch norm, optionally over groups of replicas, and group norm."""

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32, Num

from millrace.nn.layers import Call, Layer, Tree

Activations = Float[Array, "batch *pixels channels"]

NUM_UPDATES = "num_updates"
"""Entry of a model state that counts the averaged updates; only training needs it."""


class NormFactory(Protocol):
    """Builds the normalization layers of a model; the model decides where they go."""

    def __call__(
        self, name: str, *, zero_scale: bool = False, with_scale: bool = True
    ) -> Layer:
        """Return a layer; `zero_scale` makes a residual branch start as the identity."""
        ...


class ReplicaGroups(NamedTuple):
    """Groups of consecutive replicas that share batch statistics."""

    axis: str
    num_replicas: int
    group_size: int
    gathers: bool = False
    """Exchange mean and variance once per norm instead of averaging each of them."""

    def mean(self, x: Array) -> Array:
        """Average over the group of this replica."""
        return lax.pmean(x, self.axis, axis_index_groups=self._groups())

    def gather(self, x: Array) -> Array:
        """Stack the values of the group of this replica along a new leading dim."""
        return lax.all_gather(x, self.axis, axis_index_groups=self._groups())

    def _groups(self) -> list[list[int]]:
        if self.num_replicas % self.group_size:
            raise ValueError(
                f"{self.num_replicas} replicas cannot be divided into groups of "
                f"{self.group_size} for distributed batch norm."
            )
        starts = range(0, self.num_replicas, self.group_size)
        return [list(range(s, s + self.group_size)) for s in starts]


def batch_norm(
    name: str,
    *,
    momentum: float = 0.97,
    epsilon: float = 1.001e-5,
    stable: bool = False,
    zero_scale: bool = False,
    with_scale: bool = True,
    groups: ReplicaGroups | None = None,
    ema: float | None = None,
) -> Layer:
    """Normalize by batch statistics and keep a moving average of them.

    Args:
        name: The layer's name.
        momentum: Weight of the old value in the moving average. The training program
            averages over micro-batches and replicas, so it moves once per update.
        epsilon: Added to the variance.
        stable: Compute the variance in a second pass over the data.
        zero_scale: Start with a scale of 0, as at the end of a residual branch.
        with_scale: Whether to multiply by a trained scale after normalizing. A bias is
            always added.
        groups: Compute the statistics over groups of replicas.
        ema: Decay of a moving average of the weights, if there is one. The statistics are
            then averaged over the same updates, whatever the momentum.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, got {momentum}.")

    def init(x: Any) -> tuple[Tree, Tree]:
        channels = x.shape[-1]
        statistics = {"mean": jnp.zeros(channels), "var": jnp.ones(channels)}
        if ema is not None:
            statistics[NUM_UPDATES] = jnp.zeros(())
        return _init_affine(channels, zero_scale, with_scale), statistics

    def apply(
        params: Tree, model_state: Tree, x: Activations, call: Call
    ) -> tuple[Activations, Tree]:
        if not call.training:
            return _normalize(x, model_state, params, epsilon), model_state
        batch = _moments(x, stable, groups)
        kept, moved = momentum, {}
        if ema is not None:
            moved[NUM_UPDATES] = model_state[NUM_UPDATES] + 1
            kept = warmed_up_decay(ema, moved[NUM_UPDATES])
        for key, value in batch.items():
            moved[key] = kept * model_state[key] + (1 - kept) * lax.stop_gradient(value)
        return _normalize(x, batch, params, epsilon), moved

    return Layer(name, init, apply)


def warmed_up_decay(decay: float, num_updates: Num[Array, ""]) -> Float32[Array, ""]:
    """Return the decay of a moving average in update `num_updates`, which starts at 1.

    It grows to `decay`, so that the average forgets the initial values soon.
    """
    count = num_updates.astype(jnp.float32)
    return jnp.minimum(jnp.float32(decay), (1 + count) / (10 + count))


def group_norm(
    name: str,
    *,
    num_groups: int | None = None,
    channels_per_group: int | None = None,
    epsilon: float = 1.001e-5,
    zero_scale: bool = False,
    with_scale: bool = True,
) -> Layer:
    """Normalize each sample by the statistics of groups of its channels.

    Pass either the number of groups or the channels per group.
    """
    if (num_groups is None) == (channels_per_group is None):
        raise ValueError(
            "group_norm needs num_groups or channels_per_group, but only one of them; "
            f"got {num_groups} and {channels_per_group}."
        )

    def count_groups(channels: int) -> int:
        parts = num_groups or channels_per_group or 1
        if channels % parts:
            how = f"{num_groups} groups" if num_groups else f"groups of {parts}"
            raise ValueError(
                f"Layer {name}: {channels} channels cannot be divided into {how}."
            )
        return num_groups or channels // parts

    def init(x: Any) -> tuple[Tree, Tree]:
        channels = x.shape[-1]
        count_groups(channels)
        return _init_affine(channels, zero_scale, with_scale), {}

    def apply(
        params: Tree, model_state: Tree, x: Activations, call: Call
    ) -> tuple[Activations, Tree]:
        del model_state, call
        split = x.reshape(*x.shape[:-1], count_groups(x.shape[-1]), -1).astype(jnp.float32)
        dims = (*range(1, x.ndim - 1), x.ndim)
        mean = split.mean(dims, keepdims=True)
        var = jnp.square(split - mean).mean(dims, keepdims=True)
        normal = ((split - mean) * lax.rsqrt(var + epsilon)).reshape(x.shape)
        if "scale" in params:
            normal *= params["scale"].astype(jnp.float32)
        return (normal + params["bias"].astype(jnp.float32)).astype(x.dtype), {}

    return Layer(name, init, apply)


def _init_affine(channels: int, zero_scale: bool, with_scale: bool) -> Tree:
    if not with_scale:
        return {"bias": jnp.zeros(channels)}
    scale = jnp.zeros(channels) if zero_scale else jnp.ones(channels)
    return {"scale": scale, "bias": jnp.zeros(channels)}


def _moments(x: Activations, stable: bool, groups: ReplicaGroups | None) -> Tree:
    """Return mean and biased variance per channel, in float32."""
    if groups is not None and groups.gathers:
        own = _moments(x, stable, None)
        return _pool_moments(groups.gather(jnp.stack([own["mean"], own["var"]])))
    x = x.astype(jnp.float32)
    dims = tuple(range(x.ndim - 1))
    pooled = groups.mean if groups is not None else lambda value: value
    mean = pooled(x.mean(dims))
    if stable:
        return {"mean": mean, "var": pooled(jnp.square(x - mean).mean(dims))}
    squares = pooled(jnp.square(x).mean(dims))
    # E[x²] - E[x]² may come out slightly negative in float32.
    return {"mean": mean, "var": jnp.maximum(squares - jnp.square(mean), 0)}


def _pool_moments(moments: Float32[Array, "replicas 2 channels"]) -> Tree:
    """Return the moments of the union of equally large samples, given those of each.

    The variance is that within the samples plus that of their means: no difference of
    large numbers, so it is as accurate as in two passes over all of the data.
    """
    means, variances = moments[:, 0], moments[:, 1]
    mean = means.mean(0)
    return {"mean": mean, "var": variances.mean(0) + jnp.square(means - mean).mean(0)}


def _normalize(
    x: Activations, statistics: Tree, params: Tree, epsilon: float
) -> Activations:
    # Factor and shift per channel first, so that an element costs one multiply-add.
    factor = lax.rsqrt(statistics["var"] + epsilon)
    if "scale" in params:
        factor *= params["scale"].astype(jnp.float32)
    shift = params["bias"].astype(jnp.float32) - statistics["mean"] * factor
    return (x.astype(jnp.float32) * factor + shift).astype(x.dtype)
