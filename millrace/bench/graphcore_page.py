"""The page that compares the command lines of Graphcore's documents, line by line."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millrace.bench.reporting import format_table

_INTRODUCTION = """\
# Results: Graphcore's command lines

Every command line of Graphcore's documents that has a speed, cut to one device. Replicas
become micro-batches of the same update, and stages share the device; the columns say what
else was changed, and how much was measured. The commands are in
`millrace/bench/graphcore.yml`:

```
millrace bench --spec millrace/bench/graphcore.yml --out measured
```

The precision is that of the line; 16 bits are float16 for Graphcore and bfloat16 in our
CNNs. *each* is the published figure divided by its devices. Most published figures are for
later hardware and software than the documents, and other batch sizes. We found none for
the IPU-M2000, for inference, or for the autoencoder.

A session can be cut short, and the next one, with another `--out`, can leave out what is
measured already with `--skip-measured measured`.
"""


def format_graphcore_page(sessions: Sequence[Mapping[str, Any]]) -> str:
    """Return the page as Markdown; empty if no session has measured such lines.

    Args:
        sessions: Results of ``millrace bench``, newest first.
    """
    newest: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for session in sessions:
        for entry in session["entries"]:
            if entry.get("lines") and entry["status"] == "measured":
                newest.setdefault(entry["name"], (session["facts"], entry))
    if not newest:
        return ""
    rows = [row for _, entry in newest.values() for row in _format_rows(entry)]
    rows.sort(key=lambda row: _natural(row["line"]))
    measured = dict.fromkeys(
        f"- {facts['device']}, {facts['date']}, commit {facts['commit']}: "
        f"`{facts['command']}`"
        for facts, _ in newest.values()
    )
    commands = [
        f"    - `{e['name']}`: `millrace {e['command']}`" for _, e in newest.values()
    ]
    note = ["", '??? note "Commands"', "", *commands]
    return "\n".join([_INTRODUCTION, *measured, "", *format_table(rows), *note]) + "\n"


def _natural(text: str) -> list[str]:
    """Return a key that sorts batch 16 after batch 4."""
    parts = re.split(r"(\d+)", text.casefold())
    return [part.zfill(9) if part.isdigit() else part for part in parts]


def _format_rows(entry: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    speed = entry["samples_per_second"]["median"]
    for line in entry["lines"]:
        published = line.get("published") or []
        changes = [text for text in (line.get("changed"), entry.get("about")) if text]
        yield {
            "line": line["line"],
            "precision": str(entry.get("precision", "")),
            "published": "; ".join(_format_published(*figure) for figure in published),
            "each": "; ".join(f"{figure[0] / figure[1]:,.0f}" for figure in published),
            "ours, one device": f"{speed:,.0f}",
            "measured": _format_length(entry),
            "compiled in": f"{entry['compile_seconds']:.0f} s",
            "changed": "; ".join(changes),
            "entry": f"`{entry['name']}`",
        }


def _format_length(entry: Mapping[str, Any]) -> str:
    """Return how much of the line was measured, such as ``7 updates of 16,384``."""
    seconds = (entry.get("measured") or {}).get("seconds")
    if not seconds:
        return ""
    samples = entry["samples_per_unit"]
    units = max(1, round(seconds * entry["samples_per_second"]["median"] / samples))
    plural = {"update": "updates", "batch": "batches"}
    unit = entry["unit"] if units == 1 else plural[entry["unit"]]
    return f"{units:,} {unit} of {samples:,}"


def _format_published(speed: float, count: int, hardware: str, details: str) -> str:
    return f"{speed:,.0f} on {count} {hardware} ({details})"
