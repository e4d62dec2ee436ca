"""The benchmarks of datasets and infeeds."""

import json

import jax
import numpy as np
import pytest

import millrace as mr


class Ones:
    """Endless pairs of 800 ones."""

    def __iter__(self):
        while True:
            ones = np.ones(800, np.float32)
            yield {"x1": ones, "x2": ones}


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


def test_an_infeed_benchmark_waits_for_the_elements_it_counts(monkeypatch):
    # A copy to a GPU returns at once: without waiting, only the request would be timed.
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", lambda data: waited.append(data) or data)
    with mr.Infeed(Ones()) as infeed:
        mr.infeed_benchmark(infeed, 1, 50, print_stats=False)
    assert sum(len(data["x1"]) for data in waited) >= 50


def test_a_benchmark_reports_a_dataset_that_is_too_short():
    short = [np.zeros(3, np.float32)] * 7
    with pytest.raises(ValueError, match="ended after 7 elements"):
        mr.dataset_benchmark(short, 2, 5)
    with pytest.raises(mr.DatasetEnded, match="ended after 7 elements"):
        mr.infeed_benchmark(mr.Infeed(short), 2, 5)
    with pytest.raises(ValueError, match="number_of_epochs must be at least 1"):
        mr.dataset_benchmark(short, 0, 5)
