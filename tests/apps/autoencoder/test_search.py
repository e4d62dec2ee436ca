"""A search trains trials together, drops the worse ones and keeps the best model."""

import itertools

import jax
import numpy as np
import pytest
import yaml
from autoencoder_runs import command, events_of, summary_of, write_ratings
from plain_loop import rounding

import millrace as mr
from millrace.apps.autoencoder import search
from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.search import SEARCHED, draw_trials
from millrace.apps.autoencoder.config.training import Hyperparameters, Steps
from millrace.apps.autoencoder.halving import choose_survivors, plan_rungs
from millrace.config import ConfigurationError, parse
from millrace.distributed.signals import INTERRUPTED
from millrace.loop.progress import TIMED

FIRST = Hyperparameters(0.02, 1e-3, 0.5, 0.4)


def test_the_first_trial_is_given_and_the_others_fill_the_space():
    trials = draw_trials(FIRST, 64, seed=0)
    assert trials[0] == FIRST and len(set(trials)) == 64
    assert draw_trials(FIRST, 8, seed=0) == trials[:8]
    assert draw_trials(FIRST, 8, seed=1)[1:] != trials[1:8]
    ranges = {"learning_rate": (0.02 / 3, 0.06), "weight_decay": (2e-4, 5e-3)}
    for name in SEARCHED:
        values = np.array([getattr(trial, name) for trial in trials[1:]])
        low, high = ranges.get(name, (0.2, 0.8))
        share = (values - low) / (high - low)
        if name in ranges:
            share = np.log(values / low) / np.log(high / low)
        # More even than random points: every sixteenth of the range has some.
        counts, _ = np.histogram(share, 16, (-1e-3, 1 + 1e-3))
        assert counts.min() >= 2 and counts.sum() == 63, name
    pairs = np.array([[t.dropout_rate, t.learning_rate] for t in trials[1:]])
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.2


def test_some_settings_can_be_kept_and_a_decay_of_0_is_varied():
    trials = draw_trials(FIRST._replace(weight_decay=0.0), 9, 0, ("weight_decay",))
    assert {t._replace(weight_decay=0.0) for t in trials} == {trials[0]}
    assert all(1e-5 <= t.weight_decay <= 1e-2 for t in trials[1:])


def test_rungs_end_with_validations():
    steps = Steps(5, total=60, per_validation=1, batches_per_epoch=5, updates_per_batch=1)
    assert plan_rungs(16, steps) == [40, 75, 150, 300]
    assert plan_rungs(2, steps) == [300]
    assert plan_rungs(16, steps._replace(per_validation=20)) == [100, 200, 300]
    assert plan_rungs(16, steps._replace(total=2, updates_per_batch=2)) == [10, 20]


def test_the_better_half_and_the_first_trial_continue():
    histories = {0: [9.0], 1: [3.0, 5.0], 2: [4.0], 3: [np.nan], 4: [1.0]}
    assert choose_survivors([0, 1, 2, 3, 4], histories, None) == [0, 1, 4]
    assert choose_survivors([1, 2, 3], histories, None) == [1, 2]
    # A trial that has stopped is complete, and its place stays empty.
    assert choose_survivors([1, 2], histories, 1) == []


def search_args(folder, name, more=""):
    # Three trials train for two epochs, and two to the end.
    args = f"train {write_ratings(folder)}--recipe modern --search 3 --epochs 4 --quiet "
    args += "--deterministic "
    return f"{args}--learning-rate 0.01 --steps-per-log 1 --run-dir {folder}/{name} {more}"


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    assert command(None, search_args(folder, "run")).status == 0
    return folder / "run"


def test_a_search_reports_all_trials(searched):
    summary = summary_of(searched)
    trials = summary["trials"]
    assert [trial["trial"] for trial in trials] == [1, 2, 3]
    assert sorted(trial["rung"] for trial in trials) == [1, 2, 2]
    assert trials[0]["rung"] == 2 and trials[0]["learning_rate"] == 0.01
    best = min(trials, key=lambda trial: trial["validation_rmse"])
    assert [t["trial"] for t in trials if t["is_chosen"]] == [best["trial"]]
    assert summary["best"]["validation_rmse"] == best["validation_rmse"]
    assert summary["best"]["validation_rmse"] <= trials[0]["validation_rmse"]
    assert [rung["models"] for rung in summary["rungs"]] == [3, 2]
    assert summary["samples"] == sum(
        (end - start) * rung["models"] * 2
        for (start, end), rung in zip(
            itertools.pairwise([0, *(r["updates"] for r in summary["rungs"])]),
            summary["rungs"],
            strict=True,
        )
    )
    report = (searched / "report.html").read_text()
    assert "Trials of the search" in report and "trial 3" in report


