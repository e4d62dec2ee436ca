"""Arrays of every type are restored exactly, whichever process wrote them."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from several_processes import as_processes
from small_checkpoints import Params

from millrace.checkpoint import arrays
from millrace.checkpoint.arrays import assigned_leaves
from millrace.checkpoint.store import (
    CheckpointError,
    restore,
    restore_part,
    write_checkpoint,
)


def test_only_the_leftover_errors_of_a_failed_write_are_silenced():
    printed = []
    for text in ("Event loop is closed", "of a library's own"):
        error = SimpleNamespace(exc_value=RuntimeError(text))
        arrays._skip_closed_loop(printed.append, error)
    assert [str(error.exc_value) for error in printed] == ["of a library's own"]


def every_kind() -> dict:
    return {
        **{f"{name} key": jax.random.key(3, impl=name) for name in ("threefry2x32", "rbg")},
        "keys": jax.random.split(jax.random.key(4), (2, 3)),
        "no keys": jax.random.split(jax.random.key(4), 0),
        "nothing": np.zeros((3, 0), np.float32),
        "no truth": np.zeros((0,), bool),
        "truth": np.array([True, False]),
        "scalar": np.float64(0.1),
        **{
            name: np.arange(6).reshape(2, 3).astype(jnp.dtype(name))
            for name in (
                *("int8", "uint16", "int4", "uint4", "bfloat16", "complex64"),
                *("float8_e4m3fn", "float8_e5m2", "float8_e4m3"),
            )
        },
    }


def exact_value(leaf) -> tuple:
    is_prng_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    raw = jax.random.key_data(leaf) if is_prng_key else leaf
    return str(leaf.dtype), leaf.shape, np.asarray(raw).tobytes()


class Fields(NamedTuple):
    params: dict
    other: dict


@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_kind_of_array_is_restored_exactly(num_processes, folder):
    kinds = every_kind()
    state = Fields(kinds, {"x": np.ones(3)})
    path = folder / "update-000000001"
    as_processes(num_processes, lambda _: write_checkpoint(path, state, 1, {}))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), kinds)
    for found in (
        restore(path, state).state.params,
        restore_part(path, Params(kinds)).state.params,
        restore_part(path, Params(shapes)).state.params,
    ):
        assert {name: exact_value(leaf) for name, leaf in found.items()} == {
            name: exact_value(leaf) for name, leaf in kinds.items()
        }


def test_random_keys_of_another_kind_are_refused(checkpoints):
    checkpoints.save({"key": jax.random.key(0)}, 1)
    checkpoints.wait()
    with pytest.raises(CheckpointError, match=r"key<fry>\[\], this model has key<rbg>"):
        checkpoints.restore_newest({"key": jax.random.key(0, impl="rbg")})


def test_a_random_key_may_be_donated_once_save_returns(checkpoints):
    key = jax.random.key(5)
    expected = exact_value(key)
    checkpoints.save({"key": key}, 1)
    key.delete()
    checkpoints.wait()
    like = {"key": jax.random.key(0)}
    assert exact_value(checkpoints.restore_newest(like).state["key"]) == expected


def test_processes_share_the_arrays_evenly_and_write_each_once():
    sizes = [6, 5, 4, 3, 2, 0]
    state = {str(n): np.zeros(size, np.float32) for n, size in enumerate(sizes)}
    shares = as_processes(3, lambda _: assigned_leaves(state))
    assert sorted(index for share in shares for index in share) == [0, 1, 2, 3, 4, 5]
    assert sorted(sum(sizes[index] for index in share) for share in shares) == [6, 7, 7]
