"""Small networks to split into uneven stages, trained with any plan."""

from typing import Any

import jax
import numpy as np
import optax

from millrace.nn.layers import (
    Layer,
    close_residual,
    concurrent,
    conv,
    dense,
    dropout,
    flatten,
    global_average_pool,
    init_layers,
    on_branch,
    open_residual,
    relu,
    stateless,
)
from millrace.nn.losses import LayeredLoss, correct, cross_entropy
from millrace.nn.norms import batch_norm
from millrace.plan import Plan
from millrace.program.training import training_program

PIXELS, CLASSES, UPDATES = 6, 5, 2
MICRO_BATCHES = 6  # a multiple of 2 x 3 stages
SPLITS = ["block_norm", "second"]
"""The first is inside a residual block; the middle stage has most of the work."""


def residual_network() -> list[Layer]:
    return [
        conv("first", 4),
        open_residual(conv("block_conv", 4)),
        on_branch("main", batch_norm("block_norm", momentum=0.9)),
        on_branch("main", dropout("block_drop", 0.2)),
        close_residual("block_add"),
        relu("block_relu"),
        conv("second", 8, strides=2),
        batch_norm("norm", momentum=0.9),
        relu("relu"),
        global_average_pool("pool"),
        dense("classes", CLASSES),
    ]


def branched_network() -> list[Layer]:
    """Return a network with two concurrent branches."""
    return [
        conv("first", 4),
        concurrent(
            "branches",
            [conv("left", 4), batch_norm("left_norm", momentum=0.9), relu("left_relu")],
            [conv("right", 3)],
        ),
        stateless("join", lambda parts: jax.numpy.concatenate(parts, -1)),
        flatten("flat"),
        dense("classes", CLASSES),
    ]


def make_loss(layers: list[Layer]) -> LayeredLoss:
    def outputs(logits: Any, batch: Any) -> Any:
        loss = cross_entropy(logits, batch["label"]).mean()
        return loss, {"accuracy": correct(logits, batch["label"]).mean()}

    image = jax.ShapeDtypeStruct((2, PIXELS, PIXELS, 3), np.float32)
    return LayeredLoss(layers, lambda batch, key: batch["image"], outputs, {"image": image})


_weights: dict[Any, Any] = {}


def make_weights(layers: list[Layer]) -> Any:
    """Return the weights and model state of a network, computed only once."""
    names = tuple(layer.name for layer in layers)
    if names not in _weights:
        example = np.zeros((1, PIXELS, PIXELS, 3), np.float32)
        _weights[names] = init_layers(layers, jax.random.key(0), example)
    return _weights[names]


def train(
    layers: list[Layer],
    optimizer: optax.GradientTransformation | None = None,
    **plan: Any,
) -> tuple[Any, Any]:
    """Make two updates of six micro-batches; return the unpacked state and the info."""
    loss = make_loss(layers)
    given = {"micro_batch_size": 2, "gradient_accumulation_count": MICRO_BATCHES} | plan
    program = training_program(loss, optimizer or optax.adam(1e-2), Plan(**given))
    state = program.init(*make_weights(layers))
    replicas = program.plan.num_replicas
    rng = np.random.default_rng(0)
    shape = (UPDATES * MICRO_BATCHES, 2 * replicas)
    chunk = {
        "image": rng.standard_normal((*shape, PIXELS, PIXELS, 3)).astype(np.float32),
        "label": rng.integers(0, CLASSES, shape).astype(np.int32),
    }
    state, info = program.run(state, jax.device_put(chunk, program.chunk_sharding))
    return jax.device_get((program.unpack_state(state), info))


def largest_difference(one: Any, other: Any) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(
        float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())
        for a, b in pairs
    )
