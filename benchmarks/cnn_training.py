"""What the CNN benchmarks share: a network that is trained, by millrace and without it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import millrace as mr
from millrace.apps.cnn.models import catalog
from millrace.nn.layers import apply_layers, init_layers
from millrace.nn.losses import correct, cross_entropy

_OPTIMISER = optax.sgd(0.01, momentum=0.9)

Sizes = dict[str, Any]
"""model, size, classes and precision, among others."""


class Training:
    """A training program with its state, which every call carries on from.

    Args:
        sizes: Of the network and its pictures.
        batch: Samples per update.
        prepare: What the loss function does to the pictures first: ``(images, key)``.
    """

    def __init__(
        self,
        sizes: Sizes,
        batch: int,
        prepare: Callable[[jax.Array, jax.Array], jax.Array] = lambda images, key: images,
    ) -> None:
        layers = catalog.build_layers(sizes["model"], sizes["classes"])

        def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
            images, labels = prepare(batch["image"], key), batch["label"]
            logits, model_state = apply_layers(
                layers, params, model_state, images, training=True, key=key
            )
            loss = cross_entropy(logits, labels).mean()
            return loss, (model_state, {"accuracy": correct(logits, labels).mean()})

        self.sizes = sizes
        self.loss_fn = loss_fn
        plan = mr.Plan(micro_batch_size=batch, precision=sizes["precision"])
        self.program = mr.training_program(loss_fn, _OPTIMISER, plan)
        example = np.zeros((1, sizes["size"], sizes["size"], 3), np.float32)
        self.weights = init_layers(layers, jax.random.key(0), example)
        self.state = self.program.init(*self.weights)

    def calls(self, chunk: Any, count: int) -> Any:
        """Call the program on a chunk that lies on the device, two calls under way."""
        before = None
        for _ in range(count):
            self.state, info = self.program.run(self.state, chunk)
            jax.block_until_ready(before)
            before = info
        return self.state

    def fed(self, infeed: mr.Infeed, updates: int) -> Any:
        """Train from an infeed, as applications do."""
        self.state = mr.train(self.program, self.state, infeed=infeed, updates=updates)
        return self.state

    def chunk(self, updates: int, dtype: Any) -> Any:
        """Make batches on the device: pictures of bytes, or ready for the network."""
        shape = (updates, self.program.plan.micro_batch_size)
        image = (*shape, self.sizes["size"], self.sizes["size"], 3)

        def make(key: jax.Array) -> Any:
            labels = jax.random.randint(key, shape, 0, self.sizes["classes"])
            if dtype == jnp.uint8:
                return {"image": jax.random.bits(key, image, dtype), "label": labels}
            return {"image": jax.random.normal(key, image, dtype), "label": labels}

        made = jax.jit(make, out_shardings=self.program.chunk_sharding)
        return made(jax.random.key(1))

    def plain_state(self) -> Any:
        """Make the state that ``plain_update`` changes."""
        params, model_state = jax.tree.map(jnp.array, self.weights)
        return params, model_state, _OPTIMISER.init(params)

    def plain_update(self, state: Any, batch: Any) -> Any:
        """The same update as a user of plain JAX would write it."""
        params, model_state, optimizer_state = state
        compute = jnp.dtype(self.program.plan.types.compute)

        def loss_of(params: Any) -> Any:
            params = jax.tree.map(lambda p: p.astype(compute), params)
            return self.loss_fn(params, model_state, batch, jax.random.key(0))

        differentiated = jax.value_and_grad(loss_of, has_aux=True)
        (loss, (model_state, _)), gradients = differentiated(params)
        change, optimizer_state = _OPTIMISER.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, change), model_state, optimizer_state), loss
