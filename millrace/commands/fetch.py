"""``millrace data fetch``: download a dataset. Imports nothing heavy."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from millrace.config import one_of
from millrace.data.catalog import CATALOG, DatasetNotFound, data_folder, download_folder
from millrace.data.fetch import Progress, fetch, is_reachable
from millrace.numbers import format_bytes


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """Download, check and unpack a dataset.

    The files go to the folder NAME of the data folder. The applications look there if
    --dataset-path does not contain the dataset. An interrupted download is resumed.
    """

    name: str = field(metadata={"positional": True})
    """Dataset: mnist, fashion-mnist, binarized-mnist, cifar10 or cifar100."""
    data_dir: Path | None = None
    """Data folder (default: $MILLRACE_DATA, or ~/.cache/millrace)."""
    url: str | None = None
    """URL of the folder to download from, such as a mirror (default: the publisher)."""
    quiet: bool = False
    """Print errors only."""
    debug: bool = False
    """Show the full traceback of an error."""

    def __post_init__(self) -> None:
        known = one_of("NAME", self.name, CATALOG)
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--url must start with http:// or https://, got {self.url}.")
        if not known.files:
            raise ValueError(f"{self.name} is part of millrace: nothing to fetch.")
        if known.url is None and self.url is None:
            files = " and ".join(file.name for file in known.files)
            raise ValueError(
                f"{self.name} requires registration. Download {files} from "
                f"{known.website}, unpack them, and pass the folder as --dataset-path; or "
                "pass the URL of a mirror as --url."
            )


def fetch_dataset(config: FetchConfig) -> None:
    """Download the missing files and print where they are."""
    dataset = CATALOG[config.name]
    folder = (config.data_dir or data_folder()) / config.name
    with _show_progress(config.quiet) as progress:
        downloaded = fetch(dataset, folder, url=config.url, progress=progress)
    if config.quiet:
        return
    if not downloaded:
        print(f"{config.name} is already complete.")
    path = "" if folder.parent == data_folder() else f" --dataset-path {folder}"
    print(f"{config.name} is in {folder}")
    # Only vcd trains on images without labels.
    application = "cnn" if dataset.num_classes else "vcd"
    print(f"Use it with: millrace {application} train --dataset {config.name}{path}")


def may_fetch(wanted: bool) -> bool:
    """Whether a run may download data: not if an option or the environment forbids it."""
    return wanted and not os.environ.get("MILLRACE_NO_FETCH")


def fetch_missing(name: str, error: DatasetNotFound, *, quiet: bool = False) -> Path:
    """Download a dataset that a run needs; return its folder.

    Of several processes with the same folder, one downloads and the others wait.

    Args:
        name: The dataset.
        error: What is raised, with the reason, if it cannot be downloaded.
        quiet: Whether to show nothing.
    """
    # Imported here because it imports JAX, which --help must not.
    from millrace.distributed.coordination import is_first

    known = CATALOG.get(name)
    if known is None or known.url is None or not known.files:
        raise error
    if not is_reachable(known.url):
        raise DatasetNotFound(
            f"{error} (It was not downloaded: {known.url} cannot be reached.)"
        )
    folder = download_folder(name)
    if not quiet and is_first():
        size = format_bytes(sum(file.num_bytes for file in known.files))
        print(f"Downloading {name} ({size}) from {known.url} to {folder}", file=sys.stderr)
    with _show_progress(quiet) as progress:
        fetch(known, folder, progress=progress)
    return folder


@contextlib.contextmanager
def _show_progress(quiet: bool) -> Iterator[Progress]:
    """Yield a progress callback: a bar in a terminal, otherwise one line per file."""
    if quiet:
        yield lambda name, done, total: None
    elif not sys.stderr.isatty():
        yield _print_lines()
    else:
        with _show_bar() as show:
            yield show


def _print_lines() -> Progress:
    begun = set()

    def show(name: str, done: int, total: int) -> None:
        if name not in begun:
            begun.add(name)
            resumed = f", resuming at {done:,}" if done else ""
            print(f"fetching {name}, {total:,} bytes{resumed}", file=sys.stderr)

    return show


@contextlib.contextmanager
def _show_bar() -> Iterator[Progress]:
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(compact=True),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, rich_progress.TaskID] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done)

        yield show
