"""The recipe: what is learned, by which optimizer, and how it is measured."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from millrace.apps.cnn import models
from millrace.apps.cnn.augment import Mixing, draw, mix_images, mix_labels
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.data import ImageData
from millrace.loop.event_schedule import EventSchedule
from millrace.nn.layers import Layer, apply_layers
from millrace.nn.losses import LayeredLoss, correct, cross_entropy
from millrace.nn.norms import NormFactory, ReplicaGroups, batch_norm, group_norm
from millrace.program.evaluate import MetricFn
from millrace.program.learning_rate import learning_rate_schedule
from millrace.program.optimizers import build_optimizer
from millrace.program.replicas import REPLICA_AXIS
from millrace.program.training import TrainingProgram, training_program


def model_of(config: CnnConfig, images: ImageData) -> list[Layer]:
    """Return the network, with as many outputs as the data set has classes."""
    return models.build(
        config.resolved_model, images.num_classes, norm_factory(config), **config.network
    )


def program_of(
    config: CnnConfig, images: ImageData, model: list[Layer], schedule: EventSchedule
) -> TrainingProgram:
    """Return the training loop: the model's loss, the optimizer and the plan."""
    learning_rate = learning_rate_of(config, schedule)
    optimizer = build_optimizer(
        config.optimizer,
        config.optimizer_params,
        learning_rate=learning_rate,
        weight_decay=config.weight_decay,
        l2_regularization=config.l2_regularization,
        decay_kernels_only=config.decay_kernels_only,
        global_batch_size=config.batching.global_batch_size,
    )
    splits = models.split_points(model, config.pipeline_splits)
    return training_program(
        loss_of(model, images, config),
        optimizer,
        dataclasses.replace(config, pipeline_splits=splits),
        extra_info={"learning_rate": learning_rate},
    )


def learning_rate_of(config: CnnConfig, schedule: EventSchedule) -> optax.Schedule:
    """Return the learning rate of each update."""
    return learning_rate_schedule(
        config.lr_schedule,
        config.lr_schedule_params,
        global_batch_size=config.batching.global_batch_size,
        updates_per_epoch=schedule.updates_per_epoch,
        warmup=config.lr_warmup_params,
        staircase=config.lr_staircase,
    )


def warnings_about_rate(config: CnnConfig, schedule: EventSchedule) -> list[str]:
    """Say where the learning rate has come down to 0 long before the run's end."""
    starts = np.arange(0, schedule.total_updates, schedule.updates_per_epoch)
    rates = np.asarray(jax.jit(jax.vmap(learning_rate_of(config, schedule)))(starts))
    learns_until = 1 + max(np.flatnonzero(rates > 0), default=-1)
    if learns_until >= len(starts) - 1:
        return []
    decays = "epochs_to_total_decay" in config.lr_schedule_params
    where = f"from epoch {learns_until} of {len(starts)} on"
    return [
        f"The learning rate is {rates[-1]:g} {where}: nothing is learned there. Change "
        f"{'epochs_to_total_decay in ' if decays else ''}--lr-schedule-params, or "
        "--num-epochs."
    ]


def loss_of(model: list[Layer], images: ImageData, config: CnnConfig) -> LayeredLoss:
    """Return the loss of a micro-batch, and its accuracy.

    Where samples are blended, accuracy is by the label with the largest share: the
    sample's own.
    """
    mixing = Mixing(config.mixup_alpha, config.cutmix_lambda)
    side = images.image_shape[:2]

    def inputs(batch: Any, key: jax.Array) -> jax.Array:
        image = images.prepare(batch["image"], key)
        if not config.mixes:
            return image
        return mix_images(image, draw(mixing, key, len(image), *side))

    def targets(batch: Any, key: jax.Array) -> Any:
        label = batch["label"]
        if not config.mixes:
            return [(label, None)]
        return mix_labels(label, draw(mixing, key, len(label), *side), *side)

    def outputs(logits: jax.Array, parts: Any) -> Any:
        loss = jnp.float32(0)
        for label, share in parts:
            each = cross_entropy(
                logits, label, config.label_smoothing, over=config.label_smoothing_over
            )
            loss += (each if share is None else share * each).mean()
        return loss, {"accuracy": correct(logits, parts[0][0]).mean()}

    shape = (config.micro_batch_size, *images.image_shape)
    example = {"image": jax.ShapeDtypeStruct(shape, jnp.float32)}
    return LayeredLoss(model, inputs, outputs, example, targets)


def metrics_of(model: list[Layer], images: ImageData) -> MetricFn:
    """Return what validation measures of each sample."""

    def metric_fn(params: Any, model_state: Any, batch: Any) -> dict[str, jax.Array]:
        image = images.prepare(batch["image"], None)
        logits, _ = apply_layers(model, params, model_state, image, training=False)
        return {
            "loss": cross_entropy(logits, batch["label"]),
            "accuracy": correct(logits, batch["label"]),
        }

    return metric_fn


def norm_factory(config: CnnConfig) -> NormFactory:
    """Return what makes the model's normalization layers."""
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
