"""What is measured: something that can be compiled, made ready, and called."""

import abc
import collections
import contextlib
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from millrace.bench.operations import Counted, count
from millrace.feeds.infeed import Infeed
from millrace.loop.staging import MAX_IN_FLIGHT, compile_calls, next_chunk
from millrace.program.compiling import Options, compiling, peak_bytes
from millrace.program.training import TrainingProgram

_log = logging.getLogger("millrace")


class Cost(NamedTuple):
    """What a unit of work, an update or a batch, asks of the device; None if unknown."""

    operations: float | None
    num_bytes: float | None
    """The larger of what XLA counts and what products and convolutions read and write."""


class Workload(abc.ABC):
    """Work of one kind, in calls of the compiled program."""

    unit: str
    """What the work is counted in: update or batch."""
    samples_per_unit: int
    units_per_call: int
    num_devices: int
    compute: str
    """The type of computation."""
    batch: int
    """What is to be lowered where memory is short."""
    compile_seconds = 0.0
    memory_bytes = 0
    known_cost = Cost(None, None)
    peer: dict[str, Any] | str = "PyTorch's side does not know this command"
    """What PyTorch has to know to do the same, or why it cannot."""

    @abc.abstractmethod
    def compile(self, options: Options | None = None) -> None:
        """Compile, with further options of XLA's; then `memory_bytes` is known."""

    @abc.abstractmethod
    def start(self) -> None:
        """Put everything on the devices."""

    @abc.abstractmethod
    def run(self, calls: int) -> None:
        """Make calls, and wait until all are done."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Let go of everything on the devices."""

    @abc.abstractmethod
    def traced(self) -> Counted:
        """Count a unit's products and convolutions on each device, compiling nothing."""

    @abc.abstractmethod
    def compiled_bytes(self) -> float | None:
        """Return what XLA says that a unit moves on each device, None if it cannot."""

    def cost(self) -> Cost:
        """Work out what a unit costs, on each device."""
        counted = self.traced()
        # Of what XLA hands to cuDNN and cuBLAS, it counts nothing.
        num_bytes = max(counted.num_bytes, self.compiled_bytes() or 0.0)
        return Cost(counted.operations, num_bytes or None)

    def work_out_cost(self) -> None:
        """Keep what a unit costs; of a model that cannot be traced alone, nothing."""
        try:
            self.known_cost = self.cost()
        except Exception as error:
            _log.warning("What it costs is not known: %s", error)

    def latency(self, seconds: float) -> list[float]:
        """Time single calls, for about so long or some times that; [] if there are none."""
        del seconds
        return []


class Training(Workload):
    """A training program with its infeed, called as a run calls it."""

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
        self._programs: list[Any] = []
        self._capacities: tuple[int, ...] = ()

    def compile(self, options: Options | None = None) -> None:
        with compiling_with(options) as self._programs:
            self._capacities = compile_calls(
                self._program, self._state, self._infeed, self._execution
            )[:1]
        count = self._program.plan.batching.gradient_accumulation_count
        self.units_per_call = self._capacities[0] // count
        self.compile_seconds = self._program.compile_seconds
        self.memory_bytes = peak_bytes(self._programs)

    def start(self) -> None:
        self.run(1)

    def run(self, calls: int) -> None:
        in_flight: collections.deque[Any] = collections.deque()
        for _ in range(calls):
            chunk = next_chunk(self._program, self._infeed, self._capacities)
            self._state, info = self._program.run(self._state, chunk)
            in_flight.append(info)
            if len(in_flight) >= MAX_IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
        jax.block_until_ready(list(in_flight))

    def stop(self) -> None:
        self._infeed.close()
        self._state = None

    def traced(self) -> Counted:
        return training_counted(self._program, self._weights, self._infeed)

    def compiled_bytes(self) -> float | None:
        # Of loops inside an update, XLA counts one pass.
        count = self._program.plan.batching.gradient_accumulation_count
        plain = count == 1 and len(self._programs) == 1
        return bytes_accessed(self._programs[0]) if plain else None


def compiling_with(
    options: Options | None,
) -> contextlib.AbstractContextManager[list[jax.stages.Compiled]]:
    """Compile what is compiled inside with these options, and collect it."""
    return compiling({jax.default_backend(): options or {}})


def training_counted(program: TrainingProgram, weights: Any, infeed: Infeed) -> Counted:
    """Count an update from its loss."""
    plan = program.plan
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((plan.micro_batch_size, *x.shape[1:]), x.dtype),
        infeed.peek(),
    )

    def gradient(params: Any, model_state: Any, batch: Any) -> Any:
        key = jax.random.key(0)
        return jax.grad(lambda p: program.loss_fn(p, model_state, batch, key)[0])(params)

    passes = plan.batching.gradient_accumulation_count
    return count(gradient, *weights, batch).times(passes / plan.num_stages)


def bytes_accessed(program: jax.stages.Compiled) -> float | None:
    """Return the bytes XLA says a program moves, a loop once and what cuDNN does never."""
    analysis: Any = program.cost_analysis() or {}
    return analysis.get("bytes accessed")
