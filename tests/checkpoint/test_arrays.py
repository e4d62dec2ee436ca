"""Arrays of every type are restored exactly, whichever process wrote them."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from every_kind import every_kind, exact_value
from several_processes import as_processes
from small_checkpoints import Params

from millrace.checkpoint.arrays import assigned_leaves
from millrace.checkpoint.store import (
    CheckpointError,
    restore,
    restore_part,
    write_checkpoint,
)


class Fields(NamedTuple):
    params: dict
    other: dict


@pytest.mark.parametrize("written_by", [1, 2, 4])
@pytest.mark.parametrize("read_by", [1, 2, 4])
def test_any_number_of_processes_restores_every_kind_exactly(written_by, read_by, folder):
    kinds = every_kind()
    state = Fields(kinds, {"x": np.ones(3)})
    path = folder / "update-000000001"
    as_processes(written_by, lambda _: write_checkpoint(path, state, 1, {}))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), kinds)
    expected = {name: exact_value(leaf) for name, leaf in kinds.items()}

    def read(_: int) -> None:
        for found in (
            restore(path, state).state.params,
            restore_part(path, Params(kinds)).state.params,
            restore_part(path, Params(shapes)).state.params,
        ):
            assert {name: exact_value(leaf) for name, leaf in found.items()} == expected

    as_processes(read_by, read)


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
