"""The run directory: what it refuses, what it keeps, what other tools can read."""

import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml

from millrace.config import ConfigurationError
from millrace.run.directory import (
    FollowerRunDirectory,
    RunDirectory,
    open_run_directory,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    run_dir: Path | None = field(default=None, metadata={"may_change": True})
    quiet: bool = field(default=False, metadata={"may_change": True})
    learning_rate: float = 1e-5
    precision: str = field(default="16.16", metadata={"aliases": ("--half-kind",)})
    splits: tuple[str, ...] = ("a", "b")
    epochs: float | None = field(default=3, metadata={"may_grow": True})


def start(path: Path | None, config=None, *, command="cnn-train", resume=False):
    return open_run_directory(path, config or Options(), command=command, resume=resume)


def open_error(path: Path | None, config=None, **options) -> str:
    with pytest.raises(ConfigurationError) as caught:
        start(path, config, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Starting


def test_a_new_run_records_its_whole_configuration(tmp_path):
    path = tmp_path / "deep" / "inside" / "run"
    start(path, Options(run_dir=path, quiet=True))
    record = yaml.safe_load((path / "config.yml").read_text())
    assert record == {
        "command": "cnn-train",
        "run_dir": str(path),
        "quiet": True,
        "learning_rate": 1e-5,
        "precision": "16.16",
        "splits": ["a", "b"],
        "epochs": 3,
    }


def test_an_empty_directory_may_be_used(tmp_path):
    start(tmp_path)
    assert (tmp_path / "config.yml").exists()


def test_a_directory_that_is_not_empty_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    message = open_error(tmp_path)
    assert str(tmp_path) in message
    assert "--resume" in message
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("status", "other", "is_free"),
    [
        ("failed", None, True),
        ("interrupted", None, True),
        (None, None, True),
        ("completed", None, False),
        ("failed", "launch.log", True),
        ("failed", "metrics.jsonl", False),
        ("failed", "items.npy", False),
    ],
)
def test_the_directory_of_a_run_without_results_can_be_reused(
    tmp_path, status, other, is_free
):
    started = start(tmp_path)
    if status:
        started.write_summary({"status": status})
    started.close()
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "data.json").write_text("{}")
    if other:
        (tmp_path / other).write_text("")
    if not is_free:
        assert "not empty" in open_error(tmp_path)
        return
    start(tmp_path, Options(learning_rate=0.5))
    assert [path.name for path in tmp_path.iterdir()] == ["config.yml"]
    assert yaml.safe_load((tmp_path / "config.yml").read_text())["learning_rate"] == 0.5


def test_a_config_file_of_the_user_is_not_mistaken_for_a_run(tmp_path):
    (tmp_path / "config.yml").write_text("learning_rate: 0.1\n")
    assert "not empty" in open_error(tmp_path)
    assert (tmp_path / "config.yml").read_text() == "learning_rate: 0.1\n"


def test_a_file_in_place_of_the_directory_is_reported_as_a_file(tmp_path):
    path = tmp_path / "run"
    path.write_text("")
    message = open_error(path)
    assert str(path) in message
    rest = message.replace(str(path), "")
    assert "not empty" not in rest  # that would suggest --resume
    assert "file" in rest or "not a directory" in rest


def test_a_directory_that_cannot_be_created_is_refused_with_the_reason(tmp_path):
    # Not with permissions: tests may run as root, which may write anywhere.
    (tmp_path / "file").write_text("")
    message = open_error(tmp_path / "file" / "run")
    assert str(tmp_path / "file" / "run") in message
    assert "Not a directory" in message


def test_a_file_in_place_of_the_runs_folder_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    assert "Cannot write to the run directory runs/cnn-train-" in open_error(None)


def test_unnamed_runs_get_different_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = {start(None).path for _ in range(3)}  # within one second
    assert len(paths) == 3
    assert {path.parent for path in paths} == {Path("runs")}
    assert all(path.name.startswith("cnn-train-20") for path in paths)


def test_unnamed_runs_that_start_at_once_get_different_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(16) as pool:
        started = list(pool.map(lambda _: start(None), range(32)))
    assert len({directory.path for directory in started}) == 32


def test_discarding_a_run_deletes_the_folder_created_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = start(None)
    directory.discard()
    assert not directory.path.exists()


@pytest.mark.parametrize("was_there", [True, False])
def test_discarding_a_run_keeps_a_folder_that_existed_before(tmp_path, was_there):
    path = tmp_path / "run"
    if was_there:
        path.mkdir()
    start(path).discard()
    assert path.exists() == was_there
    assert not (path / "config.yml").exists()


