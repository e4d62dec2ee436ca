"""``report.html``: a run on one page that needs no network."""

import base64
import html
import json
from pathlib import Path
from typing import Any

from millrace.host.run_directory import RunDirectory

_WIDTH, _HEIGHT, _MARGIN = 560, 180, 62
_PICTURES_SHOWN = 6
"""Of each kind, from the first to the last."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #1f6feb; --grid: #8884; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.05rem; margin: 1.6rem 0 .4rem; }}
table {{ border-collapse: collapse; }} td {{ padding: .15rem 1.2rem .15rem 0;
  vertical-align: top; }} td:last-child {{ font-variant-numeric: tabular-nums; }}
code {{ overflow-wrap: anywhere; }} svg {{ width: 100%; height: auto; }}
svg text {{ font: 11px system-ui, sans-serif; fill: currentColor; }}
.curves {{ display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }}
figure {{ margin: 0; }} figcaption {{ font-weight: 600; }}
.failed {{ color: #d1242f; }} img {{ max-width: 100%; image-rendering: pixelated; }}
</style></head><body>
<h1>{title}</h1>
<p class="{status}">{status}{error}</p>
<p><code>{command}</code></p>
<h2>Results</h2><table>{results}</table>
<h2>Curves</h2><div class="curves">{curves}</div>
{pictures}
<h2>Environment</h2><table>{environment}</table>
</body></html>
"""


def write_report(directory: RunDirectory, summary: dict[str, Any]) -> None:
    """Write the report of a run, finished or not."""
    events = directory.read_metrics()
    figures = {
        "updates": summary["updates"],
        "samples": summary["samples"],
        "samples per second": summary["samples_per_second"],
        "compile seconds": summary["compile_seconds"],
        **_time_to_train(summary),
        **{name.replace("_", " "): v for name, v in summary["metrics"].items()},
    }
    device = summary["device"] or {}
    page = _PAGE.format(
        title=html.escape(directory.path.name),
        status=summary["status"],
        error=html.escape(f": {summary['error']}" if summary["error"] else ""),
        command=html.escape(summary["command"]),
        results=_rows(figures),
        curves="".join(_curve(name, points) for name, points in _series(events).items()),
        pictures=_pictures(directory.path / "pictures"),
        environment=_rows(
            {f"device {name}": value for name, value in device.items()}
            | summary["versions"]
        ),
    )
    (directory.path / "report.html").write_text(page)


def _time_to_train(summary: dict[str, Any]) -> dict[str, str]:
    seconds = summary.get("time_to_train_seconds")
    return {} if seconds is None else {"time to train": f"{seconds / 60:.2f} minutes"}


def _pictures(folder: Path) -> str:
    """Show the files ``<kind>-<update>.png`` of a folder, kind by kind."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*-*.png")):
        kinds.setdefault(path.stem.rsplit("-", 1)[0], []).append(path)
    shown = []
    for kind, paths in kinds.items():
        last = len(paths) - 1
        count = min(_PICTURES_SHOWN, len(paths))
        some = [paths[round(n * last / max(1, count - 1))] for n in range(count)]
        figures = "".join(map(_figure, some))
        shown.append(f'<h2>{html.escape(kind)}</h2><div class="curves">{figures}</div>')
    return "".join(shown)


def _figure(path: Path) -> str:
    # In the page itself: it needs no other file.
    data = base64.b64encode(path.read_bytes()).decode()
    number = path.stem.rsplit("-", 1)[1]
    words = f"after {int(number):,} updates" if number.isdecimal() else path.stem
    caption = html.escape(words)
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<img alt="{caption}" src="data:image/png;base64,{data}"></figure>'
    )


def _rows(values: dict[str, Any]) -> str:
    return "".join(
        f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(_text(value))}</td></tr>"
        for name, value in values.items()
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def _series(events: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    series: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        for name, value in event.items():
            if name not in ("update", "epoch", "time") and isinstance(value, int | float):
                series.setdefault(name, []).append((event["epoch"], value))
    return series


def _curve(name: str, points: list[tuple[float, float]]) -> str:
    """Draw one metric over epochs as an inline SVG."""
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low, high = min(ys), max(ys)
    span = (high - low) or abs(high) or 1.0
    first, width = min(xs), (max(xs) - min(xs)) or 1.0
    inner_width, inner_height = _WIDTH - 2 * _MARGIN, _HEIGHT - _MARGIN

    def place(x: float, y: float) -> tuple[float, float]:
        right = _MARGIN + (x - first) / width * inner_width
        down = 10 + (1 - (y - low) / span) * (inner_height - 10)
        return right, down

    places = [place(x, y) for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="var(--line)">'
        f"<title>epoch {px:g}: {py:.5g}</title></circle>"
        for (x, y), (px, py) in zip(places, points, strict=True)
        if len(points) <= 60
    )
    label = html.escape(name.replace("_", " "))
    base = inner_height + 4
    return (
        f"<figure><figcaption>{label}: {ys[-1]:.5g}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f'<path d="M{_MARGIN} 10V{base}H{_WIDTH - _MARGIN}" fill="none" '
        f'stroke="var(--grid)"/>'
        f'<text x="2" y="16">{high:.3g}</text><text x="2" y="{base}">{low:.3g}</text>'
        f'<text x="{_MARGIN}" y="{base + 16}">epoch {first:g}</text>'
        f'<text x="{_WIDTH - _MARGIN}" y="{base + 16}" text-anchor="end">'
        f"{max(xs):g}</text>"
        f'<polyline points="{path}" fill="none" stroke="var(--line)" '
        f'stroke-width="1.5"/>{dots}</svg></figure>'
    )
