"""``millrace report RUN…``: a page about one run or several, or a live page of a folder."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.config import STORED, open_run, writing
from millrace.numbers import format_duration, format_number
from millrace.storage.address import find_url

if TYPE_CHECKING:
    from millrace.report.record import RunRecord

_FOLDER = Path("runs")
_MOST_METRICS = 4


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Write the report of a run again, compare several runs on one page, or follow a
    folder of runs in the browser while they train."""

    run: list[Path] = field(default_factory=list, metadata={"positional": True, **STORED})
    """Run directories, or folders of run directories; a run may still be running."""
    out: Path | None = None
    """File for the page (default: report.html in the run directory, or comparison.html
    here for several runs)."""
    serve: Path | None = field(
        default=None, metadata={"bare": _FOLDER, "aliases": ("--watch",)}
    )
    """Show the runs in a folder live, in a page that only this machine can open (also
    --watch; without a folder: runs)."""
    port: int | None = None
    """Port of the live page (default: the first free one from 8600 on)."""

    def __post_init__(self) -> None:
        if self.serve is not None:
            return self._check_serve()
        if self.port is not None:
            raise ValueError("--port is for the live page: give --serve as well.")
        if not self.run:
            raise ValueError(
                "RUN is required: a run directory, several to compare them, or --serve "
                "FOLDER for a live page."
            )
        if self.out is not None and not self.out.parent.is_dir():
            raise ValueError(f"There is no folder {self.out.parent} for --out.")

    def _check_serve(self) -> None:
        if self.out is not None:
            raise ValueError("--out is for a page in a file: --serve writes none.")
        if len(self.run) > 1 or (self.run and self.serve != _FOLDER):
            raise ValueError("--serve shows one folder: give the one that has all runs.")
        if any(find_url(run) is not None for run in self.run):
            raise ValueError("--serve shows runs of this machine, not of object storage.")
        if self.port is not None and not 0 <= self.port < 65536:
            raise ValueError(f"--port must be from 0 to 65535, got {self.port}.")


def report(config: ReportConfig) -> None:
    """Write the page and print its path, or serve the live page."""
    # Imported late: --help needs only the options.
    from millrace.report.comparison import comparison_page
    from millrace.report.record import read_run
    from millrace.report.run_page import run_page, write_report
    from millrace.storage.upload import publish

    if config.serve is not None:
        from millrace.report.serve import serve

        return serve(config.run[0] if config.run else config.serve, config.port)
    runs = [run for path in config.run for run in _find_runs(path)]
    several = len(runs) > 1
    if not several and config.out is None:
        with writing(runs[0] / "report.html"):
            return print(publish(write_report(runs[0])))
    path = config.out or Path("comparison.html")
    records = [read_run(run) for run in runs]
    page = comparison_page(records) if several else run_page(records[0])
    with writing(path):
        path.write_text(page, encoding="utf-8")
    for line in format_figures(records) if several else ():
        print(line)
    print(path)


def _find_runs(path: Path) -> list[Path]:
    """Return a run directory itself, or the run directories in a folder."""
    path = open_run(path)
    inside = sorted(config.parent for config in path.glob("*/config.yml"))
    return [path] if (path / "config.yml").exists() or not inside else inside


def format_figures(records: Sequence["RunRecord"], width: int | None = None) -> list[str]:
    """Return a table of the best and last results, throughput and time of several runs.

    Args:
        records: The runs.
        width: Letters in a line; metrics that do not fit are left out (default: those of
            the terminal).
    """
    from millrace.report.comparison import run_names
    from millrace.report.metrics import (
        is_important,
        readable_name,
        sort_by_quantity,
        sort_by_split,
        split_metric,
    )

    columns = {
        "run": run_names(records),
        "status": [record.badge[0] for record in records],
        **_best_columns(records),
    }
    ends = {
        "samples/s": [_format_speed(record) for record in records],
        "time": [_format_time(record) for record in records],
    }
    names = {name for record in records for name in record.metrics}
    metrics = sort_by_split(sort_by_quantity(names))
    metrics.sort(key=lambda name: not is_important(split_metric(name)[1]))
    width = width or shutil.get_terminal_size((120, 24)).columns
    for name in metrics[:_MOST_METRICS]:
        wider = columns | {readable_name(name): [_format_last(r, name) for r in records]}
        if f"best {readable_name(name)}" not in columns and _width(wider | ends) <= width:
            columns = wider
    return _align(columns | ends)


def _best_columns(records: Sequence["RunRecord"]) -> dict[str, list[str]]:
    """Return the best result of each run, and the last value of the same metric."""
    from millrace.report.best import find_best, format_best
    from millrace.report.metrics import readable_name

    bests = [find_best(record) for record in records]
    last = [
        _format_last(record, best.metric) if best else ""
        for record, best in zip(records, bests, strict=True)
    ]
    metrics = {best.metric for best in bests if best}
    if len(metrics) == 1:
        title = f"best {readable_name(metrics.pop())}"
        return {title: [best.format() if best else "" for best in bests], "last": last}
    return {"best": [format_best(best) if best else "" for best in bests], "last": last}


def _format_last(record: "RunRecord", metric: str) -> str:
    value = record.metrics.get(metric)
    return "" if value is None else format_number(value)


def _format_speed(record: "RunRecord") -> str:
    speed = record.summary.get("samples_per_second")
    return format_number(float(speed)) if speed else ""


def _format_time(record: "RunRecord") -> str:
    last = record.events[-1]["time"] if record.events else None
    seconds = record.summary.get("wall_seconds", last)
    return format_duration(seconds) if seconds else ""


def _column_widths(columns: dict[str, list[str]]) -> list[int]:
    return [max(map(len, (name, *cells))) + 2 for name, cells in columns.items()]


def _width(columns: dict[str, list[str]]) -> int:
    return sum(_column_widths(columns)) - 2


def _align(columns: dict[str, list[str]]) -> list[str]:
    widths = _column_widths(columns)
    rows = [list(columns), *map(list, zip(*columns.values(), strict=True))]
    return [
        "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
