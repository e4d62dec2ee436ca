"""R-hat and effective sample size of Markov chains (Vehtari et al. 2021, arXiv 1903.08008).

Both are computed from the ranks of the samples, so that they hold for any distribution.
"""

from typing import NamedTuple

import numpy as np
from scipy import special, stats

MIN_STEPS = 10
"""Steps of a chain that its two halves need at least. With fewer, the effective sample size
depends on their number only, not on the samples."""


class ChainDiagnostics(NamedTuple):
    """How well the chains of each image have mixed: the worst of its latent dims."""

    rhat: np.ndarray
    """(images,): 1 if the halves of the chain agree; above 1.01 they do not yet. Infinite
    for a chain that never moved."""
    ess: np.ndarray
    """(images,): independent samples with the same information about the mean; 1 for a
    chain that never moved."""

    def statistics(self) -> dict[str, float]:
        """Return the content of the results file."""
        return {
            "rhat_median": float(np.median(self.rhat)),
            "rhat_max": float(self.rhat.max()),
            "ess_median": float(np.median(self.ess)),
            "ess_min": float(self.ess.min()),
        }


def diagnose_chains(
    positions: np.ndarray,  # (steps, images, z_dim)
) -> ChainDiagnostics:
    """Return the diagnostics of one chain per image."""
    samples = np.asarray(positions, np.float64)[None]
    with np.errstate(divide="ignore", invalid="ignore"):
        rhat, ess = rank_normalized_rhat(samples), bulk_ess(samples)
    # A chain that never moved has neither: it must not spoil the medians of the others.
    rhat = np.nan_to_num(rhat, nan=np.inf, posinf=np.inf)
    return ChainDiagnostics(rhat.max(-1), np.nan_to_num(ess, nan=1.0).min(-1))


def rank_normalized_rhat(
    samples: np.ndarray,  # (chains, steps, …)
) -> np.ndarray:
    """Return R-hat of each variable: the larger of that of its location and its spread."""
    spread = np.abs(samples - np.median(samples, (0, 1)))
    return np.fmax(_rhat(_normalize(samples)), _rhat(_normalize(spread)))


def bulk_ess(
    samples: np.ndarray,  # (chains, steps, …)
) -> np.ndarray:
    """Return the effective sample size of each variable in the bulk of its values."""
    halves = _normalize(samples)
    num_chains, num_steps = halves.shape[:2]
    covariance = _autocovariance(halves).mean(0)
    within = covariance[0] * num_steps / (num_steps - 1)
    total = covariance[0] + halves.mean(1).var(0, ddof=1)
    correlation = 1 - (within - covariance) / total
    correlation[0] = 1
    size = num_chains * num_steps
    time = np.maximum(_correlation_time(correlation), 1 / np.log10(size))
    return size / time


def _normalize(samples: np.ndarray) -> np.ndarray:
    """Split each chain in two, and replace samples by normal scores of their ranks."""
    half = samples.shape[1] // 2
    halves = np.concatenate([samples[:, :half], samples[:, -half:]])
    flat = halves.reshape(-1, *halves.shape[2:])
    ranks = stats.rankdata(flat, axis=0)  # equal after a rejected proposal: their mean
    return special.ndtri((ranks - 0.375) / (len(flat) + 0.25)).reshape(halves.shape)


def _rhat(halves: np.ndarray) -> np.ndarray:
    num_steps = halves.shape[1]
    within = halves.var(1, ddof=1).mean(0)
    between = halves.mean(1).var(0, ddof=1)
    return np.sqrt((num_steps - 1) / num_steps + between / within)


def _autocovariance(halves: np.ndarray) -> np.ndarray:
    """Return the covariance with the same chain at every lag: (chains, lags, …)."""
    num_steps = halves.shape[1]
    centered = halves - halves.mean(1, keepdims=True)
    spectrum = np.fft.rfft(centered, 2 * num_steps, axis=1)
    power = np.fft.irfft(np.abs(spectrum) ** 2, 2 * num_steps, axis=1)
    return power[:, :num_steps] / num_steps


def _correlation_time(
    correlation: np.ndarray,  # (lags, …)
) -> np.ndarray:
    """Return the sum of the correlations at all lags, in both directions.

    By Geyer's rule, pairs of lags count until one of them is negative, and no pair counts
    more than the one before it.
    """
    num_pairs = (len(correlation) - 1) // 2
    even = correlation[0 : 2 * num_pairs : 2]
    pairs = even + correlation[1 : 2 * num_pairs : 2]
    is_last = pairs < 0
    is_last[0], is_last[-1] = False, True
    last = is_last.argmax(0)
    counts = np.arange(num_pairs).reshape(-1, *(1,) * (pairs.ndim - 1)) < last
    total = np.where(counts, np.minimum.accumulate(pairs, 0), 0).sum(0)
    remainder = np.take_along_axis(even, last[None], 0)[0]
    return 2 * total - 1 + np.maximum(remainder, 0)
