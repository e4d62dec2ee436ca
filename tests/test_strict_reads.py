"""The tests' own check of reads, which the CPU does not make (see strict_reads.py)."""

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
    # Arrays have no buffer protocol here, as on a GPU; the GPU's answer is a TypeError too.
    error = TypeError if read is memoryview else jax.errors.JaxRuntimeError
    with (
        jax.transfer_guard("disallow"),
        pytest.raises(error, match=r"Disallowed|bytes-like"),
    ):
        read(array)
    if read is not memoryview:
        read(array)


def test_arrays_over_several_devices_and_their_parts_are_checked_too():
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
    spec = jax.sharding.PartitionSpec("x")
    array = jax.device_put(np.arange(4.0), jax.sharding.NamedSharding(mesh, spec))
    with jax.transfer_guard("disallow"):
        for read in (np.asarray, lambda x: np.asarray(x.addressable_shards[0].data)):
            with pytest.raises(jax.errors.JaxRuntimeError, match="device-to-host"):
                read(array)
        np.testing.assert_array_equal(jax.device_get(array), np.arange(4.0))


def test_explicit_reads_and_unguarded_threads_are_let_through():
    array, found = jnp.arange(3), []
    with jax.transfer_guard("disallow"):
        found.append(jax.device_get(array))
        found.append(jax.device_get({"x": array})["x"])
        with jax.transfer_guard_device_to_host("allow"):
            array.copy_to_host_async()
            found.append(np.asarray(array))
        # The guard is of a thread, not of the process.
        other = threading.Thread(target=lambda: found.append(np.array(array)))
        other.start()
        other.join()
        assert jax.block_until_ready(array).shape == (3,)
    assert [x.tolist() for x in found] == [[0, 1, 2]] * 4
    assert copy.deepcopy(array).tolist() == [0, 1, 2]


def test_where_even_explicit_reads_are_disallowed_they_raise():
    array = jnp.arange(3)
    with jax.transfer_guard("disallow_explicit"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="device-to-host"):
            jax.device_get(array)


def test_copies_to_the_device_raise_on_every_platform():
    array, plus = jnp.arange(3), jax.jit(lambda x: x + 1)
    for copied in (
        lambda: array[0],
        lambda: array + 1,
        lambda: plus(np.ones(3, np.float32)),
        lambda: plus(1.0),
        lambda: jnp.zeros(3),
        lambda: jnp.asarray(np.ones(3)),
    ):
        with jax.transfer_guard("disallow"):
            with pytest.raises(jax.errors.JaxRuntimeError, match="host-to-device"):
                copied()
