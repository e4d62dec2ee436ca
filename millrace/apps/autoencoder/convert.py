"""Convert published ratings into training, validation and test files."""

import contextlib
import math
import os
from pathlib import Path

import numpy as np

from millrace.apps.autoencoder.config.commands import ConvertConfig
from millrace.config import ConfigurationError, writing
from millrace.data.ratings.chunks import Events
from millrace.data.ratings.reading import read_timed_events
from millrace.data.ratings.split import (
    PERIODS,
    Period,
    Split,
    split_at,
    split_fractions,
    split_period,
    write_ratings,
)
from millrace.data.source import DatasetError

_PARTS = {"train": "training", "valid": "validation", "test": "test"}


def convert(config: ConvertConfig) -> None:
    """Write the three files, all or none, and print what is in them."""
    paths = _choose_paths(config)
    period = None if config.period is None else PERIODS[config.period]
    lowest, highest = config.rating_range
    window = (-math.inf, math.inf) if period is None else period.window
    events = read_timed_events(config.input, (lowest, highest), config.columns, window)
    split = _split(events, config, period)
    for name in _PARTS.values():
        if len(getattr(split, name)) == 0:
            raise DatasetError(f"No ratings are left for {name}. {_format_span(events)}")
    _write(paths, events, split)
    if not config.quiet:
        _print_counts(paths, events, split, period)


def _choose_paths(config: ConvertConfig) -> dict[str, Path]:
    prefix = config.prefix
    if prefix is None:
        prefix = "" if config.period is None else f"{config.period}_"
    paths = {part: config.output_dir / f"{prefix}{part}.txt" for part in _PARTS}
    existing = [str(path) for path in paths.values() if path.exists()]
    if existing and not config.overwrite:
        raise ConfigurationError(
            f"{' and '.join(existing)} would be replaced. Give --overwrite, or choose "
            "another --output-dir or --prefix."
        )
    return paths


def _split(events: Events, config: ConvertConfig, period: Period | None) -> Split:
    if period is not None:
        return split_period(events, period, seed=config.seed)
    if config.dates:
        return split_at(events, config.dates, seed=config.seed)
    return split_fractions(events, config.fractions, per_user=config.per_user)


def _format_span(events: Events) -> str:
    assert events.times is not None
    ends = events.times.min(), events.times.max()
    first, last = (np.datetime64(int(time), "s").item() for time in ends)
    return f"The ratings are from {first:%Y-%m-%d} to {last:%Y-%m-%d}."


def _write(paths: dict[str, Path], events: Events, split: Split) -> None:
    """Write temporary files next to their destinations, then move all three."""
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in paths.values()}
    try:
        for part, path in paths.items():
            chosen = getattr(split, _PARTS[part])
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_ratings(
                    parts[path], events.users, events.items, events.values, chosen
                )
        for path, written in parts.items():
            with writing(path):
                written.replace(path)
    finally:
        for written in parts.values():
            with contextlib.suppress(NotADirectoryError):
                written.unlink(missing_ok=True)


def _print_counts(
    paths: dict[str, Path], events: Events, split: Split, period: Period | None
) -> None:
    for part, path in paths.items():
        print(f"{path}  {_format_counts(events, getattr(split, _PARTS[part]))}")
    unseen = split.unseen
    print(
        f"Left out of valid and test: {unseen.num_ratings:,} ratings, because "
        f"{unseen.num_users:,} users and {unseen.num_items:,} items are not in training."
    )
    if period is not None:
        later = np.concatenate([split.validation, split.test])
        print(
            f"Published: {period.num_ratings:,} ratings by {period.num_users:,} users for "
            f"training, {period.num_test_ratings:,} by {period.num_test_users:,} after "
            f"that. Here, after that: {_format_counts(events, later)}."
        )
    train, valid = paths["train"], paths["valid"]
    print(
        f"To train: millrace autoencoder train --training-data-file {train} "
        f"--validation-data-file {valid} --test-data-file {paths['test']}"
    )


def _format_counts(events: Events, chosen: np.ndarray) -> str:
    num_users = len(np.unique(events.users.codes[chosen]))
    num_items = len(np.unique(events.items.codes[chosen]))
    return f"{len(chosen):,} ratings by {num_users:,} users of {num_items:,} items"
