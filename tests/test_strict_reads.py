"""The check of reads in strict_reads.py, which JAX does not make on the CPU."""

import copy
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

READS = {
    "np.asarray": lambda x: np.asarray(x),
    "np.array": lambda x: np.array(x),
    "np.stack": lambda x: np.stack([x, x]),
    "np.add": lambda x: np.add(x, x),
    "dlpack": lambda x: x.__dlpack__(),
    "float": float,
    "int": int,
    "bool": bool,
    "complex": complex,
    "index": lambda x: range(9)[x],
    "floor": lambda x: math.floor(x),
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "tobytes": lambda x: x.tobytes(),
    "repr": repr,
    "str": str,
    "format": lambda x: f"{x:d}",
    "reduce": lambda x: x.__reduce__(),
    "copy_to_host_async": lambda x: x.copy_to_host_async(),
    "jax.copy_to_host_async": lambda x: jax.copy_to_host_async({"x": x}),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_an_implicit_read_in_a_guarded_region_raises(read):
    array = jnp.int32(3)
    with (
        jax.transfer_guard("disallow"),
        pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed"),
    ):
        read(array)
    read(array)


def test_sharded_arrays_and_their_shards_are_checked():
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
    spec = jax.sharding.PartitionSpec("x")
    array = jax.device_put(np.arange(4.0), jax.sharding.NamedSharding(mesh, spec))
    with jax.transfer_guard("disallow"):
        for read in (np.asarray, lambda x: np.asarray(x.addressable_shards[0].data)):
            with pytest.raises(jax.errors.JaxRuntimeError, match="device-to-host"):
                read(array)
        np.testing.assert_array_equal(jax.device_get(array), np.arange(4.0))


def test_explicit_reads_and_unguarded_threads_are_allowed():
    array, found = jnp.arange(3), []
    with jax.transfer_guard("disallow"):
        found.append(jax.device_get(array))
        found.append(jax.device_get({"x": array})["x"])
        with jax.transfer_guard_device_to_host("allow"):
            array.copy_to_host_async()
            found.append(np.asarray(array))
        # The guard belongs to a thread, not to the process.
        other = threading.Thread(target=lambda: found.append(np.array(array)))
        other.start()
        other.join()
        assert jax.block_until_ready(array).shape == (3,)
    assert [x.tolist() for x in found] == [[0, 1, 2]] * 4
    assert copy.deepcopy(array).tolist() == [0, 1, 2]


def test_explicit_reads_raise_if_they_are_disallowed():
    array = jnp.arange(3)
    with jax.transfer_guard("disallow_explicit"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="device-to-host"):
            jax.device_get(array)


def test_copies_to_the_device_raise_on_every_platform():
    array, plus = jnp.arange(3), jax.jit(lambda x: x + 1)
    copies = [
        lambda: array[0],
        lambda: array + 1,
        lambda: plus(np.ones(3, np.float32)),
        lambda: plus(1.0),
        lambda: jnp.zeros(3),
    ]
    if jax.__version_info__ >= (0, 10, 2):  # jax 0.10.0 does not guard it
        copies.append(lambda: jnp.asarray(np.ones(3)))
    for copied in copies:
        with jax.transfer_guard("disallow"):
            with pytest.raises(jax.errors.JaxRuntimeError, match="host-to-device"):
                copied()
