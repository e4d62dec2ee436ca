"""Made-up ratings: some with a truth that can be learned, some of pure chance."""

from typing import NamedTuple

import numpy as np

from millrace.data.ratings.matrix import Ratings, from_events

_LOWEST, _HIGHEST = 1.5, 4.5
"""Between these lies the truth, so that noise leaves every rating above zero."""
_NOISE_CUT_AT = 5
"""In standard deviations: a rating of zero would mean that there is none."""
_TASTE_CONCENTRATION = 0.5
"""Below one, a user has mostly the taste of a few types and a little of the others."""


class Truth(NamedTuple):
    """What generated ratings are made from: ``tastes @ profiles``, plus noise."""

    tastes: np.ndarray
    """float32[num_users, rank]: how much of each type a user is; a row's sum is 1."""
    profiles: np.ndarray
    """float32[rank, num_items]: what each type thinks of each item."""
    noise: float
    """Standard deviation of the noise: no model foretells better than this RMSE."""

    def rating(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Return the ratings these users would give these items without noise."""
        return np.einsum("ij,ji->i", self.tastes[users], self.profiles[:, items])


def generated_ratings(
    num_users: int = 4000,
    num_items: int = 400,
    *,
    rank: int = 3,
    noise: float = 0.25,
    density: float = 0.3,
    seed: int = 0,
) -> tuple[Ratings, Ratings, Ratings, Truth]:
    """Return training, validation and test ratings of a known truth, and the truth.

    Every rating is there with probability `density`, and of those that are, eight in ten
    are for training. They are not rounded to stars: rounding would add to the noise.

    Args:
        num_users: How many users.
        num_items: How many items.
        rank: Types of user that everyone is a mixture of.
        noise: Standard deviation of what cannot be foretold.
        density: Share of all pairs that are rated.
        seed: Of everything random.
    """
    if not 0 <= noise < _LOWEST / _NOISE_CUT_AT:
        raise ValueError(
            f"noise must be at least 0 and below {_LOWEST / _NOISE_CUT_AT:g}, so that "
            f"ratings stay above zero; got {noise:g}."
        )
    if not 0 < density <= 1:
        raise ValueError(f"density must be above 0 and at most 1, got {density:g}.")
    generator = np.random.default_rng(seed)
    concentrations = np.full(rank, _TASTE_CONCENTRATION)
    truth = Truth(
        tastes=generator.dirichlet(concentrations, num_users).astype(np.float32),
        profiles=generator.uniform(_LOWEST, _HIGHEST, (rank, num_items)).astype(np.float32),
        noise=noise,
    )
    users, items = np.divmod(_rated(generator, num_users * num_items, density), num_items)
    chance = generator.standard_normal(len(users), np.float32)
    values = truth.rating(users, items)
    values += np.float32(noise) * np.clip(chance, -_NOISE_CUT_AT, _NOISE_CUT_AT)
    split = np.searchsorted([0.8, 0.9], generator.random(len(users)))
    training, validation, test = (
        from_events(
            users[split == part],
            items[split == part],
            values[split == part],
            user_ids=np.arange(num_users),
            item_ids=np.arange(num_items),
        )
        for part in range(3)
    )
    return training, validation, test, truth


def _rated(generator: np.random.Generator, num_pairs: int, density: float) -> np.ndarray:
    """Choose pairs, each with the same probability, without looking at every one."""
    expected = num_pairs * density
    enough = int(expected + 10 * expected**0.5 + 10)
    pairs = np.cumsum(generator.geometric(density, enough)) - 1
    while pairs[-1] < num_pairs:  # once in a lifetime
        more = np.cumsum(generator.geometric(density, enough)) + pairs[-1]
        pairs = np.append(pairs, more)
    return pairs[pairs < num_pairs]


def random_ratings(
    num_users: int = 480_000,
    num_items: int = 18_000,
    num_ratings: int = 13_000_000,
    *,
    seed: int = 0,
) -> Ratings:
    """Return ratings of 1 to 5 by chance, to measure speed with; nothing can be learned.

    The defaults are the reference's training data; its validation data are a million more.
    A user and item drawn twice count once.
    """
    generator = np.random.default_rng(seed)
    return from_events(
        generator.integers(0, num_users, num_ratings, dtype=np.int32),
        generator.integers(0, num_items, num_ratings, dtype=np.int32),
        generator.integers(1, 6, num_ratings, dtype=np.int8),
        user_ids=np.arange(num_users),
        item_ids=np.arange(num_items),
    )
