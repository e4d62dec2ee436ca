"""The report: one well-formed page that needs nothing else."""

import itertools
import math
import re
from html.parser import HTMLParser

import pytest
from made_runs import EVENTS, add_parts, make_run

from millrace.config import ConfigurationError
from millrace.report.record import read_events
from millrace.report.run_page import write_report

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


def report(run) -> tuple[Page, str]:
    text = write_report(run).read_text()
    return Page(text), text


@pytest.fixture
def run(tmp_path):
    return tmp_path / "my-run"


def test_a_report_says_what_ran_how_it_ended_and_what_came_of_it(run):
    page, _ = report(make_run(run))
    assert page.tags.count("html") == page.tags.count("body") == 1
    for words in (
        "cnn train · my-run",
        "completed",
        "0.9611 validation accuracy",
        "0.25 train loss",
        "88 updates",
        "281,600 samples",
        "21,139.8 samples per second",
        "model digits_cnn, 24,058 parameters",
        "compiling 1.6 s",
        "compiled program needs, per device 3.0 MiB",
        "most in use by the process on the host 5.0 GiB",
        "--num-epochs 2",
        "devices 4 x cpu (cpu)",
        "jax 0.10.2",
        "It was run in /home/someone",
    ):
        assert words in page.text, words


def test_what_repeats_a_run_leaves_its_directory_alone(run):
    command = "millrace cnn train --run-dir 'my run' --seed 3 --resume"
    _, text = report(make_run(run, command="cnn-train"))
    assert "<pre>pip install . jax==0.10.2\nmillrace cnn train --num-epochs 2</pre>" in text
    (run / "summary.json").write_text(f'{{"command": "{command}"}}')
    _, text = report(run)
    assert "<pre>millrace cnn train --seed 3</pre>" in text


def test_what_repeats_a_run_names_its_millrace_but_no_package_of_that_name(run):
    versions = {"python": "3.11.7", "millrace": "0.1.0", "jax": "0.10.2"}
    _, text = report(make_run(run, versions=versions, commit="874615f"))
    assert "with millrace 0.1.0, commit <code>874615f</code>. In a checkout" in text
    assert "<pre>pip install . jax==0.10.2\n" in text
    assert "millrace==" not in text
    _, text = report(make_run(run, versions=versions, commit=None))
    assert "with millrace 0.1.0. In a checkout" in text


def test_a_report_says_how_long_training_took_where_that_was_measured(run):
    page, _ = report(make_run(run, time_to_train_seconds=306.6))
    assert "5.1 minutes time to train" in page.text
    page, _ = report(make_run(run))
    assert "time to train" not in page.text


def test_a_metric_of_training_and_validation_is_one_chart_with_two_curves(run):
    more = [e | {"validation_loss": 0.6} for e in EVENTS if "validation_accuracy" in e]
    _, text = report(make_run(run, events=EVENTS + more))
    (chart,) = re.findall(r'aria-label="loss">(.*?)</svg>', text)
    assert chart.count("<polyline") == 2
    assert "train" in chart and "validation" in chart


def test_a_falling_loss_falls_in_its_chart(run):
    _, text = report(make_run(run))
    (line,) = re.findall(r'aria-label="loss">.*?points="([^"]+)"', text)
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in line.split())
    assert x1 < x2 and y1 < y2  # SVG counts downwards


def test_speed_is_drawn_over_time_with_compilation_marked(run):
    _, text = report(make_run(run))
    (chart,) = re.findall(r'aria-label="samples per second">(.*?)</svg>', text)
    assert "compiling: 1.59 s" in chart
    assert "steady state" in chart
    (line,) = re.findall(r'points="([^"]+)"', chart)
    heights = [float(point.split(",")[1]) for point in line.split()]
    # 44 updates of 3200 samples in 3 s, then in 1 s: three times as fast.
    base = 230 - 36
    assert (base - heights[2]) / (base - heights[0]) == pytest.approx(3, rel=0.02)


