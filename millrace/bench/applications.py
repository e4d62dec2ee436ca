"""Build the workload of an entry, and the settings for the same work in PyTorch."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from millrace.apps.autoencoder import data as rating_data
from millrace.apps.autoencoder import program as autoencoder
from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.commands import SweepConfig
from millrace.apps.autoencoder.config.search import draw_trials
from millrace.apps.autoencoder.config.training import Hyperparameters
from millrace.apps.autoencoder.joint_training import (
    build_trials_program,
    get_settings,
    init_trials,
)
from millrace.apps.autoencoder.model import Model
from millrace.apps.autoencoder.program import plan_steps
from millrace.apps.cnn import data as image_data
from millrace.apps.cnn import program as cnn
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.commands import ValidateConfig
from millrace.apps.cnn.inference.command import load_weights
from millrace.apps.cnn.inference.network import Network, build_network
from millrace.apps.cnn.train import plan_events
from millrace.apps.vcd import data as binary_data
from millrace.apps.vcd import program as vcd
from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.evaluate import chosen_devices
from millrace.apps.vcd.train import build_schedule
from millrace.bench.spec import Entry
from millrace.bench.workload import (
    CannotRun,
    InferenceWorkload,
    TrainingWorkload,
    Workload,
)
from millrace.data.catalog import DatasetNotFound
from millrace.data.ratings.matrix import Ratings
from millrace.data.ratings.source import active_users
from millrace.feeds.infeed import Infeed
from millrace.nn.layers import init_layers
from millrace.program.compiling import Options

Peer = dict[str, Any] | str
"""Settings of the same work in PyTorch, or why there is none."""

_NO_MODEL = "there is no PyTorch version of this network"
_TORCH_MODELS = {
    **{("resnet", n): f"resnet{n}" for n in ("18", "34", "50", "101", "152")},
    ("resnext", "50"): "resnext50_32x4d",
    ("resnext", "101"): "resnext101_32x4d",
    **{("efficientnet", f"B{n}"): f"efficientnet_b{n}" for n in range(8)},
}


def build_workload(entry: Entry, config: Any, devices: list[Any]) -> Workload:
    """Return the workload of an entry, not compiled yet; raise `CannotRun` if it cannot."""
    platform = "cpu" if devices[0].platform == "cpu" else "gpu"
    if entry.needs not in ("", platform):
        raise CannotRun(f"it needs a {entry.needs.upper()}")
    needed = _count_devices(entry.application, config)
    if needed > len(devices):
        raise CannotRun(f"it needs {needed} devices, and this machine has {len(devices)}")
    try:
        match entry.application:
            case "cnn train":
                return _build_cnn_training(config)
            case "cnn validate":
                return _build_cnn_inference(config)
            case "autoencoder train":
                return _build_autoencoder_training(config, devices)
            case "autoencoder sweep":
                return _build_autoencoder_sweep(config, devices[0])
            case _:
                return _VcdTraining(config, random_data=entry.random_data)
    except (DatasetNotFound, FileNotFoundError) as error:
        raise CannotRun(f"no data: {' '.join(str(error).split())}") from error


def _count_devices(application: str, config: Any) -> int:
    match application:
        case "cnn train":
            return config.plan.num_replicas * config.plan.devices_per_replica
        case "cnn validate":
            return config.num_replicas
        case "autoencoder train":
            return 1 + max(config.device_indices)
        case "autoencoder sweep":
            return 1  # all models train on the first device
        case _:
            return config.plan.num_replicas


# CNN


def _build_cnn_training(config: CnnConfig) -> Workload:
    images = image_data.load(config)
    model = cnn.build_model(config, images)
    schedule = plan_events(config, len(images.training))
    program = cnn.build_program(config, images, model, schedule)
    example = np.zeros((1, *images.image_shape), np.float32)
    weights = init_layers(model, jax.random.key(config.run.seed), example)
    infeed = image_data.open_infeed(images, config, schedule.updates_per_epoch)
    execution, peer = schedule.updates_per_execution, _training_peer(config, images)
    return TrainingWorkload(program, weights, infeed, execution, peer)


def _training_peer(config: CnnConfig, images: image_data.ImageData) -> Peer:
    name = find_torch_model(config)
    if name is None:
        return _NO_MODEL
    if config.recipe.optimizer != "sgd" or config.recipe.mixes_samples:
        return "the PyTorch version trains with SGD and does not mix images"
    plan = config.plan
    plain = plan.batching.global_batch_size == plan.micro_batch_size
    if not plain or plan.num_stages > 1:
        return "the PyTorch version has one device and one micro-batch per update"
    return {
        "kind": "training",
        "model": name,
        "batch": plan.micro_batch_size,
        "size": images.image_shape[0],
        "classes": images.num_classes,
        "compute": plan.types.compute,
        "momentum": config.recipe.optimizer_params.get("momentum", 0.0),
        "weight_decay": config.recipe.l2_regularization,
        "label_smoothing": config.recipe.label_smoothing,
    }


def find_torch_model(config: CnnConfig) -> str | None:
    """Return the name of the network for ``torch_models``, or None if it has none."""
    size = config.size
    if config.model.norm_layer["name"] == "group_norm":
        return None
    if config.resolved_model.startswith("cifar_resnet"):
        return config.resolved_model
    if size is None:
        return None
    # Group dim and expand ratio of the published networks.
    usual = {"resnext": (4, None), "efficientnet": (1, 6)}.get(config.resolved_model)
    given = config.model.group_dim, config.model.expand_ratio
    if usual and any(g not in (None, u) for g, u in zip(given, usual, strict=True)):
        return None
    if config.resolved_image_size < 33 and config.resolved_model != "efficientnet":
        return None  # these ResNets have another first layer
    large = config.resolved_dataset in ("imagenet", "imagefolder")
    return _TORCH_MODELS.get((config.resolved_model, size.name)) if large else None


def _build_cnn_inference(config: ValidateConfig) -> Workload:
    images, network = _load_network(config)
    return InferenceWorkload(config, images, network, _inference_peer(config, images))


_networks: dict[str, concurrent.futures.Future[tuple[image_data.ImageData, Network]]] = {}
_networks_lock = threading.Lock()


def _load_network(config: ValidateConfig) -> tuple[image_data.ImageData, Network]:
    """Return the images and the network, built once for all batch sizes.

    Entries are compiled in several threads; the first to need a network builds it, and the
    others wait.
    """
    key = repr(dataclasses.replace(config, batch_size=[1], num_batches=None))
    with _networks_lock:
        is_first = key not in _networks
        future = _networks.setdefault(key, concurrent.futures.Future())
    if is_first:
        try:
            images = image_data.load(config.train_config)
            model = cnn.build_model(config.train_config, images)
            weights, _ = load_weights(config, images, model)
            network = build_network(config, images.image_shape, model, weights)
            future.set_result((images, network))
        except BaseException as error:
            future.set_exception(error)
    return future.result()


def _inference_peer(config: ValidateConfig, images: image_data.ImageData) -> Peer:
    name = find_torch_model(config.train_config)
    if name is None:
        return _NO_MODEL
    if config.data.synthetic != "device" or config.num_replicas > 1:
        return "the PyTorch version has one device and keeps its images there"
    return {
        "kind": "inference",
        "model": name,
        "batch": config.batch_size[0],
        "size": images.image_shape[0],
        "classes": images.num_classes,
        "compute": config.train_config.plan.types.compute,
    }


# Autoencoder


def _build_autoencoder_training(config: AutoencoderConfig, devices: list[Any]) -> Workload:
    device = devices[config.device_indices[0]]
    if config.search is not None:
        return _build_autoencoder_search(config, device)
    objective = config.training.objective
    ratings = rating_data.load(config.data, config.run.seed, objective=objective).training
    steps = plan_steps(config, len(active_users(ratings)))
    model = autoencoder.build_model(config, ratings.num_items)
    program = autoencoder.build_program(config, model, steps, device)
    infeed = rating_data.open_infeed(ratings, config, steps, device)
    weights = autoencoder.init_weights(config, model)
    peer = _autoencoder_peer(config, model, ratings)
    return TrainingWorkload(program, weights, infeed, steps.updates_per_step, peer)


def _autoencoder_peer(config: AutoencoderConfig, model: Model, ratings: Ratings) -> Peer:
    ranks = config.training.objective == "ranking"
    unusual = ranks or not (model.tied and model.selu) or model.input_dropout_rate
    alone = config.plan.num_replicas == 1 and config.training.refeeding != "detached"
    if unusual or config.training.gradient_clipping or not alone:
        return "the PyTorch version has only the usual recommender, on one device"
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


def _build_autoencoder_sweep(config: SweepConfig, device: Any) -> Workload:
    return _build_trials_workload(
        config,
        lambda first: [trial.settings for trial in config.build_trials(first)],
        device,
    )


def _build_autoencoder_search(config: AutoencoderConfig, device: Any) -> Workload:
    """Return the first rung of a search, which has all models."""

    def draw(first: Hyperparameters) -> list[Hyperparameters]:
        first = first._replace(learning_rate=config.initial_learning_rate)
        assert config.search is not None
        return draw_trials(first, config.search, config.run.seed, config.searched)

    return _build_trials_workload(config, draw, device)


def _build_trials_workload(
    config: SweepConfig | AutoencoderConfig,
    build_trials: Callable[[Hyperparameters], list[Hyperparameters]],
    device: Any,
) -> Workload:
    ratings = rating_data.load(config.data, config.run.seed).training
    steps = plan_steps(config, len(active_users(ratings)))
    model = autoencoder.build_model(config, ratings.num_items)
    trials = build_trials(get_settings(config, model))
    program = build_trials_program(config, model, steps, trials, device)
    infeed = rating_data.open_infeed(ratings, config, steps, device)
    weights = init_trials(autoencoder.init_weights(config, model), len(trials))
    work = TrainingWorkload(program, weights, infeed, steps.updates_per_step)
    work.samples_per_unit *= len(trials)  # each model trains on every sample
    return work


# VCD


class _VcdTraining(TrainingWorkload):
    """VCD training, which compiles with its own matrix precision."""

    def __init__(self, config: VcdConfig, *, random_data: bool) -> None:
        self._config = config
        images = _random_images() if random_data else _load_images(config)
        schedule = build_schedule(config, len(images))
        batch_size = config.plan.batching.samples_per_step
        batches = binary_data.ShuffledIndices(len(images), batch_size, seed=config.run.seed)
        with chosen_devices(config.devices) as devices:
            super().__init__(
                vcd.build_program(config, images, devices),
                vcd.init_state(config, images),
                Infeed(batches),
                schedule.updates_per_execution,
                _vcd_peer(config, images),
            )

    def compile(self, options: Options | None = None) -> None:
        with chosen_devices(self._config.devices):
            super().compile(options)

    def run(self, seconds: float) -> int:
        with chosen_devices(self._config.devices):
            return super().run(seconds)


def _load_images(config: VcdConfig) -> binary_data.BinaryImages:
    num_held_out = config.workflow.num_held_out
    return binary_data.load_images(config.data, num_validation=num_held_out).training


def _random_images() -> binary_data.BinaryImages:
    """Return random images with the shape of the training split of binarized MNIST."""
    pixels = np.random.default_rng(0).integers(0, 2, (50_000, 28, 28, 1), np.uint8)
    return binary_data.binarize(pixels, 0)


def _vcd_peer(config: VcdConfig, images: binary_data.BinaryImages) -> Peer:
    model, plan = config.model, config.plan
    if model.resolved_objective != "vcd" or model.control_variate != "local":
        return "the PyTorch version has only VCD with local control variates"
    plain = plan.batching.global_batch_size == plan.micro_batch_size
    if not plain or plan.types.compute != "float32":
        return "the PyTorch version has one device, one micro-batch per update, and float32"
    return {
        "kind": "vcd",
        "batch": plan.micro_batch_size,
        "samples": len(images),
        "pixels": images.num_pixels,
        "hidden": model.num_hidden,
        "z_dim": model.z_dim,
        "hmc_steps": model.num_burn_in_steps + model.num_hmc_steps,
        "leapfrog_steps": model.num_leapfrog_steps,
    }
