"""Recommend items: the best unrated ones of each user, selected on the device."""

import codecs
import csv
import gzip
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millrace.apps.autoencoder.bulk import (
    Columns,
    TopItems,
    name_top_items,
    stream_top_items,
    write_top_items,
)
from millrace.apps.autoencoder.config.commands import RecommendConfig
from millrace.apps.autoencoder.predictor import (
    Recommender,
    build_predict,
    load_recommender,
)
from millrace.apps.autoencoder.run_ratings import (
    find_users,
    format_unknown,
    load_known_ratings,
)
from millrace.config import ConfigurationError
from millrace.data.ratings.matrix import Ratings, find_ids
from millrace.data.ratings.reading import load_ratings
from millrace.data.ratings.source import active_users
from millrace.run.console import Console

_DELIMITERS = ("::", "|", "\t", ",")


class Recommendation(NamedTuple):
    """An item recommended to a user."""

    user: Any
    rank: int
    """1 for the best item."""
    item: Any
    rating: float
    """The predicted rating, within the scale of the training ratings; or the score of a
    model that ranks items."""
    title: str
    popularity: int | None = None
    """How many users have rated the item in training, if the run has kept it."""
    novelty: float | None = None
    """-log2 of the fraction of users who have."""


Build = Callable[[Any, int, Any, float], Recommendation]
"""``(user, rank, item, rating) -> recommendation``, with what is known about the item."""


def make_build(recommender: Recommender, titles: dict[str, str]) -> Build:
    """Return a function that adds title, popularity and novelty to a recommendation."""
    kept, known = recommender.files.popularity, {}
    if kept is not None:
        pairs = zip(kept.counts.tolist(), kept.novelty.tolist(), strict=True)
        known = dict(zip(recommender.item_ids.tolist(), pairs, strict=True))

    def build(user: Any, rank: int, item: Any, rating: float) -> Recommendation:
        title = titles.get(str(item), "")
        popularity, novelty = known.get(item, (None, None))
        return Recommendation(user, rank, item, rating, title, popularity, novelty)

    return build


def recommend(config: RecommendConfig) -> None:
    """Print recommendations, or write them to a file."""
    lines: list[str] = []  # printed once nothing else is wrong
    recommender = load_recommender(config.checkpoint, config.which, announce=lines.append)
    rows = recommender.config.data.rows
    titles = load_titles(config.titles) if config.titles else {}
    build = make_build(recommender, titles)
    columns = recommender.list_columns(titles if config.titles else None)
    console = Console(quiet=True)
    new_users, all_are_new = find_new_users(recommender, config)
    is_new = [user in new_users for user in config.user]
    if new_users and (all_are_new if config.all else all(is_new)):
        print(*lines, sep="\n", file=sys.stderr)
        found = _fold_in(recommender, new_users, config.top, build)
        if config.out is None:
            return _show(found, config, console)
        return _write(_join(found), len(new_users), config, columns, console)
    ratings, unknown = load_known_ratings(
        recommender.config, recommender.files, config.training_data_file
    )
    users = active_users(ratings)
    if not config.all:
        known = [user for user, new in zip(config.user, is_new, strict=True) if not new]
        folds_in = recommender.folds_in
        users = find_users(known, ratings, unknown, rows, folds_in=folds_in)
    if unknown.num_ratings and not new_users:
        skipped = config.all and unknown.num_users
        ending = " These users get no recommendations." if skipped else ""
        console.warning(format_unknown(unknown, rows) + ending)
    print(*lines, sep="\n", file=sys.stderr)
    predict, weights = build_predict(recommender, ratings)
    batches = stream_top_items(
        predict, weights, ratings, users, config.top, config.batch_size
    )
    if config.out is not None:
        named = name_top_items(batches, ratings, recommender.limits)
        if new_users:  # their IDs are text, and a column has one type
            named = (batch._replace(user=batch.user.astype(str)) for batch in named)
        new = _fold_in(recommender, new_users, config.top, build)
        count = len(users) + len(new_users)
        return _write(itertools.chain(named, _join(new)), count, config, columns, console)
    found = itertools.chain(
        _build_recommendations(batches, ratings, build, recommender.limit),
        _fold_in(recommender, new_users, config.top, build),
    )
    return _show(found, config, console)


