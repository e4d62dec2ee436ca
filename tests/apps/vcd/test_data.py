"""The order of samples."""

import numpy as np

from millrace.apps.vcd.data import ShuffledIndices
from millrace.feeds.infeed import Infeed


def test_every_epoch_has_every_sample_once_in_a_new_order():
    drawn = np.asarray(ShuffledIndices(20, 5, seed=3).make(0, 8, None)["index"])
    epochs = drawn.reshape(2, 20)
    assert (np.sort(epochs, 1) == np.arange(20)).all()
    assert (epochs[0] != epochs[1]).any()
    other = np.asarray(ShuffledIndices(20, 5, seed=4).make(0, 8, None)["index"])
    assert (other != drawn).any()


def test_the_order_does_not_depend_on_position_and_chunk_sizes():
    whole = np.asarray(ShuffledIndices(23, 5, seed=0).make(0, 12, None)["index"])
    infeed = Infeed(ShuffledIndices(23, 5, seed=0))
    infeed.seek(3)
    parts = []
    for size in (2, 6, 1):
        parts.append(np.asarray(infeed.chunk(size, None).data["index"]))
        infeed.took(size)
    assert infeed.position == 12
    np.testing.assert_array_equal(np.concatenate(parts), whole[3:])
