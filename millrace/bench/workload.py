"""Workloads: compile, start and call what a command would run, and measure it."""

import abc
import collections
import contextlib
import functools
import logging
import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from millrace.apps.cnn.config.commands import ValidateConfig
from millrace.apps.cnn.data import ImageData
from millrace.apps.cnn.inference.command import build_inference
from millrace.apps.cnn.inference.feed import build_feed
from millrace.apps.cnn.inference.latency import latency_figures
from millrace.apps.cnn.inference.network import Network, time_calls
from millrace.bench.measuring import count_latency_calls, drop_unsupported
from millrace.bench.roofline import Cost, count_cost
from millrace.feeds.infeed import Infeed
from millrace.loop.activity import report_progress
from millrace.loop.stability import Stability
from millrace.loop.staging import Call, Calls
from millrace.program.compiling import Options, compiling, peak_bytes
from millrace.program.training import TrainingProgram

_FIRST_LATENCY_CALLS = 5
"""Calls that estimate the time of a call, to choose how many to time."""

_WARMUP_RUNS = 4
_ENDLESS = 1 << 30

_log = logging.getLogger("millrace")


class CannotRun(Exception):
    """An entry cannot run on this machine; the message says why."""


class Workload(abc.ABC):
    """Calls of a compiled program."""

    unit: str
    """Unit of work: update or batch."""
    samples_per_unit: int
    units_per_call: int
    num_devices: int
    compute: str
    """Type of the computation."""
    batch: int
    """Samples per device, which must be lowered if memory is short."""
    compile_seconds = 0.0
    memory_bytes = 0
    cost = Cost(0.0, 0.0)
    """Cost of a unit on each device, once estimated. Its bytes are the larger of two
    counts: that of XLA, and the operands and results of products and convolutions."""
    peer: dict[str, Any] | str = "there is no PyTorch version of this command"
    """Settings of the same work in PyTorch, or why there is none."""

    @abc.abstractmethod
    def compile(self, options: Options | None = None) -> None:
        """Compile with additional XLA options, and set `memory_bytes`."""

    @abc.abstractmethod
    def start(self) -> None:
        """Put everything on the devices."""

    @abc.abstractmethod
    def run(self, seconds: float) -> int:
        """Work for about this time, at least for one call; return the units done."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Free the memory of the devices."""

    @abc.abstractmethod
    def trace_cost(self) -> Cost:
        """Count the products and convolutions of a unit per device, without compiling."""

    @abc.abstractmethod
    def compiled_bytes(self) -> float | None:
        """Return the bytes that a unit moves on each device according to XLA, if known."""

    def estimate_cost(self) -> None:
        """Set `cost`; it stays unknown if the model cannot be traced on its own."""
        try:
            traced = self.trace_cost()
            # XLA counts nothing of what it hands to cuDNN and cuBLAS.
            num_bytes = max(traced.num_bytes, self.compiled_bytes() or 0.0)
            self.cost = Cost(traced.flops, num_bytes)
        except Exception as error:
            _log.warning("The cost of this entry is unknown: %s", error)

    def time_single_calls(self, seconds: float) -> list[float]:
        """Return latencies, timed for about `seconds`; none if latency has no meaning."""
        del seconds
        return []


def measure(
    work: Workload, repeat: int, seconds: float, max_seconds: float = 30.0
) -> dict[str, Any]:
    """Start a compiled workload, measure it, and stop it; return the figures.

    It is measured at least `repeat` times in `seconds`, and then until the mean is known to
    1 % or `max_seconds` are over.
    """
    try:
        work.start()
        measured = _time_blocks(work, repeat, seconds, max_seconds)
        latency = work.time_single_calls(seconds / 2)
    finally:
        work.stop()
    speeds = measured.grouped_rates(repeat)
    median = statistics.median(speeds)
    unit_seconds = work.samples_per_unit / median
    return {
        "samples_per_second": {
            "median": median,
            "lowest": min(speeds),
            "highest": max(speeds),
            "values": speeds,
        },
        "measured": measured.figures() | {"how": measured.describe()},
        "unit": work.unit,
        "samples_per_unit": work.samples_per_unit,
        "units_per_call": work.units_per_call,
        "ms_per_unit": 1e3 * unit_seconds,
        "latency_ms": drop_unsupported(latency_figures(latency), len(latency)),
        "latency_calls": len(latency),
        "compile_seconds": work.compile_seconds,
        "peak_bytes": work.memory_bytes,
        "num_devices": work.num_devices,
        "compute": work.compute,
        "flops_per_second": work.cost.flops / unit_seconds or None,
        "bytes_per_second": work.cost.num_bytes / unit_seconds or None,
    }


def _time_blocks(
    work: Workload, repeat: int, seconds: float, max_seconds: float
) -> Stability:
    """Return the samples per second of blocks, each about a `repeat`-th of `seconds`."""
    measured = Stability(repeat, block_seconds=0.0, max_seconds=max_seconds)
    work.run(0.0)  # dropped: caches and queues were still filling
    while not measured.is_done:
        # A figure that is stable earlier ends the measurement.
        report_progress(int(measured.seconds), math.ceil(max_seconds))
        started = time.perf_counter()
        units = work.run(seconds / repeat)
        elapsed = time.perf_counter() - started
        measured.add(work.samples_per_unit * units, elapsed)
    return measured


