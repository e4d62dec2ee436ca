"""The report: one well-formed page that needs nothing else."""

import math
import re
from html.parser import HTMLParser

import pytest

from millrace.host.report import write_report
from millrace.host.run_directory import RunDirectory

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Reads a page, insisting that every tag is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def summary(**changes):
    return {
        "status": "completed",
        "error": None,
        "command": "millrace cnn train --num-epochs 2",
        "device": {"platform": "cpu", "kind": "cpu", "count": 4},
        "updates": 88,
        "samples": 281_600,
        "samples_per_second": 21_139.81,
        "compile_seconds": 1.59,
        "metrics": {"train_loss": 0.25, "validation_accuracy": 0.9611},
        "versions": {"python": "3.11.7", "jax": "0.10.2"},
    } | changes


def report(directory: RunDirectory, **changes) -> tuple[Page, str]:
    write_report(directory, summary(**changes))
    text = (directory.path / "report.html").read_text()
    return Page(text), text


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "my-run"
    path.mkdir()
    made = RunDirectory(path)
    for update, loss in [(44, 0.5), (88, 0.25)]:
        event = {"update": update, "epoch": update / 44, "time": 1.0}
        made.append_metrics(event | {"train_loss": loss})
    made.append_metrics(
        {"update": 88, "epoch": 2.0, "time": 2.0, "validation_accuracy": 0.9611}
    )
    return made


def test_a_report_says_how_the_run_ended_and_what_came_of_it(directory):
    page, _ = report(directory)
    assert page.tags.count("html") == page.tags.count("body") == 1
    for words in (
        "my-run",
        "completed",
        "millrace cnn train --num-epochs 2",
        "updates 88",
        "samples 281,600",
        "21,139.8",
        "train loss 0.25",
        "validation accuracy 0.9611",
        "device count 4",
        "jax 0.10.2",
    ):
        assert words in page.text


def test_a_report_says_how_long_training_took_where_that_was_measured(directory):
    page, _ = report(directory, time_to_train_seconds=306.6)
    assert "time to train 5.11 minutes" in page.text
    page, _ = report(directory)
    assert "time to train" not in page.text


def test_every_metric_has_a_curve_through_its_points(directory):
    page, text = report(directory)
    assert page.tags.count("svg") == 2
    (line, single) = re.findall(r'<polyline points="([^"]+)"', text)
    points = [tuple(map(float, point.split(","))) for point in line.split()]
    (x1, y1), (x2, y2) = points
    assert x1 < x2
    assert y1 < y2  # the loss falls, and SVG counts downwards
    assert len(single.split()) == 1


def test_a_report_of_a_failure_shows_the_error_and_is_not_broken_by_it(directory):
    error = 'ValueError: <b>"a" & b</b> </body><script>alert(1)</script>'
    page, text = report(directory, status="failed", error=error, metrics={}, device=None)
    assert "failed" in page.text
    assert error in page.text
    assert "script" not in page.tags
    assert "<b>" not in text
    assert ("p", "class", "failed") in page.attributes


def test_names_from_outside_are_escaped(directory, tmp_path):
    strange = tmp_path / "<i>run & co"
    strange.mkdir()
    odd = RunDirectory(strange)
    odd.append_metrics({"update": 1, "epoch": 1, "time": 1, '<u>"loss"': 1.0})
    page, _ = report(odd, command="millrace --title '<u>'", metrics={"<u>x": 1.0})
    assert "<i>run & co" in page.text
    assert "millrace --title '<u>'" in page.text
    assert {"i", "u"}.isdisjoint(page.tags)
    assert ("svg", "aria-label", '<u>"loss"') in page.attributes


def test_a_report_needs_nothing_from_anywhere(directory):
    page, text = report(directory)
    assert not re.search(r"https?:|//\w|@import|url\(", text)
    assert {"script", "link", "img", "iframe"}.isdisjoint(page.tags)
    assert not {name for _, name, _ in page.attributes} & {"src", "href"}


def test_a_run_that_logged_nothing_still_has_a_report(tmp_path):
    page, _ = report(RunDirectory(tmp_path), status="interrupted", metrics={})
    assert "interrupted" in page.text
    assert "svg" not in page.tags


def test_values_that_are_no_numbers_do_not_break_the_curves(tmp_path):
    directory = RunDirectory(tmp_path)
    for update, loss in enumerate([0.5, math.nan, math.inf, 0.25], 1):
        directory.append_metrics(
            {"update": update, "epoch": update, "time": 1, "loss": loss, "bad": math.nan}
        )
    page, text = report(directory, metrics={"loss": math.nan, "bad": "nan"})
    assert page.tags.count("svg") == 1
    (line,) = re.findall(r'<polyline points="([^"]+)"', text)
    assert len(line.split()) == 2
    assert "nan" not in line
    assert "loss nan" in page.text


def test_a_metric_that_never_changes_can_be_drawn(tmp_path):
    directory = RunDirectory(tmp_path)
    for update in (1, 2):
        directory.append_metrics({"update": update, "epoch": update, "time": 1, "zero": 0})
    _, text = report(directory)
    (line,) = re.findall(r'<polyline points="([^"]+)"', text)
    (_, first), (_, second) = (point.split(",") for point in line.split())
    assert first == second


def test_the_axis_of_a_single_point_does_not_run_past_it(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.append_metrics({"update": 44, "epoch": 1.0, "time": 1, "loss": 0.5})
    page, _ = report(directory)
    assert "epoch 1" in page.text
    assert not re.search(r"epoch 1 2\b", page.text)  # no second epoch was run


def test_pictures_in_the_run_directory_are_shown_kind_by_kind(directory):
    folder = directory.path / "pictures"
    folder.mkdir()
    for number in range(8):
        (folder / f"prior-{10 * number:09d}.png").write_bytes(b"picture %d" % number)
    (folder / "chain-last.png").write_bytes(b"another")
    (folder / "notes.txt").write_text("not a picture")
    page, text = report(directory)
    assert page.tags.count("img") == 7  # six of eight, from the first to the last
    assert "after 0 updates" in page.text and "after 70 updates" in page.text
    assert page.text.index("chain") < page.text.index("prior")
    sources = [value for tag, name, value in page.attributes if name == "src"]
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"https?:|@import|url\(", text)
