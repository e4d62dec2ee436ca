"""``millrace data fetch``: a download with a progress bar."""

import contextlib
import sys
from collections.abc import Iterator

from millrace.commands.fetch_options import FetchConfig
from millrace.data.catalog import CATALOG, data_folder
from millrace.data.fetch import Progress, fetch


def fetch_dataset(config: FetchConfig) -> None:
    """Download what is missing, and say where it is."""
    dataset = CATALOG[config.name]
    folder = (config.data_dir or data_folder()) / config.name
    with _progress(config.quiet) as progress:
        downloaded = fetch(dataset, folder, url=config.url, progress=progress)
    if config.quiet:
        return
    if not downloaded:
        print(f"{config.name} was there already, and is right.")
    path = "" if folder.parent == data_folder() else f" --dataset-path {folder}"
    print(f"{config.name} is in {folder}")
    # Pictures without classes are for the application that has none.
    application = "cnn" if dataset.num_classes else "vcd"
    print(f"Use it with: millrace {application} train --dataset {config.name}{path}")


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    """Yield what shows the progress: a bar, lines where there is no terminal, or none."""
    if quiet:
        yield lambda name, done, total: None
    elif not sys.stderr.isatty():
        yield _lines()
    else:
        with _bar() as show:
            yield show


def _lines() -> Progress:
    begun = set()

    def show(name: str, done: int, total: int) -> None:
        if name not in begun:
            begun.add(name)
            rest = f", {done:,} bytes of it already here" if done else ""
            print(f"fetching {name}, {total:,} bytes{rest}", file=sys.stderr)

    return show


@contextlib.contextmanager
def _bar() -> Iterator[Progress]:
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(compact=True),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True)) as shown:
        tasks: dict[str, rich_progress.TaskID] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = shown.add_task(name, total=total)
            shown.update(tasks[name], completed=done)

        yield show
