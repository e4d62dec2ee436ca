"""The training program: model, loss, optimizer, learning rate and metrics."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from millrace.apps.cnn.augment import (
    Mixing,
    classify_views,
    draw_mix,
    mirror,
    mix_images,
    mix_labels,
)
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.training import TestTimeName
from millrace.apps.cnn.data import ImageData, open_infeed, scaled_samples
from millrace.apps.cnn.models import catalog
from millrace.apps.cnn.models.speednet import WHITENING, whiten
from millrace.config import ConfigurationError, replace_options
from millrace.loop.event_schedule import EventSchedule
from millrace.loop.staging import compile_calls
from millrace.nn.freezing import (
    choose_layers,
    choose_scales,
    freeze_layers,
    frozen_state_reduction,
)
from millrace.nn.layers import Layer, apply_layers, init_shapes
from millrace.nn.losses import LayeredLoss, correct, correct_in_top, cross_entropy
from millrace.nn.norms import NormFactory, ReplicaGroups, batch_norm, group_norm
from millrace.program.compiling import (
    compiling,
    describe_shortage,
    memory_limit,
    peak_bytes,
)
from millrace.program.evaluate import MetricFn
from millrace.program.learning_rate import learning_rate_schedule
from millrace.program.optimizers import build_optimizer
from millrace.program.replicas import REPLICA_AXIS
from millrace.program.step import Weights
from millrace.program.training import TrainingProgram, training_program

_CLASSES_WITHOUT_TOP5 = 10
_WHITENED_SAMPLES = 5000
"""Training images from which the first layer of a speednet is computed."""


def build_model(config: CnnConfig, images: ImageData) -> list[Layer]:
    """Return the layers of the model, with one output per class."""
    return catalog.build_layers(
        config.resolved_model, images.num_classes, build_norm(config), **config.network
    )


def weight_shapes(config: CnnConfig, images: ImageData, model: list[Layer]) -> Weights:
    """Return the shapes and types of the weights, as checkpoints hold them."""
    example = np.zeros((1, *images.image_shape), np.float32)
    params, model_state = init_shapes(model, example)
    dtype = jnp.dtype(config.plan.types.weights)
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), params)
    return Weights(params, model_state)


def build_program(
    config: CnnConfig, images: ImageData, model: list[Layer], schedule: EventSchedule
) -> TrainingProgram:
    """Return the training program: the loss and the optimizer under the plan."""
    learning_rate = build_learning_rate(config, schedule)
    shapes = weight_shapes(config, images, model)
    scales = choose_scales(
        config.recipe.freeze, config.recipe.lr_scales, list(shapes.params)
    )
    frozen = {name for name, scale in scales.items() if scale == 0}
    constant = frozen | ({WHITENING} & set(shapes.model_state))
    model = freeze_layers(model, frozen)
    optimizer = build_optimizer(
        config.recipe.optimizer,
        config.recipe.optimizer_params,
        learning_rate=learning_rate,
        weight_decay=config.recipe.weight_decay,
        l2_regularization=config.recipe.l2_regularization,
        decay_kernels_only=config.recipe.decay_kernels_only,
        global_batch_size=config.plan.batching.global_batch_size,
        clip_norm=config.recipe.clip_norm,
        ema=config.recipe.ema,
        scales=scales,
        limits=_choose_limits(config, schedule, list(shapes.params)),
    )
    splits = catalog.find_split_layers(model, config.plan.pipeline_splits)
    return training_program(
        build_loss(config, images, model),
        optimizer,
        dataclasses.replace(config.plan, pipeline_splits=splits),
        extra_info={"learning_rate": learning_rate},
        model_state_reduction=frozen_state_reduction(constant) if constant else None,
    )


def _choose_limits(
    config: CnnConfig, schedule: EventSchedule, names: Sequence[str]
) -> dict[str, int]:
    """Return the number of updates of the layers that are not trained to the end."""
    limits: dict[str, int] = {}
    for pattern, epochs in config.recipe.freeze_epochs.items():
        chosen = choose_layers("--freeze-after", pattern, names)
        limits |= dict.fromkeys(chosen, int(epochs * schedule.updates_per_epoch))
    return limits


def set_whitening(model_state: Any, images: ImageData) -> Any:
    """Return a model state in which the first layer of a speednet whitens the images."""
    if WHITENING not in model_state:
        return model_state
    kernel = whiten(scaled_samples(images, _WHITENED_SAMPLES))
    return model_state | {WHITENING: {"kernel": kernel}}


def build_loss(config: CnnConfig, images: ImageData, model: list[Layer]) -> LayeredLoss:
    """Return the loss and accuracy of a micro-batch.

    If samples are blended, the accuracy is that of the sample's own label; with a random
    share of CutMix, that of the label with the largest share.
    """
    options = config.recipe
    mixing = _build_mixing(config)
    height, width, _ = images.image_shape
    inputs = build_inputs(config, images)

    def targets(batch: Any, key: jax.Array) -> Any:
        label = batch["label"]
        if not config.mixes_samples:
            return [(label, None)]
        draw = draw_mix(mixing, key, len(label), height, width)
        return mix_labels(label, draw, height, width)

    def outputs(
        logits: jax.Array,  # (batch, classes)
        labels_and_shares: Any,
    ) -> Any:
        loss = jnp.float32(0)
        for label, share in labels_and_shares:
            losses = cross_entropy(
                logits, label, options.label_smoothing, over=options.label_smoothing_over
            )
            loss += (losses if share is None else share * losses).mean()
        own_label, _ = labels_and_shares[0]
        if mixing.cutmix_alpha > 0:
            own_label = _largest_label(labels_and_shares)
        info = {name: x.mean() for name, x in accuracies(logits, own_label).items()}
        return loss, info

    shape = (config.plan.micro_batch_size, *images.image_shape)
    example = {"image": jax.ShapeDtypeStruct(shape, jnp.float32)}
    if config.augmentation.alternating_flip:
        example["mirrored"] = jax.ShapeDtypeStruct(shape[:1], jnp.bool)
    return LayeredLoss(model, inputs, outputs, example, targets)


def build_inputs(
    config: CnnConfig, images: ImageData
) -> Callable[[Any, jax.Array], jax.Array]:
    """Return the function that augments the images of a micro-batch, given its key."""
    mixing = _build_mixing(config)
    height, width, _ = images.image_shape

    # In a pipeline, inputs run in the first stage and targets in the last. Both draw the
    # same blend from the key of the micro-batch.
    def inputs(batch: Any, key: jax.Array) -> jax.Array:
        image = images.preprocess(batch["image"], key)
        if config.augmentation.alternating_flip:
            image = mirror(image, batch["mirrored"])
        if not config.mixes_samples:
            return image
        return mix_images(image, draw_mix(mixing, key, len(image), height, width))

    return inputs


def _build_mixing(config: CnnConfig) -> Mixing:
    recipe, augmentation = config.recipe, config.augmentation
    alpha = augmentation.mixup or recipe.mixup_alpha
    return Mixing(alpha, recipe.cutmix_lambda, augmentation.cutmix)


def _largest_label(labels_and_shares: Any) -> jax.Array:
    """Return the label of each blended sample that has the largest share."""
    labels, shares = (jnp.stack(parts) for parts in zip(*labels_and_shares, strict=True))
    return jnp.take_along_axis(labels, shares.argmax(0)[None], 0)[0]


def build_metrics(
    model: list[Layer], images: ImageData, test_time_augmentation: TestTimeName = "none"
) -> MetricFn:
    """Return the function that computes loss and accuracy of each validation sample."""

    def metric_fn(params: Any, model_state: Any, batch: Any) -> dict[str, jax.Array]:
        def classify(image: jax.Array) -> jax.Array:
            return apply_layers(model, params, model_state, image, training=False)[0]

        image = images.preprocess(batch["image"], None)
        logits = classify_views(classify, image, test_time_augmentation)
        return {
            "loss": cross_entropy(logits, batch["label"]),
            **accuracies(logits, batch["label"]),
        }

    return metric_fn


def accuracies(
    logits: jax.Array,  # (batch, classes)
    labels: jax.Array,  # (batch,)
) -> dict[str, jax.Array]:
    """Return the accuracy of each sample, and the top-5 accuracy if there are many classes.

    With ten classes or fewer, the label is among five guesses too easily.
    """
    accuracies = {"accuracy": correct(logits, labels)}
    if logits.shape[-1] > _CLASSES_WITHOUT_TOP5:
        accuracies["top5_accuracy"] = correct_in_top(logits, labels, 5)
    return accuracies


def build_learning_rate(config: CnnConfig, schedule: EventSchedule) -> optax.Schedule:
    """Return the learning rate as a function of the update."""
    return learning_rate_schedule(
        config.recipe.lr_schedule,
        config.schedule_params,
        global_batch_size=config.plan.batching.global_batch_size,
        updates_per_epoch=schedule.updates_per_epoch,
        learning_rate=config.recipe.learning_rate,
        warmup=config.recipe.lr_warmup_params,
        staircase=config.recipe.lr_staircase,
    )


def build_norm(config: CnnConfig) -> NormFactory:
    """Return the factory of the model's normalization layers."""
    options = dict(config.model.norm_layer)
    if options.pop("name") == "group_norm":
        return functools.partial(group_norm, **options)
    groups = None
    if (group_size := config.model.dbn_replica_group_size) > 1:
        gathers = bool(config.model.gather_conv_output)
        groups = ReplicaGroups(REPLICA_AXIS, config.plan.num_replicas, group_size, gathers)
    options = {"momentum": config.model.bn_momentum} | options
    return functools.partial(
        batch_norm,
        stable=config.model.stable_norm,
        groups=groups,
        ema=config.recipe.ema,
        **options,
    )


