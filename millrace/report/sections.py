"""What an application adds to its report: plain data in the run directory, drawn later.

A part is kept as ``report/NAME.json``, so that a report can be made again at any time, by
a newer version, and other programs can read what it shows.
"""

import abc
import base64
import dataclasses
import html
import io
import json
import math
from pathlib import Path
from typing import Any, ClassVar

from millrace.drawing.charts import (
    MOST_CLASSES,
    histogram_chart,
    interval_chart,
    matrix_chart,
    points_chart,
)
from millrace.drawing.svg_check import check_svg
from millrace.durable import make_folder, write_atomically
from millrace.report.record import FOLDER


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part(abc.ABC):
    """A picture, or a group of them, with a heading and perhaps a sentence."""

    kind: ClassVar[str]
    title: str
    note: str = ""

    @abc.abstractmethod
    def drawing(self) -> str:
        """Return the part's own HTML, without heading and sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confusion(Part):
    """How often samples of each class were taken for which."""

    kind: ClassVar[str] = "confusion"
    names: list[str]
    """Of the classes."""
    counts: list[list[int]]
    """``[true class, taken for, how often]``, without those that never happened."""

    def drawing(self) -> str:
        """Draw the matrix where there is room for it, and list the worst confusions."""
        counts = {(row, column): number for row, column, number in self.counts}
        chart = ""
        if len(self.names) <= MOST_CLASSES:
            chart = matrix_chart(self.title, counts, self.names)
            chart = f"<figure>{chart}</figure>"
        return f'<div class="figures">{chart}{self._worst(counts)}</div>'

    def _worst(self, counts: dict[tuple[int, int], int]) -> str:
        wrong = [(n, *place) for place, n in counts.items() if place[0] != place[1]]
        if not wrong:
            return "<p>None was mistaken.</p>"
        rows = "".join(
            f"<tr><td>{html.escape(self.names[true])}</td>"
            f"<td>{html.escape(self.names[taken])}</td><td>{number:,}</td></tr>"
            for number, true, taken in sorted(wrong, key=lambda w: -w[0])[:10]
        )
        head = "<tr><th>true class</th><th>taken for</th><th>times</th></tr>"
        return f"<div><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gallery(Part):
    """Small pictures, each with some words."""

    kind: ClassVar[str] = "gallery"
    pictures: list[dict[str, str]]
    """Each has ``png`` (base64) and ``caption``."""

    def drawing(self) -> str:
        """Show the pictures side by side."""
        if not self.pictures:
            return "<p>There is none.</p>"
        shown = "".join(image(p["png"], p["caption"]) for p in self.pictures)
        return f'<div class="gallery">{shown}</div>'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histogram(Part):
    """A distribution, and how it changes with something else."""

    kind: ClassVar[str] = "histogram"
    x_name: str
    edges: list[float]
    counts: list[float]
    by_name: str = ""
    quantiles: list[list[Any]] = dataclasses.field(default_factory=list)
    """``[place, [5, 25, 50, 75 and 95 %]]`` of what else it is looked at by."""

    def drawing(self) -> str:
        """Draw the whole distribution, then its quantiles beside each other."""
        charts = histogram_chart(self.title, self.edges, self.counts, x_name=self.x_name)
        charts = _figure(f"all together: {sum(self.counts):,.0f}", charts)
        if self.quantiles:
            rows = [(float(place), values) for place, values in self.quantiles]
            boxes = interval_chart(self.title, rows, x_name=self.by_name)
            charts += _figure(f"by {self.by_name}: 5, 25, 50, 75 and 95 %", boxes)
        return f'<div class="figures">{charts}</div>'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Points(Part):
    """A value at each of several places, the lowest being the best."""

    kind: ClassVar[str] = "points"
    x_name: str
    y_name: str
    points: list[list[float]]

    def drawing(self) -> str:
        """Draw the points."""
        # What is not finite is text in JSON; float() reads it.
        points = [(float(x), float(y)) for x, y in self.points]
        chart = points_chart(self.title, points, x_name=self.x_name)
        lost = sum(not math.isfinite(y) for _, y in points)
        note = f" ({lost} diverged)" if lost else ""
        return f'<div class="figures">{_figure(self.y_name + note, chart)}</div>'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing(Part):
    """An SVG that was drawn elsewhere; it may be wider than a phone."""

    kind: ClassVar[str] = "drawing"
    svg: str
    style: str = ""
    """What gives it its colors, light and dark."""
    within: str = "drawn"
    """The class that the style speaks of."""

    def __post_init__(self) -> None:
        check_svg(self.svg)
        if "<" in self.style:
            raise ValueError("The style of a drawing cannot have tags.")

    def drawing(self) -> str:
        """Show it at its own size, to be moved sideways where it does not fit."""
        inside = f'<div class="scroll {html.escape(self.within)}">{self.svg}</div>'
        return f"<style>{self.style}</style>{inside}"


_DAMAGED = (
    *(OSError, ValueError, KeyError, TypeError, IndexError, AttributeError),
    *(OverflowError, RecursionError, ZeroDivisionError),
)
"""What reading or drawing a part that is none, or was changed, can end in."""

_KINDS = {part.kind: part for part in (Confusion, Gallery, Histogram, Points, Drawing)}


def save_part(run: Path, name: str, part: Part) -> None:
    """Keep a part in a run directory; one of the same name is replaced."""
    folder = run / FOLDER
    make_folder(folder)
    text = json.dumps({"kind": part.kind} | dataclasses.asdict(part))
    write_atomically(folder / f"{name}.json", text)


def read_parts(run: Path) -> dict[str, Part]:
    """Return a run's parts by name; one that cannot be read is left out."""
    found = {}
    for path in sorted((run / FOLDER).glob("*.json")):
        try:
            data = json.loads(path.read_text())
            found[path.stem] = _KINDS[data.pop("kind")](**data)
        except _DAMAGED:
            continue
    return found


def section(part: Part) -> str:
    """Return a part as a section of a page; nothing for one that cannot be drawn."""
    try:
        note = f'<p class="note">{html.escape(part.note)}</p>' if part.note else ""
        return f"<h2>{html.escape(part.title)}</h2>{note}{part.drawing()}"
    except _DAMAGED:
        return ""


def image(png: str, caption: str) -> str:
    """Return a picture, given in base64, that is in the page itself."""
    words = html.escape(caption)
    return (
        f'<figure><img alt="{words}" src="data:image/png;base64,{html.escape(png)}">'
        f"<figcaption>{words}</figcaption></figure>"
    )


def png_of(pixels: Any, most: int = 128) -> str:
    """Return an image of bytes, (height, width, 1 or 3), as a PNG in base64."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(pixels)
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    picture.thumbnail((most, most))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def _figure(caption: str, chart: str) -> str:
    return f"<figure><figcaption>{html.escape(caption)}</figcaption>{chart}</figure>"
