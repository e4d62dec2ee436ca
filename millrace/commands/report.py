"""``millrace report RUN…``: a page about one run, or about several."""

from pathlib import Path

from millrace.commands.report_options import ReportConfig
from millrace.config import writing
from millrace.report.comparison import comparison_page
from millrace.report.record import read_run
from millrace.report.run_page import run_page, write_report


def report(config: ReportConfig) -> None:
    """Write the page that is asked for, and say where it is."""
    runs = [run for given in config.run for run in _runs_in(given)]
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


def _runs_in(given: Path) -> list[Path]:
    """Return a run directory itself, or those that lie in a folder of them."""
    inside = sorted(path.parent for path in given.glob("*/config.yml"))
    return [given] if (given / "config.yml").exists() or not inside else inside
