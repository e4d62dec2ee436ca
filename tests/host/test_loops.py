import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millrace as mr


class Ones:
    """A constant of 800 ones as a pair, for ever."""

    def __iter__(self):
        while True:
            ones = np.ones(800, np.float32)
            yield {"x1": ones, "x2": ones}


def body(carry, batch):
    return carry + 1, {"d1": batch["x1"] + batch["x2"], "d2": batch["x1"] - batch["x2"]}


def test_the_seeds_example_gives_its_results():
    outfeed = mr.Outfeed()
    with mr.Infeed(Ones()) as infeed:
        count = mr.repeat(10, body, 0, infeed=infeed, outfeed=outfeed)
    result = outfeed.dequeue()
    assert int(count) == 10
    assert result["d1"].shape == result["d2"].shape == (10, 800)
    assert (result["d1"] == 2).all() and (result["d2"] == 0).all()


def test_the_body_is_traced_once_whatever_n_is():
    traces = 0

    def counted(carry, batch):
        nonlocal traces
        traces += 1
        return body(carry, batch)

    with mr.Infeed(Ones()) as infeed:
        for n in (1, 10, 300, 7):
            mr.repeat(n, counted, 0, infeed=infeed, outfeed=mr.Outfeed())
    assert traces == 1


@pytest.mark.parametrize("steps", [1, 4, 10, 25])
def test_steps_per_execution_changes_nothing_but_the_calls(steps):
    outfeed = mr.Outfeed()
    count = mr.repeat(
        10, lambda c: (c + 1, c * c), 0, outfeed=outfeed, steps_per_execution=steps
    )
    assert int(count) == 10
    np.testing.assert_array_equal(outfeed.dequeue(), np.arange(10) ** 2)


def test_zero_times_returns_the_carry():
    assert float(mr.repeat(0, lambda c: (c + 1, None), 3.0)) == 3.0


def test_while_stops_when_the_condition_no_longer_holds():
    outfeed = mr.Outfeed()
    end = mr.while_loop(lambda c: c < 1000, lambda c: (c * 2, c), 1, outfeed=outfeed)
    assert int(end) == 1024
    np.testing.assert_array_equal(outfeed.dequeue(), 2 ** np.arange(10))


def test_while_takes_only_the_elements_it_used():
    with mr.Infeed([np.float32(i) for i in range(100)]) as infeed:
        total = mr.while_loop(
            lambda c: c < 10, lambda c, x: (c + x, None), 0.0, infeed=infeed
        )
        assert (float(total), infeed.position) == (10.0, 5)


def test_while_stops_at_the_maximum():
    end = mr.while_loop(
        lambda c: c >= 0, lambda c: (c + 1, None), 0, maximum_iterations=1000
    )
    assert int(end) == 1000


def test_the_callers_arrays_stay_usable():
    start = jnp.zeros(5)
    mr.repeat(3, lambda c: (c + 1, None), start)
    assert float(start.sum()) == 0.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda c: c + 1, r"must return \(carry, output\)"),
        (lambda c: ((c, c), None), "carry of the structure"),
        (lambda c: (c + 0.5, None), r"from int32\[\] to float32\[\]"),
    ],
)
@pytest.mark.parametrize("steps", [None, 2])
def test_a_body_that_breaks_the_contract_is_told_how(wrong, message, steps):
    with pytest.raises(TypeError, match=message):
        mr.repeat(3, wrong, 0, steps_per_execution=steps)


def test_negative_numbers_are_refused():
    with pytest.raises(ValueError, match="n must not be negative, got -1"):
        mr.repeat(-1, lambda c: (c, None), 0)
    with pytest.raises(ValueError, match="steps_per_execution must be at least 1"):
        mr.repeat(1, lambda c: (c, None), 0, steps_per_execution=0)
    with pytest.raises(ValueError, match="maximum_iterations"):
        mr.while_loop(lambda c: True, lambda c: (c, None), 0, maximum_iterations=-1)


@pytest.mark.parametrize("kind", ["dataset", "infeed"])
def test_benchmarks_return_the_documented_json(kind):
    if kind == "dataset":
        text = mr.dataset_benchmark(Ones(), 3, 50)
    else:
        with mr.Infeed(Ones()) as infeed:
            text = mr.infeed_benchmark(infeed, 3, 50)
    epochs = json.loads(text)["epochs"]
    assert len(epochs) == 3
    for epoch in epochs:
        assert epoch["elements_processed"] == 50
        assert epoch["total_bytes_processed"] == 50 * 2 * 800 * 4
        assert epoch["elements_per_second"] == pytest.approx(50 / epoch["time_elapsed"])
        assert epoch["bandwidth"] == pytest.approx(320_000 / 1e9 / epoch["time_elapsed"])


def test_a_benchmark_of_a_dataset_that_runs_out_says_so():
    short = [np.zeros(3, np.float32)] * 7
    with pytest.raises(ValueError, match="ended after 7 elements"):
        mr.dataset_benchmark(short, 2, 5)
    with pytest.raises(mr.DatasetEnded, match="ended after 7 elements"):
        mr.infeed_benchmark(mr.Infeed(short), 2, 5)
    with pytest.raises(ValueError, match="number_of_epochs must be at least 1"):
        mr.dataset_benchmark(short, 0, 5)


def test_while_does_not_ask_for_data_it_will_not_use():
    exactly = [np.float32(1)] * 5
    end = mr.while_loop(
        lambda c: c < 5, lambda c, x: (c + x, None), 0.0, infeed=mr.Infeed(exactly)
    )
    assert float(end) == 5.0
    none = mr.while_loop(
        lambda c: c < 0, lambda c, x: (c + x, None), 0.0, infeed=mr.Infeed([])
    )
    assert float(none) == 0.0


def test_the_body_is_traced_once_for_two_lengths_of_execution():
    traces = 0

    def counted(carry):
        nonlocal traces
        traces += 1
        return carry + 1, carry

    mr.repeat(10, counted, 0, steps_per_execution=4, outfeed=mr.Outfeed())
    assert traces == 1


def test_a_loop_runs_on_the_device_in_force_or_that_of_its_carry():
    device = jax.devices()[3]
    numbers = [np.float32(n) for n in range(6)]
    with jax.default_device(device), mr.Infeed(numbers) as infeed:
        total = mr.repeat(3, lambda c, x: (c + x, None), 0.0, infeed=infeed)
    assert total == 3 and total.devices() == {device}
    with mr.Infeed(numbers) as infeed:
        first = jax.device_put(np.float32(1), device)
        total = mr.repeat(4, lambda c, x: (c + x, None), first, infeed=infeed)
    assert total == 7 and total.devices() == {device}
    assert mr.while_loop(lambda c: c < 9, lambda c: (c + 2, None), first) == 9


@pytest.mark.parametrize("count", [2.5, "3", None])
def test_a_number_of_steps_is_a_whole_number(count):
    with pytest.raises(TypeError, match="n must be a whole number"):
        mr.repeat(count, lambda c: (c, None), 0)
    assert mr.repeat(np.int64(3), lambda c: (c + 1, None), 0) == 3
