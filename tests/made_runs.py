"""Run directories written by hand, as a run of any application would leave them."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from millrace.report.sections import (
    Confusion,
    Gallery,
    Histogram,
    Points,
    SvgFigure,
    encode_png,
    save_section,
)

CURVE = r'points="([^"]+)"[^>]*stroke="var\(--c\d\)"'


def summary(**changes: Any) -> dict[str, Any]:
    return {
        "status": "completed",
        "error": None,
        "command": "millrace cnn train --num-epochs 2 --run-dir my-run",
        "device": {"platform": "cpu", "kind": "cpu", "count": 4},
        "updates": 88,
        "samples": 281_600,
        "samples_per_second": 21_139.81,
        "compile_seconds": 1.59,
        "metrics": {"train_loss": 0.25, "validation_accuracy": 0.9611},
        "versions": {"python": "3.11.7", "jax": "0.10.2"},
        "facts": {"model": "digits_cnn, 24,058 parameters"},
        "memory": {"program_bytes": 3 << 20, "host_peak_bytes": 5 << 30},
        "changed_options": {"num_epochs": 2},
        "seconds": {"compiling": 1.59, "training": 4.5},
        "machine": {"processor": "2 cores"},
        "directory": "/home/someone",
    } | changes


EVENTS: list[dict[str, Any]] = [
    {"update": 44, "epoch": 1.0, "time": 3.0, "train_loss": 0.5, "samples_per_second": 9},
    {"update": 44, "epoch": 1.0, "time": 3.1, "validation_accuracy": 0.9},
    {"update": 88, "epoch": 2.0, "time": 4.0, "train_loss": 0.25, "samples_per_second": 9},
    {"update": 88, "epoch": 2.0, "time": 4.1, "validation_accuracy": 0.9611},
]


def make_run(
    path: Path,
    *,
    events: list[dict[str, Any]] = EVENTS,
    command: str = "cnn-train",
    config: dict[str, Any] | None = None,
    ended: bool = True,
    **changes: Any,
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    config = {"command": command, "num_epochs": 2, "seed": 0} | (config or {})
    (path / "config.yml").write_text(yaml.safe_dump(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (path / "report").mkdir(exist_ok=True)
    (path / "report" / "phases.json").write_text(
        json.dumps([["compiling", 0.0, 1.59], ["training", 1.59, 4.1]])
    )
    if ended:
        (path / "summary.json").write_text(json.dumps(summary(**changes)))
    return path


def find_chart(page: str, title: str) -> str:
    """Return the one chart of a page with this title."""
    (chart,) = re.findall(rf'aria-label="{title}">(.*?)</svg>', page, re.DOTALL)
    return chart


def find_curve(page: str, title: str) -> list[tuple[float, float]]:
    """Return the points of the only curve in a chart."""
    (line,) = re.findall(CURVE, find_chart(page, title))
    return read_points(line)


def read_points(line: str) -> list[tuple[float, float]]:
    """Read the ``points`` of a polyline."""
    points = (point.split(",") for point in line.split())
    return [(float(x), float(y)) for x, y in points]


def add_sections(run: Path) -> None:
    """Add one section of every kind, and images over time."""
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8, 1) * 4
    png = encode_png(pixels)
    names = ["cat", "dog", "a class with a long name"]
    counts = [[0, 0, 9], [0, 1, 2], [1, 1, 7], [2, 2, 5]]
    save_section(run, "1-confusion", Confusion(title="Matrix", names=names, counts=counts))
    shown = [{"png": png, "caption": "cat, predicted dog (97%)"}] * 3
    save_section(run, "2-mistakes", Gallery(title="Mistakes", pictures=shown))
    residuals = Histogram(
        title="Residuals",
        x_name="predicted minus actual rating",
        edges=[-1.0, 0.0, 1.0],
        counts=[3, 4],
        by_name="rating",
        quantiles=[[1.0, [-1, -0.5, 0, 0.5, 1]], [2.0, [-2, -1, 0, 1, 2]]],
    )
    save_section(run, "residuals", residuals)
    points: list[list[Any]] = [[-18, 1.1], [-17, 0.9], [-16, "inf"]]
    sweep = Points(title="Sweep", x_name="power of 2", y_name="RMSE", points=points)
    save_section(run, "sweep", sweep)
    svg = '<svg viewBox="0 0 900 50" width="900" height="50"><text y="9">stage</text></svg>'
    save_section(run, "0-pipeline", SvgFigure(title="Pipeline", svg=svg))
    (run / "pictures").mkdir()
    for update in (10, 20):
        path = run / "pictures" / f"prior-{update:09d}.png"
        path.write_bytes(base64.b64decode(png))
