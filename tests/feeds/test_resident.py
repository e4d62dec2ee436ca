import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from millrace.feeds.resident import ResidentInfeed


def generate(count):
    x = jnp.arange(count * 8, dtype=jnp.float32).reshape(count, 8)
    return {"x": x, "label": jnp.ones((count, 8), jnp.int32)}


def test_the_same_chunk_comes_back_and_is_never_sent():
    infeed = ResidentInfeed(generate)
    with jax.transfer_guard("disallow_explicit"):
        first = infeed.chunk((2, 3))
    infeed.took(2)
    second = infeed.chunk((2, 3))
    infeed.took(3)
    third = infeed.chunk((2, 3))
    assert [c.stop for c in (first, second, third)] == [2, 3, 2]
    assert third.data["x"] is first.data["x"]
    assert infeed.position == 5


def test_an_element_can_be_looked_at_before_any_is_made():
    element = ResidentInfeed(generate).peek()
    assert {name: (x.shape, str(x.dtype)) for name, x in element.items()} == {
        "x": ((8,), "float32"),
        "label": ((8,), "int32"),
    }


@pytest.mark.devices(4)
def test_elements_lie_where_they_are_wanted():
    mesh = jax.make_mesh((4,), ("replica",), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec(None, "replica"))
    data = ResidentInfeed(generate).chunk(3, sharding).data
    assert data["x"].sharding == sharding
    np.testing.assert_array_equal(data["x"], np.arange(24).reshape(3, 8))


def test_a_position_can_be_gone_to():
    infeed = ResidentInfeed(generate)
    infeed.seek(7)
    infeed.chunk(2)
    infeed.took(2)
    assert infeed.position == 9
    infeed.close()
    assert infeed.chunk(2).start == 0
    with pytest.raises(ValueError, match="must not be negative"):
        infeed.seek(-1)
