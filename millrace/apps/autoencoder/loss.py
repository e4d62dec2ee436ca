"""The loss: the error on known ratings and of re-feeding, or the likelihood of items.

Batches arrive sparse. Where dense rows are needed, they are built here, on the device and
inside the compiled loop.
"""

from typing import Any

import jax
import jax.numpy as jnp

from millrace.apps.autoencoder.config.training import Refeeding
from millrace.apps.autoencoder.model import (
    KnownRatings,
    Model,
    activate_output,
    apply_output_layer_by_item,
    compute_hidden,
    draw_dropout_masks,
    drop_input_ratings,
    get_known_ratings,
    get_output_layer,
    reconstruct,
    reconstruct_by_item,
    reconstruct_known,
    split_liked,
    widen,
)
from millrace.program.replicas import REPLICA_AXIS
from millrace.program.step import LossFn


def to_dense_rows(
    batch: Any, num_items: int, prefix: str = ""
) -> jax.Array:  # (users, items)
    """Return the ratings of a batch as dense rows, 0 where there is no rating."""
    return _to_dense(get_known_ratings(batch, prefix), batch["user"].shape[0], num_items)


def _to_dense(known: KnownRatings, num_users: int, num_items: int) -> jax.Array:
    rows = jnp.zeros((num_users, num_items), known.value.dtype)
    # Padding has a row past the end, which is dropped.
    return rows.at[known.row, known.item].set(known.value, mode="drop")


def _rows_and_inputs(
    model: Model, batch: Any, key: jax.Array
) -> tuple[jax.Array, jax.Array]:  # (users, items) each
    """Return the dense rows of a batch, and what input dropout leaves of them."""
    known, num_users = get_known_ratings(batch), batch["user"].shape[0]
    rows = _to_dense(known, num_users, model.num_items)
    if not model.input_dropout_rate:
        return rows, rows
    inputs = drop_input_ratings(model, known, key)
    return rows, _to_dense(inputs, num_users, model.num_items)


def build_loss(
    model: Model,
    refeeding: Refeeding,
    num_replicas: int = 1,
    *,
    platform: str = "gpu",
    num_models: int = 1,
) -> LossFn:
    """Return the loss function of a batch, which also reports the RMSE of ratings.

    Replicas split a batch by rows, which have different numbers of ratings: each term is
    normalized by the ratings of all replicas. The platform and the number of models that
    are trained together select an implementation, not another loss.
    """
    if model.positive_from is not None:
        return _ranking_loss(model, num_replicas, by_item=platform == "cpu")
    if refeeding == "detached":
        return _detached_loss(model)
    if refeeding == "none":
        many = platform != "cpu" and num_models > 1
        return _known_loss(model, num_replicas, dense=many)
    # By item, an update with the Netflix items took 0.76 of the time on two CPU cores:
    # three of twelve products with all items reduce to the rated ones, and the others are
    # faster when transposed. On an H200, the first of these changed nothing.
    if platform == "cpu":
        return _joint_loss_by_item(model, num_replicas)
    return _joint_loss(model, num_replicas)


