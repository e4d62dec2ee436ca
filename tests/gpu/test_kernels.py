"""The compiled kernels of the recommender match XLA for many models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from millrace.apps.autoencoder.kernels import joint
from millrace.apps.autoencoder.loss import build_loss
from millrace.apps.autoencoder.model import Model, init_params

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

USERS, ITEMS, MODELS, RATED = 64, 1777, 16, 20


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_are_as_exact_as_those_of_xla(dtype):
    model = Model(ITEMS, 128, 0.5)
    assert joint.is_supported(model, USERS, MODELS, dtype, jax.devices()[0])
    random = np.random.default_rng(0)
    batch = {
        "user": jnp.arange(USERS),
        "row": jnp.repeat(jnp.arange(USERS), RATED).reshape(USERS, RATED),
        "item": jnp.asarray(random.permuted(np.tile(np.arange(ITEMS), (USERS, 1)), axis=1)),
        "value": jnp.asarray(random.integers(1, 6, (USERS, RATED)), jnp.float32),
    }
    batch["item"] = batch["item"][:, :RATED]
    first = init_params(model, jax.random.key(1))
    factors = jnp.linspace(0.5, 1.5, MODELS)
    params = jax.tree.map(lambda x: jnp.stack([f * x for f in factors]), first)

    def gradients(loss_fn, dtype):
        def loss(params):
            values = batch | {"value": batch["value"].astype(dtype)}
            return loss_fn(params, None, values, jax.random.key(3))[0] * 100

        narrow = jax.tree.map(lambda x: x.astype(dtype), params)
        found = jax.jit(jax.vmap(jax.grad(loss)))(narrow)
        return [np.asarray(x, np.float64) for x in jax.tree.leaves(found)]

    with jax.default_matmul_precision("highest"):
        truth = gradients(build_loss(model, "joint"), "float32")

    def distance(found):
        return np.mean(
            [
                np.linalg.norm(x - t) / np.linalg.norm(t)
                for x, t in zip(found, truth, strict=True)
            ]
        )

    ours = distance(gradients(joint.build_joint_loss(model), dtype))
    xla = distance(gradients(build_loss(model, "joint"), dtype))
    assert ours < 1.1 * xla < 0.2