def test_a_report_of_a_failure_shows_the_error_and_is_not_broken_by_it(run):
    error = 'ValueError: <b>"a" & b</b> </body><script>alert(1)</script>'
    made = make_run(run, status="failed", error=error, metrics={}, device=None)
    page, text = report(made)
    assert "failed" in page.text and "ended with an error" in page.text
    assert error in page.text
    assert "script" not in page.tags
    assert "<b>&quot;" not in text and '<b>"a"' not in text
    assert ("span", "class", "status failed") in page.attributes


def test_a_report_of_an_interrupted_run_says_how_to_go_on(run):
    made = make_run(run, status="interrupted")
    assert "--resume" not in report(made)[0].text
    (made / "checkpoints").mkdir()
    page, _ = report(made)
    assert "interrupted" in page.text and "--resume" in page.text


def test_a_run_that_was_killed_or_is_still_going_has_a_report_too(run):
    page, _ = report(make_run(run, ended=False))
    assert "unfinished" in page.text and "still going, or was killed" in page.text
    assert "0.25 train loss" in page.text  # from what it had logged


def test_names_from_outside_are_escaped(tmp_path):
    events = [{"update": n, "epoch": n, "time": 1, '<u>"loss"': 1.0} for n in (1, 2)]
    made = make_run(
        tmp_path / "<i>run & co", events=events, metrics={"<u>x": 1.0}, command="<u>-x"
    )
    page, _ = report(made)
    assert "<i>run & co" in page.text
    assert {"i", "u"}.isdisjoint(page.tags)
    assert ("svg", "aria-label", '<u>"loss"') in page.attributes


def test_a_report_needs_nothing_from_anywhere(run):
    add_parts(make_run(run))
    page, text = report(run)
    assert not re.search(r"https?:|//\w|@import|url\(", text)
    assert {"script", "link", "iframe"}.isdisjoint(page.tags)
    sources = [value for _, name, value in page.attributes if name in ("src", "href")]
    assert sources and all(s.startswith("data:image/png;base64,") for s in sources)
    assert "default-src 'none'" in text  # nor could it fetch anything


def test_a_run_that_logged_nothing_still_has_a_report(run):
    made = make_run(run, events=[], status="interrupted", metrics={}, samples=0)
    page, _ = report(made)
    assert "interrupted" in page.text
    assert "svg" not in page.tags


def test_values_that_are_no_numbers_do_not_break_the_curves(run):
    events = [
        {"update": n, "epoch": n, "time": 1, "loss": value, "bad": "nan"}
        for n, value in enumerate([0.5, "nan", "inf", 0.25], 1)
    ]
    page, text = report(make_run(run, events=events, metrics={"loss": "nan"}))
    (line,) = re.findall(r'points="([^"]+)"', text)
    assert len(line.split()) == 2 and "nan" not in line
    assert "2 not finite" in page.text
    assert "nan loss" in page.text


def losses(*values):
    return [
        {"update": 10 * n, "epoch": n, "time": n, "train_loss": value}
        for n, value in enumerate(values, 1)
    ]


@pytest.mark.parametrize("lost", ["nan", "inf"])
def test_a_run_whose_loss_was_lost_says_so_and_is_not_green(run, lost):
    events = losses(0.5, "nan", 0.4, lost, lost)
    page, _ = report(make_run(run, events=events, metrics={"train_loss": lost}))
    assert "completed, but diverged" in page.text
    assert "From update 40 on, the logged loss was not finite" in page.text
    assert ("span", "class", "status diverged") in page.attributes


def test_a_loss_that_came_back_is_no_divergence(run):
    page, _ = report(make_run(run, events=losses(0.5, "nan", 0.25)))
    assert "diverged" not in page.text
    assert ("span", "class", "status completed") in page.attributes


def test_values_far_apart_are_drawn_on_a_logarithmic_axis(run):
    events = [
        {"update": n, "epoch": n, "time": 1, "learning_rate": rate}
        for n, rate in enumerate([1.0, 0.1, 0.01, 0.001], 1)
    ]
    _, text = report(make_run(run, events=events))
    (line,) = re.findall(r'aria-label="learning rate">.*?points="([^"]+)"', text)
    heights = [float(point.split(",")[1]) for point in line.split()]
    gaps = [b - a for a, b in itertools.pairwise(heights)]
    assert max(gaps) - min(gaps) < 0.2


