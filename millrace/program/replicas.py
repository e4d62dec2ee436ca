"""The device mesh, the only place one is made, and the exchange between replicas."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from millrace.config import ConfigurationError

REPLICA_AXIS = "replica"
"""The mesh axis over which replicas lie; a layer may reduce over groups of it."""

STAGE_AXIS = "stage"
"""The mesh axis over which the devices of a pipeline lie."""


def replica_mesh(num_replicas: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Lay `num_replicas` devices out along the replica axis."""
    found = _enough_devices(f"num_replicas is {num_replicas}", num_replicas, devices)
    return _mesh((num_replicas,), (REPLICA_AXIS,), found)


def pipeline_mesh(
    num_replicas: int, num_stage_devices: int, devices: Sequence[Any] | None = None
) -> Mesh:
    """Lay devices out along the replica axis and, for each replica, the stage axis."""
    count = num_replicas * num_stage_devices
    what = f"{num_replicas} replicas of {num_stage_devices} pipeline devices need {count}"
    found = _enough_devices(what, count, devices)
    return _mesh((num_replicas, num_stage_devices), (REPLICA_AXIS, STAGE_AXIS), found)


def _enough_devices(what: str, count: int, devices: Sequence[Any] | None) -> list[Any]:
    devices = list(jax.devices() if devices is None else devices)
    if count > len(devices):
        platform = devices[0].platform
        advice = (
            f" On CPU, --virtual-devices {count} makes more of them (in Python: "
            f'jax.config.update("jax_num_cpu_devices", {count}), first of all).'
            if platform == "cpu"
            else ""
        )
        raise ConfigurationError(
            f"{what}, but there are only {len(devices)} {platform} devices.{advice}"
        )
    return devices[:count]


def _mesh(shape: tuple[int, ...], axes: tuple[str, ...], devices: list[Any]) -> Mesh:
    # Explicit axes, the default, refuse sharding constraints inside the program.
    return jax.make_mesh(
        shape, axes, axis_types=(AxisType.Auto,) * len(axes), devices=devices
    )


def replicated(mesh: Mesh, memory_kind: str | None = None) -> NamedSharding:
    """Place a whole copy on every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind)


def split_stages(mesh: Mesh, memory_kind: str | None = None) -> NamedSharding:
    """Give each device of a pipeline its row of an array (devices, ...)."""
    return NamedSharding(mesh, PartitionSpec(STAGE_AXIS), memory_kind=memory_kind)


def split_batch(mesh: Mesh) -> NamedSharding:
    """Split dim 1 of a chunk (elements, samples, ...) over the replicas."""
    return NamedSharding(mesh, PartitionSpec(None, REPLICA_AXIS))


def sum_over_replicas(tree: Any, num_replicas: int) -> Any:
    """Add every leaf up over all replicas, in one exchange."""
    if num_replicas == 1:
        return tree  # on CPU, an exchange with oneself still copies everything
    return lax.psum(tree, REPLICA_AXIS)
