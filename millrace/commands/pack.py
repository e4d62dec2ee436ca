"""``millrace data pack``: prepare an image dataset for fast training."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from millrace.config import ConfigurationError
from millrace.data.layouts import LAYOUTS, find_layout
from millrace.numbers import format_bytes

_DEFAULT_RAW_SIDE = 256
_NUM_LINES = 10


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    """Pack an image dataset into a few files made for random access.

    SOURCE is a folder of class folders, WebDataset shards, a Hugging Face dataset or the
    TFRecord files of ImageNet. DEST gets TFRecord files with an index, and dataset.json
    with the classes and a checksum of every file; train on it with cnn train
    --dataset-path DEST. An interrupted command continues where it stopped.

    Without --short-side and --raw, images are stored as they are, byte for byte.
    """

    source: Path = field(metadata={"positional": True})
    """Folder of the dataset."""
    dest: Path = field(metadata={"positional": True})
    """Folder to write."""
    short_side: int | None = None
    """Resize larger images to this length of their shorter side. 256 suits crops of 224 and
    makes reading about three times as fast as reading photographs."""
    quality: int | None = None
    """JPEG quality of resized images (default: 90)."""
    raw: bool = False
    """Store pixels instead of JPEGs, with --short-side 256 by default: about 250 KB per
    image, and nothing to decode."""
    num_workers: int | None = None
    """Worker processes (default: one per core)."""
    quiet: bool = False
    """Print errors only."""
    debug: bool = False
    """Show the full traceback of an error."""

    def __post_init__(self) -> None:
        if self.short_side is not None and self.short_side < 8:
            raise ValueError(f"--short-side must be at least 8, got {self.short_side}.")
        if self.quality is not None and not 1 <= self.quality <= 95:
            raise ValueError(f"--quality must be between 1 and 95, got {self.quality}.")
        if self.quality is not None and (self.raw or self.short_side is None):
            raise ValueError(
                "--quality is for resized JPEGs: use it with --short-side, without --raw."
            )
        if self.num_workers is not None and self.num_workers < 1:
            raise ValueError(f"--num-workers must be at least 1, got {self.num_workers}.")
        if not self.source.is_dir():
            raise ValueError(f"SOURCE: {self.source} is not a folder.")
        if find_layout(self.source) is None:
            looked_for = "; ".join(LAYOUTS)
            raise ValueError(f"SOURCE: {self.source} has none of: {looked_for}.")
        if self.dest.resolve() == self.source.resolve():
            raise ValueError("DEST must be another folder than SOURCE.")


def pack_dataset(config: PackConfig) -> None:
    """Pack the dataset and print what was written."""
    from millrace.data.decoding import Crop
    from millrace.data.image_source import num_cores
    from millrace.data.imagenet import load_imagenet
    from millrace.data.packed import Encoding, pack

    source = config.source.resolve()  # names of samples identify an unfinished dataset
    found = load_imagenet(source, Crop(), needs_validation=False, num_workers=0)
    splits = {"train": found.training, "validation": found.validation}
    short_side = config.short_side or (_DEFAULT_RAW_SIDE if config.raw else None)
    encoding = Encoding(short_side=short_side, quality=config.quality or 90, raw=config.raw)
    try:
        with _show_progress(config.quiet) as progress:
            packed = pack(
                {split: images for split, images in splits.items() if images is not None},
                config.dest,
                encoding,
                num_classes=found.num_classes,
                source=str(source),
                num_workers=config.num_workers or num_cores(),
                progress=progress,
            )
    except FileExistsError as error:
        raise ConfigurationError(f"DEST: {config.dest} is not a folder.") from error
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        raise
    if config.quiet:
        return
    manifest = packed.manifest
    shards = [shard for some in manifest.shards.values() for shard in some]
    counts = " and ".join(f"{manifest.num_samples(s):,} {s}" for s in manifest.shards)
    size = format_bytes(sum(shard.num_bytes for shard in shards))
    print(f"{counts} images of {manifest.num_classes} classes, {size}")
    skipped = {name: why for shard in shards for name, why in shard.skipped.items()}
    for name, reason in list(skipped.items())[:3]:
        print(f"left out: {name}: {reason}", file=sys.stderr)
    if skipped:
        where = config.dest / "dataset.json"
        print(f"{len(skipped)} unreadable images were left out; see {where}.")
    if not packed.num_written:
        print(f"{config.dest} was already complete.")
    else:
        rate = packed.num_written / max(packed.seconds, 1e-9)
        print(f"packed {packed.num_written:,} images in {packed.seconds:.1f} s", end="")
        print(f" ({rate:,.0f} images/s)")
    print(f"Use it with: millrace cnn train --dataset-path {config.dest}")


@contextlib.contextmanager
def _show_progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a progress callback: a bar in a terminal, otherwise a line per tenth."""
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _print_tenths(quiet)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks = {}

        def show(split: str, done: int, total: int) -> None:
            if split not in tasks:
                tasks[split] = bar.add_task(split, total=total, rate="")
            task = bar.tasks[tasks[split]]
            rate = f"{task.speed:,.0f} images/s" if task.speed else ""
            bar.update(tasks[split], completed=done, rate=rate)

        yield show


def _print_tenths(quiet: bool) -> Callable[[str, int, int], None]:
    shown: dict[str, int] = {}

    def show(split: str, done: int, total: int) -> None:
        tenth = done * _NUM_LINES // total
        if not quiet and tenth > shown.get(split, 0):
            shown[split] = tenth
            print(f"{split}: {done:,} of {total:,} images", file=sys.stderr)

    return show
