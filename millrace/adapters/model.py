"""What every adapter returns: a loss over plain trees of arrays, and the way back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from millrace.card import Card, with_card


@with_card
@dataclass(frozen=True)
class AdaptedModel:
    """A model of another library, for ``training_program`` and ``TrainingProgram.init``.

    >>> model = mr.from_nnx(network, loss)  # or another adapter
    >>> program = mr.training_program(model.loss_fn, optimizer, plan)
    >>> state = program.init(model.params, model.model_state)
    """

    loss_fn: Callable[[Any, Any, Any, Array], tuple[Array, tuple[Any, Any]]]
    """``(params, model_state, batch, key) -> (loss, (model_state, info))``."""
    params: Any
    """The initial weights, in dictionaries."""
    model_state: Any
    """The initial values that change without gradients, such as moving averages."""
    _merge: Callable[[Any, Any], Any] = field(repr=False)
    _bind: Callable[[Any, Any], Any] = field(repr=False)

    def merge(self, state: Any) -> Any:
        """Return the model with other weights, in the form of its own library.

        Args:
            state: A training state, what ``mr.load`` returns, or anything else with
                `params` and `model_state`. A pipeline's state is unpacked first:
                ``program.unpack_state(state)``.
        """
        # Libraries tell arrays from other values by type, and mr.load returns NumPy's.
        values = jax.tree.map(jnp.asarray, (state.params, state.model_state))
        return self._merge(*values)

    def metrics_fn(
        self, metrics: Callable[[Any, Any], dict[str, Array]]
    ) -> Callable[[Any, Any, Any], dict[str, Array]]:
        """Return the metrics of a model for ``EvaluationProgram``.

        Args:
            metrics: ``(model, batch)`` -> one value per sample for each name. `model` is
                what the loss gets, in evaluation mode if the library has modes; for
                Equinox models with state, the pair of model and state.
        """

        def evaluate(params: Any, model_state: Any, batch: Any) -> dict[str, Array]:
            return metrics(self._bind(params, model_state), batch)

        return evaluate

    def card(self) -> Card:
        """Return what a terminal or a notebook shows."""
        trees = {"parameters": self.params, "model_state": self.model_state}
        return Card("AdaptedModel", {n: f"{_count(tree):,}" for n, tree in trees.items()})


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def split_info(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return loss and info of a loss that may return the loss alone."""
    if isinstance(returned, tuple):
        loss, info = returned
        return loss, info
    return returned, {}
