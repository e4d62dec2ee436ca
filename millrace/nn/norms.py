"""Normalization: batch norm, also across groups of replicas, and group norm."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from millrace.nn.layers import Call, Layer, Tree


class NormFactory(Protocol):
    """Makes a model's normalization layers; the model says only where they stand."""

    def __call__(self, name: str, *, zero_scale: bool = False) -> Layer:
        """Return a layer; `zero_scale` where a residual branch should start silent."""
        ...


class ReplicaGroups(NamedTuple):
    """Consecutive replicas whose batch statistics are pooled."""

    axis: str
    num_replicas: int
    group_size: int

    def mean(self, x: jax.Array) -> jax.Array:
        """Average over this replica's group."""
        if self.num_replicas % self.group_size:
            raise ValueError(
                f"{self.num_replicas} replicas cannot be divided into groups of "
                f"{self.group_size} for distributed batch norm."
            )
        starts = range(0, self.num_replicas, self.group_size)
        groups = [list(range(s, s + self.group_size)) for s in starts]
        return lax.pmean(x, self.axis, axis_index_groups=groups)


def batch_norm(
    name: str,
    *,
    momentum: float = 0.97,
    epsilon: float = 1.001e-5,
    stable: bool = False,
    zero_scale: bool = False,
    groups: ReplicaGroups | None = None,
) -> Layer:
    """Normalize by the batch's statistics; keep a moving average of them.

    Args:
        name: The layer's name.
        momentum: Of the moving statistics. The training program averages them over
            micro-batches and replicas, so that they move once per weight update.
        epsilon: Added to the variance.
        stable: Compute the variance in a second pass over the data.
        zero_scale: Start with a scale of 0, as at the end of a residual branch.
        groups: Pool the statistics over groups of replicas.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, got {momentum}.")

    def init(x: Any) -> tuple[Tree, Tree]:
        features = x.shape[-1]
        scale = jnp.zeros(features) if zero_scale else jnp.ones(features)
        params = {"scale": scale, "bias": jnp.zeros(features)}
        return params, {"mean": jnp.zeros(features), "var": jnp.ones(features)}

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        if not call.training:
            return _normalize(x, model_state, params, epsilon), model_state
        batch = _moments(x, stable, groups)
        moved = {
            key: momentum * model_state[key]
            + (1 - momentum) * lax.stop_gradient(batch[key])
            for key in model_state
        }
        return _normalize(x, batch, params, epsilon), moved

    return Layer(name, init, apply)


def group_norm(
    name: str,
    *,
    num_groups: int | None = None,
    channels_per_group: int | None = None,
    epsilon: float = 1.001e-5,
    zero_scale: bool = False,
) -> Layer:
    """Normalize each sample by the statistics of groups of its channels.

    Give the number of groups, or how many channels each has.
    """
    if (num_groups is None) == (channels_per_group is None):
        raise ValueError(
            "group_norm needs num_groups or channels_per_group, and only one of them; "
            f"got {num_groups} and {channels_per_group}."
        )

    def groups_of(channels: int) -> int:
        parts = num_groups or channels_per_group or 1
        if channels % parts:
            how = f"{num_groups} groups" if num_groups else f"groups of {parts}"
            raise ValueError(
                f"Layer {name}: {channels} channels cannot be divided into {how}."
            )
        return num_groups or channels // parts

    def init(x: Any) -> tuple[Tree, Tree]:
        channels = x.shape[-1]
        groups_of(channels)
        scale = jnp.zeros(channels) if zero_scale else jnp.ones(channels)
        return {"scale": scale, "bias": jnp.zeros(channels)}, {}

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        del model_state, call
        split = x.reshape(*x.shape[:-1], groups_of(x.shape[-1]), -1).astype(jnp.float32)
        dims = (*range(1, x.ndim - 1), x.ndim)
        mean = split.mean(dims, keepdims=True)
        var = jnp.square(split - mean).mean(dims, keepdims=True)
        normal = ((split - mean) * lax.rsqrt(var + epsilon)).reshape(x.shape)
        return _scaled(normal, params).astype(x.dtype), {}

    return Layer(name, init, apply)


def _scaled(x: jax.Array, params: Tree) -> jax.Array:
    return x * params["scale"].astype(x.dtype) + params["bias"].astype(x.dtype)


def _moments(x: Any, stable: bool, groups: ReplicaGroups | None) -> Tree:
    """Mean and biased variance over samples and pixels, in float32."""
    x = x.astype(jnp.float32)
    dims = tuple(range(x.ndim - 1))
    pooled = groups.mean if groups is not None else lambda value: value
    mean = pooled(x.mean(dims))
    if stable:
        return {"mean": mean, "var": pooled(jnp.square(x - mean).mean(dims))}
    squares = pooled(jnp.square(x).mean(dims))
    return {"mean": mean, "var": jnp.maximum(squares - jnp.square(mean), 0)}


def _normalize(x: Any, statistics: Tree, params: Tree, epsilon: float) -> Any:
    # One multiplication and one addition per element.
    factor = params["scale"].astype(jnp.float32) * lax.rsqrt(statistics["var"] + epsilon)
    shift = params["bias"].astype(jnp.float32) - statistics["mean"] * factor
    return (x.astype(jnp.float32) * factor + shift).astype(x.dtype)
