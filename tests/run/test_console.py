"""Terminal output of a run, with a terminal and without."""

import logging
import os
import re
import subprocess
import sys
import textwrap
import time
import types

import pytest

from millrace.run.bar import Progression
from millrace.run.console import Console, _most_relevant, result_rows

SCRIPT = """
from millrace.run.console import Console
console = Console(quiet={quiet}, verbose={verbose})
console.table({{"model": "small", "global batch": 32}})
console.start(100, 0)
console.status("compiling")
console.status("training")
metrics = {{"accuracy": 0.5, "learning_rate": 0.1, "loss": 0.25, "validation_rmse": 0.7}}
console.advance(50, metrics, 1234.5)
console.warning("[odd] things")
console.status("training")
console.stop()
console.line("done [here]")
"""


def in_terminal(quiet=False, verbose=False, **environment: str) -> str:
    """Run the script in a pseudo-terminal of 120 columns and return its output."""
    own_end, other_end = os.openpty()
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(quiet=quiet, verbose=verbose)],
        stderr=other_end,
        env=kept | {"TERM": "xterm-256color", "COLUMNS": "120"} | environment,
    )
    os.close(other_end)
    received = b""
    while True:
        try:
            part = os.read(own_end, 4096)
        except OSError:  # the other end is closed, on Linux
            break
        if not part:
            break
        received += part
    os.close(own_end)
    assert process.wait() == 0
    return received.decode()


def without_terminal(quiet=False, verbose=False) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(quiet=quiet, verbose=verbose)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


COLORS = r"\x1b\[[0-9;]*3[0-9][0-9;]*m"


def test_without_a_terminal_lines_are_plain_and_each_activity_appears_once():
    assert without_terminal() == [
        "model         small",
        "global batch  32",
        "compiling …",
        "training …",
        "warning: [odd] things",
        "done [here]",
    ]


def test_quiet_prints_only_warnings():
    assert without_terminal(quiet=True) == ["warning: [odd] things"]
    seen = re.sub(r"\x1b\[[^a-z]*[a-z]", "", in_terminal(quiet=True))
    assert seen.split() == ["warning:", "[odd]", "things"]


def test_verbose_prints_every_change_of_activity_with_its_time():
    lines = without_terminal(verbose=True)
    changes = [line.split(" s  ")[1] for line in lines if " s  " in line]
    assert changes == ["compiling", "training", "training"]


def test_in_a_terminal_the_bar_shows_loss_metric_speed_and_activity():
    seen = in_terminal()
    assert "loss 0.25  val rmse 0.7  1,234 samples/s" in seen
    assert "50/100" in seen
    assert "compiling" in seen and "training" in seen
    assert "learning rate" not in seen  # shown only with verbose
    assert re.search(COLORS, seen)


@pytest.mark.parametrize("verbose", [False, True])
def test_in_a_narrow_terminal_only_the_metrics_are_truncated(verbose):
    plain = re.sub(
        r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", in_terminal(verbose=verbose, COLUMNS="80")
    )
    (*_, line) = [line for line in re.split(r"[\r\n]+", plain) if "50/100" in line]
    expected = "accuracy 0.5" if verbose else "loss 0.25  val rmse 0.7  1,234 samples/s "
    assert re.search(rf"training ━.* 50/100 {expected}.*0:0\d left", line), line
    assert ("…" in line) == verbose
    assert len(line) <= 80


def test_no_color_removes_the_colors_and_keeps_the_bar():
    seen = in_terminal(NO_COLOR="1")
    assert "50/100" in seen
    assert not re.search(COLORS, seen)


def test_in_a_terminal_long_values_break_between_words_and_paths_stay_whole(
    monkeypatch, capsys
):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "50")
    console = Console()
    console.table({"model": "word " * 12, "run": "r" * 60, "size": 1})
    assert capsys.readouterr().err.splitlines() == [
        "model  " + "word " * 7 + "word",
        "       " + "word " * 3 + "word",
        "run    " + "r" * 60,
        "size   1",
    ]


def test_the_bar_shows_the_metrics_of_the_model_before_those_of_the_training():
    logged = {"gradients_finite": 1.0, "loss_scale": 8.0, "rmse": 0.5, "loss": 0.25}
    assert list(_most_relevant(logged)) == ["loss", "rmse"]


def test_only_an_interrupted_training_says_that_nothing_was_saved():
    summary = {"status": "interrupted", "updates": 0, "wall_seconds": 3.0, "metrics": {}}
    summary |= {"compile_seconds": 0.0, "facts": {"device": "1 x cpu"}}
    assert result_rows(summary) == {"interrupted": "in 3.0 s"}
    del summary["facts"]  # it has not described what it will do
    assert result_rows(summary) == {
        "interrupted": "in 3.0 s, before it began: nothing was saved"
    }
    summary["facts"] = {"updates": "100"}
    assert "nothing was saved" in result_rows(summary)["interrupted"]


