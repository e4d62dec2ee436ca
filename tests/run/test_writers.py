"""Every writer receives the log events of the run."""

import json
import math
import sys
from types import SimpleNamespace

import pytest

from millrace.config import ConfigurationError
from millrace.run.directory import RunDirectory
from millrace.run.options import RunOptions
from millrace.run.writers import open_writers

EVENTS = [
    {"update": 44, "epoch": 1.0, "time": 2.5, "train_loss": 0.5, "learning_rate": 1e-5},
    {"update": 44, "epoch": 1.0, "time": 2.6, "validation_accuracy": 0.75},
    {"update": 88, "epoch": 2.0, "time": 3.5, "train_loss": 0.25, "learning_rate": 0.0},
]


def write_all(tmp_path, events=EVENTS, **options):
    directory = RunDirectory(tmp_path)
    config = {"micro_batch_size": 8}
    writers = open_writers(RunOptions(**options), directory, config, "cnn-train")
    for event in events:
        for writer in writers:
            writer.write(event)
    for writer in writers:
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

    def init(self, **settings):
        self.settings = settings
        return SimpleNamespace(log=self._log, finish=self._finish)

    def _log(self, metrics, step):
        self.logged.append((step, metrics))

    def _finish(self):
        self.finished += 1


def test_wandb_receives_the_configuration_and_every_metric(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write_all(tmp_path, wandb=True)
    assert wandb.settings["config"] == {"micro_batch_size": 8}
    assert wandb.settings["dir"] == str(tmp_path)
    assert wandb.logged == [
        (44, {"epoch": 1.0, "train_loss": 0.5, "learning_rate": 1e-5}),
        (44, {"epoch": 1.0, "validation_accuracy": 0.75}),
        (88, {"epoch": 2.0, "train_loss": 0.25, "learning_rate": 0.0}),
    ]
    assert wandb.finished == 1


def test_without_the_option_wandb_is_not_used(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write_all(tmp_path)
    assert wandb.settings == {}
    assert wandb.logged == []
