"""The batches of ``cnn validate``, and timed passes over them."""

import abc
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.commands import ValidateConfig
from millrace.apps.cnn.data import ImageData, open_infeed
from millrace.apps.cnn.inference.network import Inference, run_chunks
from millrace.apps.cnn.program import accuracies
from millrace.data.stream import ParallelStream, Stream
from millrace.distributed import coordination
from millrace.feeds.device import ResidentDataset
from millrace.feeds.infeed import Infeed
from millrace.loop.activity import report_progress
from millrace.loop.evaluate import evaluate
from millrace.loop.pace import Pace
from millrace.loop.stability import Stability
from millrace.nn.losses import cross_entropy
from millrace.program.evaluate import EvaluationProgram
from millrace.program.mixed_precision import narrow

_STAGED_BYTES = 64 << 20
_RESIDENT_BYTES = 256 << 20
_MAX_BATCHES_ON_CPU = 64
"""Batches per call where a call may process fewer, with memory for the logits of all."""

_MAX_SECONDS, _MIN_SECONDS = 30.0, 3.0
"""Time of all measurements of a batch size, and least time of each, if not stable."""


def divide_into_calls(num_batches: int, per_call: int) -> tuple[int, int]:
    """Divide a pass into calls of about `per_call` batches, as Graphcore's benchmark does.

    Returns:
        The number of calls, and the batches in each; leftover batches are dropped.

    >>> [divide_into_calls(count, 1000) for count in (50_000, 12_500, 555)]
    [(50, 1000), (12, 1041), (1, 555)]
    """
    if num_batches <= per_call:
        return 1, num_batches
    each = num_batches // max(1, round(num_batches / per_call))
    return num_batches // each, each


class Measured(NamedTuple):
    """The speed of a pass."""

    samples_per_second: float
    metrics: dict[str, float]
    how: str
    """How the measurement ended: because the pass did, or because it was stable."""


