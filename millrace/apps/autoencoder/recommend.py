"""Recommend items: the best unrated ones of each user, selected on the device."""

import codecs
import contextlib
import csv
import gzip
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from millrace.apps.autoencoder.config.commands import RecommendConfig
from millrace.apps.autoencoder.data import RowSource
from millrace.apps.autoencoder.loss import to_dense_rows
from millrace.apps.autoencoder.metrics import select_top_items
from millrace.apps.autoencoder.predictor import (
    Predict,
    Recommender,
    build_predict,
    load_recommender,
)
from millrace.apps.autoencoder.run_ratings import (
    find_users,
    format_unknown,
    load_known_ratings,
)
from millrace.config import ConfigurationError, writing
from millrace.data.ratings.matrix import Ratings, find_ids
from millrace.data.ratings.reading import load_ratings
from millrace.data.ratings.source import active_users, evaluation_source
from millrace.data.stream import EvaluationBatches
from millrace.durable import replacing
from millrace.feeds.infeed import Infeed
from millrace.feeds.outfeed import Outfeed
from millrace.loop.repeat import repeat
from millrace.run.console import Console

_DELIMITERS = ("::", "|", "\t", ",")


class Recommendation(NamedTuple):
    """An item recommended to a user."""

    user: Any
    rank: int
    """1 for the best item."""
    item: Any
    rating: float
    """The predicted rating, within the scale of the training ratings."""
    title: str


def recommend(config: RecommendConfig) -> None:
    """Print recommendations, or write them to a file."""
    lines: list[str] = []  # printed once nothing else is wrong
    recommender = load_recommender(config.checkpoint, config.which, announce=lines.append)
    rows = recommender.config.data.rows
    titles = load_titles(config.titles) if config.titles else {}
    console = Console(quiet=True)
    new_users = find_new_users(recommender, config)
    is_new = [user in new_users for user in config.user]
    if new_users and not config.all and all(is_new):
        print(*lines, sep="\n", file=sys.stderr)
        found = _fold_in(recommender, new_users, config.top, titles)
        return _show(found, len(new_users), config, titles, console)
    ratings, unknown = load_known_ratings(
        recommender.config, recommender.files, config.training_data_file
    )
    users = active_users(ratings)
    if not config.all:
        known = [user for user, new in zip(config.user, is_new, strict=True) if not new]
        users = find_users(known, ratings, unknown, rows)
    if unknown.num_ratings and not new_users:
        skipped = config.all and unknown.num_users
        ending = " These users get no recommendations." if skipped else ""
        console.warning(format_unknown(unknown, rows) + ending)
    print(*lines, sep="\n", file=sys.stderr)
    predict, weights = build_predict(recommender, ratings)
    batches = _stream_top_items(
        predict, weights, ratings, users, config.top, config.batch_size
    )
    found = itertools.chain(
        _build_recommendations(batches, ratings, titles, recommender.limit),
        _fold_in(recommender, new_users, config.top, titles),
    )
    _show(found, len(users) + len(new_users), config, titles, console)


def find_new_users(
    recommender: Recommender, config: RecommendConfig
) -> dict[str, dict[Any, float]]:
    """Return the ratings of wanted users in the file that a model can fold in."""
    if config.training_data_file is None or not recommender.folds_in:
        return {}
    low, high = recommender.config.data.rating_range
    ratings = load_ratings(config.training_data_file, limits=(low, high), quiet=True)
    is_new = find_ids(recommender.files.column_ids, ratings.user_ids) < 0
    is_known_item = find_ids(recommender.item_ids, ratings.item_ids) >= 0
    found = {}
    for place in np.flatnonzero(is_new).tolist():
        user = str(ratings.user_ids[place])
        if not config.all and user not in config.user:
            continue
        items, values = ratings.get_user(place)
        known = is_known_item[items]
        if known.any():
            ids = ratings.item_ids[items[known]].tolist()
            found[user] = dict(zip(ids, values[known].tolist(), strict=True))
    return found


def _fold_in(
    recommender: Recommender,
    users: Mapping[str, Mapping[Any, float]],
    top: int,
    titles: dict[str, str],
) -> Iterator[Recommendation]:
    """Yield the best items of users whom the model was not trained on."""
    for user, ratings in users.items():
        for rank, (item, rating) in enumerate(recommender.recommend(ratings, top), 1):
            yield Recommendation(user, rank, item, rating, titles.get(str(item), ""))


