import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import millrace as mr
from millrace.feeds.device import DeviceDataset, ResidentDataset


def generate(count):
    x = jnp.arange(count * 8, dtype=jnp.float32).reshape(count, 8)
    return {"x": x, "label": jnp.ones((count, 8), jnp.int32)}


def test_resident_chunks_come_back_without_a_transfer():
    infeed = mr.Infeed(ResidentDataset(generate))
    with jax.transfer_guard("disallow_explicit"):
        first = infeed.chunk((2, 3))
    infeed.took(2)
    second = infeed.chunk((2, 3))
    infeed.took(3)
    third = infeed.chunk((2, 3))
    assert [c.stop for c in (first, second, third)] == [2, 3, 2]
    assert third.data["x"] is first.data["x"]
    assert infeed.position == infeed.elements_read == 5


def test_peeking_makes_no_elements():
    element = mr.Infeed(ResidentDataset(generate)).peek()
    assert {name: (x.shape, str(x.dtype)) for name, x in element.items()} == {
        "x": ((8,), "float32"),
        "label": ((8,), "int32"),
    }


@pytest.mark.devices(4)
def test_elements_are_made_where_the_loop_wants_them():
    mesh = jax.make_mesh((4,), ("replica",), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec(None, "replica"))
    data = mr.Infeed(ResidentDataset(generate)).chunk(3, sharding).data
    assert data["x"].sharding == sharding
    np.testing.assert_array_equal(data["x"], np.arange(24).reshape(3, 8))


def test_seeking_sets_the_position():
    infeed = mr.Infeed(ResidentDataset(generate))
    infeed.seek(7)
    infeed.chunk(2)
    infeed.took(2)
    assert infeed.position == 9
    infeed.close()
    assert infeed.chunk(2).start == 0
    with pytest.raises(ValueError, match="must not be negative"):
        infeed.seek(-1)


class Counting(DeviceDataset):
    """Elements that are their own numbers."""

    def peek(self):
        return np.float32(0)

    def make(self, position, count, sharding):
        return jnp.arange(position, position + count, dtype=jnp.float32)


def test_loops_continue_where_the_last_one_stopped_whatever_their_chunks():
    infeed, outfeed = mr.Infeed(Counting()), mr.Outfeed()
    for steps, per_execution in ((4, 4), (3, 1), (5, None)):
        mr.repeat(
            steps,
            lambda carry, x: (carry, x),
            0.0,
            infeed=infeed,
            outfeed=outfeed,
            steps_per_execution=per_execution,
        )
    np.testing.assert_array_equal(outfeed.dequeue(), np.arange(12))


def test_the_unused_part_of_a_chunk_is_made_again_for_another_request():
    infeed = mr.Infeed(Counting())
    infeed.chunk(8)
    infeed.took(3)
    np.testing.assert_array_equal(infeed.chunk(2).data, [3, 4])
    infeed.took(2)
    infeed.seek(1)
    np.testing.assert_array_equal(infeed.chunk(2).data, [1, 2])
