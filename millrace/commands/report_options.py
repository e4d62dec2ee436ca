"""Options of ``millrace report``. Imports nothing heavy."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Make the report of a run again, or compare several runs on one page."""

    run: list[Path] = field(metadata={"positional": True})
    """Run directories, or folders of them; one that is still going will do."""
    out: Path | None = None
    """Where to write the page (default: report.html in the run directory; of several
    runs, comparison.html here)."""

    def __post_init__(self) -> None:
        if not self.run:
            raise ValueError("report needs the directory of a run, or several.")
        if self.out is not None and not self.out.parent.is_dir():
            raise ValueError(f"There is no folder {self.out.parent} for --out.")