def report_in_ratings(loss_fn: LossFn, unit: float) -> LossFn:
    """Return a loss that reports the RMSE of ratings, given values in another unit."""

    def in_ratings(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        loss, (model_state, info) = loss_fn(params, model_state, batch, key)
        return loss, (model_state, info | {"rmse": info["rmse"] * unit})

    return loss_fn if unit == 1 else in_ratings


def _mean_count(count: jax.Array, num_replicas: int) -> jax.Array:
    """Return the mean number of ratings per replica, at least 1."""
    if num_replicas > 1:
        count = jax.lax.psum(count, REPLICA_AXIS) / num_replicas
    return jnp.maximum(count, 1)


def _rmse(error: jax.Array, num_replicas: int) -> jax.Array:
    if num_replicas > 1:
        error = jax.lax.pmean(jax.lax.stop_gradient(error), REPLICA_AXIS)
    return jnp.sqrt(error)


def _known_loss(model: Model, num_replicas: int, *, dense: bool = False) -> LossFn:
    """Return the loss without re-feeding.

    It computes known ratings only. If `dense`, it computes all and selects the known ones:
    then no array has a row of weights for each known rating of each model.
    """

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        known, num_users = get_known_ratings(batch), batch["user"].shape[0]
        (mask,) = draw_dropout_masks(model, key, 1, num_users)
        inputs = drop_input_ratings(model, known, key)
        if dense:
            rows = _to_dense(inputs, num_users, model.num_items)
            # Padding reads some other user's rating, which the error masks out.
            output = reconstruct(model, params, rows, mask)[known.row, known.item]
        else:
            output = reconstruct_known(model, params, inputs, num_users, mask)
        loss = _known_error(known, output, num_users, num_replicas)
        return loss, (model_state, {"rmse": _rmse(loss, num_replicas)})

    return loss_fn


def _known_error(
    known: KnownRatings,
    output: jax.Array,  # (ratings,)
    num_users: int,
    num_replicas: int,
) -> jax.Array:
    """Return the mean squared error over a flat list of known ratings."""
    is_real = known.row < num_users
    squares = jnp.where(is_real, jnp.square(widen(output) - widen(known.value)), 0)
    return squares.sum() / _mean_count(is_real.sum(), num_replicas)


def _ranking_loss(model: Model, num_replicas: int, *, by_item: bool) -> LossFn:
    """Return the negative log-likelihood of liked items that the network does not see.

    The likelihood is multinomial over the items that the network does not see, as those
    are what it ranks for a user. It is the mean over the hidden items of a user, and then
    over users: heavy users count like others, as in the metrics.
    """

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        known, num_users = get_known_ratings(batch), batch["user"].shape[0]
        (mask,) = draw_dropout_masks(model, key, 1, num_users)
        liked = split_liked(model, known, num_users, key)
        hidden = compute_hidden(model, params, liked.inputs, num_users, mask)
        if by_item:
            logits = widen(apply_output_layer_by_item(model, params, hidden)).T
        else:
            output = get_output_layer(model, params)
            logits = widen(activate_output(model, hidden @ output.kernel.T + output.bias))
        if model.input_dropout_rate:
            shown = jnp.where(liked.is_input, known.row, num_users)
            logits = logits.at[shown, known.item].set(-jnp.inf, mode="drop")
        normalizer = jax.nn.logsumexp(logits, axis=1)
        row = jnp.where(liked.is_target, known.row, num_users)
        logit = logits.at[row, known.item].get(mode="fill", fill_value=0)
        surprise = normalizer.at[row].get(mode="fill", fill_value=0) - logit
        zeros = jnp.zeros(num_users, logits.dtype)
        count = zeros.at[row].add(1, mode="drop")
        mean = zeros.at[row].add(surprise, mode="drop") / jnp.maximum(count, 1)
        loss = mean.sum() / _mean_count((count > 0).sum(), num_replicas)
        return loss, (model_state, {})

    return loss_fn


def _joint_loss(model: Model, num_replicas: int) -> LossFn:
    """Return the loss with re-feeding as a second term."""

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        rows, inputs = _rows_and_inputs(model, batch, key)
        first, second = draw_dropout_masks(model, key, 2, len(rows))
        output = reconstruct(model, params, inputs, first)
        error = masked_error(rows, output, num_replicas)
        again = reconstruct(model, params, output, second)
        refed = jnp.square(widen(again) - widen(output)).mean()
        return error + refed, (model_state, {"rmse": _rmse(error, num_replicas)})

    return loss_fn


def _joint_loss_by_item(model: Model, num_replicas: int) -> LossFn:
    """Return ``_joint_loss`` with the first pass sparse and reconstructions transposed."""

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        known, num_users = get_known_ratings(batch), batch["user"].shape[0]
        first, second = draw_dropout_masks(model, key, 2, num_users)
        inputs = drop_input_ratings(model, known, key)
        hidden = compute_hidden(model, params, inputs, num_users, first)
        output = apply_output_layer_by_item(model, params, hidden)
        # Padding reads some other user's rating, which the error masks out.
        at_known = output[known.item, known.row]
        error = _known_error(known, at_known, num_users, num_replicas)
        again = reconstruct_by_item(model, params, output, second)
        refed = jnp.square(widen(again) - widen(output)).mean()
        return error + refed, (model_state, {"rmse": _rmse(error, num_replicas)})

    return loss_fn


def _detached_loss(model: Model) -> LossFn:
    """Return the loss of alternating updates: a batch, then its reconstruction.

    The model state carries the reconstruction from one update to the next, and
    ``batch["refed"]`` says which of the two an update is. Both use the same code, because
    a rating of the reconstruction counts as known wherever it is not 0.
    """

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        is_refed = batch["refed"][0]
        rows, inputs = _rows_and_inputs(model, batch, key)
        before = model_state["output"].astype(rows.dtype)
        rows, inputs = (jnp.where(is_refed, before, each) for each in (rows, inputs))
        (mask,) = draw_dropout_masks(model, key, 1, len(rows))
        output = reconstruct(model, params, inputs, mask)
        loss = masked_error(rows, output)
        # Report the RMSE of ratings only; that of a reconstruction means little.
        rmse = jnp.where(is_refed, model_state["rmse"], jnp.sqrt(loss))
        model_state = jax.lax.stop_gradient({"output": output, "rmse": rmse})
        return loss, (model_state, {"rmse": rmse})

    return loss_fn


def init_model_state(
    model: Model, refeeding: Refeeding, batch_size: int, dtype: str
) -> dict[str, jax.Array] | None:
    """Return the model state before the first update."""
    if refeeding != "detached":
        return None
    output = jnp.zeros((batch_size, model.num_items), dtype)
    return {"output": output, "rmse": jnp.float32(0)}


def masked_error(
    rows: jax.Array,  # (users, items), 0 where there is no rating
    output: jax.Array,  # (users, items)
    num_replicas: int = 1,
) -> jax.Array:
    """Return the mean squared error over the known ratings of all rows."""
    is_known = rows != 0
    squares = jnp.where(is_known, jnp.square(widen(output) - widen(rows)), 0)
    return squares.sum() / _mean_count(is_known.sum(), num_replicas)