def test_activities_are_recorded_on_the_clock_of_the_run(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("millrace.run.console.time.perf_counter", lambda: now[0])
    console = Console(quiet=True)
    now[0] += 5
    console.start(10, 4, elapsed=50.0)
    console.status("compiling")
    now[0] += 2
    console.status("training")
    now[0] += 3
    assert console.phases == [("compiling", 50, 52), ("training", 52, 55)]
    console.stop()
    now[0] += 9
    assert console.phases[-1] == ("training", 52, 55)


def test_a_second_bar_does_not_reset_the_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("millrace.run.console.time.perf_counter", lambda: now[0])
    console = Console(quiet=True)
    console.start(10, 0, elapsed=0.0)
    console.status("training")
    now[0] += 12
    console.stop()
    console.status("estimating")
    now[0] += 1
    console.start(5, 0)
    console.status("estimating")
    now[0] += 2
    console.stop()
    assert console.phases == [
        ("training", 0, 12),
        ("estimating", 12, 13),
        ("estimating", 13, 15),
    ]


def test_setting_the_clock_ends_the_current_activity_first(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("millrace.run.console.time.perf_counter", lambda: now[0])
    console = Console(quiet=True)
    now[0] += 5
    console.status("watching the pipeline")
    now[0] += 3
    console.start(10, 0, elapsed=0.5)
    console.status("training")
    now[0] += 1
    seconds = [end - start for _, start, end in console.phases]
    assert seconds == [3, 1]


@pytest.mark.parametrize("verbose", [False, True])
def test_the_log_of_the_package_goes_to_the_console(verbose, capsys):
    Console(verbose=verbose)
    log = logging.getLogger("millrace")
    log.debug("a detail")
    log.info("[a] fact")
    log.warning("beware")
    details = "a detail\n" if verbose else ""
    expected = textwrap.dedent(f"{details}[a] fact\nwarning: beware\n")
    assert capsys.readouterr().err == expected


# Activities other than training


def test_an_activity_shows_its_time_and_its_own_progress(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("millrace.run.bar.time.perf_counter", lambda: now[0])
    shown = Progression(total=400, done=100)
    shown.begin("compiling")
    now[0] += 12
    assert (shown.counts, shown.times) == ("", "12 s")
    shown.begin("training")
    assert (shown.counts, shown.times) == ("100/400", "--:-- left")
    now[0] += 10
    shown.advance(200, "loss 1")
    assert (shown.counts, shown.times) == ("200/400", "0:20 left")
    shown.begin("validating")
    now[0] += 30
    shown.report(1, 4)
    assert (shown.counts, shown.times) == ("1/4", "1:30 left")
    shown.begin("training")
    assert (shown.counts, shown.times) == ("200/400", "0:20 left")


def test_the_bar_is_erased_when_it_is_stopped():
    seen = in_terminal()
    last_bar = seen.rindex("50/100")
    assert "\x1b[2K" in seen[last_bar:]  # erases the line
    assert seen.rstrip().endswith("done [here]")


class Display:
    """Stands in for a notebook: keeps the outputs of a cell, which can be updated."""

    def __init__(self):
        self.outputs = []

    def display(self, content, raw, display_id):
        assert raw and display_id
        self.outputs.append([content])
        return self

    def update(self, content, raw):
        self.outputs[-1].append(content)


def test_a_notebook_has_one_output_that_is_updated(monkeypatch, capsys):
    shown = Display()
    module = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=1))
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setattr("millrace.run.bar._TICK_SECONDS", 0.01)
    console = Console()
    console.status("starting")
    time.sleep(0.1)
    console.start(100, 0)
    console.status("training")
    console.advance(50, {"loss": 0.25}, 1234.5)
    console.event({"epoch": 1, "update": 50, "train_loss": 0.25})
    time.sleep(0.1)
    console.stop()
    console.status("testing")
    time.sleep(0.1)
    console.stop()
    (updates,) = shown.outputs
    texts = [content["text/plain"] for content in updates]
    places = [
        next(place for place, text in enumerate(texts) if expected in text)
        for expected in ("starting", "50/100  loss 0.25  1,234 samples/s", "testing")
    ]
    assert places == sorted(places) and places[0] == 0
    assert texts[-1] == ""
    assert capsys.readouterr().err == ""  # and no line per event
