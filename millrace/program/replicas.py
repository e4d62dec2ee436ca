"""The device mesh, made only here, and the exchange between replicas.

With several processes, each has an equal share of consecutive replicas, and all devices of
a pipeline belong to one process.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from millrace.config import ConfigurationError

REPLICA_AXIS = "replica"
"""The mesh axis of replicas; a layer may reduce over groups of it."""

STAGE_AXIS = "stage"
"""The mesh axis of the devices of a pipeline."""


def replica_mesh(num_replicas: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh of one device per replica."""
    request = f"num_replicas is {num_replicas}"
    chosen = _choose_devices(request, num_replicas, 1, devices)
    return _make_mesh((num_replicas,), (REPLICA_AXIS,), chosen)


def pipeline_mesh(
    num_replicas: int, num_stage_devices: int, devices: Sequence[Any] | None = None
) -> Mesh:
    """Return a mesh (replicas, pipeline devices)."""
    count = num_replicas * num_stage_devices
    request = (
        f"{num_replicas} replicas of {num_stage_devices} pipeline devices need {count}"
    )
    chosen = _choose_devices(request, num_replicas, num_stage_devices, devices)
    shape = (num_replicas, num_stage_devices)
    return _make_mesh(shape, (REPLICA_AXIS, STAGE_AXIS), chosen)


def _choose_devices(
    request: str, num_replicas: int, per_replica: int, devices: Sequence[Any] | None
) -> list[Any]:
    """Choose the same number of devices from every process."""
    devices = list(jax.devices() if devices is None else devices)
    processes = sorted({device.process_index for device in devices})
    if num_replicas % len(processes):
        raise ConfigurationError(
            f"num_replicas is {num_replicas}, which {len(processes)} processes cannot "
            f"share evenly. Choose a multiple of {len(processes)}."
        )
    count = num_replicas * per_replica // len(processes)
    chosen = []
    for process in processes:
        own = [device for device in devices if device.process_index == process]
        if count > len(own):
            hint = _sharing_hint(per_replica, len(own) * per_replica // count)
            _raise_too_few_devices(request, count, own, len(processes), hint)
        chosen += own[:count]
    return chosen


def _sharing_hint(num_stages: int, num_devices: int) -> str:
    """Suggest a device mapping, if every replica has at least one device."""
    if num_devices < 1 or num_stages == 1:
        return ""
    mapping = " ".join(str(n * num_devices // num_stages) for n in range(num_stages))
    return (
        f" Stages can share a device: --device-mapping {mapping} (one number per stage; "
        "in Python: device_mapping)."
    )


def _raise_too_few_devices(
    request: str, count: int, devices: list[Any], num_processes: int, hint: str
) -> None:
    platform = devices[0].platform
    advice = (
        f" On CPU, --virtual-devices {count} creates more (in Python: "
        f'jax.config.update("jax_num_cpu_devices", {count}), before anything else).'
        if platform == "cpu"
        else ""
    )
    share, where = "", ""
    if num_processes > 1:
        share = f", {count} for each of {num_processes} processes"
        where = f" in process {devices[0].process_index}"
    raise ConfigurationError(
        f"{request}{share}, but there are only {len(devices)} {platform} "
        f"devices{where}.{hint}{advice}"
    )


def _make_mesh(shape: tuple[int, ...], axes: tuple[str, ...], devices: list[Any]) -> Mesh:
    # Explicit axes, the default, refuse sharding constraints inside the program.
    return jax.make_mesh(
        shape, axes, axis_types=(AxisType.Auto,) * len(axes), devices=devices
    )


def map_over_mesh(
    mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return a function that runs `function` on every device with its shard."""
    # Unchecked: with check_vma, JAX exchanges gradients inside the loop over micro-batches
    # instead of once per update, and refuses batch norm over groups of replicas.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def replicated(mesh: Mesh, memory_kind: str | None = None) -> NamedSharding:
    """Return the sharding of a full copy on every device."""
    return NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind)


def stage_sharding(mesh: Mesh, memory_kind: str | None = None) -> NamedSharding:
    """Return the sharding of an array (pipeline devices, ...), one row per device."""
    return NamedSharding(mesh, PartitionSpec(STAGE_AXIS), memory_kind=memory_kind)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a chunk (elements, samples, ...): samples over replicas."""
    return NamedSharding(mesh, PartitionSpec(None, REPLICA_AXIS))


def sum_over_replicas(tree: Any, num_replicas: int) -> Any:
    """Sum every leaf over all replicas in one exchange; float16 becomes float32.

    The sum of gradients that just fit into float16 would overflow.
    """
    if num_replicas == 1:
        return tree  # on CPU, even an exchange with itself copies everything
    tree = jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype == jnp.float16 else x, tree
    )
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        return _sum_concatenated(tree)
    return lax.psum(tree, REPLICA_AXIS)


def _sum_concatenated(tree: Any) -> Any:
    """Sum all leaves of a dtype as one array: Gloo takes a round trip per array."""
    leaves, treedef = jax.tree.flatten(tree)
    summed: list[Any] = [None] * len(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        positions = [n for n, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = jnp.concatenate([leaves[n].ravel() for n in positions])
        flat = lax.psum(flat, REPLICA_AXIS)
        ends = np.cumsum([leaves[n].size for n in positions])
        for n, part in zip(positions, jnp.split(flat, ends[:-1]), strict=True):
            summed[n] = part.reshape(leaves[n].shape)
    return jax.tree.unflatten(treedef, summed)


def put_on_devices(tree: Any, shardings: Any) -> Any:
    """Put arrays that every process has on the devices of all processes.

    Args:
        tree: Arrays, the same in every process.
        shardings: One for all leaves, or a tree of them.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(_put_leaf, tree, shardings)


def _put_leaf(value: Any, sharding: NamedSharding) -> jax.Array:
    if jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
        words = _put_leaf(jax.random.key_data(value), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    current = isinstance(value, jax.Array) and value.sharding.device_set
    if sharding.is_fully_addressable or current == sharding.device_set:
        # From the devices of all processes to our own: only this process's copy is used.
        own = value if current == sharding.device_set else to_host(value)
        return jax.device_put(own, sharding)
    host = to_host(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def to_host(value: Any) -> np.ndarray:
    """Return an array as NumPy; this process must have all of its parts."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return np.asarray(value)
    if value.is_fully_replicated:
        return np.asarray(value.addressable_data(0))
    host = np.empty(value.shape, value.dtype)
    for shard in value.addressable_shards:
        host[shard.index] = shard.data
    return host
