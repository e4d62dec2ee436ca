"""How a run has ended, as the terminal, the summary, the report and a notebook show it."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from killable_run import Config

import millrace as mr
from millrace.commands.calling import RunResult
from millrace.commands.report import format_figures
from millrace.report.comparison import comparison_page
from millrace.report.record import read_run
from millrace.run.console import result_styles
from millrace.run.run import run_command

UPDATES = 24


def loss_fn(weight, model_state, batch, key):
    return ((weight * batch["x"] - 1) ** 2).mean(), (model_state, {})


def train(path, *, accuracies, saves=0, learning_rate=0.1, loss_falls=True):
    """Train a weight with as many validations as accuracies; return the run."""
    left = iter(accuracies)

    def work(config, run):
        plan = mr.Plan(micro_batch_size=2)
        program = mr.training_program(loss_fn, optax.sgd(learning_rate), plan)
        rates = {"log": 1, "validate": len(accuracies), "checkpoint": saves}
        schedule = mr.schedule_events(
            updates_per_epoch=UPDATES, num_epochs=1, events_per_epoch=rates
        )
        data = mr.ArraySource({"x": np.linspace(1, 2, 8, dtype=np.float32)})
        with run.checkpoints(best="validation_accuracy") as checkpoints:
            run.train(
                program,
                program.init(jnp.float32(0), {}, seed=0),
                mr.Infeed(mr.Stream(data, 2)),
                schedule,
                validate=lambda state: {"accuracy": next(left)},
                checkpoints=checkpoints,
                loss_falls=loss_falls,
            )

    config = Config(run=mr.RunOptions(run_dir=path))
    assert run_command(work, config, command="mine", command_line="mine") == 0
    return path


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


LAST = {"value": 0.7, "update": 24, "epoch": 1.0}
LAST |= {"checkpoint": "checkpoints/update-000000024"}


def test_the_best_validation_counts_even_if_no_checkpoint_has_it(tmp_path, capsys):
    run = train(tmp_path / "run", accuracies=[0.5, 0.9, 0.7])
    metric = {"metric": "validation_accuracy", "mode": "max"}
    best = metric | {"value": 0.9, "update": 16, "epoch": 0.666667, "checkpoint": None}
    assert summary_of(run)["best"] == best | {"best_checkpoint": LAST}
    place = "not saved; best checkpoint: 0.7 at epoch 1, checkpoints/update-000000024"
    printed = " ".join(capsys.readouterr().err.split())
    assert f"accuracy 0.9 at update 16, epoch 0.666667 ({place})" in printed
    result = RunResult(run, summary_of(run), lambda _: None)
    assert "0.9 at epoch 0.666667 (not saved)" in repr(result)
    assert place in result._repr_html_()
    assert result.best is not None and result.best.checkpoint is None
    record = read_run(run)
    assert f"at epoch 0.6667, {place}" in (run / "report.html").read_text()
    assert place in comparison_page([record, record])
    assert "0.9 at epoch 0.6667 (not saved)" in " ".join(format_figures([record] * 2))


@pytest.mark.parametrize("accuracies", [[0.5, 0.6, 0.7], [0.7, 0.6, 0.7]])
def test_the_best_result_is_that_of_a_checkpoint_if_one_has_it(accuracies, tmp_path):
    run = train(tmp_path / "run", accuracies=accuracies)
    best = {"metric": "validation_accuracy", "mode": "max"} | LAST
    assert summary_of(run)["best"] == best
    card = RunResult(run, summary_of(run), lambda _: None)._repr_html_()
    assert "<td>checkpoint</td><td>checkpoints/update-000000024</td>" in card


# Losses that are larger at the end


def test_a_run_that_ends_with_a_larger_loss_is_no_green_success(tmp_path, capsys):
    run = train(tmp_path / "run", accuracies=[0.1], learning_rate=-0.01)
    summary = summary_of(run)
    assert summary["status"] == "completed" and "diverged" not in summary
    rising = summary["rising_loss"]
    assert rising["updates"] == 12 and rising["loss"] > 1.5 > rising["first_loss"] > 0
    printed = " ".join(capsys.readouterr().err.split())
    assert f"at the start and {rising['loss']:.4g} in the last 12 updates; use" in printed
    assert result_styles(summary)["completed"] == "yellow"
    result = RunResult(run, summary, lambda _: None)
    assert "status=completed, but the loss rose" in repr(result)
    page = (run / "report.html").read_text()
    assert "completed, but the loss rose" in page and "made the model worse" in page


def test_a_loss_that_may_rise_is_no_failure(tmp_path):
    run = train(tmp_path / "run", accuracies=[0], learning_rate=-0.01, loss_falls=False)
    assert "rising_loss" not in summary_of(run)
    assert result_styles(summary_of(run))["completed"] == "green"
