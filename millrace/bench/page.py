"""The pages of results: kept measurements with their commands and hardware.

They depend on nothing but the kept files, so that a test can check them.
"""

import fnmatch
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from millrace.bench.graphcore_page import format_graphcore_page
from millrace.bench.reporting import (
    format_command,
    format_notes,
    format_row,
    format_table,
    read_results,
)
from millrace.config import ConfigurationError, writing

_DATED = re.compile(r"\d{4}-\d\d-\d\d-(.+)")
_HEADING = re.compile(r"^(#+ )", re.MULTILINE)
_DRAWING = re.compile(r"(!\[[^\]]*\])\(([^)/]+\.svg)\)")
_DRAWINGS = "results"
"""Folder for the drawings, next to the page."""
_COMPARED = (
    *("torch eager", "eager spread", "torch compiled", "compiled spread"),
    *("ratio", "latency ratio", "published elsewhere"),
)
"""Columns of the second table of a session."""

_INTRODUCTION = """\
# Results

Measurements of `millrace bench`, and reports of the scripts in `benchmarks/`: accuracy on
real data, and the cost of each feature. All pages are generated from the files in
`benchmarks/results/`:

```
millrace bench --page benchmarks/results --out docs/results.md
```
"""

_COLUMNS = """\
## How to read the tables

A row is an entry of the spec. Its command is below the table and runs on its own.

- *samples/s* is the median of several values without the first, and *spread* the distance
  of the lowest and highest value.
- *ms* is the time per update, or per batch among many.
- *latency* is the time of a call with one batch, measured on the host until the logits
  arrive: the median and, with enough calls, the 99th and 99.9th percentile.
- *TFLOP/s* counts matrix products and convolutions. *GB/s* is the larger of two counts:
  the bytes that XLA reports, which leave out cuDNN and cuBLAS, and the operands and results
  of products and convolutions. The percentages are shares of what the same device reached
  in the same session with plain products and copies.
- *ratio* is our samples/s divided by those of the faster PyTorch variant in the same
  session, with a ~ if its distance from 1 is within the noise of the two values. *latency
  ratio* is the median latency of PyTorch divided by ours. Above 1, millrace is faster.
"""


class _Subject(NamedTuple):
    """A page of results: its title, and which entries and reports it shows."""

    title: str
    command: str
    """Entries whose command starts with this; empty for none."""
    reports: str
    """Regular expression for the names of reports."""


_SUBJECTS = {
    "training": _Subject("CNN training", "cnn train", "cifar|cnn|convolutions"),
    "inference": _Subject("CNN inference", "cnn validate", "(?!)"),
    "images": _Subject("Image files", "", "image_"),
    "recommender": _Subject(
        "Recommender", "autoencoder", "autoencoder|own_ratings|rating|search"
    ),
    "vcd": _Subject("VCD", "vcd", "vcd"),
    "reliability": _Subject(
        "Reliability", "", "chaos|detection|engines|interrupts|repeatability|test_gpu"
    ),
    "front_door": _Subject("The first hour", "", "front_door"),
    # What no other page has:
    "runtime": _Subject("Runtime", "", ""),
}


def write_page(places: Sequence[Path], out: Path | None) -> None:
    """Write the pages of these files and folders, or print them.

    Args:
        places: JSON results, and folders of results and reports.
        out: The first page; those of the subjects are next to it, with the subject after
            an underscore. None prints all of them.
    """
    reports = find_reports(places)
    stem = "results" if out is None else out.stem
    pages = format_pages(find_results(places), reports, stem)
    if out is None:
        print("\n".join(pages.values()), end="")
        return
    with writing(out):
        first, *others = pages.items()
        out.write_text(first[1])
        for name, text in others:
            out.with_name(name).write_text(text)
        for drawing in find_drawings(reports):
            (out.parent / _DRAWINGS).mkdir(exist_ok=True)
            shutil.copyfile(drawing, out.parent / _DRAWINGS / drawing.name)


def find_results(places: Sequence[Path]) -> list[Path]:
    """Return the JSON results in these files and folders, newest first."""
    found: list[Path] = []
    for place in places:
        found += sorted(place.rglob("*.json")) if place.is_dir() else [place]
    if not found:
        raise ConfigurationError(
            f"There is no results.json in {', '.join(map(str, places))}."
        )
    return sorted(found, key=lambda path: path.name, reverse=True)


def find_reports(places: Sequence[Path]) -> list[Path]:
    """Return the newest dated report in these folders for each subject and device."""
    newest: dict[str, Path] = {}
    for place in places:
        for path in sorted(place.rglob("*.md")):
            if dated := _DATED.fullmatch(path.stem):
                newest[dated[1]] = path
    return [newest[subject] for subject in sorted(newest)]


def find_drawings(reports: Sequence[Path]) -> list[Path]:
    """Return the drawings that these reports show; they are next to the reports."""
    return [
        path.with_name(name)
        for path in reports
        for _, name in _DRAWING.findall(path.read_text())
    ]


