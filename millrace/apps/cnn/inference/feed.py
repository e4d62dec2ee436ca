"""Where the pictures of ``cnn validate`` come from, and a timed pass over them."""

import abc
import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn.config.inference import ValidateConfig
from millrace.apps.cnn.data import ImageData
from millrace.apps.cnn.feeding import open_infeed
from millrace.apps.cnn.inference.network import Inference, drain
from millrace.data.parallel import ParallelStream
from millrace.data.stream import Stream
from millrace.feeds.infeed import Infeed
from millrace.feeds.resident import ResidentInfeed
from millrace.loop.evaluate import evaluate
from millrace.nn.losses import correct, cross_entropy
from millrace.program.evaluate import EvaluationProgram
from millrace.program.mixed_precision import narrow

_STAGED_BYTES = 64 << 20
_RESIDENT_BYTES = 256 << 20


def calls_of(num_batches: int, per_call: int) -> tuple[int, int]:
    """Divide a pass into calls of about `per_call` batches, as the reference does.

    Returns:
        How many calls, and the batches in each; what is left over is left out.

    >>> calls_of(50_000, 1000), calls_of(12_500, 1000), calls_of(555, 1000)
    ((50, 1000), (12, 1041), (1, 555))
    """
    if num_batches <= per_call:
        return 1, num_batches
    each = num_batches // max(1, round(num_batches / per_call))
    return num_batches // each, each