def _show(
    found: Iterable[Recommendation],
    num_users: int,
    config: RecommendConfig,
    titles: dict[str, str],
    console: Console,
) -> None:
    """Print recommendations, or write them to a file."""
    if config.titles is not None:
        found = _warn_without_titles(found, config.titles, console)
    if config.out is None:
        return _print(found, with_titles=bool(titles))
    with _write_atomically(config.out) as file:
        count = _write(found, file, "," if config.out.suffix == ".csv" else "\t")
    print(f"{count:,} recommendations for {num_users:,} users: {config.out}")


def _stream_top_items(
    predict: Predict,
    weights: Any,
    ratings: Ratings,
    users: np.ndarray,
    top: int,
    batch_size: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of users with their best items, as soon as the device has them."""

    def body(weights: Any, element: Any) -> tuple[Any, dict[str, jax.Array]]:
        batch = element["batch"]
        rows = to_dense_rows(batch, ratings.num_items)
        rows = rows.astype(jax.tree.leaves(weights)[0].dtype)
        output = predict(weights, rows, batch["user"])
        rating, item = select_top_items(output, rows, top)
        valid = element["valid"]
        return weights, {
            "user": batch["user"], "item": item, "rating": rating, "valid": valid
        }  # fmt: skip

    batch_size = min(batch_size, len(users))
    source = RowSource(evaluation_source(ratings, None, batch_size, users))
    batches = EvaluationBatches(source, batch_size)
    outfeed = Outfeed()
    with Infeed(batches) as infeed, ThreadPoolExecutor(1) as pool:
        loop = pool.submit(
            repeat, len(batches), body, weights, infeed=infeed, outfeed=outfeed
        )
        yield from outfeed
        loop.result()  # raises the error of the thread, if there was one


def _build_recommendations(
    batches: Iterable[dict[str, np.ndarray]],
    ratings: Ratings,
    titles: dict[str, str],
    limit: Callable[[Any], float],
) -> Iterator[Recommendation]:
    """Yield the best items of each user, best first."""
    for batch in batches:
        for place, is_real in enumerate(batch["valid"]):
            if not is_real:
                continue
            user = ratings.user_ids[batch["user"][place]]
            best = zip(batch["item"][place], batch["rating"][place], strict=True)
            for rank, (item, rating) in enumerate(best, 1):
                if np.isfinite(rating):
                    item_id = ratings.item_ids[item]
                    title = titles.get(str(item_id), "")
                    yield Recommendation(user, rank, item_id, limit(rating), title)


def _warn_without_titles(
    found: Iterable[Recommendation], titles: Path, console: Console
) -> Iterator[Recommendation]:
    """Pass recommendations on; warn at the end if none of them had a title."""
    item, has_title = None, False
    for entry in found:
        item, has_title = entry.item, has_title or bool(entry.title)
        yield entry
    if item is not None and not has_title:
        console.warning(
            f"{titles} has no titles for these items. Does it use the item IDs of the "
            f"ratings, such as {item}?"
        )


@contextlib.contextmanager
def _write_atomically(path: Path) -> Iterator[IO[str]]:
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


def load_titles(path: Path) -> dict[str, str]:
    """Return item titles by item ID, from files like those of Netflix and MovieLens.

    A line has the ID and the title. In comma-separated files a year may stand between
    them, as in the Netflix file, whose titles may themselves contain commas. Fields after
    the title, as in the MovieLens files, are ignored.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"Cannot read the titles in {path}: {reason}.") from error
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = content.decode("latin-1")  # Netflix and older MovieLens files
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigurationError(f"The file of titles {path} is empty.")
    delimiter = _find_delimiter(lines[0])
    fields = [line.split(delimiter) for line in lines]
    if delimiter == ",":
        fields = [_split_commas(line) for line in lines]
    return {entry[0].strip(): entry[1].strip() for entry in fields if len(entry) > 1}


def _find_delimiter(line: str) -> str:
    """Return the first delimiter, which follows the ID; later ones may be in the title."""
    positions = {line.find(mark): mark for mark in _DELIMITERS if mark in line}
    return positions[min(positions)] if positions else ","


def _split_commas(line: str) -> list[str]:
    entry = next(csv.reader([line]))
    if len(entry) > 2 and (entry[1].isdigit() or entry[1] == "NULL"):
        title, year = line.split(",", 2)[2], entry[1]
        return [entry[0], title if year == "NULL" else f"{title} ({year})"]
    return entry