def test_a_metric_that_never_changes_can_be_drawn(run):
    events = [{"update": n, "epoch": n, "time": 1, "zero": 0} for n in (1, 2)]
    _, text = report(make_run(run, events=events))
    (line,) = re.findall(r'points="([^"]+)"', text)
    (_, first), (_, second) = (point.split(",") for point in line.split())
    assert first == second


def test_the_axis_of_a_single_point_does_not_run_past_it(run):
    events = [{"update": 44, "epoch": 1.0, "time": 1, "train_loss": 0.512345678}]
    _, text = report(make_run(run, events=events))
    (chart,) = re.findall(r'aria-label="loss">(.*?)</svg>', text)
    assert re.findall(r'middle">([^<]+)<', chart) == ["1", "epoch"]
    assert re.findall(r'end">([^<]+)<', chart) == ["0.5123"]


def test_what_was_measured_once_has_figures_but_no_curves(run):
    events = [{"update": 44, "epoch": 1.0, "time": 1, "validation_loss": 0.5}]
    page, text = report(make_run(run, events=events, metrics={"validation_loss": 0.5}))
    assert "0.5 validation loss" in page.text
    assert 'aria-label="loss"' not in text


def test_a_long_run_keeps_its_peaks_in_few_points(run):
    events = [
        {"update": n, "epoch": n, "time": n, "loss": 9.0 if n == 7777 else math.sin(n)}
        for n in range(1, 10_001)
    ]
    _, text = report(make_run(run, events=events))
    assert len(text) < 60_000
    (line,) = re.findall(r'aria-label="loss">.*?points="([^"]+)"', text)
    points = [tuple(map(float, point.split(","))) for point in line.split()]
    highest = min(points, key=lambda p: p[1])
    share = (highest[0] - 50) / (400 - 12 - 50)
    assert share == pytest.approx(0.7777, abs=0.005)


def test_an_applications_parts_are_shown_in_order_with_their_pictures(run):
    add_parts(make_run(run))
    page, _ = report(run)
    words = ["Pipeline", "Matrix", "Mistakes", "Residuals", "Sweep", "Samples from"]
    places = [page.text.index(word) for word in words]
    assert places == sorted(places)
    assert page.tags.count("img") == 5
    assert "cat taken for dog: 2" in page.text
    assert "1 diverged" in page.text
    assert "after 10 updates" in page.text and "after 20 updates" in page.text


def test_a_damaged_part_does_not_keep_the_rest_from_being_shown(run):
    add_parts(make_run(run))
    (run / "report" / "sweep.json").write_text('{"kind": "points", "ti')
    (run / "report" / "strange.json").write_text('{"kind": "hologram"}')
    page, _ = report(run)
    assert "Sweep" not in page.text and "Residuals" in page.text


def test_of_many_pictures_some_are_shown_from_the_first_to_the_last(run):
    folder = make_run(run) / "pictures"
    folder.mkdir()
    for number in range(8):
        (folder / f"prior-{10 * number:09d}.png").write_bytes(b"picture %d" % number)
    (folder / "notes.txt").write_text("not a picture")
    page, _ = report(run)
    assert page.tags.count("img") == 6
    assert "after 0 updates" in page.text and "after 70 updates" in page.text


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"not the directory of a run.*config\.yml"
    ):
        write_report(tmp_path)


def test_log_events_that_are_damaged_are_left_out(tmp_path):
    lines = [
        b'{"update": 1, "loss": 0.5}',
        b'{"update": 2, "l\xff": 1}',
        b"[]",
        b'{"a": 1}',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines, b'{"update": 3}', b'{"u']))
    assert read_events(tmp_path) == [{"update": 1, "loss": 0.5}, {"update": 3}]
