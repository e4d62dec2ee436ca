"""Predictions for users from a model whose rows are items.

In such a model a user is a column of the last layer. The input of the last layer is small
and is computed once for all items; predictions for a batch of users then take one product,
and the full matrix of users by items never exists.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.autoencoder.data import RowSource
from millrace.apps.autoencoder.model import (
    Model,
    OutputLayer,
    activate_output,
    add_input_offset,
    compute_hidden,
    get_known_ratings,
    get_output_layer,
)
from millrace.data.ratings.matrix import Ratings
from millrace.data.ratings.source import evaluation_source
from millrace.data.stream import EvaluationBatches
from millrace.program.compiling import jit
from millrace.program.mixed_precision import narrow


class EncodedItems(NamedTuple):
    """All items after every layer but the last, and the last layer."""

    hidden: jax.Array  # (items, width)
    output: OutputLayer
    """The kernel is (users, width)."""


def encode_items(
    model: Model, params: Any, by_item: Ratings, batch_size: int, compute_dtype: str
) -> EncodedItems:
    """Apply all layers but the last to the ratings of every item, given by item."""

    @jit
    def encode(params: Any, batch: Any) -> jax.Array:
        known = add_input_offset(model, get_known_ratings(narrow(batch, compute_dtype)))
        return compute_hidden(model, params, known, batch["user"].shape[0])

    device = jax.local_devices()[0]
    params = jax.device_put(narrow(params, compute_dtype), device)
    num_items = by_item.num_users
    source = evaluation_source(by_item, None, batch_size, np.arange(num_items))
    hidden = [
        encode(params, jax.device_put(element["batch"], device))
        for element in EvaluationBatches(RowSource(source), batch_size)
    ]
    return EncodedItems(
        jnp.concatenate(hidden)[:num_items],  # the last batch is padded
        get_output_layer(model, params),
    )


def fold_in(
    encoded: EncodedItems,
    items: np.ndarray,
    residuals: np.ndarray,
    penalty: float,
) -> np.ndarray:  # (items,)
    """Return the predictions for a user who is not a column of the model.

    The column of the last layer for this user, and its bias, are the optimum of the loss
    that the other columns were trained with: ridge regression on the encoded items.

    Args:
        encoded: The items.
        items: The items that the user has rated.
        residuals: The ratings without biases.
        penalty: L2 penalty of the sum of squared errors.
    """
    features = _build_features(encoded)
    return features @ _solve_user(features[items], residuals, penalty)


def fold_in_users(encoded: EncodedItems, known: Ratings, penalty: float) -> EncodedItems:
    """Return the items with columns of the last layer for other users, as of ``fold_in``.

    Args:
        encoded: The items.
        known: The ratings of these users without biases.
        penalty: L2 penalty of the sum of squared errors.
    """
    features = _build_features(encoded)
    columns = np.zeros((known.num_users, features.shape[1]), np.float32)
    for user in np.flatnonzero(known.num_ratings_by_user).tolist():
        items, residuals = known.get_user(user)
        columns[user] = _solve_user(features[items], residuals, penalty)
    layer = OutputLayer(jnp.asarray(columns[:, :-1]), jnp.asarray(columns[:, -1]))
    return EncodedItems(encoded.hidden.astype(jnp.float32), layer)


def _build_features(encoded: EncodedItems) -> np.ndarray:  # (items, width + 1)
    hidden = np.asarray(encoded.hidden, np.float64)
    return np.concatenate([hidden, np.ones((len(hidden), 1))], axis=1)


def _solve_user(rated: np.ndarray, residuals: np.ndarray, penalty: float) -> np.ndarray:
    if not penalty:  # of all solutions the smallest, to which small penalties lead
        return np.linalg.lstsq(rated, residuals, rcond=None)[0]
    gram = rated.T @ rated + penalty * np.eye(rated.shape[1])
    return np.linalg.solve(gram, rated.T @ residuals)


def predict_for_users(
    model: Model,
    encoded: EncodedItems,
    users: jax.Array,  # (users,)
) -> jax.Array:  # (users, items)
    """Return the predicted ratings of some users."""
    products = encoded.output.kernel[users] @ encoded.hidden.T
    return activate_output(model, products + encoded.output.bias[users][:, None])
