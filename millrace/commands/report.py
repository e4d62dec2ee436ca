"""``millrace report RUN…``: a page about one run, or about several."""

from dataclasses import dataclass, field
from pathlib import Path

from millrace.config import writing


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Write the report of a run again, or compare several runs on one page."""

    run: list[Path] = field(metadata={"positional": True})
    """Run directories, or folders of run directories; a run may still be running."""
    out: Path | None = None
    """File for the page (default: report.html in the run directory, or comparison.html
    here for several runs)."""

    def __post_init__(self) -> None:
        if not self.run:
            raise ValueError("report needs at least one run directory.")
        if self.out is not None and not self.out.parent.is_dir():
            raise ValueError(f"There is no folder {self.out.parent} for --out.")


def report(config: ReportConfig) -> None:
    """Write the page and print its path."""
    # Imported late: --help needs only the options.
    from millrace.report.comparison import comparison_page
    from millrace.report.record import read_run
    from millrace.report.run_page import run_page, write_report

    runs = [run for path in config.run for run in _find_runs(path)]
    several = len(runs) > 1
    if not several and config.out is None:
        with writing(runs[0] / "report.html"):
            return print(write_report(runs[0]))
    path = config.out or Path("comparison.html")
    records = [read_run(run) for run in runs]
    page = comparison_page(records) if several else run_page(records[0])
    with writing(path):
        path.write_text(page, encoding="utf-8")
    print(path)


def _find_runs(path: Path) -> list[Path]:
    """Return a run directory itself, or the run directories in a folder."""
    inside = sorted(config.parent for config in path.glob("*/config.yml"))
    return [path] if (path / "config.yml").exists() or not inside else inside
