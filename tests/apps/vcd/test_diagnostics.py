"""R-hat and effective sample size, against ArviZ and a closed form."""

import numpy as np
import pytest

from millrace.apps.vcd.diagnostics import (
    MIN_STEPS,
    bulk_ess,
    diagnose_chains,
    rank_normalized_rhat,
)


def autoregressive(shape, factor, seed=0):
    """Return chains (chains, steps, …) whose lag-1 correlation is `factor`."""
    noise = np.random.default_rng(seed).standard_normal(shape)
    x = np.empty(shape)
    x[:, 0] = noise[:, 0]
    for step in range(1, shape[1]):
        x[:, step] = factor * x[:, step - 1] + np.sqrt(1 - factor**2) * noise[:, step]
    return x


CASES = {
    "independent": autoregressive((4, 200, 3), 0.0),
    "correlated": autoregressive((4, 301, 3), 0.8),  # an odd number of steps
    "antithetic": autoregressive((2, 100, 3), -0.5),
    "not mixed": autoregressive((4, 100, 3), 0.3) + np.arange(4).reshape(4, 1, 1),
    "other spread": autoregressive((2, 150, 3), 0.3) * np.array([1, 5]).reshape(2, 1, 1),
    "rejections": np.round(autoregressive((3, 120, 3), 0.5), 1),
    "heavy tails": autoregressive((2, 250, 3), 0.5) ** 9,
    "short": autoregressive((2, 8, 3), 0.5),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_both_equal_those_of_arviz(case):
    theirs = pytest.importorskip("arviz_stats.base").array_stats
    samples, axes = CASES[case], {"chain_axis": 0, "draw_axis": 1}
    wanted = theirs.rhat(samples, method="rank", **axes)
    np.testing.assert_allclose(rank_normalized_rhat(samples), wanted, rtol=1e-10)
    wanted = theirs.ess(samples, method="bulk", **axes)
    np.testing.assert_allclose(bulk_ess(samples), wanted, rtol=1e-10)


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.9])
def test_the_effective_sample_size_is_that_of_an_autoregressive_process(factor):
    samples = autoregressive((8, 4000, 4), factor)
    wanted = 8 * 4000 * (1 - factor) / (1 + factor)
    np.testing.assert_allclose(bulk_ess(samples), wanted, rtol=0.15)
    np.testing.assert_allclose(rank_normalized_rhat(samples), 1, atol=0.01)


def test_one_chain_is_compared_with_itself_and_the_worst_dim_counts():
    positions = autoregressive((1, 400, 2, 3), 0.2)[0]
    positions[:, 1, 2] += np.linspace(0, 6, 400)  # the second image still drifts
    found = diagnose_chains(positions)
    assert found.rhat.shape == found.ess.shape == (2,)
    assert found.rhat[0] < 1.02 < 1.5 < found.rhat[1]
    assert found.ess[0] > 150 > 20 > found.ess[1]
    statistics = found.statistics()
    assert statistics["rhat_max"] == found.rhat[1] and statistics["ess_min"] == found.ess[1]


def test_a_chain_that_never_moves_does_not_spoil_the_medians():
    positions = autoregressive((1, 100, 5, 3), 0.2)[0]
    others = diagnose_chains(np.delete(positions, 2, axis=1))
    positions[:, 2] = 0.5
    found = diagnose_chains(positions)
    assert found.rhat[2] == np.inf and found.ess[2] == 1
    assert others.rhat.min() <= found.statistics()["rhat_median"] <= others.rhat.max()
    assert others.ess.min() <= found.statistics()["ess_median"] <= others.ess.max()


def test_the_shortest_chains_tell_one_that_never_moves_from_others():
    positions = autoregressive((1, MIN_STEPS, 2, 3), 0.9)[0]
    positions[:, 1] = 0.5
    found = diagnose_chains(positions)
    assert found.ess[0] > 1 == found.ess[1] and found.rhat[0] < np.inf == found.rhat[1]


def test_a_chain_that_moves_once_has_not_mixed():
    positions = autoregressive((1, 100, 2, 3), 0.2)[0]
    positions[:50, 1], positions[50:, 1] = 0.5, 0.7
    found = diagnose_chains(positions)
    assert found.rhat[0] < 1.1 < 100 < found.rhat[1]
    assert 1 <= found.ess[1] < 1.2