# Resuming


@pytest.mark.parametrize("exists", [True, False])
def test_there_must_be_a_run_to_resume(tmp_path, exists):
    path = tmp_path / "run"
    if exists:
        path.mkdir()
    assert f"no run to resume in {path}" in open_error(path, resume=True)
    assert path.exists() == exists


def test_the_same_configuration_resumes(tmp_path):
    start(tmp_path)
    record = (tmp_path / "config.yml").read_bytes()
    assert start(tmp_path, resume=True).path == tmp_path
    assert (tmp_path / "config.yml").read_bytes() == record


def test_more_epochs_are_recorded_once_the_run_continues_and_fewer_are_refused(tmp_path):
    start(tmp_path).close()
    before = (tmp_path / "config.yml").read_text()
    longer = start(tmp_path, Options(epochs=5), resume=True)
    assert longer.extended_options == {"epochs": 5}
    assert (tmp_path / "config.yml").read_text() == before
    longer.record_extended_options()
    assert (tmp_path / "config.yml").read_text() == before.replace("epochs: 3", "epochs: 5")
    longer.close()
    for fewer in (3, None):
        message = open_error(tmp_path, Options(epochs=fewer), resume=True)
        assert f"epochs was 5, now {fewer}" in message


def test_a_run_cannot_be_opened_by_two_processes(tmp_path):
    running = start(tmp_path)
    message = open_error(tmp_path, resume=True)
    assert "Another process is writing the run" in message and str(tmp_path) in message
    running.close()
    resumed = start(tmp_path, resume=True)
    assert "Another process" in open_error(tmp_path, resume=True)
    resumed.close()


def test_a_run_older_than_an_option_resumes_with_its_default(tmp_path):
    start(tmp_path)
    record = yaml.safe_load((tmp_path / "config.yml").read_text())
    del record["precision"], record["splits"]
    (tmp_path / "config.yml").write_text(yaml.safe_dump(record))
    assert start(tmp_path, resume=True).path == tmp_path
    message = open_error(tmp_path, Options(precision="32.32"), resume=True)
    assert "precision was '16.16', now '32.32'" in message


def test_a_run_that_recorded_an_option_under_its_old_name_resumes(tmp_path):
    start(tmp_path, Options(precision="32.32"))
    text = (tmp_path / "config.yml").read_text()
    (tmp_path / "config.yml").write_text(text.replace("precision:", "half_kind:"))
    assert "precision was '32.32'" in open_error(tmp_path, resume=True)
    start(tmp_path, Options(precision="32.32"), resume=True).close()


def test_another_configuration_is_refused_naming_every_option_that_differs(tmp_path):
    start(tmp_path)
    other = Options(learning_rate=0.5, splits=("a",))
    message = open_error(tmp_path, other, resume=True)
    assert "learning_rate was 1e-05, now 0.5" in message
    assert "splits was ['a', 'b'], now ['a']" in message
    assert "precision" not in message


def test_options_that_do_not_affect_results_may_differ(tmp_path):
    start(tmp_path, Options(run_dir=Path("here")))
    start(tmp_path, replace(Options(), run_dir=tmp_path, quiet=True), resume=True)


def test_a_run_of_another_command_is_not_resumed(tmp_path):
    start(tmp_path)
    message = open_error(tmp_path, command="vcd-train", resume=True)
    assert "cnn-train" in message
    assert "vcd-train" in message


@pytest.mark.parametrize("text", ["", "command: [", "- a list\n"])
def test_a_damaged_config_file_is_refused(tmp_path, text):
    start(tmp_path)
    (tmp_path / "config.yml").write_text(text)
    assert "config.yml" in open_error(tmp_path, resume=True)


# Metrics


