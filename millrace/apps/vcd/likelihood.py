"""The log-likelihood of images by importance sampling, in constant memory.

log p(x) is estimated by log (1/S) sum_s p(x, z_s) / r(z_s|x), which is a lower bound on
average. There are three normal proposals r, each somewhat wider than its source.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from millrace.apps.vcd.config.sections import LikelihoodOptions
from millrace.apps.vcd.data import BinaryImages, unpack
from millrace.apps.vcd.diagnostics import (
    MIN_STEPS,
    ChainDiagnostics,
    diagnose_chains,
)
from millrace.apps.vcd.model import (
    SMALLEST_STD,
    Gaussian,
    Model,
    bernoulli_vae,
    log_prior,
)
from millrace.apps.vcd.sampler import HmcSettings, draw_noise, run_chains, start_chains
from millrace.data.source import ArraySource
from millrace.data.stream import EvaluationBatches
from millrace.program.compiling import jit

PROPOSALS = ("encoder", "hmc_mean", "hmc")
"""Sources of mean and std: the encoder for both; the chain and the encoder; the chain."""

_OVERDISPERSION = 1.2  # too narrow a proposal has weights of huge variance
_GROUPS_PER_CALL = 20  # between two progress reports
_MAX_DIAGNOSED = 512  # images; ranks are computed on the host

Progress = Callable[[int, int], None]
"""Called with the number of finished calls and of all calls."""


class LogLikelihoods(NamedTuple):
    """Log-likelihood estimates of every image by every proposal."""

    values: dict[str, np.ndarray]
    """(images,) by proposal."""
    num_batches: int
    chains: ChainDiagnostics | None = None
    """Of the first images; None if the chains are too short."""

    @property
    def best(self) -> np.ndarray:
        """The highest estimate of each image; all are lower bounds on average."""
        return np.max(list(self.values.values()), axis=0)

    def metrics(self, split: str) -> dict[str, float]:
        """Return the means of all estimates, and the medians of the diagnostics."""
        metrics = {f"{split}_log_likelihood": float(self.best.mean())} | {
            f"{split}_log_likelihood_{name}": float(values.mean())
            for name, values in self.values.items()
        }
        if self.chains is not None:
            statistics = self.chains.statistics()
            metrics[f"{split}_chain_rhat"] = statistics["rhat_median"]
            metrics[f"{split}_chain_ess"] = statistics["ess_median"]
        return metrics

    def statistics(self) -> dict[str, Any]:
        """Return the content of the results file."""
        count = len(self.best)

        def summarize(values: np.ndarray) -> dict[str, float]:
            return {
                "mean": float(values.mean()),
                "std": float(values.std()),
                "standard_error": float(values.std() / np.sqrt(count)),
            }

        return {
            "num_pictures": count,
            "num_batches": self.num_batches,
            "best": summarize(self.best),
            **{name: summarize(values) for name, values in self.values.items()},
            "chains": self.chains and self.chains.statistics(),
        }


def estimate_log_likelihoods(
    params: Any,
    images: BinaryImages,
    options: LikelihoodOptions,
    *,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> LogLikelihoods:
    """Estimate the log-likelihood of every image."""
    model, hmc = bernoulli_vae(), _hmc_settings(options)
    num_pixels, group_size = images.num_pixels, options.importance_group_size
    batches = EvaluationBatches(
        ArraySource({"packed": images.packed}), options.test_micro_batch_size
    )
    calls = list(_calls(options))
    total, done = len(batches) * len(calls), 0
    key = jax.random.key(seed)
    results, chains, num_chains = [], [], 0
    # In full float32: likelihoods are compared to a hundredth of a nat.
    with jax.default_matmul_precision("float32"):
        for number, batch in enumerate(batches):
            packed, valid = batch["batch"]["packed"], batch["valid"]
            chain_key, sample_key = jax.random.split(jax.random.fold_in(key, number))
            x = unpack(jnp.asarray(packed), num_pixels)
            size = options.test_step_size
            proposals, positions = build_proposals(
                model, params, x, valid, hmc, size, chain_key
            )
            if len(positions) >= MIN_STEPS and num_chains < _MAX_DIAGNOSED:
                chains.append(diagnose_chains(jax.device_get(positions)[:, valid]))
                num_chains += int(valid.sum())
            log_sum = jnp.full((len(PROPOSALS), len(valid)), -jnp.inf)
            for first, count in calls:
                groups = jnp.arange(first, first + count)
                keys = jax.vmap(lambda n, k=sample_key: jax.random.fold_in(k, n))(groups)
                previous = log_sum
                log_sum = add_groups(model, params, x, proposals, log_sum, keys, group_size)
                # Dispatch is asynchronous; without this, progress would run ahead.
                jax.block_until_ready(previous)
                done += 1
                progress(done, total)
            results.append(np.asarray(log_sum)[:, valid])
    values = np.concatenate(results, 1) - np.log(options.num_importance_samples)
    by_proposal: dict[str, np.ndarray] = dict(zip(PROPOSALS, values, strict=True))
    diagnosed = None
    if chains:
        diagnosed = ChainDiagnostics(*map(np.concatenate, zip(*chains, strict=True)))
    return LogLikelihoods(by_proposal, len(batches), diagnosed)


def _hmc_settings(options: LikelihoodOptions) -> HmcSettings:
    return HmcSettings(
        num_burn_in_steps=options.num_test_burn_in_steps,
        num_steps=options.num_test_hmc_steps,
        num_leapfrog_steps=options.num_test_leapfrog_steps,
        acceptance_target=options.test_acceptance_target,
        adaption_rate=0.01 * options.test_micro_batch_size / 100,
    )


def _calls(options: LikelihoodOptions) -> Iterator[tuple[int, int]]:
    """Yield the first group of samples and the number of groups of each call."""
    groups = options.num_importance_samples // options.importance_group_size
    for first in range(0, groups, _GROUPS_PER_CALL):
        yield first, min(_GROUPS_PER_CALL, groups - first)


@functools.partial(jit, static_argnames=("model", "hmc"))
def build_proposals(
    model: Model,
    params: Any,
    x: jax.Array,  # (images, pixels)
    valid: jax.Array,  # (images,): False for padding
    hmc: HmcSettings,
    step_size: float,
    key: jax.Array,
) -> tuple[Gaussian, jax.Array]:
    """Return the three proposals of each image, and the positions of its chain.

    They are (proposals, images, z_dim) and (steps, images, z_dim), without burn-in.
    """
    q = model.encode(params["encoder"], x)
    target = model.log_joint(params["decoder"], x)
    num_valid = valid.sum()
    num_images, z_dim = q.mean.shape
    result = run_chains(
        target,
        start_chains(target, q.mean),
        draw_noise(key, hmc.total_steps, (num_images, z_dim)),
        jnp.float32(step_size),
        hmc,
        # Padding must not influence the step size of the other chains.
        average=lambda accepted: jnp.where(valid, accepted, 0).sum() / num_valid,
    )
    kept = result.positions[hmc.num_burn_in_steps :]
    mean, std = kept.mean(0), jnp.maximum(kept.std(0), SMALLEST_STD)
    proposals = Gaussian(
        jnp.stack([q.mean, mean, mean]),
        _OVERDISPERSION * jnp.stack([q.std, q.std, std]),
    )
    return proposals, kept


@functools.partial(jit, static_argnames=("model", "group_size"))
def add_groups(
    model: Model,
    params: Any,
    x: jax.Array,  # (images, pixels)
    proposals: Gaussian,  # (proposals, images, z_dim)
    log_sum: jax.Array,  # (proposals, images), -inf at first
    keys: jax.Array,  # (groups,)
    group_size: int,
) -> jax.Array:
    """Add groups of importance samples to the log of the sum of their weights."""

    def sum_group(item: tuple[Gaussian, jax.Array]) -> jax.Array:
        q, key = item
        noise = jax.random.normal(key, (group_size, *q.mean.shape))
        z = q.at(noise)
        weights = (
            model.log_likelihood(params["decoder"], x, z) + log_prior(z) - q.log_density(z)
        )
        return jax.nn.logsumexp(weights, axis=0)

    def add_group(log_sum: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        proposal_keys = jax.random.split(key, proposals.mean.shape[0])
        # One proposal at a time: three groups at once would need three times the memory.
        group = lax.map(sum_group, (proposals, proposal_keys))
        return jnp.logaddexp(log_sum, group), None

    return lax.scan(add_group, log_sum, keys)[0]
