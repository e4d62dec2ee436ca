"""``millrace report RUN…``: a page about one run, or about several."""

from pathlib import Path

from millrace.report.comparison import comparison_page
from millrace.report.options import ReportConfig
from millrace.report.page import run_page, write_report
from millrace.report.record import read_run


def report(config: ReportConfig) -> None:
    """Write the page that is asked for, and say where it is."""
    runs = [run for given in config.run for run in _runs_in(given)]
    if len(runs) > 1:
        path = config.out or Path("comparison.html")
        page = comparison_page([read_run(run) for run in runs])
        path.write_text(page, encoding="utf-8")
    elif config.out is not None:
        path = config.out
        path.write_text(run_page(read_run(runs[0])), encoding="utf-8")
    else:
        path = write_report(runs[0])
    print(path)


def _runs_in(given: Path) -> list[Path]:
    """Return a run directory itself, or those that lie in a folder of them."""
    inside = sorted(path.parent for path in given.glob("*/config.yml"))
    return [given] if (given / "config.yml").exists() or not inside else inside
