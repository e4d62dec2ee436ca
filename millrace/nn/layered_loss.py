"""A loss made of named layers: what a pipeline can split into stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from millrace.nn.layers import Layer, Tree, apply_layers


@dataclass(frozen=True)
class LayeredLoss:
    """A loss function ``(params, model_state, batch, key) -> (loss, (model_state, info))``.

    It can be called like any other; and since its parts are known, a plan with
    `pipeline_splits` can spread them over devices.
    """

    layers: Sequence[Layer]
    """The model; their weights and model state are keyed by layer name."""
    inputs: Callable[[Any, jax.Array], Any]
    """``(batch, key) -> x``, what the first layer is given."""
    outputs: Callable[[Any, Any], tuple[jax.Array, dict[str, Any]]]
    """``(y, batch) -> (loss, info)`` from what the last layer returns."""
    example: Any = None
    """Arrays or shapes like a batch of a few samples: what the layers cost is worked out
    from it, to choose a pipeline's stages or to judge those chosen."""
    targets: Callable[[Any, jax.Array], Any] = lambda batch, key: batch
    """``(batch, key) -> batch`` as `outputs` should see it: `inputs` is given the same key,
    so that what is done at random to the samples can be done to their labels."""

    def __call__(
        self, params: Tree, model_state: Tree, batch: Any, key: jax.Array
    ) -> tuple[jax.Array, tuple[Tree, dict[str, Any]]]:
        """Return the loss over a batch, the new model state and info."""
        x = self.inputs(batch, key)
        y, model_state = apply_layers(
            self.layers, params, model_state, x, training=True, key=key
        )
        loss, info = self.outputs(y, self.targets(batch, key))
        return loss, (model_state, info)