def find_new_users(
    recommender: Recommender, config: RecommendConfig
) -> tuple[dict[str, dict[Any, float]], bool]:
    """Return the ratings of wanted users in the file that a model can fold in.

    Also return whether the model knows none of the users in the file.
    """
    if config.training_data_file is None or not recommender.folds_in:
        return {}, False
    low, high = recommender.config.data.rating_range
    no_ratings = recommender.config.data.no_ratings
    ratings = load_ratings(
        config.training_data_file, limits=(low, high), no_ratings=no_ratings, quiet=True
    )
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
    return found, bool(is_new.all())


def _fold_in(
    recommender: Recommender,
    users: Mapping[str, Mapping[Any, float]],
    top: int,
    build: Build,
) -> Iterator[Recommendation]:
    """Yield the best items of users whom the model was not trained on."""
    for user, ratings in users.items():
        for rank, (item, rating) in enumerate(recommender.recommend(ratings, top), 1):
            yield build(user, rank, item, rating)


def _show(
    found: Iterable[Recommendation], config: RecommendConfig, console: Console
) -> None:
    """Print recommendations."""
    if config.titles is not None:
        found = _warn_without_titles(found, config.titles, console)
    _print(found)


def _write(
    batches: Iterable[TopItems],
    num_users: int,
    config: RecommendConfig,
    columns: Columns,
    console: Console,
) -> None:
    """Write recommendations to a file, with a progress bar."""
    assert config.out is not None
    titles = columns.titles
    has_title = titles is None

    def watch() -> Iterator[TopItems]:
        nonlocal has_title
        done = 0
        for batch in batches:
            has_title = has_title or any(str(i) in (titles or ()) for i in batch.item)
            done += int((batch.rank == 1).sum())
            console.progress(done, num_users)
            yield batch

    start = time.perf_counter()
    console = Console()
    console.status(f"recommending to {num_users:,} users")
    try:
        count = write_top_items(config.out, watch(), columns)
    finally:
        console.stop()
    speed = num_users / (time.perf_counter() - start)
    if not has_title:
        console.warning(
            f"{config.titles} has no titles for these items. Does it use the item IDs of "
            "the ratings?"
        )
    print(
        f"{count:,} recommendations for {num_users:,} users: {config.out} "
        f"({speed:,.0f} users/s)"
    )


def _join(found: Iterable[Recommendation]) -> Iterator[TopItems]:
    """Yield the recommendations of each user together."""
    for user, entries in itertools.groupby(found, lambda entry: entry.user):
        _, ranks, items, ratings, *_ = zip(*entries, strict=True)
        users = np.full(len(ranks), user)
        yield TopItems(
            users, np.array(ranks, np.int32), np.array(items), np.array(ratings, np.float32)
        )


def _build_recommendations(
    batches: Iterable[dict[str, np.ndarray]],
    ratings: Ratings,
    build: Build,
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
                    item_id = ratings.item_ids[item].item()
                    yield build(user, rank, item_id, limit(rating))


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


def _print(found: Iterable[Recommendation]) -> None:
    """Print the list of each user, with the mean popularity and novelty of its items."""
    for number, (user, group) in enumerate(itertools.groupby(found, lambda e: e.user)):
        entries = list(group)
        print(f"{chr(10) if number else ''}user {user}{_format_popularity(entries)}")
        for entry in entries:
            title = f"  {entry.title}" if entry.title else ""
            shown = f"  {entry.rank:3}  {entry.rating:6.3f}  {entry.item}{title}"
            print(f"{shown}{_format_popularity([entry])}")
    sys.stdout.flush()


def _format_popularity(entries: Sequence[Recommendation]) -> str:
    """Return the mean popularity and novelty of items, if they are known."""
    counts = [entry.popularity for entry in entries if entry.popularity is not None]
    novelties = [entry.novelty for entry in entries if entry.novelty is not None]
    if not counts:
        return ""
    popularity = sum(counts) / len(counts)
    word = "rating" if popularity == 1 else "ratings"
    novelty = sum(novelties) / len(novelties)
    mean = "mean: " if len(entries) > 1 else ""
    return f"  ({mean}{popularity:,.0f} {word}, novelty {novelty:.1f})"


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
