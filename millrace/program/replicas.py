"""The device mesh, the only place one is made, and the exchange between replicas."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from millrace.config import ConfigurationError

REPLICA_AXIS = "replica"
"""The mesh axis over which replicas lie; a layer may reduce over groups of it."""


def replica_mesh(num_replicas: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Lay `num_replicas` devices out along the replica axis."""
    devices = list(jax.devices() if devices is None else devices)
    if num_replicas > len(devices):
        platform = devices[0].platform
        advice = (
            f" On CPU, --virtual-devices {num_replicas} makes more of them (in Python: "
            f'jax.config.update("jax_num_cpu_devices", {num_replicas}), first of all).'
            if platform == "cpu"
            else ""
        )
        raise ConfigurationError(
            f"num_replicas is {num_replicas}, but there are only {len(devices)} "
            f"{platform} devices.{advice}"
        )
    # Explicit axes, the default, refuse sharding constraints inside the program.
    return jax.make_mesh(
        (num_replicas,),
        (REPLICA_AXIS,),
        axis_types=(AxisType.Auto,),
        devices=devices[:num_replicas],
    )


def replicated(mesh: Mesh, memory_kind: str | None = None) -> NamedSharding:
    """Place a whole copy on every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind)


def split_batch(mesh: Mesh) -> NamedSharding:
    """Split dim 1 of a chunk (elements, samples, ...) over the replicas."""
    return NamedSharding(mesh, PartitionSpec(None, REPLICA_AXIS))


def sum_over_replicas(tree: Any) -> Any:
    """Add every leaf up over all replicas, in one exchange."""
    return lax.psum(tree, REPLICA_AXIS)
