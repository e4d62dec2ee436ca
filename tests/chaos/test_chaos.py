"""Faults at random moments, in all applications: results stay those of a quiet run."""

import os
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chaos import campaign
from chaos.campaign import DisturbedRun, Subject, disturb
from chaos.faults import Attempt, Disk
from chaos.findings import Findings, find_differences, find_shortfalls, read_events


@pytest.fixture
def folder(tmp_path):
    """Return a folder, on a machine that can mount a file system."""
    try:
        Disk(tmp_path / "try").unmount()
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"") or str(error)
        pytest.skip(f"a power cut is simulated with a mounted ext4 image: {reason!r}")
    return tmp_path


@pytest.mark.slow
def test_half_an_hour_of_faults_changes_no_result(folder):
    minutes = float(os.environ.get("CHAOS_MINUTES", "30"))
    found, shortfalls = disturb(seed=1, minutes=minutes, parallel=2, folder=folder)
    assert not found.problems, found.problems[0]
    assert not shortfalls


def test_a_weight_or_event_that_differs_is_found():
    expected = {"weights": [np.ones(2), np.zeros(3)], "events": [{"update": 1}]}
    assert find_differences(expected, expected) == {}
    other = {"weights": [np.ones(2), np.full(3, 1e-9)], "events": [{"update": 1}]}
    assert find_differences(other, expected) == {
        "differing weights": "1 of 2 weights differ, by up to 1e-09"
    }
    assert find_differences(other, expected, tolerance=1e-8) == {}
    without = expected | {"events": []}
    assert find_differences(without, expected) == {
        "differing log events": "log events differ (0 and 1)"
    }
    not_a_number = expected | {"weights": [np.ones(2), np.full(3, np.nan)]}
    assert find_differences(not_a_number, expected, tolerance=1.0)


def test_a_campaign_that_has_tested_too_little_fails():
    found = Findings()
    found.caused["vcd"].update({"power cut": 150, "Ctrl-C": 49})
    found.runs["vcd"] += 1
    asked = {"subjects": ["vcd"], "faults": ["power cut", "Ctrl-C"]}
    assert find_shortfalls(found, **asked, minutes=30) == ["199 faults, fewer than 200"]
    assert find_shortfalls(found, **asked, minutes=29) == []
    more = {"subjects": ["vcd", "cnn"], "faults": ["power cut", "SIGTERM"]}
    found.caused["vcd"]["Ctrl-C"] += 1
    assert find_shortfalls(found, **more, minutes=30) == [
        "cnn was not disturbed",
        "no disturbed run of cnn was completed",
        "never caused: SIGTERM",
    ]


def test_a_log_event_that_is_being_written_is_no_progress(tmp_path):
    assert read_events(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"update": 1}\n{"update": 2')
    assert read_events(tmp_path) == [{"update": 1}]


def make_place(path) -> Any:
    """Return what a `Disk` is for faults that need no file system of their own."""
    return SimpleNamespace(root=path)


COMMAND = """
import json, sys, time
for update in range(int(sys.argv[1])):
    open("run/metrics.jsonl", "a").write(json.dumps({"update": update}) + "\\n")
    time.sleep(0.05)
time.sleep(60)
"""


@pytest.mark.parametrize(("updates", "is_hung"), [(1, True), (600, False)])
def test_a_command_that_hangs_after_a_pause_is_found(
    updates, is_hung, tmp_path, monkeypatch
):
    monkeypatch.setattr(campaign, "_LONGEST_PAUSE", 1.0)
    monkeypatch.setattr(campaign, "_HANG_WATCHED", 0.1)
    pause = {"a process stopped for a while": lambda *_: False}
    monkeypatch.setattr(campaign, "FAULTS", pause)
    (tmp_path / "run").mkdir()
    found, disk = Findings(), make_place(tmp_path)
    subject = Subject("sleeper", [], {}, 1.0)
    words = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{COMMAND}"]
    attempt = Attempt([*words, str(updates)], disk, dict(os.environ))
    while not attempt.has_logged:
        assert not attempt.wait(0.05), attempt.output
    run = DisturbedRun(subject, disk, random.Random(0), found)
    assert run.disturb(attempt) == (not is_hung)
    attempt.close()
    assert found.count_problems()["hangs"] == is_hung
    assert found.faults.total() == 1


def test_each_subject_meets_the_fault_that_it_has_met_least(tmp_path, monkeypatch):
    def cannot(*_):
        raise LookupError

    faults = {"often": lambda *_: True, "seldom": lambda *_: True, "never": cannot}
    monkeypatch.setattr(campaign, "FAULTS", faults)
    found, disk = Findings(), make_place(tmp_path)
    found.caused["sleeper"]["often"] += 3
    subject = Subject("sleeper", [], {}, 1.0)
    run = DisturbedRun(subject, disk, random.Random(0), found)
    attempt = Attempt([sys.executable, "-c", ""], disk, dict(os.environ))
    for _ in range(3):
        assert run.disturb(attempt)
    attempt.close()
    assert found.caused["sleeper"] == {"often": 3, "seldom": 3}
    assert len(found.ends["seldom"]) == 3
