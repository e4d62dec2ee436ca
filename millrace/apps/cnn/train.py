"""Train a CNN. Read from top to bottom: this is the whole application."""

import functools
from typing import Any

import jax
import numpy as np

from millrace.apps.cnn import data, models
from millrace.apps.cnn.config import CnnConfig
from millrace.data.parallel import ParallelStream
from millrace.data.stream import Stream
from millrace.feeds.infeed import Infeed
from millrace.host.events import Schedule, schedule_events
from millrace.host.run import Run
from millrace.host.runner import Runner
from millrace.host.validation import evaluate
from millrace.nn.layers import apply_layers, init_layers, num_parameters
from millrace.nn.losses import correct, cross_entropy
from millrace.nn.norms import NormFactory, ReplicaGroups, batch_norm, group_norm
from millrace.program.evaluate import EvaluationProgram
from millrace.program.learning_rate import learning_rate_schedule
from millrace.program.optimiser import build_optimiser
from millrace.program.replicas import REPLICA_AXIS
from millrace.program.training import training_program


def train(config: CnnConfig, run: Run) -> None:
    """Train and validate as `config` says; results go to the run directory."""
    images = data.load(config)
    model = models.build(config.resolved_model, images.num_classes, norm_factory(config))
    batching = config.batching
    schedule = plan_events(config, len(images.training))
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

    def loss_fn(params: Any, carried: Any, batch: Any, key: jax.Array) -> Any:
        image = images.prepare(batch["image"], key)
        logits, carried = apply_layers(
            model, params, carried, image, training=True, key=key
        )
        loss = cross_entropy(logits, batch["label"], config.label_smoothing).mean()
        accuracy = correct(logits, batch["label"]).mean()
        return loss, (carried, {"accuracy": accuracy})

    def metric_fn(params: Any, carried: Any, batch: Any) -> dict[str, jax.Array]:
        image = images.prepare(batch["image"], None)
        logits, _ = apply_layers(model, params, carried, image, training=False)
        return {
            "loss": cross_entropy(logits, batch["label"]),
            "accuracy": correct(logits, batch["label"]),
        }

    program = training_program(
        loss_fn, optimiser, config, watch={"learning_rate": learning_rate}
    )
    evaluation = EvaluationProgram(metric_fn, config)
    example = images.validation[np.arange(1)]["image"].astype(np.float32)
    params, carried = init_layers(model, jax.random.key(config.seed), example)
    run.describe(
        program.devices,
        config,
        schedule,
        model=f"{config.resolved_model}, {num_parameters(params):,} parameters",
        dataset=f"{config.resolved_dataset}, {len(images.training):,} training and "
        f"{len(images.validation):,} validation samples",
    )
    stream = Stream(
        images.training,
        batching.samples_per_step,
        batches_per_epoch=_batches_per_epoch(config, schedule, len(images.training)),
        seed=config.seed,
        transform=images.transform,
    )
    micro_batch = config.validation_micro_batch_size or config.micro_batch_size

    def validate(state: Any) -> dict[str, float]:
        samples = micro_batch * config.num_replicas
        return evaluate(evaluation, state, images.validation, samples)

    with run.checkpoints(best="validation_accuracy", keep=config.keep_checkpoints) as saved:
        runner = Runner(
            program,
            Infeed(ParallelStream(stream, config.pipeline_num_parallel)),
            schedule,
            directory=run.directory,
            console=run.console,
            writers=run.writers,
            checkpoints=saved,
            validate=validate if config.validation else None,
        )
        run.train(runner, program.init(params, carried, seed=config.seed))


def plan_events(config: CnnConfig, dataset_size: int) -> Schedule:
    """Work out the run in whole updates."""
    updates = config.weight_updates_per_epoch
    if updates == -1:
        updates = config.batching.updates_per_epoch(dataset_size)
    return schedule_events(
        updates_per_epoch=updates,
        num_epochs=config.num_epochs,
        events_per_epoch={
            "log": config.logs_per_epoch,
            "checkpoint": config.ckpts_per_epoch,
            "validate": config.validations_per_epoch if config.validation else 0,
        },
        updates_per_execution=config.updates_per_execution,
    )


def _batches_per_epoch(config: CnnConfig, schedule: Schedule, dataset_size: int) -> int:
    """After how many batches the order is drawn anew: never more than there are."""
    batching = config.batching
    whole = batching.updates_per_epoch(dataset_size)
    updates = min(schedule.updates_per_epoch, whole)
    return updates * batching.gradient_accumulation_count


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
