"""The report: one well-formed page that needs no other file."""

import itertools
import math
import re
from html.parser import HTMLParser

import pytest
from made_runs import CURVE, EVENTS, add_sections, find_chart, find_curve, make_run

from millrace.config import ConfigurationError
from millrace.drawing.charts import is_logarithmic
from millrace.drawing.interactive import chart_script
from millrace.report.metrics import run_curves
from millrace.report.record import read_events, read_run
from millrace.report.run_page import write_report

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """A parsed page; every tag must be closed in the right place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
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
        if "script" in self.open:
            self.scripts.append(data)
        elif "style" not in self.open:
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


def test_a_report_shows_what_ran_how_it_ended_and_its_results(run):
    page, _ = report(make_run(run))
    assert page.tags.count("html") == page.tags.count("body") == 1
    for words in (
        "cnn train · my-run",
        "completed",
        "0.9611 validation accuracy",
        "0.25 train loss",
        "88 updates",
        "281,600 samples",
        "21,140 samples per second",
        "model digits_cnn, 24,058 parameters",
        "compiling 1.6 s",
        "compiled program, per device 3.0 MiB",
        "peak host memory of the process 5.0 GiB",
        "--num-epochs 2",
        "devices 4 x cpu (cpu)",
        "jax 0.10.2",
        "Run in /home/someone",
    ):
        assert words in page.text, words


def test_the_command_to_reproduce_a_run_has_no_run_directory(run):
    command = "millrace cnn train --run-dir 'my run' --seed 3 --resume"
    _, text = report(make_run(run, command="cnn-train"))
    assert "<pre>pip install . jax==0.10.2\nmillrace cnn train --num-epochs 2</pre>" in text
    (run / "summary.json").write_text(f'{{"command": "{command}"}}')
    _, text = report(run)
    assert "<pre>millrace cnn train --seed 3</pre>" in text


def test_the_command_to_reproduce_a_run_installs_millrace_from_a_checkout(run):
    versions = {"python": "3.11.7", "millrace": "0.1.0", "jax": "0.10.2"}
    _, text = report(make_run(run, versions=versions, commit="874615f"))
    assert "with millrace 0.1.0, commit <code>874615f</code>. In a checkout" in text
    assert "<pre>pip install . jax==0.10.2\n" in text
    assert "millrace==" not in text
    _, text = report(make_run(run, versions=versions, commit=None))
    assert "with millrace 0.1.0. In a checkout" in text


def test_a_report_shows_the_time_to_train_if_it_was_measured(run):
    page, _ = report(make_run(run, time_to_train_seconds=306.6))
    assert "5.1 minutes time to train" in page.text
    page, _ = report(make_run(run))
    assert "time to train" not in page.text


def test_the_best_result_comes_first_and_the_last_after_it(run):
    worse = {"update": 99, "epoch": 3.0, "time": 5.0, "validation_accuracy": 0.63}
    made = make_run(run, events=[*EVENTS, worse], metrics={"validation_accuracy": 0.63})
    words = "0.9611 best validation accuracy at epoch 2 0.63 validation accuracy last"
    assert words in report(made)[0].text
    best = {"metric": "validation_accuracy", "value": 0.7, "epoch": 9.0, "update": 9}
    page, _ = report(make_run(run, best=best))
    assert "0.7 best validation accuracy at epoch 9 0.9611" in page.text
    page, _ = report(make_run(run))  # the last is the best
    assert "0.9611 validation accuracy best, at epoch 2 0.25 train loss" in page.text


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (("9", "10.5", "16"), ["2^-9", "2^-10.5", "2^-16"]),
        (("lr_0.1", "lr_1e-05", "lr_0.02"), ["lr 1e-05", "lr 0.02", "lr 0.1"]),
    ],
)
def test_the_trials_of_a_sweep_share_the_first_chart(run, labels, names):
    events = [
        {"update": n, "epoch": n, "time": n, "train_loss": 1.0}
        | {f"validation_rmse_{label}": 1.0 / n for label in labels}
        for n in (1, 2)
    ]
    metrics = {"best_rmse": 0.5}
    made = make_run(run, events=events, command="autoencoder-sweep", metrics=metrics)
    _, text = report(made)
    chart = find_chart(text, "validation RMSE")
    assert re.findall(r"● ([^<]+)<", chart) == names
    assert len(re.findall(CURVE, chart)) == 3
    assert text.index('aria-label="validation RMSE"') < text.index('aria-label="loss"')


def test_a_ranking_is_judged_by_its_ndcg(run):
    events = [
        {"update": n, "epoch": n, "time": n, "train_loss": 6 - n}
        | {"validation_ndcg_at_10": value, "validation_network_weight": 0.1}
        for n, value in ((1, 0.21), (2, 0.25), (3, 0.23))
    ]
    metrics = {"validation_ndcg_at_10": 0.23, "train_loss": 3.0}
    page, _ = report(make_run(run, events=events, metrics=metrics))
    assert (
        "0.25 best validation NDCG@10 at epoch 2 0.23 validation NDCG@10 last" in page.text
    )
    # A model of ratings is judged by its error, also if its rankings are measured.
    events[-1]["validation_rmse"] = 0.9
    page, _ = report(make_run(run, events=events, metrics=metrics))
    assert "0.9 best validation RMSE at epoch 3" in page.text


def test_the_latency_of_inference_has_a_table(run):
    result = {
        "batch_size": 8,
        "samples_per_second": [1200.0, 1300.0],
        "latency_ms": {"mean": 0.3, "p99": 0.52},
        "latency_calls": 1000,
        "accuracy": 0.75,
        "memory_bytes": 2048,
    }
    page, _ = report(make_run(run, command="cnn-validate", results=[result]))
    titles = "batch size samples per second latency mean latency p99 calls accuracy memory"
    assert f"Inference {titles} 8 1,300 0.300 ms 0.520 ms 1,000 0.75 2.0 KiB" in page.text


def test_the_columns_of_a_confusion_matrix_have_names(run):
    add_sections(make_run(run))
    chart = find_chart(report(run)[1], "Matrix")
    for name in ("cat", "dog", "a class wit…"):
        assert chart.count(f">{name}</text>") == 2  # a row and a column
    assert chart.count("rotate(-90)") == 4


def test_training_and_validation_share_a_chart(run):
    more = [e | {"validation_loss": 0.6} for e in EVENTS if "validation_accuracy" in e]
    _, text = report(make_run(run, events=EVENTS + more))
    chart = find_chart(text, "loss")
    assert len(re.findall(CURVE, chart)) == 2
    assert "train" in chart and "validation" in chart


def test_a_falling_loss_falls_in_its_chart(run):
    _, text = report(make_run(run))
    (x1, y1), (x2, y2) = find_curve(text, "loss")
    assert x1 < x2 and y1 < y2  # SVG counts downwards


def test_throughput_is_drawn_over_time_with_compilation_marked(run):
    _, text = report(make_run(run))
    chart = find_chart(text, "samples per second")
    assert "compiling: 1.59 s" in chart
    assert "steady state" in chart
    heights = [y for _, y in find_curve(text, "samples per second")]
    # 44 updates of 3200 samples in 3 s, then in 1 s: three times as fast.
    base = 230 - 36
    assert (base - heights[2]) / (base - heights[0]) == pytest.approx(3, rel=0.02)


def with_waits(*shares):
    logged = [event for event in EVENTS if "train_loss" in event]
    return [e | {"input_wait": x} for e, x in zip(logged, shares, strict=True)]


def test_waiting_for_data_has_a_chart_if_it_is_worth_one(run):
    _, text = report(make_run(run, events=with_waits(0.02, 0.4)))
    (_, y1), (_, y2) = find_curve(text, "input wait")
    assert y2 < y1  # SVG counts downwards
    page, _ = report(make_run(run, events=with_waits(0.0, 0.009)))
    assert "input wait" not in page.text


def test_negligible_shares_of_waiting_do_not_make_the_axis_logarithmic(run):
    made = make_run(run, events=with_waits(0.0004, 0.4))
    (wait,) = run_curves(read_run(made))["input_wait"]
    assert [y for _, y in wait.points] == [0.0, 0.4]
    assert not is_logarithmic(0.0, 0.4)


def test_a_report_of_a_failed_run_shows_and_escapes_the_error(run):
    error = 'ValueError: <b>"a" & b</b> </body><script>alert(1)</script>'
    made = make_run(run, status="failed", error=error, metrics={}, device=None)
    page, text = report(made)
    assert "failed" in page.text and "ended with an error" in page.text
    assert error in page.text
    assert "alert(1)" not in "".join(page.scripts)
    assert "<b>&quot;" not in text and '<b>"a"' not in text
    assert ("span", "class", "status failed") in page.attributes


def test_a_report_of_an_interrupted_run_says_how_to_resume_it(run):
    made = make_run(run, status="interrupted")
    assert "--resume" not in report(made)[0].text
    (made / "checkpoints").mkdir()
    page, _ = report(made)
    assert "interrupted" in page.text and "--resume" in page.text


def test_a_run_that_was_killed_or_is_still_running_has_a_report_too(run):
    page, _ = report(make_run(run, ended=False))
    assert "unfinished" in page.text and "still running, or was killed" in page.text
    assert "0.25 train loss" in page.text  # from what it had logged


def test_names_of_runs_and_metrics_are_escaped(tmp_path):
    events = [{"update": n, "epoch": n, "time": 1, '<u>"loss"': 1.0} for n in (1, 2)]
    made = make_run(
        tmp_path / "<i>run & co", events=events, metrics={"<u>x": 1.0}, command="<u>-x"
    )
    page, _ = report(made)
    assert "<i>run & co" in page.text
    assert {"i", "u"}.isdisjoint(page.tags)
    assert ("svg", "aria-label", '<u>"loss"') in page.attributes


def test_a_report_loads_no_other_file(run):
    add_sections(make_run(run))
    page, text = report(run)
    rest = text.replace(chart_script(), "")
    assert not re.search(r"https?:|//\w|@import|url\(", rest)
    assert not re.search(r"fetch|XMLHttp|import|WebSocket|eval|innerHTML", chart_script())
    assert {"link", "iframe"}.isdisjoint(page.tags)
    sources = [value for _, name, value in page.attributes if name in ("src", "href")]
    assert sources and all(s.startswith("data:image/png;base64,") for s in sources)
    assert "default-src 'none'" in text  # nor could it fetch anything


def test_a_run_that_logged_nothing_still_has_a_report(run):
    made = make_run(run, events=[], status="interrupted", metrics={}, samples=0)
    page, _ = report(made)
    assert "interrupted" in page.text
    assert "svg" not in page.tags


def test_curves_leave_out_values_that_are_not_finite(run):
    events = [
        {"update": n, "epoch": n, "time": 1, "loss": value, "bad": "nan"}
        for n, value in enumerate([0.5, "nan", "inf", 0.25], 1)
    ]
    page, text = report(make_run(run, events=events, metrics={"loss": "nan"}))
    (line,) = re.findall(CURVE, text)
    assert len(line.split()) == 2 and "nan" not in line
    assert "2 not finite" in page.text
    assert "nan loss" in page.text


def losses(*values):
    return [
        {"update": 10 * n, "epoch": n, "time": n, "train_loss": value}
        for n, value in enumerate(values, 1)
    ]


@pytest.mark.parametrize("lost", ["nan", "inf"])
def test_a_report_says_that_training_diverged(run, lost):
    events = losses(0.5, "nan", 0.4, lost, lost)
    page, _ = report(make_run(run, events=events, metrics={"train_loss": lost}))
    assert "completed, but diverged" in page.text
    assert "From update 40 on, the logged loss was not finite" in page.text
    assert ("span", "class", "status diverged") in page.attributes


def test_a_report_says_that_the_loss_exploded(run):
    exploded = {"update": 1060, "loss": 1e6, "first_loss": 2.3}
    page, _ = report(make_run(run, events=losses(2.3, 1e6), diverged=exploded))
    assert "completed, but diverged" in page.text
    assert "1,000,000 at update 1,060, 2.3 at the start" in page.text


def test_a_loss_that_recovered_is_not_a_divergence(run):
    page, _ = report(make_run(run, events=losses(0.5, "nan", 0.25)))
    assert "diverged" not in page.text
    assert ("span", "class", "status completed") in page.attributes


def test_values_that_differ_by_much_have_a_logarithmic_axis(run):
    events = [
        {"update": n, "epoch": n, "time": 1, "learning_rate": rate}
        for n, rate in enumerate([1.0, 0.1, 0.01, 0.001], 1)
    ]
    _, text = report(make_run(run, events=events))
    heights = [y for _, y in find_curve(text, "learning rate")]
    gaps = [b - a for a, b in itertools.pairwise(heights)]
    assert max(gaps) - min(gaps) < 0.2


def test_a_metric_that_never_changes_can_be_drawn(run):
    events = [{"update": n, "epoch": n, "time": 1, "zero": 0} for n in (1, 2)]
    _, text = report(make_run(run, events=events))
    (_, first), (_, second) = find_curve(text, "zero")
    assert first == second


def test_the_axes_of_a_single_point_have_one_tick_each(run):
    events = [{"update": 44, "epoch": 1.0, "time": 1, "train_loss": 0.512345678}]
    _, text = report(make_run(run, events=events))
    chart = find_chart(text, "loss")
    assert re.findall(r'middle">([^<]+)<', chart) == ["1", "epoch"]
    assert re.findall(r'end">([^<]+)<', chart) == ["0.5123"]


def test_a_single_point_is_no_curve_next_to_others(run):
    once = {"update": 88, "epoch": 2.0, "time": 4.2, "train_finite_models": 4.0}
    charts = run_curves(read_run(make_run(run, events=[*EVENTS, once])))
    assert list(charts) == ["loss", "accuracy"]
    charts = run_curves(read_run(make_run(run, events=[EVENTS[0], EVENTS[1]])))
    assert list(charts) == ["loss", "accuracy"]  # there is nothing else


def test_the_best_result_of_a_sweep_is_shown_once(run):
    best = {"metric": "validation_rmse", "value": 0.51}
    page, _ = report(make_run(run, best=best, metrics={"best_rmse": 0.51}))
    assert "0.51 best validation RMSE" in page.text
    assert "best RMSE" not in page.text


def test_metrics_measured_once_are_shown_without_curves(run):
    events = [{"update": 44, "epoch": 1.0, "time": 1, "validation_loss": 0.5}]
    page, text = report(make_run(run, events=events, metrics={"validation_loss": 0.5}))
    assert "0.5 validation loss" in page.text
    assert 'aria-label="loss"' not in text


def test_the_curve_of_a_long_run_keeps_its_peaks_with_few_points(run):
    events = [
        {"update": n, "epoch": n, "time": n, "loss": 9.0 if n == 7777 else math.sin(n)}
        for n in range(1, 10_001)
    ]
    _, text = report(make_run(run, events=events))
    assert len(text) - len(chart_script()) < 60_000
    highest = min(find_curve(text, "loss"), key=lambda p: p[1])
    share = (highest[0] - 50) / (400 - 12 - 50)
    assert share == pytest.approx(0.7777, abs=0.005)


def test_the_sections_of_an_application_are_shown_in_order_with_their_images(run):
    add_sections(make_run(run))
    page, _ = report(run)
    words = ["Pipeline", "Matrix", "Mistakes", "Residuals", "Sweep", "Samples from"]
    places = [page.text.index(word) for word in words]
    assert places == sorted(places)
    assert page.tags.count("img") == 5
    assert "cat predicted as dog: 2" in page.text
    assert "1 diverged" in page.text
    assert "after 10 updates" in page.text and "after 20 updates" in page.text


def test_a_damaged_section_is_left_out(run):
    add_sections(make_run(run))
    (run / "report" / "sweep.json").write_text('{"kind": "points", "ti')
    (run / "report" / "strange.json").write_text('{"kind": "hologram"}')
    page, _ = report(run)
    assert "Sweep" not in page.text and "Residuals" in page.text


def test_of_many_images_some_are_shown_from_the_first_to_the_last(run):
    folder = make_run(run) / "pictures"
    folder.mkdir()
    for number in range(8):
        (folder / f"prior-{10 * number:09d}.png").write_bytes(b"image %d" % number)
    (folder / "notes.txt").write_text("not an image")
    page, _ = report(run)
    assert page.tags.count("img") == 4
    assert "after 0 updates" in page.text and "after 70 updates" in page.text


def test_a_folder_that_is_not_a_run_is_rejected(tmp_path):
    with pytest.raises(ConfigurationError, match=r"is not a run directory.*config\.yml"):
        write_report(tmp_path)


def test_damaged_log_events_are_left_out(tmp_path):
    lines = [
        b'{"update": 1, "loss": 0.5}',
        b'{"update": 2, "l\xff": 1}',
        b"[]",
        b'{"a": 1}',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines, b'{"update": 3}', b'{"u']))
    assert read_events(tmp_path) == [{"update": 1, "loss": 0.5}, {"update": 3}]
