"""Convert published ratings into training, validation and test files."""

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from millrace.apps.autoencoder.config.commands import ConvertConfig
from millrace.apps.autoencoder.config.data import REFERENCE_SETTINGS
from millrace.config import ConfigurationError, writing
from millrace.data.ratings.chunks import Events
from millrace.data.ratings.reading import read_timed_events
from millrace.data.ratings.split import (
    PERIODS,
    Period,
    Split,
    drop_repeats,
    leave_one_out,
    split_at,
    split_fractions,
    split_period,
    write_parquet,
    write_ratings,
)
from millrace.data.ratings.tables import import_pyarrow
from millrace.data.source import DatasetError

_FRACTIONS = (0.8, 0.1, 0.1)
_PARTS = {"train": "training", "valid": "validation", "test": "test"}


def convert(config: ConvertConfig) -> None:
    """Write the three files, all or none, and print what is in them."""
    paths = _choose_paths(config)
    period = None if config.period is None else PERIODS[config.period]
    lowest, highest = config.rating_range
    window = (-math.inf, math.inf) if period is None else period.window
    if config.format == "parquet":
        import_pyarrow("--format parquet")
    events = read_timed_events(
        config.input,
        (lowest, highest),
        config.columns,
        window,
        times_for="to split by" if config.needs_times else None,
        no_ratings=config.no_ratings,
    )
    if events.implicit:
        events, num_repeats = drop_repeats(events)
        if num_repeats and not config.quiet:
            print(f"{num_repeats:,} repeated choices of an item count once.")
    split = _split(events, config, period)
    for name in _PARTS.values():
        if len(getattr(split, name)) == 0:
            raise DatasetError(f"No ratings are left for {name}. {_format_span(events)}")
    _write(paths, events, split, config.format)
    if not config.quiet:
        _print_counts(paths, events, split, period)


def _choose_paths(config: ConvertConfig) -> dict[str, Path]:
    prefix = config.prefix
    if prefix is None:
        prefix = "" if config.period is None else f"{config.period}_"
    paths = {part: config.output_dir / f"{prefix}{part}.{config.format}" for part in _PARTS}
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
    seed = None if config.needs_times else config.seed
    if config.protocol in ("leave-one-out", "random-leave-one-out"):
        return leave_one_out(events, random_seed=seed)
    fractions = config.fractions or _FRACTIONS
    return split_fractions(events, fractions, per_user=config.per_user, random_seed=seed)


def _format_span(events: Events) -> str:
    if events.times is None:
        return f"There are {len(events.values):,} by {len(events.users.ids):,} users."
    ends = events.times.min(), events.times.max()
    first, last = (np.datetime64(int(time), "s").item() for time in ends)
    return f"The ratings are from {first:%Y-%m-%d} to {last:%Y-%m-%d}."


def _write(paths: dict[str, Path], events: Events, split: Split, form: str) -> None:
    """Write temporary files next to their destinations, then move all three."""
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in paths.values()}
    try:
        for part, path in paths.items():
            chosen = getattr(split, _PARTS[part])
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                _write_part(parts[path], events, chosen, form)
        for path, written in parts.items():
            with writing(path):
                written.replace(path)
    finally:
        for written in parts.values():
            with contextlib.suppress(NotADirectoryError):
                written.unlink(missing_ok=True)


def _write_part(path: Path, events: Events, chosen: np.ndarray, form: str) -> None:
    if form == "parquet":
        return write_parquet(path, events, chosen)
    values = None if events.implicit else events.values
    extra: dict[str, Any] = {}
    if form == "csv":
        extra = {"times": events.times, "delimiter": ",", "with_header": True}
    return write_ratings(path, events.users, events.items, values, chosen, **extra)


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
    if train.name in REFERENCE_SETTINGS:
        print(
            f"The name {train.name} chooses the recipe of Graphcore's application. Add "
            "--recipe modern for a lower error."
        )


def _format_counts(events: Events, chosen: np.ndarray) -> str:
    num_users = len(np.unique(events.users.codes[chosen]))
    num_items = len(np.unique(events.items.codes[chosen]))
    return f"{len(chosen):,} ratings by {num_users:,} users of {num_items:,} items"
