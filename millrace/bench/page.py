"""The results page: measurements that were kept, each with its command and hardware.

First what ``millrace bench`` has measured, then what the programs in ``benchmarks/`` found.

It is made from files and nothing else, so that a test can make it again.
"""

import fnmatch
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from millrace.bench.comparing import read_results
from millrace.bench.reporting import command_line, notes, row_of, table
from millrace.config import ConfigurationError, writing

_DATED = re.compile(r"\d{4}-\d\d-\d\d-(.+)")
_HEADING = re.compile(r"^(#+ )", re.MULTILINE)
_DRAWING = re.compile(r"(!\[[^\]]*\])\(([^)/]+\.svg)\)")
_DRAWINGS = "results"
"""The folder of a page's drawings, beside it."""

_INTRODUCTION = """\
# Results

What `millrace bench` has measured, newest first; below it, the [reports](#reports) of the
programs in `benchmarks/`: accuracy on real data, speed against PyTorch, and what each
feature costs. This page is made from the files in `benchmarks/results/` by

```
millrace bench --page benchmarks/results --out docs/results.md
```

A row is an entry of the spec; its command stands below the table and can be typed by
itself. *samples/s* is the median of some values, the first dropped, and *spread* how far
the lowest and the highest are apart; *ms* is for an update, or a batch in the middle of
many; *latency* is a call with one batch, timed on the host until its logits are there: its
median and, where it is known that there were enough calls, 99th and 99.9th percentile.
*TFLOP/s* counts products and convolutions, and *GB/s* is the larger of two counts: what XLA
says a program moves, which leaves out what it hands to cuDNN and cuBLAS, and the operands
and results of products and convolutions. Each has its part of what the same device reached,
in the same call, in plain products and copies. *ratio* is our samples/s over those of the
faster of PyTorch's two ways, run in the same call, with a ~ where the spreads of the two
are larger than its distance from 1; *latency ratio* is PyTorch's median latency over ours.
Above 1, ours is faster.
"""


def write_page(places: Sequence[Path], out: Path | None) -> int:
    """Write the page from these files or folders to a file, or print it."""
    reports = reports_in(places)
    text = page(files_in(places), reports)
    if out is None:
        print(text, end="")
    else:
        with writing(out):
            out.write_text(text)
            for drawing in drawings_in(reports):
                (out.parent / _DRAWINGS).mkdir(exist_ok=True)
                shutil.copyfile(drawing, out.parent / _DRAWINGS / drawing.name)
    return 0


def drawings_in(reports: Sequence[Path]) -> list[Path]:
    """Return the drawings that these reports show, which lie beside them."""
    return [
        path.with_name(name)
        for path in reports
        for _, name in _DRAWING.findall(path.read_text())
    ]


def files_in(places: Sequence[Path]) -> list[Path]:
    """Return the results in these files and folders, newest first."""
    found: list[Path] = []
    for place in places:
        found += sorted(place.rglob("*.json")) if place.is_dir() else [place]
    if not found:
        raise ConfigurationError(
            f"There is no results.json in {', '.join(map(str, places))}."
        )
    return sorted(found, key=lambda path: path.name, reverse=True)


def reports_in(places: Sequence[Path]) -> list[Path]:
    """Return the dated reports in these folders: of each subject and device, the newest."""
    newest: dict[str, Path] = {}
    for place in places:
        for path in sorted(place.rglob("*.md")):
            if dated := _DATED.fullmatch(path.stem):
                newest[dated[1]] = path
    return [newest[subject] for subject in sorted(newest)]


def page(paths: Sequence[Path], reports: Sequence[Path] = ()) -> str:
    """Return the page as Markdown."""
    files = resources.files("millrace.bench")
    published = yaml.safe_load((files / "published.yml").read_text())
    kept = [read_results(path) for path in paths]
    kept.sort(key=lambda results: results["facts"]["date"], reverse=True)
    sections = [_section(results, published) for results in kept]
    parts = [_INTRODUCTION, *sections, _others(published), *_reports(reports)]
    return "\n".join(parts).rstrip() + "\n"


def _reports(paths: Sequence[Path]) -> list[str]:
    """Return the reports as they are, a level lower."""
    if not paths:
        return []
    texts = [_HEADING.sub(r"##\1", path.read_text().rstrip()) + "\n" for path in paths]
    shown = [_DRAWING.sub(rf"\1({_DRAWINGS}/\2)", text) for text in texts]
    return ["\n## Reports\n", *shown]


def _section(results: Mapping[str, Any], published: Sequence[Mapping[str, Any]]) -> str:
    facts = results["facts"]
    measured = [e for e in results["entries"] if e["status"] == "measured"]
    lines = [f"## {facts['device']}, {facts['date']}", "", *_facts(results), ""]
    for title, some in _topics(measured).items():
        lines += [f"### {title}", "", *table([_row(e, published) for e in some])]
        lines += [*notes(some), "", *map(command_line, some), ""]
    left = [e for e in results["entries"] if e["status"] != "measured"]
    if left:
        lines += ["Not measured:", ""]
        lines += [f"- {e['name']}: {e['status']}, {e['reason'].rstrip('.')}" for e in left]
        lines.append("")
    return "\n".join(lines)


def _facts(results: Mapping[str, Any]) -> list[str]:
    limits = {name: f"{value:.3g}/s" for name, value in results["limits"].items()}
    shown = {name: v for name, v in results["facts"].items() if name != "date"}
    shown["command"] = f"`{shown['command']}`"
    shown["limits"] = ", ".join(f"{name} {value}" for name, value in limits.items())
    return [f"- {name}: {value}" for name, value in shown.items()]


def _topics(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Sort entries by what they are: updates of a network, batches, or something else."""
    titles = {
        "cnn train": "CNN training",
        "cnn validate": "CNN inference",
        "autoencoder": "Autoencoder",
        "vcd": "VCD",
    }
    return {
        title: some
        for command, title in titles.items()
        if (some := [e for e in entries if e["command"].startswith(command)])
    }


def _row(
    entry: Mapping[str, Any], published: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    return row_of(entry) | {"published elsewhere": beside(entry["name"], published)}


def _others(published: Sequence[Mapping[str, Any]]) -> str:
    """What others say, by the network."""
    rows = [
        {
            "what": part["what"],
            "beside": ", ".join(f"`{pattern}`" for pattern in part["entries"])
            or "none: another network",
            "hardware": hardware,
            "samples/s": figure,
            "batch": batch,
            "how": how,
            "source": source,
        }
        for part in published
        for hardware, figure, batch, how, source in part["figures"]
    ]
    return "\n".join(
        [
            "## Published elsewhere",
            "",
            "On other hardware, by those who made it or by the networks' keepers. For the "
            "IPU-M2000 commands of Graphcore's benchmarks no published figures were found. "
            "The batch is theirs, over all devices, where it is said.",
            "",
            *table(rows),
        ]
    )


def beside(name: str, published: Sequence[Mapping[str, Any]]) -> str:
    """Return in a few words what others have published for an entry's network."""
    for part in published:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in part["entries"]):
            hardware, figure, batch, _, _ = part["figures"][0]
            said = f"batch {batch}" if batch else "batch not said"
            return f"{figure} ({hardware}, {said})"
    return ""
