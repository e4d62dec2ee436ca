"""The device mesh, the only place one is made, and the exchange between replicas.

Where several processes take part, each has an equal share of the replicas, one after the
other, and a pipeline's devices are all of one process.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from millrace.config import ConfigurationError

REPLICA_AXIS = "replica"
"""The mesh axis over which replicas lie; a layer may reduce over groups of it."""

STAGE_AXIS = "stage"
"""The mesh axis over which the devices of a pipeline lie."""


def replica_mesh(num_replicas: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Lay `num_replicas` devices out along the replica axis."""
    what = f"num_replicas is {num_replicas}"
    found = _enough_devices(what, num_replicas, 1, devices)
    return _mesh((num_replicas,), (REPLICA_AXIS,), found)


def pipeline_mesh(
    num_replicas: int, num_stage_devices: int, devices: Sequence[Any] | None = None
) -> Mesh:
    """Lay devices out along the replica axis and, for each replica, the stage axis."""
    count = num_replicas * num_stage_devices
    what = f"{num_replicas} replicas of {num_stage_devices} pipeline devices need {count}"
    found = _enough_devices(what, num_replicas, num_stage_devices, devices)
    return _mesh((num_replicas, num_stage_devices), (REPLICA_AXIS, STAGE_AXIS), found)


def _enough_devices(
    what: str, num_replicas: int, each: int, devices: Sequence[Any] | None
) -> list[Any]:
    """Choose devices for replicas of `each`, as many from every process as from another."""
    devices = list(jax.devices() if devices is None else devices)
    processes = sorted({device.process_index for device in devices})
    if num_replicas % len(processes):
        raise ConfigurationError(
            f"num_replicas is {num_replicas}, which {len(processes)} processes cannot "
            f"share evenly. Choose a multiple of {len(processes)}."
        )
    count = num_replicas * each // len(processes)
    chosen = []
    for process in processes:
        own = [device for device in devices if device.process_index == process]
        if count > len(own):
            sharing = _advice_on_sharing(each, len(own) * each // count)
            _refuse(what, count, own, len(processes), sharing)
        chosen += own[:count]
    return chosen


def _advice_on_sharing(num_stages: int, num_devices: int) -> str:
    """Say how a replica's stages fit its devices, if there is a device for each replica."""
    if num_devices < 1 or num_stages == 1:
        return ""
    mapping = " ".join(str(n * num_devices // num_stages) for n in range(num_stages))
    return (
        f" Stages can share a device: --device-mapping {mapping} (a number for each "
        "stage; in Python: device_mapping)."
    )


def _refuse(
    what: str, count: int, devices: list[Any], num_processes: int, sharing: str
) -> None:
    platform = devices[0].platform
    advice = (
        f" On CPU, --virtual-devices {count} makes more of them (in Python: "
        f'jax.config.update("jax_num_cpu_devices", {count}), first of all).'
        if platform == "cpu"
        else ""
    )
    share, whose = "", ""
    if num_processes > 1:
        share = f", {count} for each of {num_processes} processes"
        whose = f" in process {devices[0].process_index}"
    raise ConfigurationError(
        f"{what}{share}, but there are only {len(devices)} {platform} "
        f"devices{whose}.{sharing}{advice}"
    )


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
    """Add every leaf up over all replicas, in one exchange; float16 becomes float32.

    A gradient that float16 just holds would not fit it times the number of replicas.
    """
    if num_replicas == 1:
        return tree  # on CPU, an exchange with oneself still copies everything
    tree = jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype == jnp.float16 else x, tree
    )
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        return _summed_in_one_piece(tree)
    return lax.psum(tree, REPLICA_AXIS)


def _summed_in_one_piece(tree: Any) -> Any:
    """Send all leaves of a type together: Gloo takes a round trip for every array."""
    leaves, treedef = jax.tree.flatten(tree)
    summed: list[Any] = [None] * len(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        places = [n for n, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = jnp.concatenate([leaves[place].ravel() for place in places])
        flat = lax.psum(flat, REPLICA_AXIS)
        ends = np.cumsum([leaves[place].size for place in places])
        for place, part in zip(places, jnp.split(flat, ends[:-1]), strict=True):
            summed[place] = part.reshape(leaves[place].shape)
    return jax.tree.unflatten(treedef, summed)


def place(tree: Any, shardings: Any) -> Any:
    """Put values that every process has on the devices of all of them.

    Args:
        tree: Arrays, the same ones in every process.
        shardings: One for all, or a tree of them.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(_place_one, tree, shardings)


def _place_one(value: Any, sharding: NamedSharding) -> jax.Array:
    if jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
        words = _place_one(jax.random.key_data(value), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    there = isinstance(value, jax.Array) and value.sharding.device_set
    if sharding.is_fully_addressable or there == sharding.device_set:
        # A copy here of what lies in all processes is taken from this one's own.
        own = value if there == sharding.device_set else fetch(value)
        return jax.device_put(own, sharding)
    host = fetch(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fetch(value: Any) -> np.ndarray:
    """Return an array as this process can see it: all of it must lie here."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return np.asarray(value)
    if value.is_fully_replicated:
        return np.asarray(value.addressable_data(0))
    host = np.empty(value.shape, value.dtype)
    for shard in value.addressable_shards:
        host[shard.index] = shard.data
    return host
