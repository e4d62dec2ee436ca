"""Configurations: defaults, named ones, files, and shorthands."""

import dataclasses
import json
from pathlib import Path

import pytest

import millrace.apps.vcd as vcd
from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.config.sections import (
    TUNED_LEARNING_RATES,
    LikelihoodOptions,
    TrainingOptions,
)
from millrace.apps.vcd.program import hmc_settings
from millrace.apps.vcd.train import build_schedule
from millrace.config import ConfigurationError, as_plain, build, load_named

RUNS = Path(vcd.__file__).with_name("runs.yml")


@pytest.mark.parametrize(
    ("name", "updates", "objective", "variate"),
    [
        ("default", 400_000, "vcd", "local"),
        ("global_cv", 400_000, "vcd", "global"),
        ("test", 500, "vcd", "local"),
        ("benchmark", 100_000, "vcd", "global"),
        ("plain_vae", 400_000, "standard_kl", "local"),
        ("hoffman", 400_000, "hoffman", "local"),
        ("bs_experiment", 25_625_000, "vcd", "global"),
    ],
)
def test_named_configurations_match_the_reference(name, updates, objective, variate):
    config = build(VcdConfig, load_named(RUNS, name))
    schedule = build_schedule(config, 50_000)
    assert schedule.total_updates == updates and not schedule.warnings
    assert config.model.resolved_objective == objective
    assert config.model.control_variate == variate
    assert config.workflow.run_name == name
    batch = config.plan.batching.global_batch_size
    assert config.training.learning_rates(batch)["decoder"] == 5e-4
    if name in ("default", "plain_vae", "hoffman"):
        assert config.training.updates_per_decay(50_000, batch) == 15_000
        assert schedule.updates_per_execution == 500
        hmc = hmc_settings(config)
        assert (hmc.total_steps, hmc.num_leapfrog_steps, hmc.adaption_rate) == (8, 5, 0.01)


@pytest.mark.parametrize(("batch", "rate"), TUNED_LEARNING_RATES.items())
def test_the_batch_size_experiment_uses_the_tuned_learning_rate(batch, rate):
    values = load_named(RUNS, "bs_experiment") | {"micro_batch_size": batch}
    config = build(VcdConfig, values)
    assert config.training.learning_rates(batch) == {
        "encoder/mean": rate,
        "encoder/std": rate / 2,
        "decoder": rate,
    }
    assert hmc_settings(config).adaption_rate == pytest.approx(batch / 10_000)


def test_the_error_for_an_untuned_batch_size_lists_the_tuned_ones():
    values = load_named(RUNS, "bs_experiment") | {"micro_batch_size": 64}
    with pytest.raises(ConfigurationError, match=r"batch of 64.*16, 100, 128, 512, 1024"):
        build(VcdConfig, values)
    config = build(VcdConfig, values | {"learning_rate": 1e-3})
    assert config.training.learning_rates(64)["decoder"] == 1e-3


def test_a_file_is_a_configuration(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"num_epochs": 3, "control_variate": "none"}))
    assert load_named(RUNS, str(path)) == {"num_epochs": 3, "control_variate": "none"}
    assert load_named(RUNS, "configs/global_cv_config.json")["control_variate"] == "global"
    with pytest.raises(ConfigurationError, match=r"mine_too\.yml: No such file"):
        load_named(RUNS, str(tmp_path / "mine_too.yml"))


def test_the_error_for_an_unknown_key_suggests_the_nearest(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text("num_leapfrog_step: 3\n")
    with pytest.raises(
        ConfigurationError, match=r"num_leapfrog_step\..*num_leapfrog_steps"
    ):
        build(VcdConfig, load_named(RUNS, str(path)))


def test_the_learning_rates_of_the_scopes():
    assert TrainingOptions().learning_rates(100) == {
        "encoder/mean": 5e-4,
        "encoder/std": 2.5e-4,
        "decoder": 5e-4,
    }
    assert TrainingOptions(learning_rate=0.01).learning_rates(64) == {
        "encoder/mean": 0.01,
        "encoder/std": 0.005,
        "decoder": 0.01,
    }


def test_the_defaults_of_the_evaluation_match_the_reference():
    ours = LikelihoodOptions()
    assert (ours.num_importance_samples, ours.importance_group_size) == (20_000, 50)
    assert (ours.num_test_burn_in_steps, ours.num_test_hmc_steps) == (300, 300)
    assert (ours.num_test_leapfrog_steps, ours.test_acceptance_target) == (5, 0.9)


def test_counts_of_one_are_accepted_and_zero_is_not():
    names = ["num_importance_samples", "importance_group_size", "test_micro_batch_size"]
    names += [f"num_test_{kind}_steps" for kind in ("burn_in", "hmc", "leapfrog")]
    one = LikelihoodOptions(**dict.fromkeys(names, 1))
    for name in names:
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            dataclasses.replace(one, **{name: 0})


def test_results_dir_stands_for_a_new_run_directory(tmp_path):
    values = {"results_dir": tmp_path, "run_name": "mine"}
    assert build(VcdConfig, values).run.run_dir == tmp_path / "mine"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine_0").mkdir()
    config = build(VcdConfig, values)
    assert config.run.run_dir == tmp_path / "mine_1"
    assert as_plain(config)["results_dir"] == str(tmp_path)
    assert build(VcdConfig, {"results_dir": tmp_path}).run.run_dir == tmp_path / "default"
    with pytest.raises(ConfigurationError, match="creates a new run directory"):
        build(VcdConfig, values | {"resume": True})


@pytest.mark.parametrize(
    ("level", "quiet", "debug"),
    [("INFO", False, False), ("DEBUG", False, True), ("ERROR", True, False)],
)
def test_the_log_level_sets_quiet_and_debug(level, quiet, debug):
    run = build(VcdConfig, {"log_level": level}).run
    assert (run.quiet, run.debug) == (quiet, debug)
    with pytest.raises(ConfigurationError, match="quiet and verbose"):
        build(VcdConfig, {"log_level": "WARNING", "verbose": True})
