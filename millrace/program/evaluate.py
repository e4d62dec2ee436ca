"""The compiled evaluation loop: every sample counts once, padding never."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from millrace.plan import Plan
from millrace.program.compiling import compile_for
from millrace.program.replicas import (
    REPLICA_AXIS,
    STAGE_AXIS,
    place,
    replica_mesh,
    replicated,
    split_batch,
)
from millrace.program.step import TrainState, narrow

MetricFn = Callable[[Any, Any, Any], dict[str, jax.Array]]
"""``(params, model_state, batch) -> {name: one value per sample}``."""


class EvaluationProgram:
    """Means of per-sample metrics over a dataset, on all replicas.

    Args:
        metric_fn: Returns one value per sample for each name; a value outside
            `batch`'s samples, or a mean, is an error.
        plan: Gives the number of replicas and the precision.
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

    def place(self, state: Any) -> Any:
        """Put weights, from wherever they lie, on these devices."""
        return place(state, replicated(self._mesh))

    @property
    def chunk_sharding(self) -> NamedSharding:
        """Where a chunk of batches must lie."""
        return split_batch(self._mesh)

    def validate_state(self, state: TrainState) -> TrainState:
        """Return a state whose weights lie on these devices; copy them if they do not.

        Args:
            state: From a training program with any number of replicas, or of NumPy
                arrays. A used-up state, and the packed one of a pipeline, are refused.
        """
        target = replicated(self._mesh)
        leaves = jax.tree.leaves((state.params, state.model_state))
        _check_whole(leaves)
        if all(
            isinstance(leaf, jax.Array)
            and leaf.sharding.is_equivalent_to(target, leaf.ndim)
            for leaf in leaves
        ):
            return state
        params, model_state = self.place((state.params, state.model_state))
        return state._replace(params=params, model_state=model_state)

    def run(self, state: TrainState, chunk: Any) -> dict[str, np.ndarray]:
        """Return the sums of the metrics over a chunk's real samples, and "count".

        Args:
            state: Whose weights to evaluate; it stays usable.
            chunk: ``{"batch": ..., "valid": ...}``, leaves (batches, samples, ...).
        """
        state = self.validate_state(state)
        given = (state.params, state.model_state, chunk)
        shapes = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(given))
        key = (shapes, jax.tree.structure(given))
        if key not in self._compiled:
            self._compiled[key] = self._compile(*given)
        with jax.transfer_guard("disallow"):
            sums = self._compiled[key](*given)
        return jax.device_get(sums)

    def _compile(self, params: Any, model_state: Any, chunk: Any) -> Callable[..., Any]:
        def sums(params: Any, model_state: Any, chunk: Any) -> dict[str, jax.Array]:
            compute = narrow(params, self._plan.types.compute)

            def one(totals: None, item: Any) -> tuple[None, dict[str, jax.Array]]:
                batch = narrow(item["batch"], self._plan.types.compute)
                values = self._metric_fn(compute, model_state, batch)
                return totals, _masked_sums(values, item["valid"])

            _, per_batch = lax.scan(one, None, chunk)
            total = jax.tree.map(lambda v: v.sum(0), per_batch)
            return lax.psum(total, REPLICA_AXIS)

        mapped = jax.shard_map(
            sums,
            mesh=self._mesh,
            in_specs=(
                PartitionSpec(),
                PartitionSpec(),
                PartitionSpec(None, REPLICA_AXIS),
            ),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return compile_for(self._mesh, mapped, params, model_state, chunk)


def _check_whole(leaves: Sequence[Any]) -> None:
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    if any(leaf.is_deleted() for leaf in arrays):
        raise ValueError(
            "This state was used up by an earlier call. Evaluate the state that the call "
            "returned."
        )
    meshes = [getattr(leaf.sharding, "mesh", None) for leaf in arrays]
    if any(mesh is not None and STAGE_AXIS in mesh.axis_names for mesh in meshes):
        raise ValueError(
            "This state is a pipeline's, packed for its devices. Evaluate "
            "program.unpack_state(state), where program is the training program."
        )


def _masked_sums(values: dict[str, jax.Array], valid: jax.Array) -> dict[str, jax.Array]:
    if "count" in values:
        raise ValueError("A metric cannot be called count: that is the samples' number.")
    sums = {}
    for name, value in values.items():
        if jnp.shape(value) != valid.shape:
            raise ValueError(
                f"Metric {name} must have one value per sample {valid.shape}, got shape "
                f"{jnp.shape(value)}."
            )
        # Padding is a repeated sample; whatever it gave, it does not count.
        sums[name] = jnp.where(valid, value.astype(jnp.float32), 0).sum()
    sums["count"] = valid.astype(jnp.float32).sum()
    return sums