class Feed(abc.ABC):
    """Batches of one size. A context manager."""

    batch: jax.ShapeDtypeStruct
    """Shape and type of a batch over all replicas, as it reaches the devices."""
    num_batches: int
    """Batches per pass."""
    num_samples: int
    """Samples per pass."""
    batches_per_call: int
    """Batches per call; with real data, a call is a pass."""

    @abc.abstractmethod
    def compile(self, inference: Inference) -> None:
        """Compile what a pass needs."""

    @abc.abstractmethod
    def start(self, inference: Inference) -> None:
        """Stage what a pass needs, and warm up."""

    @abc.abstractmethod
    def run(self, inference: Inference) -> Measured:
        """Measure a pass, or what it takes for a stable figure."""

    @abc.abstractmethod
    def run_for(self, inference: Inference, seconds: float) -> int:
        """Work for about this time, at least for one call; return the batches done."""

    @abc.abstractmethod
    def one_batch(self, number: int = 0) -> Any:
        """Return a batch of a pass for measuring latency."""

    def several_batches(self, at_most: int) -> list[Any]:
        """Return different batches, as many as a pass has and little memory holds."""
        small_enough = max(1, _STAGED_BYTES // _num_bytes(self.batch))
        count = min(at_most, self.num_batches, small_enough)
        return [self.one_batch(number) for number in range(count)]

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Release resources."""
        return


def build_feed(config: ValidateConfig, images: ImageData, size: int) -> Feed:
    """Return the batches of a configuration, of `size` samples per replica."""
    if config.data.synthetic == "device":
        return DeviceFeed(config, images, size)
    if config.data.synthetic == "host":
        return HostFeed(config, images, size)
    return DatasetFeed(config, images, size)


class SyntheticFeed(Feed):
    """Random batches, run in calls of several batches each."""

    _is_whole_pass: bool
    """Whether a pass is always finished, because its length was asked for."""

    def _divide(self, config: ValidateConfig, one_pass: int, per_call: int) -> None:
        """Set the sizes of a pass, and its time if it is not asked for in full."""
        asked, repeat = config.num_batches, config.repeat
        if jax.local_devices()[0].platform == "cpu":
            per_call = min(per_call, _MAX_BATCHES_ON_CPU)
        calls, self.batches_per_call = divide_into_calls(asked or one_pass, per_call)
        self.num_batches = calls * self.batches_per_call
        self.num_samples = self.num_batches * self.batch.shape[0]
        self._is_whole_pass = asked is not None
        self._max_seconds = max(_MIN_SECONDS, _MAX_SECONDS / repeat)
        self._pace = Pace()

    @abc.abstractmethod
    def _take(self, inference: Inference, at_most: int) -> tuple[Any, tuple[int, int]]:
        """Return a chunk of batches on the devices, and the part of it to process next."""

    def run(self, inference: Inference) -> Measured:
        measured, done = Stability(max_seconds=self._max_seconds), 0

        def batches_left(started: int) -> int:
            is_enough = measured.is_done and not self._is_whole_pass
            return 0 if is_enough else self.num_batches - started

        last = time.perf_counter()
        for count in self._iterate(inference, batches_left):
            now = time.perf_counter()
            measured.add(count * self.batch.shape[0], now - last)
            last, done = now, done + count
            report_progress(done, self.num_batches)
        how = "whole pass" if done == self.num_batches else measured.describe()
        return Measured(measured.units / measured.seconds, {}, how)

    def run_for(self, inference: Inference, seconds: float) -> int:
        until = time.perf_counter() + seconds

        def batches_left(started: int) -> int:
            is_over = started and time.perf_counter() >= until
            return 0 if is_over else self.batches_per_call

        return sum(self._iterate(inference, batches_left))

    def _iterate(
        self, inference: Inference, batches_left: Callable[[int], int]
    ) -> Iterator[int]:
        """Yield the number of batches of each call when it has ended.

        Args:
            inference: The network.
            batches_left: Returns how many batches may follow those that have been started.
        """
        counts: list[int] = []

        def parts() -> Iterator[tuple[Any, tuple[int, int]]]:
            started = 0
            while left := batches_left(started):
                length = self.batches_per_call
                if inference.takes_any_number:
                    length = min(length, left, self._pace.updates)
                chunk, part = self._take(inference, length)
                started += part[1]
                counts.append(part[1])
                yield chunk, part

        self._pace.start()
        logits = None
        for newest in run_chunks(inference, parts()):
            logits, count = newest, counts.pop(0)
            self._pace.add(count)
            yield count
        if logits is not None and not np.isfinite(logits.astype(np.float32)).all():
            raise FloatingPointError("The logits of the model are not finite.")


class DeviceFeed(SyntheticFeed):
    """A few batches generated on the devices and used again and again."""

    def __init__(self, config: ValidateConfig, images: ImageData, size: int) -> None:
        train_config = config.train_config_for(size)
        self._infeed = open_infeed(images, train_config, batches_per_epoch=1)
        assert isinstance(self._infeed.dataset, ResidentDataset)
        self.batch = _arriving_batch(images, train_config)
        one_pass = max(1, len(images.validation) // self.batch.shape[0])
        self._divide(config, one_pass, config.batches_per_step)
        # At least two: XLA would hoist the logits of a single batch out of the loop.
        self._distinct = max(
            2, min(self.batches_per_call, _RESIDENT_BYTES // _num_bytes(self.batch))
        )
        self._chunk: Any = None

    def compile(self, inference: Inference) -> None:
        inference.compile_many(self._distinct, self.batches_per_call)

    def start(self, inference: Inference) -> None:
        chunk = self._infeed.chunk(self._distinct, inference.chunk_sharding)
        assert chunk is not None, "a resident dataset does not end"
        cast = jax.jit(lambda images: images.astype(self.batch.dtype))
        self._chunk = cast(chunk.data["image"])
        self._infeed.close()
        self.run_for(inference, 0.0)

    def _take(self, inference: Inference, at_most: int) -> tuple[Any, tuple[int, int]]:
        return self._chunk, (0, at_most)

    def one_batch(self, number: int = 0) -> jax.Array:
        return jax.block_until_ready(self._chunk[number % self._distinct])

    def close(self) -> None:
        self._chunk = None


class HostFeed(SyntheticFeed):
    """Batches generated on the host and sent like real ones."""

    def __init__(self, config: ValidateConfig, images: ImageData, size: int) -> None:
        self._stream = Stream(images.validation, size * config.num_replicas, shuffle=False)
        image = self._stream.batch(0)["image"]
        self.batch = jax.ShapeDtypeStruct(image.shape, image.dtype)
        one_pass = max(1, len(images.validation) // image.shape[0])
        staged = max(1, _STAGED_BYTES // image.nbytes)
        per_call = min(config.batches_per_step, staged)
        self._divide(config, one_pass, per_call)
        num_parallel = config.data.parallel_batches(image.shape[0])
        self._infeed = Infeed(ParallelStream(self._stream, num_parallel))

    def compile(self, inference: Inference) -> None:
        inference.compile_many(self.batches_per_call, self.batches_per_call)

    def start(self, inference: Inference) -> None:
        self.run_for(inference, 0.0)

    def _take(self, inference: Inference, at_most: int) -> tuple[Any, tuple[int, int]]:
        chunk = self._infeed.chunk(
            (self.batches_per_call,), inference.chunk_sharding, only_full=True
        )
        assert chunk is not None, "the stream does not end"
        count = min(at_most, chunk.stop - chunk.start)
        self._infeed.took(count)
        return chunk.data["image"], (chunk.start, count)

    def one_batch(self, number: int = 0) -> np.ndarray:
        return self._stream.batch(number)["image"]

    def close(self) -> None:
        self._infeed.close()


class DatasetFeed(Feed):
    """Whole passes over the validation set with its labels: accuracy needs all of it."""

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
        network, preprocess = inference.network, self._images.preprocess
        plan = self._config.train_config.plan

        def metric_fn(params: Any, model_state: Any, batch: Any) -> dict[str, jax.Array]:
            images = narrow(preprocess(batch["image"], None), plan.types.compute)
            logits = network.apply((params, model_state), images)
            return {
                "loss": cross_entropy(logits, batch["label"]),
                **accuracies(logits, batch["label"]),
            }

        program = EvaluationProgram(metric_fn, plan, inference.devices)
        self._evaluate = functools.partial(
            evaluate,
            program,
            inference.replicate(network.weights),
            self._images.validation,
            self._samples,
        )

    def start(self, inference: Inference) -> None:
        self._evaluate()

    def run(self, inference: Inference) -> Measured:
        seconds = max(_MIN_SECONDS, _MAX_SECONDS / self._config.repeat)
        measured, is_enough = Stability(max_seconds=seconds), False
        metrics: dict[str, float] = {}
        # The processes share each pass, and their rates are added up.
        share = self.num_samples / coordination.num_processes()
        while not is_enough:
            started = time.perf_counter()
            metrics = self._evaluate()
            measured.add(share, time.perf_counter() - started)
            # Therefore, all of them make as many passes.
            is_enough = coordination.broadcast("measured-enough", measured.is_done)
        return Measured(measured.units / measured.seconds, metrics, measured.describe())

    def run_for(self, inference: Inference, seconds: float) -> int:
        until, batches = time.perf_counter() + seconds, 0
        while not batches or time.perf_counter() < until:
            self._evaluate()
            batches += self.num_batches
        return batches

    def one_batch(self, number: int = 0) -> np.ndarray:
        indices = np.arange(number * self._samples, (number + 1) * self._samples)
        source = self._images.validation
        return source[indices % len(source)]["image"]


def _arriving_batch(images: ImageData, config: CnnConfig) -> jax.ShapeDtypeStruct:
    """Return the shape and type of a batch as it reaches the devices.

    If the device preprocesses images, they are as sent; otherwise of the compute type.
    """
    dtype = images.validation[np.arange(1)]["image"].dtype
    if not config.scales_on_device:
        dtype = jnp.dtype(config.plan.types.compute)
    samples = config.plan.batching.samples_per_step
    return jax.ShapeDtypeStruct((samples, *images.image_shape), dtype)


def _num_bytes(batch: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(batch.shape)) * batch.dtype.itemsize