def test_the_run_is_like_one_that_trained_the_chosen_settings(searched, tmp_path, capsys):
    summary = summary_of(searched)
    options = yaml.safe_load((searched / "config.yml").read_text())
    (chosen,) = [trial for trial in summary["trials"] if trial["is_chosen"]]
    assert {name: options[name] for name in SEARCHED} == {n: chosen[n] for n in SEARCHED}
    assert options["search"] is None and not (searched / "search").exists()
    assert len(list((searched / "checkpoints").iterdir())) == 1
    ended = command(capsys, f"validate {searched} --quiet --run-dir {tmp_path}/validation")
    assert ended.status == 0, ended.err
    again = summary_of(tmp_path / "validation")["metrics"]["validation_rmse"]
    assert again == pytest.approx(summary["best"]["validation_rmse"], rel=1e-5)
    ended = command(capsys, f"train --config {searched} --quiet --run-dir {tmp_path}/alone")
    assert ended.status == 0, ended.err
    alone = summary_of(tmp_path / "alone")
    assert alone["best"]["validation_rmse"] == pytest.approx(
        summary["best"]["validation_rmse"], rel=10 * rounding()
    )
    found, expected = (mr.autoencoder.load(f) for f in (searched, tmp_path / "alone"))
    trees = map(jax.tree.leaves, (found.params, expected.params))
    for ours, theirs in zip(*trees, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=10 * rounding())


def history(folder):
    """Return the log events without the values that depend on the clock."""
    return [{k: v for k, v in e.items() if k not in TIMED} for e in events_of(folder)]


def test_an_interrupted_and_then_killed_search_ends_with_the_same_bits(
    searched, capsys, monkeypatch
):
    validate, calls = search._Rung._validate, itertools.count(1)

    def interfere(rung, state):
        number = next(calls)
        if number == 3:  # the first validation of the second rung
            raise RuntimeError("killed")
        metrics = validate(rung, state)
        if number == 4:  # the same one, after a resume
            rung._run.stop()  # as Ctrl-C does
        return metrics

    monkeypatch.setattr(search._Rung, "_validate", interfere)
    folder = searched.parent
    assert command(capsys, search_args(folder, "again")).status == 1
    resume = f"train --resume {folder}/again --quiet"
    assert command(capsys, resume).status == INTERRUPTED
    assert command(capsys, resume).status == 0
    assert next(calls) == 6
    assert history(folder / "again") == history(searched)
    ours, theirs = (mr.autoencoder.load(f).params for f in (folder / "again", searched))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    ended = command(capsys, f"train --resume {folder}/again")
    assert ended.status == 0 and "its search has ended" in ended.err
    ended = command(capsys, f"train --resume {folder}/again --search 7")
    assert ended.status == 0 and "its search has ended" in ended.err


def test_early_stopping_ends_the_search(searched, capsys):
    folder = searched.parent
    args = search_args(folder, "early", "--early-stopping 1 --learning-rate 1e-12 ")
    args = args.replace("--search 3", "--search 2 --search-over dropout_rate")
    ended = command(capsys, args.replace("--learning-rate 0.01", ""))
    assert ended.status == 0, ended.err
    summary = summary_of(folder / "early")
    assert summary["updates"] < summary_of(searched)["updates"]
    assert len({t["weight_decay"] for t in summary["trials"]}) == 1
    assert len({t["dropout_rate"] for t in summary["trials"]}) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--search 1", "search must be from 2 to 1024, got 1"),
        ("--search 4 --no-validation", "search compares models by validation"),
        ("--search 4 --valid-per-epoch 0", "needs valid_per_epoch above 0"),
        ("--search 4 --num-replicas 2", "all models on one device"),
        ("--search 4 --multiprocessing", "waits for validation"),
        ("--search 4 --search-over dropout_rate --no-dropout", "no_dropout or search_over"),
        ("--search 4 --search-over weight_decay weight_decay", "more than once"),
        ("--search-over weight_decay", "search_over needs search"),
        ("--search 4 --search-over size", "must be one of learning_rate"),
    ],
)
def test_a_mistake_is_explained(args, message):
    with pytest.raises(ConfigurationError, match=message):
        parse(AutoencoderConfig, f"--data generated {args}".split(), program="x")


def test_a_run_without_a_search_does_not_become_one(searched, capsys):
    folder = searched.parent
    args = search_args(folder, "plain", "--build-init").replace("--search 3 ", "")
    assert command(capsys, args).status == 0
    ended = command(capsys, f"train --resume {folder}/plain --search 4")
    assert ended.status == 2 and "was started without --search" in ended.err


def test_the_newest_rung_is_found(tmp_path):
    assert search._find_rung(tmp_path, 5, 3) == (0, [0, 1, 2, 3, 4])
    (tmp_path / "rung-2").mkdir()  # its checkpoints are deleted when the next rung starts
    (tmp_path / "rung-3" / "update-000000010").mkdir(parents=True)
    (tmp_path / "rung-3" / "trials.json").write_text("[0, 4]")
    assert search._find_rung(tmp_path, 5, 3) == (2, [0, 4])
