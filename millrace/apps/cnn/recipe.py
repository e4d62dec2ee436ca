"""The recipe: what is learnt, by which optimiser, and how it is measured."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.data import ImageData
from millrace.host.events import Schedule
from millrace.nn.layered_loss import LayeredLoss
from millrace.nn.layers import Layer, apply_layers
from millrace.nn.losses import correct, cross_entropy
from millrace.nn.norms import NormFactory, ReplicaGroups, batch_norm, group_norm
from millrace.program.evaluate import MetricFn
from millrace.program.learning_rate import learning_rate_schedule
from millrace.program.optimiser import build_optimiser
from millrace.program.replicas import REPLICA_AXIS
from millrace.program.training import TrainingProgram, training_program


def program_of(
    config: CnnConfig, images: ImageData, model: list[Layer], schedule: Schedule
) -> TrainingProgram:
    """Return the training loop: the model's loss, the optimiser and the plan."""
    batching = config.batching
    learning_rate = learning_rate_schedule(
        config.lr_schedule,
        config.lr_schedule_params,
        global_batch_size=batching.global_batch_size,
        updates_per_epoch=schedule.updates_per_epoch,
        warmup=config.lr_warmup_params,
        staircase=config.lr_staircase,
    )
    optimiser = build_optimiser(
        config.optimizer,
        config.optimizer_params,
        learning_rate=learning_rate,
        weight_decay=config.weight_decay,
        l2_regularization=config.l2_regularization,
        global_batch_size=batching.global_batch_size,
    )
    return training_program(
        loss_of(model, images, config),
        optimiser,
        config,
        watch={"learning_rate": learning_rate},
    )


def loss_of(model: list[Layer], images: ImageData, config: CnnConfig) -> LayeredLoss:
    """Return the loss of a micro-batch, and its accuracy."""

    def inputs(batch: Any, key: jax.Array) -> jax.Array:
        return images.prepare(batch["image"], key)

    def outputs(logits: jax.Array, batch: Any) -> Any:
        loss = cross_entropy(logits, batch["label"], config.label_smoothing).mean()
        return loss, {"accuracy": correct(logits, batch["label"]).mean()}

    shape = (config.micro_batch_size, *images.image_shape)
    example = {"image": jax.ShapeDtypeStruct(shape, jnp.float32)}
    return LayeredLoss(model, inputs, outputs, example)


def metrics_of(model: list[Layer], images: ImageData) -> MetricFn:
    """Return what validation measures of each sample."""

    def metric_fn(params: Any, carried: Any, batch: Any) -> dict[str, jax.Array]:
        image = images.prepare(batch["image"], None)
        logits, _ = apply_layers(model, params, carried, image, training=False)
        return {
            "loss": cross_entropy(logits, batch["label"]),
            "accuracy": correct(logits, batch["label"]),
        }

    return metric_fn


def norm_factory(config: CnnConfig) -> NormFactory:
    """Return what makes the model's normalisation layers."""
    options = {key: value for key, value in config.norm_layer.items() if key != "name"}
    if config.norm_layer["name"] == "group_norm":
        return functools.partial(group_norm, **options)
    groups = None
    if config.dbn_replica_group_size > 1:
        groups = ReplicaGroups(
            REPLICA_AXIS, config.num_replicas, config.dbn_replica_group_size
        )
    options = {"momentum": config.bn_momentum} | options
    return functools.partial(
        batch_norm, stable=config.stable_norm, groups=groups, **options
    )
