"""``autoencoder train`` and ``autoencoder sweep`` as work to be measured."""

from typing import Any

from millrace.apps.autoencoder import data
from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.commands import SweepConfig
from millrace.apps.autoencoder.joint_training import build_trials_program, init_trials
from millrace.apps.autoencoder.model import Model
from millrace.apps.autoencoder.program import (
    build_model,
    build_program,
    init_weights,
    plan_steps,
)
from millrace.bench.workload import Training, Workload
from millrace.data.ratings.matrix import Ratings
from millrace.data.ratings.source import active_users


def autoencoder_training(config: AutoencoderConfig, devices: list[Any]) -> Workload:
    """Return training as a run does it: ratings gathered where a run gathers them."""
    device = devices[config.device_indices[0]]
    ratings = data.load(config.data, config.run.seed).training
    steps = plan_steps(config, len(active_users(ratings)))
    model = build_model(config, ratings.num_items)
    program = build_program(config, model, steps, device)
    infeed = data.open_infeed(ratings, config, steps, device)
    weights = init_weights(config, model)
    peer = _peer(config, model, ratings)
    return Training(program, weights, infeed, steps.updates_per_step, peer)


def _peer(
    config: AutoencoderConfig, model: Model, ratings: Ratings
) -> dict[str, Any] | str:
    """Say what PyTorch should train, or why it would not be the same work."""
    unusual = not (model.tied and model.selu) or model.input_dropout_rate
    alone = config.plan.num_replicas == 1 and config.training.refeeding != "detached"
    if unusual or config.training.gradient_clipping or not alone:
        return "PyTorch's side has the usual recommender alone, on one device"
    return {
        "kind": "autoencoder",
        "batch": config.resolved_batch_size,
        "widths": list(model.widths),
        "dropout": model.dropout_rate,
        "rated": max(1, ratings.num_ratings // len(active_users(ratings))),
        "refeeding": config.training.refeeding,
        "momentum": 0.9 if config.training.optimizer == "Momentum" else 0.0,
        "weight_decay": config.training.weight_decay,
        "compute": config.plan.types.compute,
    }


def autoencoder_sweep(config: SweepConfig, devices: list[Any]) -> Workload:
    """Return the training of one model for each learning rate, all on the first device."""
    ratings = data.load(config.data, config.run.seed).training
    steps = plan_steps(config, len(active_users(ratings)))
    model = build_model(config, ratings.num_items)
    count = len(config.exponents)
    program = build_trials_program(config, model, steps, config.exponents, devices[0])
    infeed = data.open_infeed(ratings, config, steps, devices[0])
    weights = init_trials(init_weights(config, model), count)
    work = Training(program, weights, infeed, steps.updates_per_step)
    work.samples_per_unit *= count
    return work