def test_metrics_are_read_as_they_were_written(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.read_metrics() == []
    events = [{"update": n, "epoch": n / 2, "time": 0.5, "loss": 0.1} for n in (1, 2)]
    for event in events:
        directory.append_metrics(event)
    assert directory.read_metrics() == events
    assert directory.metrics_path.read_text().count("\n") == 2


def parse_strictly(line: str):
    def no_such_number(text):
        raise AssertionError(f"{text} is not JSON")

    return json.loads(line, parse_constant=no_such_number)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_are_written_as_valid_json(tmp_path, value):
    directory = RunDirectory(tmp_path)
    directory.append_metrics({"update": 1, "loss": value, "nested": {"all": [value, 1.5]}})
    event = parse_strictly(directory.metrics_path.read_text())
    assert event["nested"]["all"][1] == 1.5
    assert math.isnan(value) == math.isnan(float(event["loss"]))
    assert float(event["loss"]) == value or math.isnan(value)
    directory.write_summary({"metrics": {"train_loss": value}})
    summary = parse_strictly((tmp_path / "summary.json").read_text())
    assert summary["metrics"]["train_loss"] == event["loss"]


def test_a_truncated_last_line_is_skipped(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.append_metrics({"update": 1, "loss": 0.5})
    directory.append_metrics({"update": 2, "loss": 0.25})
    whole = directory.metrics_path.read_bytes()
    directory.metrics_path.write_bytes(whole[:-9])
    assert directory.read_metrics() == [{"update": 1, "loss": 0.5}]


def test_events_after_a_truncated_line_are_not_lost(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.append_metrics({"update": 1})
    with directory.metrics_path.open("a") as file:
        file.write('{"update": 2, "lo')
    directory.truncate_metrics(1)  # as resuming does
    directory.append_metrics({"update": 2})
    assert directory.read_metrics() == [{"update": 1}, {"update": 2}]


def test_events_after_the_checkpoint_are_deleted_when_a_run_resumes(tmp_path):
    directory = RunDirectory(tmp_path)
    for update in (10, 20, 20, 30):
        directory.append_metrics({"update": update, "loss": math.nan})
    directory.truncate_metrics(20)
    assert [event["update"] for event in directory.read_metrics()] == [10, 20, 20]
    assert all(
        parse_strictly(line) for line in directory.metrics_path.read_text().splitlines()
    )
    directory.truncate_metrics(0)
    assert directory.metrics_path.read_text() == ""


# Previous summaries


def test_resuming_removes_and_returns_the_previous_summary(tmp_path):
    directory = start(tmp_path)
    directory.write_summary({"status": "interrupted", "updates": 198})
    assert directory.pop_summary() == {"status": "interrupted", "updates": 198}
    assert not (tmp_path / "summary.json").exists()
    assert directory.pop_summary() == {}


# Other processes of the run


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_follower_that_writes_nothing_creates_no_scratch_folder(tmp_path, temporary):
    home = start(tmp_path / "run").path
    follower = FollowerRunDirectory(home)
    assert follower.read_metrics() == []
    follower.append_metrics({"update": 1})
    follower.write_summary({})
    follower.close()
    assert follower.home == home
    assert list(temporary.iterdir()) == []
    assert [path.name for path in home.iterdir()] == ["config.yml"]


def test_the_scratch_folder_of_a_follower_is_deleted_on_close(tmp_path, temporary):
    follower = FollowerRunDirectory(start(tmp_path / "run").path)
    (follower.path / "items.npy").write_text("")
    assert follower.path == follower.path
    assert follower.path.parent == temporary
    follower.close()
    assert list(temporary.iterdir()) == []


def test_the_scratch_folder_of_a_killed_process_is_deleted_by_the_next(tmp_path, temporary):
    home = start(tmp_path / "run").path
    code = (
        "import os, pathlib, sys\n"
        "from millrace.run.directory import FollowerRunDirectory\n"
        "(FollowerRunDirectory(pathlib.Path(sys.argv[1])).path / 'file').write_text('')\n"
        "os._exit(9)"
    )
    environment = os.environ | {"TMPDIR": str(temporary)}
    subprocess.run([sys.executable, "-c", code, str(home)], env=environment)
    (left,) = temporary.glob("millrace-*")
    working, other = FollowerRunDirectory(home), FollowerRunDirectory(home)
    (temporary / "millrace-mine").mkdir()
    names = {path.name for path in (working.path, other.path)}
    assert len(names) == 2
    assert left.name not in names
    assert {path.name for path in temporary.iterdir()} == names | {"millrace-mine"}
    working.close()
    other.close()


# Leftovers of killed runs


def test_partial_files_of_a_killed_run_are_deleted_when_it_resumes(tmp_path):
    start(tmp_path).close()
    (tmp_path / "report").mkdir()
    leftovers = [
        *(f".{name}.0a1b2c3d.partial" for name in ("config.yml", "metrics.jsonl")),
        "report/.phases.json.0a1b2c3d.partial",
    ]
    for name in (*leftovers, ".mine.partial"):
        (tmp_path / name).write_text("")
    start(tmp_path, resume=True).close()
    assert not any((tmp_path / name).exists() for name in leftovers)
    assert (tmp_path / ".mine.partial").exists()


def test_the_directory_of_a_run_killed_during_its_first_writes_can_be_reused(tmp_path):
    for name in ("config.yml", "summary.json"):
        (tmp_path / f".{name}.0a1b2c3d.partial").write_text("")
        start(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["config.yml"]
