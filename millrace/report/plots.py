"""``mr.plots``: every picture of a report by itself, for a notebook or a file."""

import html
from pathlib import Path
from typing import Any, NamedTuple

from millrace.config import ConfigurationError, did_you_mean
from millrace.drawing.style import CHART, COLORS, FIGURES
from millrace.report.curves import metric_charts, metric_figure, throughput_figure
from millrace.report.image_grids import picture_kinds, picture_row
from millrace.report.record import RunRecord, read_run
from millrace.report.run_page import frame
from millrace.report.sections import Part, read_parts

Run = Any
"""A run directory, or what ``train`` has returned."""


class Picture(NamedTuple):
    """A picture; a notebook shows it, and `save` writes it."""

    title: str
    body: str

    def _repr_html_(self) -> str:
        # Nothing else in the notebook may change its looks.
        style = COLORS.replace(":root", ".millrace") + CHART
        style += f".millrace {{ color: var(--ink); {FIGURES} }}"
        return f'<style>{style}</style><div class="millrace">{self.body}</div>'

    def save(self, path: Path | str) -> Path:
        """Write a page, or with the ending .svg the drawing alone."""
        path = Path(path)
        if path.suffix == ".html":
            head = f"<h1>{html.escape(self.title)}</h1>"
            path.write_text(frame(self.title, head + self.body))
        elif path.suffix == ".svg":
            path.write_text(self._svg())
        else:
            raise ConfigurationError(f"A picture is saved as .html or .svg, not as {path}.")
        return path

    def _svg(self) -> str:
        start, end = self.body.find("<svg"), self.body.find("</svg>")
        if start < 0:
            raise ConfigurationError(f"{self.title} has no drawing: save it as .html.")
        drawing = self.body[start : end + 6]
        if "xmlns" not in drawing:
            drawing = drawing.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
        inside = drawing.index(">") + 1
        style = f"<style>{COLORS}{CHART}</style>"
        return drawing[:inside] + style + drawing[inside:]


def metrics(run: Run) -> list[str]:
    """Return the names that `curve` knows for a run."""
    return list(metric_charts(_record(run)))


def curve(run: Run, quantity: str = "loss") -> Picture:
    """Draw a metric over epochs: loss, accuracy, rmse, learning_rate, acceptance, …"""
    charts = metric_charts(_record(run))
    if quantity not in charts:
        raise ConfigurationError(
            f"The run has not logged {quantity}. There is: {', '.join(charts)}."
            + did_you_mean(quantity, list(charts))
        )
    return Picture(quantity, metric_figure(quantity, charts[quantity]))


def throughput(run: Run) -> Picture:
    """Draw samples per second over time, with compilation marked."""
    found = throughput_figure(_record(run))
    if not found:
        raise ConfigurationError("The run has not logged how fast it was.")
    return Picture("samples per second", found)


def confusion(run: Run) -> Picture:
    """Draw what was taken for what (``cnn train``)."""
    return _part(run, "1-confusion", "a confusion matrix")


def mistakes(run: Run) -> Picture:
    """Show the most confident mistakes (``cnn train``)."""
    return _part(run, "2-mistakes", "mistakes")


def pipeline(run: Run) -> Picture:
    """Draw the pipeline as it ran (``cnn train --profile-pipeline``)."""
    return _part(run, "0-pipeline", "a watched pipeline")


def residuals(run: Run) -> Picture:
    """Draw by how much ratings were missed (``autoencoder train``)."""
    return _part(run, "residuals", "residuals")


def sweep(run: Run) -> Picture:
    """Draw the error over the learning rate (``autoencoder sweep``)."""
    return _part(run, "sweep", "a sweep")


def pictures(run: Run, kind: str = "prior") -> Picture:
    """Show what a model drew over time: prior, reconstructions or chain (``vcd train``)."""
    kinds = picture_kinds(_record(run).path)
    if kind not in kinds:
        known = ", ".join(kinds) or "nothing"
        raise ConfigurationError(f"The run has not drawn {kind!r}; it has drawn {known}.")
    return Picture(kind, picture_row(kinds[kind]))


def _record(run: Run) -> RunRecord:
    return read_run(Path(getattr(run, "path", run)))


def _part(run: Run, name: str, what: str) -> Picture:
    parts: dict[str, Part] = read_parts(_record(run).path)
    if name not in parts:
        raise ConfigurationError(f"The run in {_record(run).path} has not kept {what}.")
    return Picture(parts[name].title, parts[name].drawing())
