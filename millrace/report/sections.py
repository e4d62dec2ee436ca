"""Sections that applications add to a report: plain data in the run directory, drawn later.

A section is kept as ``report/NAME.json``, so that a newer version can draw the report
again and other programs can read the data. Images are kept as ``pictures/KIND-UPDATE.png``.
"""

import abc
import base64
import dataclasses
import io
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from millrace.drawing import html
from millrace.drawing.charts import (
    MOST_CLASSES,
    histogram_chart,
    interval_chart,
    matrix_chart,
    points_chart,
)
from millrace.drawing.svg import check_svg
from millrace.durable import make_folder, write_atomically
from millrace.report.record import FOLDER

_IMAGE_FOLDER = "pictures"
_MOST_IMAGES = 4
_IMAGE_TITLES = {
    "prior": "Samples from the prior",
    "reconstructions": "Originals and, below each, its reconstruction",
    "chain": "In each row an original, then its Markov chain step by step",
}
_MOST_CONFUSIONS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section(abc.ABC):
    """A heading, an optional note, and figures drawn from data."""

    kind: ClassVar[str]
    title: str
    note: str = ""

    @abc.abstractmethod
    def render(self) -> str:
        """Return the figures as HTML, without heading and note."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confusion(Section):
    """A confusion matrix."""

    kind: ClassVar[str] = "confusion"
    names: list[str]
    """The names of the classes."""
    counts: list[list[int]]
    """``[true class, predicted class, count]`` for all counts above 0."""

    def render(self) -> str:
        """Draw the matrix, unless it is too large, and list the worst confusions."""
        counts = {(true, predicted): n for true, predicted, n in self.counts}
        chart = ""
        if len(self.names) <= MOST_CLASSES:
            chart = html.figure(matrix_chart(self.title, counts, self.names))
        return html.figures([chart, self._render_worst(counts)])

    def _render_worst(self, counts: dict[tuple[int, int], int]) -> str:
        wrong = [(n, *pair) for pair, n in counts.items() if pair[0] != pair[1]]
        if not wrong:
            return "<p>No mistakes.</p>"
        wrong = sorted(wrong, key=lambda entry: -entry[0])[:_MOST_CONFUSIONS]
        return html.table(
            [
                (self.names[true], self.names[predicted], f"{n:,}")
                for n, true, predicted in wrong
            ],
            head=["true class", "predicted", "count"],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gallery(Section):
    """Small images with captions."""

    kind: ClassVar[str] = "gallery"
    pictures: list[dict[str, str]]
    """Images, each with ``png`` (base64) and ``caption``."""

    def render(self) -> str:
        """Show the images side by side."""
        if not self.pictures:
            return "<p>None.</p>"
        images = [
            html.figure(html.image(each["png"], each["caption"]), each["caption"])
            for each in self.pictures
        ]
        return f'<div class="gallery">{"".join(images)}</div>'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histogram(Section):
    """A distribution, and optionally its quantiles by another quantity."""

    kind: ClassVar[str] = "histogram"
    x_name: str
    edges: list[float]
    counts: list[float]
    by_name: str = ""
    quantiles: list[list[Any]] = dataclasses.field(default_factory=list)
    """``[value, [5, 25, 50, 75 and 95% quantile]]`` for values of the other quantity."""

    def render(self) -> str:
        """Draw the distribution, and next to it the quantiles."""
        chart = histogram_chart(self.title, self.edges, self.counts, x_name=self.x_name)
        charts = [html.figure(chart, f"all {sum(self.counts):,.0f}")]
        if self.quantiles:
            rows = [(float(value), quantiles) for value, quantiles in self.quantiles]
            chart = interval_chart(self.title, rows, x_name=self.by_name)
            charts.append(
                html.figure(chart, f"by {self.by_name}: 5, 25, 50, 75 and 95% quantiles")
            )
        return html.figures(charts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Points(Section):
    """One value per setting; the lowest is the best."""

    kind: ClassVar[str] = "points"
    x_name: str
    y_name: str
    points: list[list[float]]

    def render(self) -> str:
        """Draw the points."""
        # JSON has nan and inf as text, which float() reads.
        points = [(float(x), float(y)) for x, y in self.points]
        chart = points_chart(self.title, points, x_name=self.x_name)
        num_diverged = sum(not math.isfinite(y) for _, y in points)
        note = f"{num_diverged} diverged" if num_diverged else ""
        return html.figures([html.figure(chart, self.y_name, note)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table(Section):
    """Rows of text."""

    kind: ClassVar[str] = "table"
    columns: list[str]
    rows: list[list[str]]

    def render(self) -> str:
        """Show the rows."""
        return html.table(self.rows, head=self.columns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SvgFigure(Section):
    """A finished SVG, which may be wider than a phone."""

    kind: ClassVar[str] = "drawing"
    svg: str
    style: str = ""
    """CSS with the colors of the SVG (runs of older versions; now the page has them)."""
    within: str = ""
    """The CSS class that `style` refers to."""

    def __post_init__(self) -> None:
        check_svg(self.svg)
        if "<" in self.style:
            raise ValueError("The style of a drawing cannot have tags.")

    def render(self) -> str:
        """Show the SVG in its own size, scrolling sideways if it does not fit."""
        style = f"<style>{self.style}</style>" if self.style else ""
        return f'{style}<div class="scroll {escape(self.within)}">{self.svg}</div>'


_DAMAGED = (
    *(OSError, ValueError, KeyError, TypeError, IndexError, AttributeError),
    *(OverflowError, RecursionError, ZeroDivisionError),
)
"""Errors from reading or drawing a section whose file was damaged or changed."""

_KINDS = {
    cls.kind: cls for cls in (Confusion, Gallery, Histogram, Points, Table, SvgFigure)
}


def save_section(run: Path, name: str, section: Section) -> None:
    """Keep a section in a run directory; one with the same name is replaced."""
    folder = run / FOLDER
    make_folder(folder)
    text = json.dumps({"kind": section.kind} | dataclasses.asdict(section))
    write_atomically(folder / f"{name}.json", text)


def read_sections(run: Path) -> dict[str, Section]:
    """Return the sections of a run by name; unreadable ones are left out."""
    sections = {}
    for path in sorted((run / FOLDER).glob("*.json")):
        try:
            data = json.loads(path.read_text())
            sections[path.stem] = _KINDS[data.pop("kind")](**data)
        except _DAMAGED:
            continue
    return sections


def render_sections(run: Path) -> str:
    """Return the sections and the images of a run as HTML."""
    sections = map(_render_section, read_sections(run).values())
    images = (
        html.section(_IMAGE_TITLES.get(kind, kind), render_images(paths))
        for kind, paths in find_images(run).items()
    )
    return "".join([*sections, *images])


def _render_section(section: Section) -> str:
    try:
        note = f'<p class="note">{escape(section.note)}</p>' if section.note else ""
        return html.section(section.title, note + section.render())
    except _DAMAGED:
        return ""


def find_images(run: Path) -> dict[str, list[Path]]:
    """Return the images of a run by kind, in the order of updates."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted((run / _IMAGE_FOLDER).glob("*-*.png")):
        kinds.setdefault(path.stem.rsplit("-", 1)[0], []).append(path)
    return kinds


def render_images(paths: Sequence[Path]) -> str:
    """Show the last image, and smaller ones from before, each with its update."""
    last, count = len(paths) - 1, min(_MOST_IMAGES, len(paths))
    *earlier, latest = [paths[round(n * last / max(1, count - 1))] for n in range(count)]
    shown = f'<div class="grid">{_render_image(latest)}</div>'
    if earlier:
        before = "".join(map(_render_image, earlier))
        shown += f'<div class="grid earlier">{before}</div>'
    return shown


def _render_image(path: Path) -> str:
    update = path.stem.rsplit("-", 1)[1]
    caption = f"after {int(update):,} updates" if update.isdecimal() else path.stem
    png = base64.b64encode(path.read_bytes()).decode()
    return html.figure(html.image(png, caption), caption)


def encode_png(pixels: Any, most: int = 128) -> str:
    """Return pixels, uint8 (height, width, 1 or 3), as a PNG in base64.

    Args:
        pixels: The image.
        most: The largest height and width; a larger image is scaled down.
    """
    import numpy as np
    from PIL import Image

    pixels = np.asarray(pixels)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    image.thumbnail((most, most))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
