"""Synthetic ratings: some with a known structure to learn, some purely random."""

from typing import NamedTuple

import numpy as np

from millrace.data.ratings.matrix import Ratings, from_events

_LOWEST, _HIGHEST = 1.5, 4.5
"""Range of the ratings without noise, so that noise leaves every rating above 0."""
_NOISE_TRUNCATION = 5
"""Noise is clipped to this many std: a rating of 0 would mean that there is none."""
_TASTE_CONCENTRATION = 0.5
"""Below 1, the taste of a user consists mostly of a few types."""


class Truth(NamedTuple):
    """The model behind generated ratings: ``tastes @ profiles``, plus noise."""

    tastes: np.ndarray
    """float32[num_users, rank], the mixture of types of each user; rows sum to 1."""
    profiles: np.ndarray
    """float32[rank, num_items], the rating of each item by each type."""
    noise: float
    """Standard deviation of the noise, the lowest RMSE a model can reach."""

    def rating(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Return the ratings of these items by these users without noise."""
        return np.einsum("ij,ji->i", self.tastes[users], self.profiles[:, items])


def generate_ratings(
    num_users: int = 4000,
    num_items: int = 400,
    *,
    rank: int = 3,
    noise: float = 0.25,
    density: float = 0.3,
    seed: int = 0,
) -> tuple[Ratings, Ratings, Ratings, Truth]:
    """Return training (80 %), validation and test ratings, and the truth behind them.

    They are not rounded to stars, because rounding would add to the noise.

    Args:
        num_users: Number of users.
        num_items: Number of items.
        rank: Number of types of which every user is a mixture.
        noise: Standard deviation of the noise.
        density: Probability that a user has rated an item.
        seed: Seed for all random numbers.
    """
    if not 0 <= noise < _LOWEST / _NOISE_TRUNCATION:
        raise ValueError(
            f"noise must be at least 0 and below {_LOWEST / _NOISE_TRUNCATION:g}, so that "
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
    pairs = _draw_pairs(generator, num_users * num_items, density)
    users, items = np.divmod(pairs, num_items)
    noises = generator.standard_normal(len(users), np.float32)
    values = truth.rating(users, items)
    values += np.float32(noise) * np.clip(noises, -_NOISE_TRUNCATION, _NOISE_TRUNCATION)
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


def _draw_pairs(
    generator: np.random.Generator, num_pairs: int, density: float
) -> np.ndarray:
    """Draw each pair with the same probability, without a random number for each.

    The gaps between the pairs drawn have a geometric distribution.
    """
    expected = num_pairs * density
    enough = int(expected + 10 * expected**0.5 + 10)  # ten standard deviations
    pairs = np.cumsum(generator.geometric(density, enough)) - 1
    while pairs[-1] < num_pairs:
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
    """Return random ratings from 1 to 5, to measure speed; there is nothing to learn.

    The defaults are the sizes of the training data of the reference; its validation data
    are a million more. Duplicates count once.
    """
    generator = np.random.default_rng(seed)
    return from_events(
        generator.integers(0, num_users, num_ratings, dtype=np.int32),
        generator.integers(0, num_items, num_ratings, dtype=np.int32),
        generator.integers(1, 6, num_ratings, dtype=np.int8),
        user_ids=np.arange(num_users),
        item_ids=np.arange(num_items),
    )