class Feed(abc.ABC):
    """Batches of one size; closed by leaving its ``with``."""

    batch: jax.ShapeDtypeStruct
    """Shape and type of a batch over all replicas, as the devices get it."""
    num_batches: int
    """In one pass."""
    num_samples: int
    batches_per_call: int
    """In one call, of which a pass is some; of real data, a pass."""

    @abc.abstractmethod
    def compile(self, inference: Inference) -> None:
        """Compile what a pass needs."""

    @abc.abstractmethod
    def start(self, inference: Inference) -> None:
        """Make everything ready, and warm."""

    @abc.abstractmethod
    def run(
        self, inference: Inference, calls: int | None = None
    ) -> tuple[float, dict[str, float]]:
        """Make a pass, or so many calls; return their seconds, and what was found."""

    @abc.abstractmethod
    def one_batch(self, number: int = 0) -> Any:
        """Return a batch of a pass, to measure latency with."""

    def several_batches(self, at_most: int) -> list[Any]:
        """Return different ones, as many as a pass has and as take little memory."""
        small_enough = max(1, _STAGED_BYTES // _size(self.batch))
        count = min(at_most, self.num_batches, small_enough)
        return [self.one_batch(number) for number in range(count)]

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what is held."""
        return


def feed_of(config: ValidateConfig, images: ImageData, size: int) -> Feed:
    """Return the batches that a configuration asks for."""
    if config.synthetic == "device":
        return OnDevice(config, images, size)
    if config.synthetic == "host":
        return FromHost(config, images, size)
    return Real(config, images, size)


class OnDevice(Feed):
    """A few batches that are made on the devices, over and over."""

    def __init__(self, config: ValidateConfig, images: ImageData, size: int) -> None:
        training = config.for_batch(size)
        self._infeed = open_infeed(images, training, batches_per_epoch=1)
        assert isinstance(self._infeed, ResidentInfeed)
        self.batch = _arriving(images, training)
        samples = self.batch.shape[0]
        wanted = config.num_batches or max(1, len(images.validation) // samples)
        self._calls, self.batches_per_call = calls_of(wanted, config.batches_per_step)
        self.num_batches = self._calls * self.batches_per_call
        self.num_samples = self.num_batches * samples
        # Never one alone: its logits would be computed once, before the loop.
        self._distinct = max(
            2, min(self.batches_per_call, _RESIDENT_BYTES // _size(self.batch))
        )
        self._chunk: Any = None

    def compile(self, inference: Inference) -> None:
        inference.compile_many(self._distinct, self.batches_per_call)

    def start(self, inference: Inference) -> None:
        chunk = self._infeed.chunk(self._distinct, inference.chunk_sharding)
        assert chunk is not None, "there are always more"
        cast = jax.jit(lambda images: images.astype(self.batch.dtype))
        self._chunk = cast(chunk.data["image"])
        self._infeed.close()
        jax.block_until_ready(inference.many(self._chunk))

    def run(
        self, inference: Inference, calls: int | None = None
    ) -> tuple[float, dict[str, float]]:
        started = time.perf_counter()
        logits = drain(inference, itertools.repeat(self._chunk, calls or self._calls))
        return time.perf_counter() - started, _checked(logits)

    def one_batch(self, number: int = 0) -> jax.Array:
        return jax.block_until_ready(self._chunk[number % self._distinct])

    def close(self) -> None:
        self._chunk = None


class FromHost(Feed):
    """Batches made on the host and sent, as real ones are."""

    def __init__(self, config: ValidateConfig, images: ImageData, size: int) -> None:
        self._stream = Stream(images.validation, size * config.num_replicas, shuffle=False)
        image = self._stream.batch(0)["image"]
        self.batch = jax.ShapeDtypeStruct(image.shape, image.dtype)
        wanted = config.num_batches or max(1, len(images.validation) // image.shape[0])
        staged = max(1, _STAGED_BYTES // image.nbytes)
        per_call = min(config.batches_per_step, staged)
        self._calls, self.batches_per_call = calls_of(wanted, per_call)
        self.num_batches = self._calls * self.batches_per_call
        self.num_samples = self.num_batches * image.shape[0]
        self._infeed = Infeed(ParallelStream(self._stream, config.pipeline_num_parallel))

    def compile(self, inference: Inference) -> None:
        inference.compile_many(self.batches_per_call, self.batches_per_call)

    def start(self, inference: Inference) -> None:
        drain(inference, self._chunks(inference, 1))

    def run(
        self, inference: Inference, calls: int | None = None
    ) -> tuple[float, dict[str, float]]:
        started = time.perf_counter()
        logits = drain(inference, self._chunks(inference, calls or self._calls))
        return time.perf_counter() - started, _checked(logits)

    def _chunks(self, inference: Inference, count: int) -> Iterator[Any]:
        for _ in range(count):
            chunk = self._infeed.chunk(
                (self.batches_per_call,), inference.chunk_sharding, only_full=True
            )
            assert chunk is not None, "the stream has no end"
            self._infeed.took(chunk.stop)
            yield chunk.data["image"]

    def one_batch(self, number: int = 0) -> np.ndarray:
        return self._stream.batch(number)["image"]

    def close(self) -> None:
        self._infeed.close()


class Real(Feed):
    """Every sample of the validation set once, with its label."""

    def __init__(self, config: ValidateConfig, images: ImageData, size: int) -> None:
        self._config, self._images = config, images
        self._samples = size * config.num_replicas
        image = self.one_batch()
        self.batch = jax.ShapeDtypeStruct(image.shape, image.dtype)
        self.num_samples = len(images.validation)
        self.num_batches = -(-self.num_samples // self._samples)
        self.batches_per_call = self.num_batches
        self._evaluate: Any = None

    def compile(self, inference: Inference) -> None:
        network, prepare = inference.network, self._images.prepare
        compute = self._config.training.types.compute

        def metric_fn(params: Any, model_state: Any, batch: Any) -> dict[str, jax.Array]:
            images = narrow(prepare(batch["image"], None), compute)
            logits = network.apply((params, model_state), images)
            return {
                "loss": cross_entropy(logits, batch["label"]),
                "accuracy": correct(logits, batch["label"]),
            }

        program = EvaluationProgram(metric_fn, self._config.training, inference.devices)
        weights = inference.placed(network.params, network.model_state)
        self._evaluate = functools.partial(
            evaluate, program, weights, self._images.validation, self._samples
        )

    def start(self, inference: Inference) -> None:
        self._evaluate()

    def run(
        self, inference: Inference, calls: int | None = None
    ) -> tuple[float, dict[str, float]]:
        started = time.perf_counter()
        found: dict[str, float] = {}
        for _ in range(calls or 1):
            found = self._evaluate()
        return time.perf_counter() - started, found

    def one_batch(self, number: int = 0) -> np.ndarray:
        places = np.arange(number * self._samples, (number + 1) * self._samples)
        source = self._images.validation
        return source[places % len(source)]["image"]


def _arriving(images: ImageData, training: Any) -> jax.ShapeDtypeStruct:
    """Bytes, where the device prepares them; else what the network computes with."""
    samples = training.batching.samples_per_step
    kind = images.validation[np.arange(1)]["image"].dtype
    if not training.accelerator_side_preprocess:
        kind = jnp.dtype(training.types.compute)
    return jax.ShapeDtypeStruct((samples, *images.image_shape), kind)


def _size(batch: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(batch.shape)) * batch.dtype.itemsize


def _checked(logits: np.ndarray | None) -> dict[str, float]:
    """Find nothing out about random pictures, except that a network must answer them."""
    if logits is not None and not np.isfinite(logits.astype(np.float32)).all():
        raise FloatingPointError("The network's logits are not finite.")
    return {}