def check_memory(
    config: CnnConfig,
    images: ImageData,
    model: list[Layer],
    weights: Weights,
    schedule: EventSchedule,
    programs: list[jax.stages.Compiled],
) -> None:
    """Raise an error if compiled programs do not fit; name a micro-batch size that does."""

    def needs(micro_batch_size: int) -> int:
        count = config.plan.batching.gradient_accumulation_count
        smaller = replace_options(
            config,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_count=count,
            global_batch_size=None,
        )
        program = build_program(smaller, images, model, schedule)
        state = program.init(*weights, seed=config.run.seed)
        # Only the size matters, so the kernels need not be autotuned.
        options = config.workflow.compiler_options()
        options["gpu"] = {**options["gpu"], "xla_gpu_autotune_level": 0}
        with compiling(options) as programs, open_infeed(images, smaller, 1) as infeed:
            compile_calls(program, state, infeed, 1)
        return peak_bytes(programs)

    needed, limit = peak_bytes(programs), memory_limit(jax.local_devices()[0])
    problem = describe_shortage(config.plan.micro_batch_size, needed, limit, needs)
    if problem is not None:
        raise ConfigurationError(
            f"A micro-{problem}. Lower --micro-batch-size (with a larger "
            "--gradient-accumulation-count for the same global batch), or save memory "
            "with --recomputation or --precision 16.16."
        )
