"""Recommend: the best of what a user has not rated, chosen on the device."""

import contextlib
import csv
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.autoencoder.config.recommend import RecommendConfig
from millrace.apps.autoencoder.evaluate import ratings_for, said_of_unknown
from millrace.apps.autoencoder.feeding import ByUser
from millrace.apps.autoencoder.item_rows import columns_of, foretold
from millrace.apps.autoencoder.loss import dense_rows
from millrace.apps.autoencoder.model import reconstruct
from millrace.apps.autoencoder.scoring import adding, top_items
from millrace.apps.autoencoder.titles import load_titles
from millrace.apps.autoencoder.trained import Trained, find_trained
from millrace.config import ConfigurationError, writing
from millrace.data.ratings.matrix import Ratings, Unseen, find, transposed
from millrace.data.ratings.source import active_users, evaluation_source
from millrace.data.stream import EvaluationBatches
from millrace.durable import replacing
from millrace.feeds.infeed import Infeed
from millrace.feeds.outfeed import Outfeed
from millrace.loop.repeat import repeat
from millrace.program.mixed_precision import narrow
from millrace.run.console import Console


class Recommendation(NamedTuple):
    """An item for a user; the first has rank 1."""

    user: Any
    rank: int
    item: Any
    rating: float
    """What the model foretells."""
    title: str


def recommend(config: RecommendConfig) -> None:
    """Print recommendations, or write them to a file."""
    trained = find_trained(config.checkpoint, newest=config.which == "newest")
    titles = load_titles(config.titles) if config.titles else {}
    console = Console(quiet=True)
    ratings, unknown = rated_before(trained, config.training_data_file)
    users = active_users(ratings)
    if not config.all:
        users = find_users(config.user, ratings, unknown, trained)
    if unknown.num_ratings:
        missed = config.all and unknown.num_users
        ending = " Nothing is recommended to these users." if missed else ""
        console.warning(said_of_unknown(unknown, trained.config.rows) + ending)
    found = recommendations(trained, ratings, users, config.top, config.batch_size, titles)
    if config.titles is not None:
        found = _watched(found, config.titles, console)
    if config.out is None:
        return _print(found, with_titles=bool(titles))
    with _written_whole(config.out) as file:
        count = _write(found, file, "," if config.out.suffix == ".csv" else "\t")
    print(f"{count:,} recommendations to {len(users):,} users: {config.out}")


def rated_before(trained: Trained, path: Path | None = None) -> tuple[Ratings, Unseen]:
    """Return what users have rated, by user, of what the model knows, and what it does not.

    Args:
        trained: The model.
        path: A file of ratings; None for what it was trained on.
    """
    # What it was validated with is not needed, and may be gone.
    without = dataclasses.replace(trained.config, validation_data_file=None)
    found, unknown = ratings_for(trained._replace(config=without), path, None)
    by_item = trained.config.rows == "items"
    return transposed(found.training) if by_item else found.training, unknown


def find_users(
    names: Iterable[Any], ratings: Ratings, unknown: Unseen, trained: Trained
) -> np.ndarray:
    """Return the places of users in the ratings; each must have some."""
    names = list(names)
    places = find(ratings.user_ids, np.array(names))
    for name, place in zip(names, places, strict=True):
        if place < 0 and trained.config.rows == "items":
            raise ConfigurationError(
                f"The model was trained without user {name}, and a model with rows of "
                "items knows no others. Train again with this user's ratings, or with "
                "--rows users, which can recommend to new users."
            )
        if place < 0:
            raise ConfigurationError(f"There is no user {name} in the ratings.")
        if not len(ratings.of_user(place)[0]):
            # Whoever stands in a file has rated something.
            lost = unknown.num_users and trained.config.rows == "users"
            what = "rated only items that the model does not know" if lost else "no ratings"
            raise ConfigurationError(
                f"User {name} has {what}, so there is nothing to go by."
            )
    return places


