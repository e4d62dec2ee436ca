import jax.numpy as jnp
import numpy as np
import optax
import pytest

import millrace as mr


def loss_fn(params, model_state, batch, key):
    loss = jnp.square(params["w"] - batch["x"]).mean()
    return loss, (model_state, {"seen": batch["x"].mean()})


def program_of(**plan):
    program = mr.training_program(
        loss_fn, optax.sgd(0.1), mr.Plan(micro_batch_size=2, **plan)
    )
    return program, program.init({"w": jnp.ones(1)})


class Shuffling:
    """A loader that gives its elements in another order each time."""

    def __init__(self, count):
        self.rng, self.count, self.read = np.random.default_rng(0), count, []

    def __iter__(self):
        for number in self.rng.permutation(self.count):
            self.read.append(number)
            yield {"x": np.full(2, number, np.float32)}


def plain_weight(numbers, accumulation=1):
    """Return what plain SGD makes of the weight, in NumPy."""
    weight = 1.0
    for update in np.reshape(numbers, (-1, accumulation)):
        weight -= 0.1 * np.mean(2 * (weight - update))
    return weight


def test_one_call_makes_one_pass_whatever_the_number_of_updates():
    program, state = program_of()
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


def test_many_calls_on_one_infeed_read_what_they_use_and_little_ahead():
    program, state = program_of()
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
def test_a_dataset_that_ends_may_end_the_training(count, made):
    program, state = program_of(gradient_accumulation_count=4, updates_per_execution=3)
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
    program, state = program_of(updates_per_execution=3)
    loader = Shuffling(7)
    with mr.Infeed(loader) as infeed:
        with pytest.raises(mr.DatasetEnded, match="ended after 7 elements") as caught:
            mr.train(program, state, infeed=infeed, updates=12)
        reached = caught.value.state
        assert int(reached.update) == infeed.position == 6
        expected = plain_weight(loader.read[:6])
        np.testing.assert_allclose(reached.params["w"], expected, rtol=1e-5)
        # What is left makes one more update, from there.
        assert int(mr.train(program, reached, infeed=infeed, updates=1).update) == 7


def test_a_dataset_without_elements_leaves_the_state_usable():
    program, state = program_of()
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
def test_a_mistake_in_a_call_is_named(changes, error, message):
    program, state = program_of()
    arguments = {"state": state, "updates": 1} | changes
    with mr.Infeed([{"x": np.ones(2, np.float32)}]) as infeed:
        with pytest.raises(error, match=message):
            mr.train(program, infeed=infeed, **arguments)