class TrainingWorkload(Workload):
    """A training program with its infeed, called as in a run."""

    unit = "update"

    def __init__(
        self,
        program: TrainingProgram,
        weights: tuple[Any, Any],
        infeed: Infeed,
        execution: int,
        peer: dict[str, Any] | str = Workload.peer,
    ) -> None:
        batching = program.plan.batching
        self.samples_per_unit = batching.global_batch_size
        self.batch = batching.micro_batch_size
        self.num_devices = len(program.devices)
        self.compute = program.plan.types.compute
        self.peer = peer
        self._program, self._infeed, self._execution = program, infeed, execution
        self._weights = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), weights
        )
        self._state: Any = program.init(*weights)
        self._compiled: list[Any] = []
        self._calls = Calls(program, infeed, execution=execution, total=_ENDLESS)
        self._done = 0
        self._options: Options | None = None

    def compile(self, options: Options | None = None) -> None:
        self._options = options
        with _compiling_with(options) as self._compiled:
            self._calls.compile(self._state)
        self.compile_seconds = self._program.compile_seconds
        self.memory_bytes = peak_bytes(self._compiled)

    def start(self) -> None:
        # The length of calls settles.
        for _ in range(_WARMUP_RUNS):
            self.run(0.0)
            if self._execution == 1 and self._calls.pace.is_slow:
                return  # calls cannot be shorter

    def run(self, seconds: float) -> int:
        calls, until = self._calls, time.perf_counter() + seconds
        in_flight: collections.deque[Call] = collections.deque()
        units = 0
        calls.pace.start()
        while not units or time.perf_counter() < until:
            chunk = calls.next_chunk()
            with _compiling_with(self._options):  # it may need another length of calls
                self._state, call = calls.run(self._state, chunk, self._done, _ENDLESS)
            self._done += call.updates
            units += call.updates
            in_flight.append(call)
            while len(in_flight) >= calls.max_in_flight:
                self._wait(in_flight.popleft())
        while in_flight:
            self._wait(in_flight.popleft())
        self.units_per_call = calls.pace.updates
        return units

    def _wait(self, call: Call) -> None:
        jax.block_until_ready(call.info)
        self._calls.pace.add(call.updates)

    def stop(self) -> None:
        self._infeed.close()
        self._state = None

    def trace_cost(self) -> Cost:
        program, plan = self._program, self._program.plan
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((plan.micro_batch_size, *x.shape[1:]), x.dtype),
            self._infeed.peek(),
        )

        def gradient(params: Any, model_state: Any, batch: Any) -> Any:
            key = jax.random.key(0)
            return jax.grad(lambda p: program.loss_fn(p, model_state, batch, key)[0])(
                params
            )

        passes = plan.batching.gradient_accumulation_count
        cost = count_cost(gradient, *self._weights, batch)
        return cost.scale(passes / plan.num_stages)

    def compiled_bytes(self) -> float | None:
        # XLA counts loops once, so its count is right only without accumulation.
        micro_batches = self._program.plan.batching.gradient_accumulation_count
        plain = micro_batches == 1 and len(self._compiled) == 1
        return _bytes_accessed(self._compiled[0]) if plain else None


class InferenceWorkload(Workload):
    """``cnn validate`` with one batch size."""

    unit = "batch"

    def __init__(
        self,
        config: ValidateConfig,
        images: ImageData,
        network: Network,
        peer: dict[str, Any] | str,
    ) -> None:
        (self.batch,) = config.batch_size
        self._feed = build_feed(config, images, self.batch)
        self._inference = build_inference(config, images, network, self._feed)
        self.samples_per_unit = self._feed.batch.shape[0]
        self.units_per_call = self._feed.batches_per_call
        self.num_devices = config.num_replicas
        self.compute = config.train_config.plan.types.compute
        self.peer = peer

    def compile(self, options: Options | None = None) -> None:
        with _compiling_with(options) as compiled:
            self._feed.compile(self._inference)
            self._inference.compile_one()
        self.compile_seconds = self._inference.compile_seconds
        self.memory_bytes = peak_bytes(compiled)

    def start(self) -> None:
        self._inference.place_weights()
        self._feed.start(self._inference)

    def run(self, seconds: float) -> int:
        return self._feed.run_for(self._inference, seconds)

    def stop(self) -> None:
        self._feed.close()
        self._inference.release()

    def trace_cost(self) -> Cost:
        network, batch = self._inference.network, self._feed.batch
        shape = (batch.shape[0] // self.num_devices, *batch.shape[1:])
        images = jax.ShapeDtypeStruct(shape, jnp.dtype(self.compute))
        weights = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), network.weights
        )
        return count_cost(network.apply, weights, images)

    def compiled_bytes(self) -> float | None:
        return _bytes_accessed(self._inference.programs["one"])

    def time_single_calls(self, seconds: float) -> list[float]:
        batch = self._feed.one_batch()
        timed = functools.partial(time_calls, self._inference, [batch])
        once = statistics.median(timed(_FIRST_LATENCY_CALLS))
        return list(timed(count_latency_calls(once, seconds)))


def _compiling_with(
    options: Options | None,
) -> contextlib.AbstractContextManager[list[jax.stages.Compiled]]:
    """Compile with these XLA options inside the context, and collect the programs."""
    return compiling({jax.default_backend(): options or {}})


def _bytes_accessed(program: jax.stages.Compiled) -> float | None:
    analysis: Any = program.cost_analysis() or {}
    return analysis.get("bytes accessed")
