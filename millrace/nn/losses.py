"""Losses and the measures that go with them, per sample, in float32."""

from typing import Literal

import jax
import jax.numpy as jnp


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    label_smoothing: float = 0.0,
    *,
    over: Literal["all", "others"] = "all",
) -> jax.Array:
    """Return each sample's cross-entropy with its label.

    Smoothing moves the given share of the label's weight to all classes alike, so that
    the label gets some of it back, or to all others.
    """
    if over == "others":
        num_classes = logits.shape[-1]
        label_smoothing *= num_classes / (num_classes - 1)
    log_probability = jax.nn.log_softmax(logits.astype(jnp.float32))
    right = jnp.take_along_axis(log_probability, labels[:, None], 1)[:, 0]
    if not label_smoothing:
        return -right
    return -(1 - label_smoothing) * right - label_smoothing * log_probability.mean(-1)


def correct(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return 1 for each sample whose largest logit is its label's, else 0."""
    return (logits.argmax(-1) == labels).astype(jnp.float32)
