"""Losses and accuracy per sample, and losses made of layers that a pipeline can split."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from millrace.nn.layers import Layer, Tree, apply_layers


def cross_entropy(
    logits: Float[Array, "batch classes"],
    labels: Int[Array, " batch"],
    label_smoothing: float = 0.0,
    *,
    over: Literal["all", "others"] = "all",
) -> Float[Array, " batch"]:
    """Return the cross-entropy of each sample, in float32.

    Args:
        logits: In any floating dtype.
        labels: Class indices.
        label_smoothing: Share of the target that is spread evenly over classes.
        over: Spread it over all classes, the label included, or over the others only.
    """
    if over == "others":
        num_classes = logits.shape[-1]
        label_smoothing *= num_classes / (num_classes - 1)
    log_probability = jax.nn.log_softmax(logits.astype(jnp.float32))
    of_label = jnp.take_along_axis(log_probability, labels[:, None], 1)[:, 0]
    if not label_smoothing:
        return -of_label
    return -(1 - label_smoothing) * of_label - label_smoothing * log_probability.mean(-1)


def correct(
    logits: Float[Array, "batch classes"], labels: Int[Array, " batch"]
) -> Float[Array, " batch"]:
    """Return 1 for each sample whose largest logit is at its label, else 0."""
    return (logits.argmax(-1) == labels).astype(jnp.float32)


def correct_in_top(
    logits: Float[Array, "batch classes"], labels: Int[Array, " batch"], count: int
) -> Float[Array, " batch"]:
    """Return 1 for each sample whose label has one of the `count` largest logits, else 0.

    A class with the same logit as the label counts as larger if it comes first, as in
    ``argmax``.
    """
    own = jnp.take_along_axis(logits, labels[:, None], -1)
    comes_first = jnp.arange(logits.shape[-1]) < labels[:, None]
    ahead = (logits > own) | ((logits == own) & comes_first)
    # A label with a logit that is not a number has none of the largest.
    return (ahead.sum(-1) < count).astype(jnp.float32) * jnp.isfinite(own[:, 0])


@dataclass(frozen=True)
class LayeredLoss:
    """A loss function ``(params, model_state, batch, key) -> (loss, (model_state, info))``.

    Call it like any other. Because its layers are known, a plan with `pipeline_splits`
    can distribute them over devices.
    """

    layers: Sequence[Layer]
    """The model. Weights and model state are keyed by layer name."""
    inputs: Callable[[Any, Array], Any]
    """``(batch, key) -> x``, the input of the first layer."""
    outputs: Callable[[Any, Any], tuple[Array, dict[str, Any]]]
    """``(y, batch) -> (loss, info)``, given the output of the last layer."""
    example: Any = None
    """Arrays or shapes like a batch of a few samples, to estimate the cost of layers when
    choosing or checking pipeline stages."""
    targets: Callable[[Any, Array], Any] = lambda batch, key: batch
    """``(batch, key) -> batch``, applied before `outputs`. It gets the key that `inputs`
    gets, so a random augmentation of samples can be applied to labels too."""

    def __call__(
        self, params: Tree, model_state: Tree, batch: Any, key: Array
    ) -> tuple[Array, tuple[Tree, dict[str, Any]]]:
        """Return the loss of a batch, the new model state and info."""
        x = self.inputs(batch, key)
        y, new = apply_layers(
            self.layers, params, model_state or {}, x, training=True, key=key
        )
        loss, info = self.outputs(y, self.targets(batch, key))
        return loss, (new or model_state, info)