def recommendations(
    trained: Trained,
    ratings: Ratings,
    users: np.ndarray,
    top: int,
    batch_size: int,
    titles: dict[str, str],
) -> Iterator[Recommendation]:
    """Yield the best items of each user, the best first, while later ones are computed.

    Args:
        trained: The model.
        ratings: What users have rated, by user; it is not recommended again.
        users: Places in `ratings`.
        top: Items for each user.
        batch_size: Users at a time.
        titles: What items are called, as far as is known.
    """
    foretell, weights = _foreteller(trained, ratings)
    add_biases = adding(ratings.biases)

    def with_biases(weights: Any, rows: jax.Array, users: jax.Array) -> jax.Array:
        output = foretell(weights, rows, users).astype(jnp.float32)
        return add_biases(output, users)

    for found in top_streamed(with_biases, weights, ratings, users, top, batch_size):
        for place, is_real in enumerate(found["valid"]):
            if not is_real:
                continue
            user = ratings.user_ids[found["user"][place]]
            best = zip(found["item"][place], found["rating"][place], strict=True)
            for rank, (item, rating) in enumerate(best, 1):
                if np.isfinite(rating):
                    name = ratings.item_ids[item]
                    title = titles.get(str(name), "")
                    yield Recommendation(user, rank, name, float(rating), title)


Foretell = Callable[[Any, jax.Array, jax.Array], jax.Array]
"""``(weights, rows, users) -> what the users would rate, (users, items)``."""


def _foreteller(trained: Trained, ratings: Ratings) -> tuple[Foretell, Any]:
    """Return what foretells ratings by user, and the weights that it needs."""
    model, compute = trained.model, trained.config.plan.types.compute
    params, _ = trained.weights()
    if trained.config.rows == "users":
        params = narrow(params, compute)
        return lambda params, rows, _: reconstruct(model, params, rows), params
    batch_size = trained.config.resolved_validation_batch_size
    columns = columns_of(model, params, transposed(ratings), batch_size, compute)
    return lambda columns, _, users: foretold(model, columns, users), columns


def top_streamed(
    foretell: Foretell,
    weights: Any,
    ratings: Ratings,
    users: np.ndarray,
    top: int,
    batch_size: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of users with their best items, as the device hands them over."""

    def body(weights: Any, element: Any) -> tuple[Any, dict[str, jax.Array]]:
        batch = element["batch"]
        rows = dense_rows(batch, ratings.num_items)
        rows = rows.astype(jax.tree.leaves(weights)[0].dtype)
        output = foretell(weights, rows, batch["user"])
        rating, item = top_items(output, rows, top)
        valid = element["valid"]
        return weights, {
            "user": batch["user"], "item": item, "rating": rating, "valid": valid
        }  # fmt: skip

    batch_size = min(batch_size, len(users))
    source = ByUser(evaluation_source(ratings, None, batch_size, users))
    batches = EvaluationBatches(source, batch_size)
    outfeed = Outfeed()
    with Infeed(batches) as infeed, ThreadPoolExecutor(1) as pool:
        loop = pool.submit(
            repeat, len(batches), body, weights, infeed=infeed, outfeed=outfeed
        )
        yield from outfeed
        loop.result()  # raises what went wrong


def _watched(
    found: Iterable[Recommendation], titles: Path, console: Console
) -> Iterator[Recommendation]:
    """Hand recommendations on, and warn in the end if none of them had a title."""
    item, has_title = None, False
    for entry in found:
        item, has_title = entry.item, has_title or bool(entry.title)
        yield entry
    if item is not None and not has_title:
        console.warning(
            f"{titles} has a title for none of these items. Does it call them as the "
            f"ratings do, such as {item}?"
        )


@contextlib.contextmanager
def _written_whole(path: Path) -> Iterator[IO[str]]:
    """Write a file whole or not at all."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, newline="") as file:
            yield file


def _write(found: Iterable[Recommendation], file: IO[str], delimiter: str) -> int:
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    writer.writerow(Recommendation._fields)
    count = 0
    for entry in found:
        writer.writerow([*entry[:3], f"{entry.rating:.4f}", entry.title])
        count += 1
    return count


def _print(found: Iterable[Recommendation], *, with_titles: bool) -> None:
    last = None
    for entry in found:
        if entry.user != last:
            print(f"{'' if last is None else chr(10)}user {entry.user}")
            last = entry.user
        title = f"  {entry.title}" if with_titles else ""
        print(f"  {entry.rank:3}  {entry.rating:6.3f}  {entry.item}{title}")
    sys.stdout.flush()
