"""What is minimized: the error on known ratings, and that of re-feeding.

Batches come sparse and become dense rows here, on the device, inside the compiled loop.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from millrace.apps.autoencoder.model import (
    Known,
    Model,
    hidden_of_known,
    hidden_ratings,
    kept_codes,
    ratings_by_item,
    reconstruct,
    reconstruct_by_item,
    reconstruct_known,
)
from millrace.program.replicas import REPLICA_AXIS
from millrace.program.step import LossFn

Refeeding = Literal["none", "joint", "detached"]
"""What becomes of a batch's reconstruction: nothing; a second term of the same loss,
differentiated through both passes; or, as in the paper, a new and constant example for an
update of its own."""


def known_ratings(batch: Any, prefix: str = "") -> Known:
    """Return the ratings of a batch as one list."""
    return Known(*(batch[prefix + name].reshape(-1) for name in Known._fields))


def dense_rows(batch: Any, num_items: int, prefix: str = "") -> jax.Array:
    """Return the ratings of a batch as (users, items), 0 where there is none."""
    return _dense(known_ratings(batch, prefix), batch["user"].shape[0], num_items)


def _dense(known: Known, num_users: int, num_items: int) -> jax.Array:
    rows = jnp.zeros((num_users, num_items), known.value.dtype)
    # Filling has a row past the end, which is dropped.
    return rows.at[known.row, known.item].set(known.value, mode="drop")


def _rows_and_seen(model: Model, batch: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the dense rows of a batch, and what the network gets to see of them."""
    known, num_users = known_ratings(batch), batch["user"].shape[0]
    rows = _dense(known, num_users, model.num_items)
    if not model.input_dropout_rate:
        return rows, rows
    return rows, _dense(hidden_ratings(model, known, key), num_users, model.num_items)


def loss_of(
    model: Model, refeeding: Refeeding, num_replicas: int = 1, *, platform: str = "gpu"
) -> LossFn:
    """Return the loss of a batch on the runtime's terms; it reports the batch's RMSE.

    Replicas share a batch's users, who have rated more or less: what each adds to the
    loss is weighed by the ratings of all.

    Args:
        model: The choices.
        refeeding: What becomes of the reconstruction.
        num_replicas: That share a batch.
        platform: What it will run on; how it is computed depends on it, not what.
    """
    if refeeding == "detached":
        return _detached(model)
    if refeeding == "none":
        return _once(model, num_replicas)
    # Three of twelve products with all items are with what is rated only, and the others
    # item by item: on two CPU cores an update of Netflix' size took about 0.76 of the time.
    # On an H200 the first of these changed nothing.
    return (_joint_of_known if platform == "cpu" else _joint)(model, num_replicas)


def _mean_count(count: jax.Array, num_replicas: int) -> jax.Array:
    """Return the mean over the replicas of how many ratings they have, at least 1."""
    if num_replicas > 1:
        count = jax.lax.psum(count, REPLICA_AXIS) / num_replicas
    return jnp.maximum(count, 1)


def _rmse(error: jax.Array, num_replicas: int) -> jax.Array:
    if num_replicas > 1:
        error = jax.lax.pmean(jax.lax.stop_gradient(error), REPLICA_AXIS)
    return jnp.sqrt(error)


def _once(model: Model, num_replicas: int) -> LossFn:
    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        known, num_users = known_ratings(batch), batch["user"].shape[0]
        (kept,) = kept_codes(model, key, 1, num_users)
        seen = hidden_ratings(model, known, key)
        output = reconstruct_known(model, params, seen, num_users, kept)
        loss = _error_of_known(known, output, num_users, num_replicas)
        return loss, (model_state, {"rmse": _rmse(loss, num_replicas)})

    return loss_fn


def _error_of_known(
    known: Known, output: jax.Array, num_users: int, num_replicas: int
) -> jax.Array:
    """Return the mean squared error of what was made of the known ratings."""
    is_real = known.row < num_users
    squares = jnp.where(is_real, jnp.square(_wide(output) - _wide(known.value)), 0)
    return squares.sum() / _mean_count(is_real.sum(), num_replicas)


def _joint(model: Model, num_replicas: int) -> LossFn:
    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        rows, seen = _rows_and_seen(model, batch, key)
        first, second = kept_codes(model, key, 2, len(rows))
        output = reconstruct(model, params, seen, first)
        error = masked_error(rows, output, num_replicas)
        again = reconstruct(model, params, output, second)
        refed = jnp.square(_wide(again) - _wide(output)).mean()
        return error + refed, (model_state, {"rmse": _rmse(error, num_replicas)})

    return loss_fn


def _joint_of_known(model: Model, num_replicas: int) -> LossFn:
    """Return the same as ``_joint``; only re-feeding makes dense ratings, item by item."""

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        known, num_users = known_ratings(batch), batch["user"].shape[0]
        first, second = kept_codes(model, key, 2, num_users)
        seen = hidden_ratings(model, known, key)
        hidden = hidden_of_known(model, params, seen, num_users, first)
        output = ratings_by_item(model, params, hidden)
        of_known = output[known.item, known.row]  # of filling, some other user's
        error = _error_of_known(known, of_known, num_users, num_replicas)
        again = reconstruct_by_item(model, params, output, second)
        refed = jnp.square(_wide(again) - _wide(output)).mean()
        return error + refed, (model_state, {"rmse": _rmse(error, num_replicas)})

    return loss_fn


def _detached(model: Model) -> LossFn:
    """Train on a batch and on its reconstruction in turn; the model state keep that.

    Both are one kind of update: a rating of the reconstruction is known wherever it is
    not 0. The batch says whose turn it is.
    """

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        is_refed = batch["refed"][0]
        rows, seen = _rows_and_seen(model, batch, key)
        before = model_state["output"].astype(rows.dtype)
        rows, seen = (jnp.where(is_refed, before, each) for each in (rows, seen))
        (kept,) = kept_codes(model, key, 1, len(rows))
        output = reconstruct(model, params, seen, kept)
        loss = masked_error(rows, output)
        # Of the ratings only: that of the reconstruction says nothing to a reader.
        rmse = jnp.where(is_refed, model_state["rmse"], jnp.sqrt(loss))
        model_state = jax.lax.stop_gradient({"output": output, "rmse": rmse})
        return loss, (model_state, {"rmse": rmse})

    return loss_fn


def initial_model_state(
    model: Model, refeeding: Refeeding, batch_size: int, dtype: str
) -> dict[str, jax.Array] | None:
    """Return the model state before the first update."""
    if refeeding != "detached":
        return None
    output = jnp.zeros((batch_size, model.num_items), dtype)
    return {"output": output, "rmse": jnp.float32(0)}


def masked_error(rows: jax.Array, output: jax.Array, num_replicas: int = 1) -> jax.Array:
    """Return the mean squared error over the known ratings of all rows together."""
    is_known = rows != 0
    squares = jnp.where(is_known, jnp.square(_wide(output) - _wide(rows)), 0)
    return squares.sum() / _mean_count(is_known.sum(), num_replicas)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
