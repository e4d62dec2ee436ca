"""The compiled evaluation loop: every sample counts once, padding never."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Float32

from millrace.plan import Plan
from millrace.program.compiling import compile_for
from millrace.program.mixed_precision import narrow
from millrace.program.replicas import (
    REPLICA_AXIS,
    STAGE_AXIS,
    batch_sharding,
    map_over_mesh,
    put_on_devices,
    replica_mesh,
    replicated,
)
from millrace.program.step import TrainState
from millrace.program.update_loop import repeat_update

MetricFn = Callable[[Any, Any, Any], dict[str, Array]]
"""``(params, model_state, batch) -> {name: one value per sample}``."""


class EvaluationProgram:
    """Sums per-sample metrics over a dataset, on all replicas.

    Args:
        metric_fn: Returns one value per sample for each metric; anything else, such as a
            mean, is an error.
        plan: Its number of replicas and precision are used.
        devices: Where to run; by default the first devices.
    """

    def __init__(
        self,
        metric_fn: MetricFn,
        plan: Plan,
        devices: Sequence[Any] | None = None,
    ) -> None:
        self._metric_fn = metric_fn
        self._plan = plan
        self._mesh = replica_mesh(plan.num_replicas, devices)
        self._compiled: dict[Any, Callable[..., Any]] = {}

    @property
    def devices(self) -> list[Any]:
        """The devices this program runs on."""
        return list(self._mesh.devices.flat)

    def place_state(self, state: Any) -> Any:
        """Copy weights to the devices of this program."""
        return put_on_devices(state, replicated(self._mesh))

    @property
    def chunk_sharding(self) -> NamedSharding:
        """The sharding that a chunk of batches must have."""
        return batch_sharding(self._mesh)

    def validate_state(self, state: TrainState) -> TrainState:
        """Return a state whose weights are on the devices of this program.

        Args:
            state: From a training program with any number of replicas, or of NumPy
                arrays. A donated state or the packed state of a pipeline is an error.
        """
        target = replicated(self._mesh)
        leaves = jax.tree.leaves((state.params, state.model_state))
        _check_usable(leaves)
        if all(
            isinstance(leaf, jax.Array)
            and leaf.sharding.is_equivalent_to(target, leaf.ndim)
            for leaf in leaves
        ):
            return state
        params, model_state = self.place_state((state.params, state.model_state))
        return state._replace(params=params, model_state=model_state)

    @property
    def runs_parts(self) -> bool:
        """Whether one compiled program evaluates any number of the batches of a chunk."""
        return self._mesh.devices.flat[0].platform == "cpu"

    def run(self, state: TrainState, chunk: Any) -> dict[str, float]:
        """Return the sums of the metrics over the real samples of a chunk, and "count".

        Args:
            state: The weights to evaluate; the state stays usable.
            chunk: ``{"batch": ..., "valid": ...}``, leaves (batches, samples, ...).
        """
        values = self.sum_batches(state, chunk)
        return {name: float(value.sum(dtype=np.float64)) for name, value in values.items()}

    def sum_batches(
        self, state: TrainState, chunk: Any, part: tuple[int, int] | None = None
    ) -> dict[str, np.ndarray]:  # (batches,)
        """Return the sums of the metrics over the real samples of each batch.

        Args:
            state: The weights to evaluate; the state stays usable.
            chunk: ``{"batch": ..., "valid": ...}``, leaves (batches, samples, ...).
            part: The first batch and their number; by default all. Only a program with
                `runs_parts` accepts it.
        """
        assert part is None or self.runs_parts
        state = self.validate_state(state)
        size = jax.tree.leaves(chunk)[0].shape[0]
        first, count = part or (0, size)
        given = (state.params, state.model_state, chunk)
        if self.runs_parts:
            place = np.array([first, count], np.int32)
            given = (*given, put_on_devices(place, replicated(self._mesh)))
        shapes = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(given))
        key = (shapes, jax.tree.structure(given))
        if key not in self._compiled:
            self._compiled[key] = self._compile(*given)
        with jax.transfer_guard("disallow"):
            sums = self._compiled[key](*given)
        fetched = jax.device_get(sums)
        return {name: np.asarray(values)[:count] for name, values in fetched.items()}

    def _compile(
        self, params: Any, model_state: Any, chunk: Any, *part: Array
    ) -> Callable[..., Any]:
        def sums(
            params: Any, model_state: Any, chunk: Any, *part: Array
        ) -> dict[str, Array]:
            compute = narrow(params, self._plan.types.compute)

            @jax.jit  # traced only once
            def add_batch(_: None, item: Any) -> tuple[None, dict[str, Array]]:
                batch = narrow(item["batch"], self._plan.types.compute)
                values = self._metric_fn(compute, model_state, batch)
                return None, _masked_sums(values, item["valid"])

            _, per_batch = repeat_update(add_batch, None, chunk, *part)
            # Batches are added on the host, so that the result does not depend on the part.
            return lax.psum(per_batch, REPLICA_AXIS)

        same, split = PartitionSpec(), PartitionSpec(None, REPLICA_AXIS)
        specs = (same, same, split, *[same for _ in part])
        mapped = map_over_mesh(self._mesh, sums, specs, same)
        return compile_for(self._mesh, mapped, params, model_state, chunk, *part)


def _check_usable(leaves: Sequence[Any]) -> None:
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    if any(leaf.is_deleted() for leaf in arrays):
        raise ValueError(
            "This state was used up by an earlier call. Evaluate the state that the call "
            "returned."
        )
    meshes = [getattr(leaf.sharding, "mesh", None) for leaf in arrays]
    if any(mesh is not None and STAGE_AXIS in mesh.axis_names for mesh in meshes):
        raise ValueError(
            "This state is packed for the devices of a pipeline. Evaluate "
            "program.unpack_state(state), where program is the training program."
        )


def _masked_sums(
    values: dict[str, Array], valid: Bool[Array, " samples"]
) -> dict[str, Float32[Array, ""]]:
    if "count" in values:
        raise ValueError("A metric cannot be called count, the number of samples.")
    sums = {}
    for name, value in values.items():
        if jnp.shape(value) != valid.shape:
            raise ValueError(
                f"Metric {name} must have one value per sample {valid.shape}, got shape "
                f"{jnp.shape(value)}."
            )
        # Padding repeats a sample and must not count, even if its value is NaN.
        sums[name] = jnp.where(valid, value.astype(jnp.float32), 0).sum()
    sums["count"] = valid.astype(jnp.float32).sum()
    return sums
