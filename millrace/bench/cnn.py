"""The CNN's commands as work to be measured."""

import concurrent.futures
import dataclasses
import functools
import statistics
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.commands import ValidateConfig
from millrace.apps.cnn.data import ImageData, open_infeed
from millrace.apps.cnn.inference.command import build_inference, load_weights
from millrace.apps.cnn.inference.feed import build_feed
from millrace.apps.cnn.inference.network import Network, build_network, time_calls
from millrace.apps.cnn.program import build_model, build_program
from millrace.apps.cnn.train import plan_events
from millrace.bench.latency import latency_calls
from millrace.bench.operations import Counted, count
from millrace.bench.workload import Training, Workload, bytes_accessed, compiling_with
from millrace.nn.layers import init_layers
from millrace.program.compiling import Options, peak_bytes

_FIRST_CALLS = 5
_NO_MODEL = "torchvision has no such network"

_TORCH_MODELS = {
    **{("resnet", n): f"resnet{n}" for n in ("18", "34", "50", "101", "152")},
    ("resnext", "50"): "resnext50_32x4d",
    ("resnext", "101"): "resnext101_32x4d",
    **{("efficientnet", f"B{n}"): f"efficientnet_b{n}" for n in range(8)},
}


def cnn_training(config: CnnConfig) -> Workload:
    """Return ``cnn train`` as work."""
    images = data.load(config)
    model = build_model(config, images)
    schedule = plan_events(config, len(images.training))
    program = build_program(config, images, model, schedule)
    example = np.zeros((1, *images.image_shape), np.float32)
    weights = init_layers(model, jax.random.key(config.run.seed), example)
    infeed = open_infeed(images, config, schedule.updates_per_epoch)
    execution = schedule.updates_per_execution
    return Training(program, weights, infeed, execution, _training_peer(config, images))


def _training_peer(config: CnnConfig, images: Any) -> dict[str, Any] | str:
    """Say what PyTorch should train, or why it would not be the same work."""
    name = torch_model(config)
    if name is None:
        return _NO_MODEL
    if config.recipe.optimizer != "sgd" or config.recipe.mixes_samples:
        return "PyTorch's side trains with SGD, and mixes no pictures"
    plan = config.plan
    plain = plan.batching.global_batch_size == plan.micro_batch_size
    if not plain or plan.num_stages > 1:
        return "PyTorch's side has one device, and an update for each micro-batch"
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


def torch_model(config: CnnConfig) -> str | None:
    """Return what PyTorch calls this network, if it has it."""
    size = config.size
    if size is None or config.model.norm_layer["name"] == "group_norm":
        return None
    usual = {"resnext": (4, None), "efficientnet": (1, 6)}.get(config.resolved_model)
    given = config.model.group_dim, config.model.expand_ratio
    if usual and any(g not in (None, u) for g, u in zip(given, usual, strict=True)):
        return None
    if config.resolved_image_size < 33 and config.resolved_model != "efficientnet":
        return None
    large = config.resolved_dataset in ("imagenet", "imagefolder")
    return _TORCH_MODELS.get((config.resolved_model, size.name)) if large else None


class _Shared:
    """Networks that several entries use, each made once, by whoever comes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[str, concurrent.futures.Future[Any]] = {}

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, which is called only once for a key."""
        with self._lock:
            mine = key not in self._futures
            future = self._futures.setdefault(key, concurrent.futures.Future())
        if mine:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
        return future.result()


_shared = _Shared()


def _network(config: ValidateConfig) -> tuple[ImageData, Network]:
    """Return pictures and network of a configuration; the batch does not matter."""
    like = dataclasses.replace(config, batch_size=[1], num_batches=None)

    def make() -> tuple[ImageData, Network]:
        images = data.load(config.train_config)
        model = build_model(config.train_config, images)
        weights, _ = load_weights(config, images, model)
        return images, build_network(config, images.image_shape, model, weights)

    return _shared.get(repr(like), make)


class Validation(Workload):
    """``cnn validate`` for one batch size."""

    unit = "batch"

    def __init__(self, config: ValidateConfig) -> None:
        (self.batch,) = config.batch_size
        images, network = _network(config)
        self._feed = build_feed(config, images, self.batch)
        self._inference = build_inference(config, images, network, self._feed)
        self.samples_per_unit = self._feed.batch.shape[0]
        self.units_per_call = self._feed.batches_per_call
        self.num_devices = config.num_replicas
        self.compute = config.train_config.plan.types.compute
        self.peer = _inference_peer(config, images)
        self._programs: list[Any] = []

    def compile(self, options: Options | None = None) -> None:
        with compiling_with(options) as self._programs:
            self._feed.compile(self._inference)
            self._inference.compile_one()
        self.compile_seconds = self._inference.compile_seconds
        self.memory_bytes = peak_bytes(self._programs)

    def start(self) -> None:
        self._inference.place_weights()
        self._feed.start(self._inference)

    def run(self, calls: int) -> None:
        self._feed.run(self._inference, calls)

    def stop(self) -> None:
        self._feed.close()
        self._inference.release()

    def traced(self) -> Counted:
        network, batch = self._inference.network, self._feed.batch
        shape = (batch.shape[0] // self.num_devices, *batch.shape[1:])
        images = jax.ShapeDtypeStruct(shape, jnp.dtype(self.compute))
        weights = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), network.weights
        )
        return count(network.apply, weights, images)

    def compiled_bytes(self) -> float | None:
        return bytes_accessed(self._inference.programs["one"])

    def latency(self, seconds: float) -> list[float]:
        batch = self._feed.one_batch()
        timed = functools.partial(time_calls, self._inference, [batch])
        once = statistics.median(timed(_FIRST_CALLS))
        return list(timed(latency_calls(once, seconds)))


def _inference_peer(config: ValidateConfig, images: Any) -> dict[str, Any] | str:
    name = torch_model(config.train_config)
    if name is None:
        return _NO_MODEL
    if config.data.synthetic != "device" or config.num_replicas > 1:
        return "PyTorch's side has one device, on which its pictures lie"
    return {
        "kind": "inference",
        "model": name,
        "batch": config.batch_size[0],
        "size": images.image_shape[0],
        "classes": images.num_classes,
        "compute": config.train_config.plan.types.compute,
    }
