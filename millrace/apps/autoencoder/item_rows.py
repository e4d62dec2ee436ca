"""What users would rate, from a model whose rows are items: there a user is a column.

What an item's row comes to before the last layer is small, and is computed once for every
item. A user is a column of the last layer, and with these two, users come in batches as
they do where they are rows: no more than a batch of them is ever reconstructed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.autoencoder.feeding import ByUser
from millrace.apps.autoencoder.loss import known_ratings
from millrace.apps.autoencoder.model import (
    LastLayer,
    Model,
    activate_output,
    hidden_of_known,
    last_layer,
)
from millrace.data.ratings.matrix import Ratings
from millrace.data.ratings.source import evaluation_source
from millrace.data.stream import EvaluationBatches
from millrace.program.compiling import jit
from millrace.program.mixed_precision import narrow


class Columns(NamedTuple):
    """A trained model and all items' ratings, made ready to be asked for users."""

    hidden: jax.Array
    """(items, width): what enters the last layer."""
    last: LastLayer
    """(users, width): what becomes of it."""


def columns_of(
    model: Model, params: Any, by_item: Ratings, batch_size: int, compute: str
) -> Columns:
    """Send every item's ratings through all layers but the last.

    Args:
        model: The choices.
        params: The weights.
        by_item: What the items have been rated, by item.
        batch_size: Items at a time.
        compute: The type to compute in.
    """

    @jit
    def hidden_of(params: Any, batch: Any) -> jax.Array:
        known = known_ratings(narrow(batch, compute))
        return hidden_of_known(model, params, known, batch["user"].shape[0])

    device = jax.local_devices()[0]
    params = jax.device_put(narrow(params, compute), device)
    count = by_item.num_users
    items = evaluation_source(by_item, None, batch_size, np.arange(count))
    found = [
        hidden_of(params, jax.device_put(element["batch"], device))
        for element in EvaluationBatches(ByUser(items), batch_size)
    ]
    hidden = jnp.concatenate(found)[:count]
    return Columns(hidden, last_layer(model, params))


def foretold(model: Model, columns: Columns, users: jax.Array) -> jax.Array:
    """Return what some users would rate: (users, items)."""
    products = columns.last.kernel[users] @ columns.hidden.T
    return activate_output(model, products + columns.last.bias[users][:, None])
