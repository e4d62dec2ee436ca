"""Train a CNN. Read from top to bottom: this is the whole application."""

import functools
from typing import Any

import jax
import numpy as np
import optax

from millrace.apps.cnn import models
from millrace.apps.cnn.config import CnnConfig
from millrace.data.digits import NUM_CLASSES, load_digits
from millrace.data.stream import Stream
from millrace.feeds.infeed import Infeed
from millrace.host.events import schedule_events
from millrace.host.run import Run
from millrace.host.runner import Runner
from millrace.host.validation import evaluate
from millrace.nn.layers import apply_layers, init_layers, num_parameters
from millrace.nn.losses import correct, cross_entropy
from millrace.nn.norms import batch_norm
from millrace.program.evaluate import EvaluationProgram
from millrace.program.training import training_program


def train(config: CnnConfig, run: Run) -> None:
    """Train on `config.dataset`; results go to the run directory."""
    training, validation = load_digits()
    norm = functools.partial(batch_norm, momentum=0.9)
    model = models.build(config.model_name, NUM_CLASSES, norm)
    batching = config.batching
    schedule = schedule_events(
        updates_per_epoch=batching.updates_per_epoch(len(training)),
        num_epochs=config.num_epochs,
        events_per_epoch={
            "log": config.logs_per_epoch,
            "checkpoint": config.ckpts_per_epoch,
            "validate": config.validations_per_epoch if config.validation else 0,
        },
        updates_per_execution=config.updates_per_execution,
    )
    learning_rate = optax.cosine_decay_schedule(
        config.learning_rate, schedule.total_updates
    )

    def loss_fn(params: Any, carried: Any, batch: Any, key: jax.Array) -> Any:
        logits, carried = apply_layers(
            model, params, carried, batch["image"], training=True, key=key
        )
        loss = cross_entropy(logits, batch["label"], config.label_smoothing).mean()
        accuracy = correct(logits, batch["label"]).mean()
        return loss, (carried, {"accuracy": accuracy})

    def metric_fn(params: Any, carried: Any, batch: Any) -> dict[str, jax.Array]:
        logits, _ = apply_layers(model, params, carried, batch["image"], training=False)
        return {
            "loss": cross_entropy(logits, batch["label"]),
            "accuracy": correct(logits, batch["label"]),
        }

    program = training_program(
        loss_fn,
        optax.sgd(learning_rate, momentum=config.momentum),
        config,
        watch={"learning_rate": learning_rate},
    )
    evaluation = EvaluationProgram(metric_fn, config)
    example = training[np.arange(config.micro_batch_size)]["image"]
    params, carried = init_layers(model, jax.random.key(config.seed), example)
    run.describe(
        program.devices,
        config,
        schedule,
        model=f"{config.model_name}, {num_parameters(params):,} parameters",
        dataset=f"{config.dataset}, {len(training)} training samples",
    )
    stream = Stream(
        training,
        batching.samples_per_step,
        batches_per_epoch=schedule.updates_per_epoch * batching.gradient_accumulation_count,
        seed=config.seed,
    )
    micro_batch = config.validation_micro_batch_size or config.micro_batch_size

    def validate(state: Any) -> dict[str, float]:
        samples = micro_batch * config.num_replicas
        return evaluate(evaluation, state, validation, samples)

    with run.checkpoints(best="validation_accuracy", keep=config.keep_checkpoints) as c:
        runner = Runner(
            program,
            Infeed(stream),
            schedule,
            directory=run.directory,
            console=run.console,
            writers=run.writers,
            checkpoints=c,
            validate=validate if config.validation else None,
        )
        state = program.init(params, carried, seed=config.seed)
        run.finished(runner.run(state, resume=config.resume), batching)