def format_pages(
    paths: Sequence[Path], reports: Sequence[Path] = (), stem: str = "results"
) -> dict[str, str]:
    """Return the pages as Markdown, by file name; the first one links to the others."""
    files = resources.files("millrace.bench")
    published = yaml.safe_load((files / "published.yml").read_text())
    sessions = [read_results(path) for path in paths]
    sessions.sort(key=lambda results: results["facts"]["date"], reverse=True)
    pages: dict[str, str] = {}
    rows = []
    left = list(reports)
    for name, subject in _SUBJECTS.items():
        chosen = [path for path in left if re.match(subject.reports, _subject_of(path))]
        left = [path for path in left if path not in chosen]
        sections = [_format_session(s, subject.command, published) for s in sessions]
        parts = [part for part in sections if part] + [*map(_format_report, chosen)]
        if not parts:
            continue
        page = f"{stem}_{name}.md"
        pages[page] = "\n".join([f"# Results: {subject.title}\n", *parts]).rstrip() + "\n"
        shown = [line[3:] for line in pages[page].splitlines() if line.startswith("## ")]
        rows.append({"page": f"[{subject.title}]({page})", "shows": "; ".join(shown)})
    if graphcore := format_graphcore_page(sessions):
        pages[f"{stem}_graphcore.md"] = graphcore
        link = f"[Graphcore's command lines]({stem}_graphcore.md)"
        rows.append({"page": link, "shows": "published IPU figures and ours, line by line"})
    pages[f"{stem}_published.md"] = _format_published(published) + "\n"
    link = f"[Published elsewhere]({stem}_published.md)"
    rows.append({"page": link, "shows": "figures of vendors and maintainers"})
    left_out = _format_unmeasured(sessions)
    first = "\n".join([_INTRODUCTION, *format_table(rows), "", _COLUMNS, *left_out])
    return {f"{stem}.md": first.rstrip() + "\n", **pages}


def _subject_of(report: Path) -> str:
    dated = _DATED.fullmatch(report.stem)
    assert dated is not None, "chosen by find_reports"
    return dated[1]


def _format_session(
    results: Mapping[str, Any], command: str, published: Sequence[Mapping[str, Any]]
) -> str:
    """Return the entries of a session whose command starts so; empty if there are none."""
    facts = results["facts"]
    entries = [
        e
        for e in results["entries"]
        if e["status"] == "measured" and command and e["command"].startswith(command)
    ]
    if not entries:
        return ""
    rows = [format_row(entry) for entry in entries]
    for row, entry in zip(rows, entries, strict=True):
        row["published elsewhere"] = find_published(entry["name"], published)
    lines = [f"## {facts['device']}, {facts['date']}", "", *_format_facts(results), ""]
    # Two tables: one of all columns would be wider than any screen.
    lines += format_table([_without(row, _COMPARED) for row in rows])
    compared = [_only(row, ("entry", "samples/s", *_COMPARED)) for row in rows]
    if any(row[name] for row in compared for name in _COMPARED):
        lines += ["", "Compared with PyTorch, and with figures for other hardware:", ""]
        lines += format_table(compared)
    lines += [*format_notes(entries), "", '??? note "Commands"', ""]
    lines += [f"    {format_command(entry)}" for entry in entries]
    return "\n".join([*lines, ""])


def _without(row: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: cell for name, cell in row.items() if name not in names}


def _only(row: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: row[name] for name in names}


def _format_unmeasured(sessions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a section about entries that were skipped or failed in all sessions."""
    measured = {
        (results["facts"]["device"], e["name"])
        for results in sessions
        for e in results["entries"]
        if e["status"] == "measured"
    }
    lines = [
        f"- {results['facts']['device']}, {e['name']}: {e['status']}, "
        f"{e['reason'].rstrip('.')}"
        for results in sessions
        for e in results["entries"]
        if (results["facts"]["device"], e["name"]) not in measured
    ]
    return ["## Not measured", "", *dict.fromkeys(lines)] if lines else []


def _format_facts(results: Mapping[str, Any]) -> list[str]:
    limits = {name: f"{value:.3g}/s" for name, value in results["limits"].items()}
    shown = {name: v for name, v in results["facts"].items() if name != "date"}
    shown["command"] = f"`{shown['command']}`"
    shown["limits"] = ", ".join(f"{name} {value}" for name, value in limits.items())
    return [f"- {name}: {value}" for name, value in shown.items()]


def _format_published(published: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        {
            "workload": part["what"],
            "compare with": ", ".join(f"`{pattern}`" for pattern in part["entries"])
            or "nothing: a different network",
            "hardware": hardware,
            "samples/s": figure,
            "batch": batch,
            "details": details,
            "source": source,
        }
        for part in published
        for hardware, figure, batch, details, source in part["figures"]
    ]
    return "\n".join(
        [
            "# Results: published elsewhere",
            "",
            "Figures for other hardware, from its vendors or the maintainers of the "
            "networks. We found none for the IPU-M2000 commands of Graphcore's benchmarks. "
            "The batch is the total over all devices, where it is known.",
            "",
            *format_table(rows),
        ]
    )


def find_published(name: str, published: Sequence[Mapping[str, Any]]) -> str:
    """Return the first published figure for the network of an entry, in a few words."""
    for part in published:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in part["entries"]):
            hardware, figure, batch, _, _ = part["figures"][0]
            return f"{figure} ({hardware}, batch {batch or 'unknown'})"
    return ""


def _format_report(path: Path) -> str:
    """Return a report with its headings one level lower."""
    text = _HEADING.sub(r"#\1", path.read_text().rstrip()) + "\n"
    return _DRAWING.sub(rf"\1({_DRAWINGS}/\2)", text)
