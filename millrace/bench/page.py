"""The results page: kept measurements with their commands and hardware.

It depends on nothing but the kept files, so that a test can check it.
"""

import fnmatch
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

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

_INTRODUCTION = """\
# Results

Measurements of `millrace bench`, newest first, followed by the [reports](#reports) of the
scripts in `benchmarks/`: accuracy on real data, and the cost of each feature. This page is
generated from the files in `benchmarks/results/`:

```
millrace bench --page benchmarks/results --out docs/results.md
```

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


def write_page(places: Sequence[Path], out: Path | None) -> None:
    """Write the page of these files and folders to a file, or print it."""
    reports = find_reports(places)
    text = format_page(find_results(places), reports)
    if out is None:
        print(text, end="")
        return
    with writing(out):
        out.write_text(text)
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


def format_page(paths: Sequence[Path], reports: Sequence[Path] = ()) -> str:
    """Return the page as Markdown."""
    files = resources.files("millrace.bench")
    published = yaml.safe_load((files / "published.yml").read_text())
    kept = [read_results(path) for path in paths]
    kept.sort(key=lambda results: results["facts"]["date"], reverse=True)
    sections = [_format_session(results, published) for results in kept]
    parts = [_INTRODUCTION, *sections, _format_published(published)]
    return "\n".join([*parts, *_format_reports(reports)]).rstrip() + "\n"


def _format_session(
    results: Mapping[str, Any], published: Sequence[Mapping[str, Any]]
) -> str:
    facts = results["facts"]
    measured = [e for e in results["entries"] if e["status"] == "measured"]
    lines = [f"## {facts['device']}, {facts['date']}", "", *_format_facts(results), ""]
    for title, entries in _group_by_topic(measured).items():
        rows = [
            format_row(entry)
            | {"published elsewhere": find_published(entry["name"], published)}
            for entry in entries
        ]
        lines += [f"### {title}", "", *format_table(rows)]
        lines += [*format_notes(entries), "", *map(format_command, entries), ""]
    if others := [e for e in results["entries"] if e["status"] != "measured"]:
        lines += ["Not measured:", ""]
        lines += [
            f"- {e['name']}: {e['status']}, {e['reason'].rstrip('.')}" for e in others
        ]
        lines.append("")
    return "\n".join(lines)


def _format_facts(results: Mapping[str, Any]) -> list[str]:
    limits = {name: f"{value:.3g}/s" for name, value in results["limits"].items()}
    shown = {name: v for name, v in results["facts"].items() if name != "date"}
    shown["command"] = f"`{shown['command']}`"
    shown["limits"] = ", ".join(f"{name} {value}" for name, value in limits.items())
    return [f"- {name}: {value}" for name, value in shown.items()]


def _group_by_topic(
    entries: Sequence[Mapping[str, Any]],
) -> dict[str, list[Mapping[str, Any]]]:
    titles = {
        "cnn train": "CNN training",
        "cnn validate": "CNN inference",
        "autoencoder": "Autoencoder",
        "vcd": "VCD",
    }
    return {
        title: matching
        for command, title in titles.items()
        if (matching := [e for e in entries if e["command"].startswith(command)])
    }


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
            "## Published elsewhere",
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


def _format_reports(paths: Sequence[Path]) -> list[str]:
    """Return the reports with their headings two levels lower."""
    if not paths:
        return []
    texts = [_HEADING.sub(r"##\1", path.read_text().rstrip()) + "\n" for path in paths]
    shown = [_DRAWING.sub(rf"\1({_DRAWINGS}/\2)", text) for text in texts]
    return ["\n## Reports\n", *shown]
