"""Every writer receives the log events of the run."""

import importlib.util
import json
import math
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from millrace.config import ConfigurationError, parse
from millrace.run.directory import RunDirectory
from millrace.run.options import RunOptions
from millrace.run.run import run_command
from millrace.run.writers import Tracker, open_writers

EVENTS = [
    {"update": 44, "epoch": 1.0, "time": 2.5, "train_loss": 0.5, "learning_rate": 1e-5},
    {"update": 44, "epoch": 1.0, "time": 2.6, "validation_accuracy": 0.75},
    {"update": 88, "epoch": 2.0, "time": 3.5, "train_loss": 0.25, "learning_rate": 0.0},
]


def write_all(tmp_path, events=EVENTS, status=0, **options):
    directory = RunDirectory(tmp_path)
    config = {"micro_batch_size": 8}
    writers = open_writers(RunOptions(**options), directory, config, "cnn-train")
    for event in events:
        for writer in writers:
            writer.write(event)
    for writer in writers:
        if isinstance(writer, Tracker):
            writer.exit_status = status
        writer.close()
    return directory


def test_json_lines_are_always_written(tmp_path):
    write_all(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == EVENTS
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_an_event_can_be_read_as_soon_as_it_is_written(tmp_path):
    directory = RunDirectory(tmp_path)
    (writer,) = open_writers(RunOptions(), directory, {}, "cnn-train")
    writer.write(EVENTS[0])
    assert directory.read_metrics() == EVENTS[:1]


# TensorBoard


def read_tensorboard(path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    accumulator = EventAccumulator(str(path)).Reload()
    tags = accumulator.Tags()
    series = {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in tags["scalars"]
    }
    for tag in tags["tensors"]:
        series[tag] = [
            (event.step, make_ndarray(event.tensor_proto).item())
            for event in accumulator.Tensors(tag)
        ]
    return series


def test_tensorboard_reads_every_metric_at_its_update(tmp_path):
    write_all(tmp_path, tensorboard=True)
    series = read_tensorboard(tmp_path / "tensorboard")
    assert series["train_loss"] == [(44, 0.5), (88, 0.25)]
    assert series["validation_accuracy"] == [(44, 0.75)]
    assert series["learning_rate"] == [(44, pytest.approx(1e-5)), (88, 0.0)]
    assert "update" not in series
    assert "time" not in series


def test_tensorboard_shows_a_loss_that_is_not_a_number(tmp_path):
    events = [{"update": 1, "epoch": 0.5, "time": 1.0, "train_loss": math.nan}]
    write_all(tmp_path, events, tensorboard=True)
    ((step, loss),) = read_tensorboard(tmp_path / "tensorboard")["train_loss"]
    assert step == 1
    assert math.isnan(loss)


def test_a_resumed_run_continues_its_tensorboard_files(tmp_path):
    write_all(tmp_path, EVENTS[:2], tensorboard=True)
    write_all(tmp_path, EVENTS[2:], tensorboard=True)
    series = read_tensorboard(tmp_path / "tensorboard")
    assert series["train_loss"] == [(44, 0.5), (88, 0.25)]


def test_without_the_option_there_is_no_tensorboard_folder(tmp_path):
    write_all(tmp_path)
    assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_without_its_package_is_an_error_with_the_install_command(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install tensorboard\."):
        write_all(tmp_path, tensorboard=True)
    assert not (tmp_path / "tensorboard").exists()


# Weights & Biases


def test_wandb_without_its_package_is_an_error_with_the_install_command(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it now fails
    with pytest.raises(ConfigurationError, match=r"pip install wandb\."):
        write_all(tmp_path, wandb=True)


class FakeWandb:
    """Records what a run sends."""

    def __init__(self):
        self.logged = []
        self.settings = {}
        self.finished = 0
        self.exit_codes = []
        self.axes = {}

    def init(self, **settings):
        self.settings = settings
        return SimpleNamespace(
            log=self.logged.append, finish=self._finish, define_metric=self._define
        )

    def _define(self, name, step_metric=None):
        self.axes[name] = step_metric

    def _finish(self, **exit_code):
        self.finished += 1
        self.exit_codes += exit_code.values()


def test_wandb_receives_the_configuration_and_every_metric(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write_all(tmp_path, wandb=True)
    assert wandb.settings["config"] == {"micro_batch_size": 8}
    assert wandb.settings["dir"] == str(tmp_path)
    assert wandb.logged == [
        {"update": 44, "epoch": 1.0, "train_loss": 0.5, "learning_rate": 1e-5},
        {"update": 44, "epoch": 1.0, "validation_accuracy": 0.75},
        {"update": 88, "epoch": 2.0, "train_loss": 0.25, "learning_rate": 0.0},
    ]
    assert wandb.axes == {"update": None, "*": "update"}
    assert wandb.finished == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, 0), (KeyError(), 1), (ConfigurationError("x"), 2), (KeyboardInterrupt(), 130)],
)
def test_wandb_learns_how_a_run_has_ended(error, status, tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    def work(config, run):
        if error is not None:
            raise error

    config = OwnConfig(run=RunOptions(run_dir=tmp_path / "run", tracker=["wandb"]))
    assert run_command(work, config, command="own", command_line="own") == status
    assert wandb.exit_codes == [status]


def test_a_tracker_is_closed_if_the_next_one_cannot_be_opened(tmp_path, monkeypatch):
    trackio = FakeWandb()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match=r"pip install wandb\."):
        write_all(tmp_path, tracker=["trackio", "wandb"])
    assert trackio.finished == 1


def test_wandb_draws_old_checkpoints_at_their_own_updates(tmp_path, monkeypatch):
    """With ``--validate every``, they are validated after the last update."""
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    late = [
        {"update": update, "epoch": update / 44, "time": 9.0, "validation_accuracy": 0.5}
        for update in (44, 88)
    ]
    write_all(tmp_path, [*EVENTS, *late], wandb=True)
    assert [logged["update"] for logged in wandb.logged] == [44, 44, 88, 44, 88]


def test_without_the_option_wandb_is_not_used(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write_all(tmp_path)
    assert wandb.settings == {}
    assert wandb.logged == []


# Trackers by name


@pytest.mark.parametrize("tracker", ["mlflow", "trackio", "wandb"])
def test_a_tracker_without_its_package_is_an_error_with_the_install_command(
    tracker, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(ConfigurationError, match=rf"pip install {tracker}\."):
        write_all(tmp_path, tracker=[tracker])


def test_project_and_run_name_are_options_and_old_names_still_work(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write_all(tmp_path, tracker=["wandb"], tracker_project="cats", tracker_run_name="first")
    assert (wandb.settings["project"], wandb.settings["name"]) == ("cats", "first")
    config, _ = parse(
        OwnConfig,
        ["--tracker", "wandb", "--wandb-run-name", "old", "--tracker", "tensorboard"],
        program="own",
    )
    assert config.run.tracker == ["wandb", "tensorboard"]
    assert config.run.tracker_run_name == "old"
    with pytest.raises(ConfigurationError, match="tracker"):
        parse(OwnConfig, ["--tracker", "nothing"], program="own")


@dataclass(frozen=True, kw_only=True)
class OwnConfig:
    """Options of a run."""

    run: RunOptions = RunOptions()


def test_tensorboard_by_name(tmp_path):
    write_all(tmp_path, tracker=["tensorboard"])
    assert (tmp_path / "tensorboard").is_dir()


def test_mlflow_has_the_metrics_of_a_run_and_of_its_resume_in_one_run(
    tmp_path, monkeypatch
):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'store'}")
    run = tmp_path / "run"
    run.mkdir()
    options = {"tracker": ["mlflow"], "tracker_project": "cats"}
    client = mlflow.MlflowClient()

    def find_run():
        experiment = client.get_experiment_by_name("cats")
        (found,) = client.search_runs([experiment.experiment_id])
        return found

    write_all(run, EVENTS[:1], status=1, **options)
    assert find_run().info.status == "FAILED"
    write_all(run, EVENTS[1:2], status=130, **options)
    assert find_run().info.status == "KILLED"
    (_, writer) = open_writers(RunOptions(**options), RunDirectory(run), {}, "cnn-train")
    assert find_run().info.status == "RUNNING"
    write_all(run, EVENTS[2:], **options)
    writer.close()
    found = find_run()
    history = client.get_metric_history(found.info.run_id, "train_loss")
    assert [(m.step, m.value) for m in history] == [(44, 0.5), (88, 0.25)]
    assert found.data.params == {"micro_batch_size": "8"}
    assert (found.info.run_name, found.info.status) == ("cnn-train-run", "FINISHED")


def test_wandb_offline_writes_its_files_to_the_run_directory(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write_all(tmp_path, tracker=["wandb"])
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_trackio_has_the_run_in_its_local_database(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    run = tmp_path / "run"
    run.mkdir()
    write_all(run, tracker=["trackio"], tracker_project="cats")
    (found,) = trackio.Api().runs("cats")
    assert found.name == "cnn-train-run"
