"""What a run shows, with a terminal and without."""

import logging
import os
import re
import subprocess
import sys
import textwrap

import pytest

from millrace.run.console import Console

STORY = """
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
    """Run the story in a pseudo-terminal of 120 columns and return what it received."""
    ours, theirs = os.openpty()
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", STORY.format(quiet=quiet, verbose=verbose)],
        stderr=theirs,
        env=kept | {"TERM": "xterm-256color", "COLUMNS": "120"} | environment,
    )
    os.close(theirs)
    received = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        received += part
    os.close(ours)
    assert process.wait() == 0
    return received.decode()


def plainly(quiet=False, verbose=False) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", STORY.format(quiet=quiet, verbose=verbose)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


COLORS = r"\x1b\[[0-9;]*3[0-9][0-9;]*m"


def test_without_a_terminal_there_are_plain_lines_and_each_activity_once():
    assert plainly() == [
        "model         small",
        "global batch  32",
        "compiling …",
        "training …",
        "warning: [odd] things",
        "done [here]",
    ]


def test_quiet_leaves_only_warnings():
    assert plainly(quiet=True) == ["warning: [odd] things"]
    seen = re.sub(r"\x1b\[[^a-z]*[a-z]", "", in_terminal(quiet=True))
    assert seen.split() == ["warning:", "[odd]", "things"]


def test_verbose_says_every_change_with_its_time():
    lines = plainly(verbose=True)
    changes = [line.split(" s  ")[1] for line in lines if " s  " in line]
    assert changes == ["compiling", "training", "training"]


def test_in_a_terminal_the_bar_shows_loss_metric_speed_and_what_is_being_done():
    seen = in_terminal()
    assert "loss 0.25  val rmse 0.7  1,234 samples/s" in seen
    assert "50/100" in seen
    assert "compiling" in seen and "training" in seen
    assert "learning rate" not in seen  # only with verbose is there room for everything
    assert re.search(COLORS, seen)


@pytest.mark.parametrize("verbose", [False, True])
def test_in_a_narrow_terminal_count_and_time_left_stay_and_metrics_are_cut(verbose):
    plain = re.sub(
        r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", in_terminal(verbose=verbose, COLUMNS="80")
    )
    (*_, line) = [line for line in re.split(r"[\r\n]+", plain) if "50/100" in line]
    words = "accuracy 0.5" if verbose else "loss 0.25  val rmse 0.7  1,234 samples/s "
    assert re.search(rf"training ━.* 50/100 {words}.*--:--", line), line
    assert ("…" in line) == verbose
    assert len(line) <= 80


def test_no_color_leaves_the_bar_but_no_colors():
    seen = in_terminal(NO_COLOR="1")
    assert "50/100" in seen
    assert not re.search(COLORS, seen)


def test_what_was_done_when_is_remembered_on_the_runs_clock(monkeypatch):
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


def test_a_second_bar_leaves_the_runs_clock_as_it_is(monkeypatch):
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


def test_what_is_being_done_when_the_clock_is_set_does_not_end_before_it_began(monkeypatch):
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
def test_the_packages_log_goes_to_the_console(verbose, capsys):
    Console(verbose=verbose)
    log = logging.getLogger("millrace")
    log.debug("a detail")
    log.info("[a] fact")
    log.warning("beware")
    details = "a detail\n" if verbose else ""
    expected = textwrap.dedent(f"{details}[a] fact\nwarning: beware\n")
    assert capsys.readouterr().err == expected
