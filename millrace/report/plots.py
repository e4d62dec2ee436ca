"""``mr.plots``: each plot of a report on its own, for a notebook or a file."""

from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from millrace.config import ConfigurationError, did_you_mean, open_run
from millrace.drawing.html import page
from millrace.drawing.style import COLORS, FIGURES
from millrace.report.metrics import curve_figure, run_curves, run_throughput_figure
from millrace.report.record import RunRecord, read_run
from millrace.report.sections import find_images, read_sections, render_images

Run = Any
"""A run directory, or the result of ``train``."""


class Plot(NamedTuple):
    """A plot that a notebook shows and `save` writes to a file."""

    title: str
    body: str

    def _repr_html_(self) -> str:
        # Everything is nested in a class of our own, so that the notebook keeps its style.
        style = COLORS.replace(":root", ".millrace")
        style += f".millrace {{ color: var(--ink); {FIGURES} }}"
        return f'<style>{style}</style><div class="millrace">{self.body}</div>'

    def save(self, path: Path | str) -> Path:
        """Write a page (.html), or only the drawing (.svg), and return its path."""
        path = Path(path)
        if path.suffix == ".html":
            body = f"<h1>{escape(self.title)}</h1>{self.body}"
            path.write_text(page(self.title, body))
        elif path.suffix == ".svg":
            path.write_text(self._svg())
        else:
            raise ConfigurationError(f"A plot is saved as .html or .svg, got {path}.")
        return path

    def _svg(self) -> str:
        start, end = self.body.find("<svg"), self.body.find("</svg>")
        if start < 0:
            raise ConfigurationError(f"{self.title} has no drawing. Save it as .html.")
        svg = self.body[start : end + len("</svg>")]
        if "xmlns" not in svg:
            svg = svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
        inside = svg.index(">") + 1
        return f"{svg[:inside]}<style>{COLORS}</style>{svg[inside:]}"


def metrics(run: Run) -> list[str]:
    """Return the metrics of a run that `curve` can draw."""
    return list(run_curves(_read(run)))


def curve(run: Run, quantity: str = "loss") -> Plot:
    """Draw a metric over epochs: loss, accuracy, rmse, learning_rate, acceptance, …"""
    charts = run_curves(_read(run))
    if quantity not in charts:
        raise ConfigurationError(
            f"The run has not logged {quantity}, only {', '.join(charts)}."
            + did_you_mean(quantity, list(charts))
        )
    return Plot(quantity, curve_figure(quantity, charts[quantity]))


def throughput(run: Run) -> Plot:
    """Draw samples per second over time, with compilation marked."""
    chart = run_throughput_figure(_read(run))
    if not chart:
        raise ConfigurationError("The run has not logged its throughput.")
    return Plot("samples per second", chart)


def confusion(run: Run) -> Plot:
    """Draw the confusion matrix (``cnn train``)."""
    return _plot_section(run, "1-confusion", "confusion matrix")


def mistakes(run: Run) -> Plot:
    """Show the most confident mistakes (``cnn train``)."""
    return _plot_section(run, "2-mistakes", "mistakes")


def pipeline(run: Run) -> Plot:
    """Draw the measured pipeline (``cnn train --profile-pipeline``)."""
    return _plot_section(run, "0-pipeline", "pipeline profile")


def residuals(run: Run) -> Plot:
    """Draw the distribution of rating errors (``autoencoder train``)."""
    return _plot_section(run, "residuals", "residuals")


def sweep(run: Run) -> Plot:
    """Draw the error over the learning rate (``autoencoder sweep``)."""
    return _plot_section(run, "sweep", "sweep")


def images(run: Run, kind: str = "prior") -> Plot:
    """Show images over time: prior, reconstructions or chain (``vcd train``)."""
    kinds = find_images(_read(run).path)
    if kind not in kinds:
        known = ", ".join(kinds) or "none"
        raise ConfigurationError(f"The run has no images of {kind!r}; it has {known}.")
    return Plot(kind, render_images(kinds[kind]))


pictures = images
"""The name of `images` in older versions."""


def _read(run: Run) -> RunRecord:
    return read_run(open_run(getattr(run, "path", run)))


def _plot_section(run: Run, name: str, what: str) -> Plot:
    path = _read(run).path
    sections = read_sections(path)
    if name not in sections:
        raise ConfigurationError(f"The run in {path} has no {what}.")
    return Plot(sections[name].title, sections[name].render())
