"""``millrace autoencoder convert``: published ratings become training, valid and test."""

import contextlib
import math
import os
from pathlib import Path

import numpy as np

from millrace.apps.autoencoder.config.commands import ConvertConfig
from millrace.apps.autoencoder.config.data import REFERENCE_SETTINGS
from millrace.config import ConfigurationError, writing
from millrace.data.ratings.raw import read_raw
from millrace.data.ratings.split import (
    PERIODS,
    Period,
    Split,
    split_at,
    split_fractions,
    split_period,
    window_of,
)
from millrace.data.ratings.text import Events
from millrace.data.ratings.writing import write_text
from millrace.data.source import DatasetError

_MOST_SMALL_RATINGS = 100_000
"""Up to so many are trained well with the named configuration small_ratings."""
_PARTS = {"train": "training", "valid": "validation", "test": "test"}


def convert(config: ConvertConfig) -> None:
    """Write the three files, all or none, and say what is in them."""
    paths = _paths(config)
    period = None if config.period is None else PERIODS[config.period]
    lowest, highest = config.rating_range
    window = (-math.inf, math.inf) if period is None else window_of(period)
    events = read_raw(config.input, (lowest, highest), config.columns, window)
    split = _split(events, config, period)
    for name in _PARTS.values():
        if len(getattr(split, name)) == 0:
            raise DatasetError(f"No ratings are left for {name}. {_span(events)}")
    _write(paths, events, split)
    if not config.quiet:
        _report(paths, events, split, period)


def _paths(config: ConvertConfig) -> dict[str, Path]:
    prefix = config.prefix
    if prefix is None:
        prefix = "" if config.period is None else f"{config.period}_"
    paths = {part: config.output_dir / f"{prefix}{part}.txt" for part in _PARTS}
    there = [str(path) for path in paths.values() if path.exists()]
    if there and not config.overwrite:
        raise ConfigurationError(
            f"{' and '.join(there)} would be replaced. Say --overwrite, or choose another "
            "--output-dir or --prefix."
        )
    return paths


def _split(events: Events, config: ConvertConfig, period: Period | None) -> Split:
    if period is not None:
        return split_period(events, period, seed=config.seed)
    if config.dates:
        return split_at(events, config.dates, seed=config.seed)
    return split_fractions(events, config.fractions, per_user=config.per_user)


def _span(events: Events) -> str:
    assert events.times is not None
    first, last = (np.datetime64(int(t), "s").item() for t in _ends(events.times))
    return f"The ratings are from {first:%Y-%m-%d} to {last:%Y-%m-%d}."


def _ends(times: np.ndarray) -> tuple[int, int]:
    return times.min(), times.max()


def _write(paths: dict[str, Path], events: Events, split: Split) -> None:
    """Write all three beside their places, then move them there."""
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in paths.values()}
    try:
        for part, path in paths.items():
            chosen = getattr(split, _PARTS[part])
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(parts[path], events.users, events.items, events.values, chosen)
        for path, written in parts.items():
            with writing(path):
                written.replace(path)
    finally:
        for written in parts.values():
            with contextlib.suppress(NotADirectoryError):
                written.unlink(missing_ok=True)


def _report(
    paths: dict[str, Path], events: Events, split: Split, period: Period | None
) -> None:
    for part, path in paths.items():
        chosen = getattr(split, _PARTS[part])
        print(f"{path}  {_counts(events, chosen)}")
    unseen = split.unseen
    print(
        f"Left out of valid and test: {unseen.num_ratings:,} ratings, because "
        f"{unseen.num_users:,} users and {unseen.num_items:,} items are not in training."
    )
    if period is not None:
        later = np.concatenate([split.validation, split.test])
        print(
            f"Published: {period.num_ratings:,} ratings by {period.num_users:,} users, and "
            f"later {period.num_test_ratings:,} by {period.num_test_users:,}; here later "
            f"{_counts(events, later)}."
        )
    train, valid = paths["train"], paths["valid"]
    # Size and batch are known for the published periods' names only.
    how = "" if train.name in REFERENCE_SETTINGS else _how_to_train(len(split.training))
    print(
        f"Use them with: millrace autoencoder train {how}--training-data-file {train} "
        f"--validation-data-file {valid}"
    )


def _how_to_train(num_ratings: int) -> str:
    """Return options that so many ratings can be trained with, to begin with."""
    if num_ratings <= _MOST_SMALL_RATINGS:
        return "--config small_ratings "
    enough = (name for name, period in PERIODS.items() if num_ratings <= period.num_ratings)
    usual = REFERENCE_SETTINGS[f"{next(enough, 'full')}_train.txt"]
    return f"--size {usual.size} --batch-size {usual.batch_size} "


def _counts(events: Events, chosen: np.ndarray) -> str:
    num_users = len(np.unique(events.users.codes[chosen]))
    num_items = len(np.unique(events.items.codes[chosen]))
    return f"{len(chosen):,} ratings by {num_users:,} users of {num_items:,} items"
