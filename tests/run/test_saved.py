"""Which checkpoint of a run is taken, and what is said about it."""

import json

import numpy as np
import pytest

from millrace.apps.cnn.config import CnnConfig
from millrace.checkpoint.averaging import save_average
from millrace.checkpoint.best import BestMetric
from millrace.checkpoint.store import write_checkpoint
from millrace.config import ConfigurationError
from millrace.program.step import Weights
from millrace.run.saved import SavedRun, find_run

LOSS = BestMetric("validation_loss", "min")


def make_run(path, scores, *, best_by=None, events=()):
    """Write a run with a checkpoint per score: after updates 10, 20 and so on."""
    path.mkdir()
    (path / "config.yml").write_text("command: mine\nsize: 3\n")
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (path / "metrics.jsonl").write_text(lines)
    for number, score in enumerate(scores, 1):
        metadata = {"epoch": number / 2, "time": 1.0, "metrics": {"train_loss": "nan"}}
        metadata["scores"] = {} if score is None else {"validation_loss": score}
        if best_by is not None:
            metadata["best_by"] = list(best_by)
        checkpoint = path / "checkpoints" / f"update-{10 * number:09d}"
        weights = Weights({"w": np.full(1, number, np.float32)})
        write_checkpoint(checkpoint, weights, 10 * number, metadata)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("r") / "run", [0.3, 0.1, 0.2], best_by=LOSS)


@pytest.mark.parametrize(
    ("which", "line"),
    [
        ("best", "using the best checkpoint: update 20, epoch 1, validation loss 0.1"),
        ("last", "using the last checkpoint: update 30, epoch 1.5, validation loss 0.2"),
        ("newest", "using the last checkpoint: update 30, epoch 1.5, validation loss 0.2"),
        (10, "using the checkpoint: update 10, epoch 0.5, validation loss 0.3"),
    ],
)
def test_a_checkpoint_is_chosen_and_described(run, which, line):
    for path in (run, run / "checkpoints"):
        assert find_run(path).choose(which).describe() == line


def test_the_metric_that_a_run_has_recorded_comes_first(run):
    assert find_run(run).choose(best_by=BestMetric("validation_loss", "max")).update == 20


def test_one_checkpoint_is_taken_whatever_the_default(run):
    saved = find_run(run / "checkpoints" / "update-000000030")
    assert saved.choose("best").update == saved.choose(30).update == 30
    assert saved.options["size"] == 3
    with pytest.raises(ConfigurationError, match="not that after update 20"):
        saved.choose(20)


@pytest.mark.parametrize(
    ("which", "message"),
    [(15, "only after 10, 20, 30"), ("first", "best, last or the number of an update")],
)
def test_what_does_not_exist_is_refused(run, which, message):
    with pytest.raises(ConfigurationError, match=message):
        find_run(run).choose(which)


def test_without_validation_the_last_checkpoint_is_the_best(tmp_path):
    saved = find_run(make_run(tmp_path / "run", [None, None], best_by=LOSS))
    expected = "using the last checkpoint, because none was validated: update 20, epoch 1"
    assert saved.choose("best").describe() == expected


def test_validation_after_training_counts_but_not_for_an_average(tmp_path):
    events = [{"update": 20, "validation_loss": 0.5}, {"update": 30, "validation_loss": 1}]
    run = make_run(tmp_path / "run", [None] * 3, events=events)
    assert find_run(run).choose(best_by=LOSS).update == 20
    average = run / "checkpoints" / "weight_avg_N_1"
    save_average(average, Weights({"w": np.ones(1)}), find_run(run).checkpoints)
    assert find_run(average).choose(best_by=LOSS).score is None


def test_a_damaged_checkpoint_is_never_the_best(tmp_path):
    run = make_run(tmp_path / "run", [0.1, 0.2], best_by=LOSS)
    (run / "checkpoints" / "update-000000010" / "manifest.json").write_text("{}")
    assert find_run(run).choose().update == 20


def test_a_configuration_has_nothing_about_how_the_run_was_started(tmp_path):
    started = {"run_dir": str(tmp_path), "auto_resume": True, "quiet": True}
    options = {"command": "cnn-train", "seed": 7, **started, "process_id": 1}
    config = SavedRun(tmp_path, tmp_path, options, []).build_config(CnnConfig)
    assert (config.run.seed, config.run.run_dir) == (7, None)
    assert not config.run.auto_resume and not config.run.quiet
    assert config.run.process_id is None
