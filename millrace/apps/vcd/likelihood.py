"""The log-likelihood of pictures by importance sampling, streamed: memory stays flat.

log p(x) is estimated by log (1/S) sum_s p(x, z_s) / r(z_s|x), which on average is a lower
bound. Three normal proposals r are tried, each a little wider than what it is made from.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from millrace.apps.vcd.config.common import TestOptions
from millrace.apps.vcd.data import BinaryPictures, unpack
from millrace.apps.vcd.model import Gaussian, Model, bernoulli_vae, log_prior
from millrace.apps.vcd.sampler import HmcSettings, draw_noise, sample, start
from millrace.data.source import ArraySource
from millrace.data.stream import EvaluationBatches
from millrace.program.compiling import jit

PROPOSALS = ("encoder", "hmc_mean", "hmc")
"""Mean and standard deviation: both the encoder's; the chain's and the encoder's; both
the chain's."""

_OVERDISPERSION = 1.2
_SMALLEST_STD = 1e-4
_GROUPS_PER_CALL = 20
"""Groups of samples between two looks at the clock."""

Progress = Callable[[int, int], None]
"""Told how many calls are done, of how many."""


class LogLikelihoods(NamedTuple):
    """Estimates for each picture by each proposal."""

    values: dict[str, np.ndarray]
    num_batches: int

    @property
    def best(self) -> np.ndarray:
        """Each picture's highest estimate: all are lower bounds on average."""
        return np.max(list(self.values.values()), axis=0)

    def metrics(self, split: str) -> dict[str, float]:
        """Return the means: of the best estimates, and of each proposal's."""
        return {f"{split}_log_likelihood": float(self.best.mean())} | {
            f"{split}_log_likelihood_{name}": float(values.mean())
            for name, values in self.values.items()
        }

    def statistics(self) -> dict[str, Any]:
        """Return what a results file keeps."""
        count = len(self.best)

        def of(values: np.ndarray) -> dict[str, float]:
            return {
                "mean": float(values.mean()),
                "std": float(values.std()),
                "standard_error": float(values.std() / np.sqrt(count)),
            }

        return {
            "num_pictures": count,
            "num_batches": self.num_batches,
            "best": of(self.best),
            **{name: of(values) for name, values in self.values.items()},
        }


def log_likelihoods(
    params: Any,
    pictures: BinaryPictures,
    options: TestOptions,
    *,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> LogLikelihoods:
    """Estimate the log-likelihood of every picture.

    Args:
        params: The model's weights.
        pictures: Whose likelihood.
        options: How many samples, and how chains are run.
        seed: Of all randomness.
        progress: Called now and then.
    """
    hmc = _hmc(options)
    num_pixels, group_size = pictures.num_pixels, options.importance_group_size
    batches = EvaluationBatches(
        ArraySource({"packed": pictures.packed}), options.test_micro_batch_size
    )
    calls = list(_calls(options))
    total, done = len(batches) * len(calls), 0
    key = jax.random.key(seed)
    found = []
    # All of it in 32 bits: a likelihood is compared to a hundredth of a nat.
    with jax.default_matmul_precision("float32"):
        for number, batch in enumerate(batches):
            packed, valid = batch["batch"]["packed"], batch["valid"]
            chain_key, sample_key = jax.random.split(jax.random.fold_in(key, number))
            x = unpack(jnp.asarray(packed), num_pixels)
            size = options.test_step_size
            proposed = _propose(params, x, valid, size, chain_key, hmc)
            so_far = jnp.full((len(PROPOSALS), len(valid)), -jnp.inf)
            for first, count in calls:
                groups = jnp.arange(first, first + count)
                keys = jax.vmap(lambda n, k=sample_key: jax.random.fold_in(k, n))(groups)
                before = so_far
                so_far = _add(params, x, proposed, so_far, keys, group_size)
                jax.block_until_ready(before)  # so that what is shown is done
                done += 1
                progress(done, total)
            found.append(np.asarray(so_far)[:, valid])
    values = np.concatenate(found, 1) - np.log(options.num_importance_samples)
    return LogLikelihoods(dict(zip(PROPOSALS, values, strict=True)), len(batches))


@functools.partial(jit, static_argnames="hmc")
def _propose(
    params: Any, x: Any, valid: Any, step_size: float, key: Any, hmc: HmcSettings
) -> Gaussian:
    return proposals(bernoulli_vae(), params, x, valid, hmc, step_size, key)


@functools.partial(jit, static_argnames="group_size")
def _add(
    params: Any, x: Any, proposed: Gaussian, so_far: Any, keys: Any, group_size: int
) -> jax.Array:
    return add_groups(bernoulli_vae(), params, x, proposed, so_far, keys, group_size)


def _hmc(options: TestOptions) -> HmcSettings:
    return HmcSettings(
        num_burn_in_steps=options.num_test_burn_in_steps,
        num_steps=options.num_test_hmc_steps,
        num_leapfrog_steps=options.num_test_leapfrog_steps,
        acceptance_target=options.test_acceptance_target,
        adaption_rate=0.01 * options.test_micro_batch_size / 100,
    )


def _calls(options: TestOptions) -> Iterator[tuple[int, int]]:
    """Cut the groups of samples into calls: the first group of each, and how many."""
    groups = options.num_importance_samples // options.importance_group_size
    for first in range(0, groups, _GROUPS_PER_CALL):
        yield first, min(_GROUPS_PER_CALL, groups - first)


def proposals(
    model: Model,
    params: Any,
    x: jax.Array,
    valid: jax.Array,
    hmc: HmcSettings,
    step_size: float,
    key: jax.Array,
) -> Gaussian:
    """Return the three proposals for each row of `x`, stacked along dim 0."""
    q = model.encode(params["encoder"], x)
    target = model.log_joint(params["decoder"], x)
    num_valid = valid.sum()
    shape = (q.mean.shape[0], q.mean.shape[1])
    chains = sample(
        target,
        start(target, q.mean),
        draw_noise(key, hmc.total_steps, shape),
        jnp.float32(step_size),
        hmc,
        average=lambda accepted: jnp.where(valid, accepted, 0).sum() / num_valid,
    )
    kept = chains.positions[hmc.num_burn_in_steps :]
    mean, std = kept.mean(0), jnp.maximum(kept.std(0), _SMALLEST_STD)
    return Gaussian(
        jnp.stack([q.mean, mean, mean]),
        _OVERDISPERSION * jnp.stack([q.std, q.std, std]),
    )


def add_groups(
    model: Model,
    params: Any,
    x: jax.Array,
    proposed: Gaussian,
    so_far: jax.Array,
    keys: jax.Array,
    group_size: int,
) -> jax.Array:
    """Add groups of samples to the log of the sum of weights.

    Args:
        model: Its decoder's likelihood is what counts.
        params: The model's weights.
        x: (pictures, pixels).
        proposed: (proposals, pictures, dims).
        so_far: (proposals, pictures), -inf at first.
        keys: One for each group.
        group_size: Samples in a group.
    """

    def one_proposal(item: tuple[Gaussian, jax.Array]) -> jax.Array:
        q, key = item
        noise = jax.random.normal(key, (group_size, *q.mean.shape))
        z = q.at(noise)
        weights = (
            model.log_likelihood(params["decoder"], x, z) + log_prior(z) - q.log_density(z)
        )
        return jax.nn.logsumexp(weights, axis=0)

    def group(so_far: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        own = jax.random.split(key, proposed.mean.shape[0])
        return jnp.logaddexp(so_far, lax.map(one_proposal, (proposed, own))), None

    return lax.scan(group, so_far, keys)[0]
