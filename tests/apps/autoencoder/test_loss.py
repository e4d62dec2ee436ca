"""The joint loss has the same value on every platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from millrace.apps.autoencoder.loss import build_loss
from millrace.apps.autoencoder.model import Model, init_params

USERS, ITEMS = 6, 30


def batch():
    """Users with 1 to 6 ratings each, and three entries of padding."""
    rng = np.random.default_rng(0)
    rows = np.repeat(np.arange(USERS), np.arange(1, USERS + 1))
    items = np.concatenate([rng.permutation(ITEMS)[: n + 1] for n in range(USERS)])
    padding = {"row": [USERS] * 3, "item": [0, 0, 0], "value": [0.0] * 3}
    values = rng.integers(1, 6, len(rows))
    real = {"row": rows, "item": items, "value": values}
    joined = {name: np.concatenate([real[name], padding[name]]) for name in real}
    return {
        "user": jnp.arange(USERS),
        "row": jnp.asarray(joined["row"], jnp.int32),
        "item": jnp.asarray(joined["item"], jnp.int32),
        "value": jnp.asarray(joined["value"], float),
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("hidden", [0.0, 0.4])
def test_the_loss_by_item_has_the_value_and_gradient_of_dense_rows(tied, hidden):
    model = Model(ITEMS, 128, 0.5, tied=tied, input_dropout_rate=hidden)

    def value_and_grad(platform):
        params = init_params(model, jax.random.key(1))
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        key = jax.random.fold_in(jax.random.key(2), 3)
        loss = build_loss(model, "joint", platform=platform)
        both = jax.value_and_grad(lambda p: loss(p, None, batch(), key), has_aux=True)
        return jax.jit(both)(params)

    # In float64: in float32, both are 1e-5 from the exact result, in different directions.
    with jax.enable_x64(True):
        (dense, (_, info)), expected = value_and_grad("gpu")
        (by_item, (_, other)), gradient = value_and_grad("cpu")
    np.testing.assert_allclose(by_item, dense, rtol=1e-12)
    np.testing.assert_allclose(other["rmse"], info["rmse"], rtol=1e-12)
    for ours, theirs in zip(
        jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)
