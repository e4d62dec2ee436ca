"""``mr.train``: updates as a library call."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runner import batches
from small_runner import loss_fn as array_loss_fn

import millrace as mr


def loss_fn(params, model_state, batch, key):
    loss = jnp.square(params["w"] - batch["x"]).mean()
    return loss, (model_state, {"seen": batch["x"].mean()})


def make_program(**plan):
    program = mr.training_program(
        loss_fn, optax.sgd(0.1), mr.Plan(micro_batch_size=2, **plan)
    )
    return program, program.init({"w": jnp.ones(1)})


class Shuffling:
    """A loader with another order in each pass."""

    def __init__(self, count):
        self.rng, self.count, self.read = np.random.default_rng(0), count, []

    def __iter__(self):
        for number in self.rng.permutation(self.count):
            self.read.append(number)
            yield {"x": np.full(2, number, np.float32)}


def plain_weight(numbers, accumulation=1):
    """Return the weight after plain SGD in NumPy."""
    weight = 1.0
    for update in np.reshape(numbers, (-1, accumulation)):
        weight -= 0.1 * np.mean(2 * (weight - update))
    return weight


def test_calls_with_any_number_of_updates_share_one_pass():
    program, state = make_program()
    loader, outfeed = Shuffling(300), mr.Outfeed()
    with mr.Infeed(loader) as infeed:
        # 41 updates are 13 executions of 3 and one of 2.
        for updates in (41, 41, 7):
            state = mr.train(
                program, state, infeed=infeed, updates=updates, outfeed=outfeed
            )
    assert infeed.position == 89
    np.testing.assert_array_equal(outfeed.dequeue()["seen"], loader.read[:89])
    np.testing.assert_allclose(state.params["w"], plain_weight(loader.read[:89]), rtol=1e-5)


@pytest.mark.cpu("a GPU has programs for fixed numbers of updates")
def test_many_calls_on_one_infeed_read_only_a_little_ahead():
    program, state = make_program()
    loader = Shuffling(5000)
    with mr.Infeed(loader) as infeed:
        for _ in range(30):
            state = mr.train(program, state, infeed=infeed, updates=41)
    assert int(state.update) == infeed.position == 1230
    assert len(set(loader.read[:1230])) == 1230
    assert len(loader.read) <= 1230 + 4 * 3


@pytest.mark.parametrize(
    ("count", "made"), [(22, 5), (20, 5), (8, 2), (3, 0), (0, 0)], ids=str
)
def test_training_may_stop_where_the_dataset_ends(count, made):
    program, state = make_program(gradient_accumulation_count=4, updates_per_execution=3)
    loader, outfeed = Shuffling(count), mr.Outfeed()
    with mr.Infeed(loader, on_end="stop") as infeed:
        state = mr.train(program, state, infeed=infeed, updates=9, outfeed=outfeed)
        assert (int(state.update), infeed.position) == (made, made * 4)
        again = mr.train(program, state, infeed=infeed, updates=9)
    assert int(again.update) == made
    expected = plain_weight(loader.read[: made * 4], 4)
    np.testing.assert_allclose(again.params["w"], expected, rtol=1e-5)
    if made:
        assert len(outfeed.dequeue()["seen"]) == made


def test_the_state_is_not_lost_when_the_dataset_ends():
    program, state = make_program(updates_per_execution=3)
    loader = Shuffling(7)
    with mr.Infeed(loader) as infeed:
        with pytest.raises(mr.DatasetEnded, match="ended after 7 elements") as caught:
            mr.train(program, state, infeed=infeed, updates=12)
        last_state = caught.value.state
        assert int(last_state.update) == infeed.position == 6
        expected = plain_weight(loader.read[:6])
        np.testing.assert_allclose(last_state.params["w"], expected, rtol=1e-5)
        # The remaining element makes one more update.
        assert int(mr.train(program, last_state, infeed=infeed, updates=1).update) == 7


def test_a_dataset_without_elements_leaves_the_state_usable():
    program, state = make_program()
    with pytest.raises(mr.DatasetEnded, match="no elements") as caught:
        mr.train(program, state, infeed=mr.Infeed([]), updates=2)
    assert int(caught.value.state.update) == 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"updates": 2.5}, TypeError, r"updates must be a whole number, got 2\.5"),
        ({"updates": -1}, ValueError, "updates must not be negative, got -1"),
        ({"state": {"w": 1.0}}, TypeError, "state must come from program.init .* a dict"),
    ],
    ids=["a fraction", "negative", "no state"],
)
def test_a_wrong_argument_is_named(changes, error, message):
    program, state = make_program()
    arguments = {"state": state, "updates": 1} | changes
    with mr.Infeed([{"x": np.ones(2, np.float32)}]) as infeed:
        with pytest.raises(error, match=message):
            mr.train(program, infeed=infeed, **arguments)


def test_repeated_calls_of_train_continue_on_one_infeed():
    outfeed = mr.Outfeed()
    program = mr.training_program(
        array_loss_fn, optax.sgd(0.01), mr.Plan(micro_batch_size=2)
    )
    state = program.init({"w": jnp.ones(1)})
    with mr.Infeed(batches(range(50))) as infeed:
        state = mr.train(program, state, infeed=infeed, updates=20, outfeed=outfeed)
        state = mr.train(program, state, infeed=infeed, updates=7, outfeed=outfeed)
        assert infeed.position == 27
    assert int(state.update) == 27
    np.testing.assert_array_equal(outfeed.dequeue()["seen"], np.arange(27))
    with pytest.raises(ValueError, match="updates must not be negative"):
        mr.train(program, state, infeed=infeed, updates=-1)
    with pytest.raises(TypeError, match=r"Wrap the dataset: Infeed\(dataset\)"):
        mr.train(program, state, infeed=[1], updates=1)


@pytest.mark.devices(8)
def test_train_may_be_called_many_times_on_replicas():
    """Without waiting for earlier calls, the 33rd would deadlock."""
    plan = mr.Plan(micro_batch_size=1, num_replicas=8)
    program = mr.training_program(array_loss_fn, optax.sgd(0.01), plan)
    state = program.init({"w": jnp.ones(1)})
    data = [np.ones(8, np.float32)] * 120
    with mr.Infeed(data) as infeed:
        for _ in range(120):
            state = mr.train(program, state, infeed=infeed, updates=1)
    assert int(state.update) == 120
