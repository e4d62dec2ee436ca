"""Configurations: defaults, named ones, files, and shorthands."""

import dataclasses
import json
from pathlib import Path

import pytest

import millrace.apps.vcd as vcd
from millrace.apps.vcd.config import SampleConfig, VcdConfig
from millrace.apps.vcd.config.sections import (
    LikelihoodOptions,
    TrainingOptions,
)
from millrace.apps.vcd.program import hmc_settings
from millrace.apps.vcd.train import build_schedule
from millrace.config import (
    ConfigurationError,
    as_plain,
    build,
    configure,
    load_named,
    parse,
)

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


def test_the_test_configuration_is_one_epoch_of_the_default():
    default, test = (
        as_plain(build(VcdConfig, load_named(RUNS, f"configs/{name}_config.json")))
        for name in ("default", "test")
    )
    assert (test["dataset"], test["num_importance_samples"]) == ("binarized-mnist", 20_000)
    changed = {"run_name": "test", "num_epochs": 1, "checkpoints": False}
    assert test == default | changed


@pytest.mark.parametrize(
    ("batch", "rate"), [(16, 5e-4), (100, 5e-4), (128, 9e-4), (512, 9e-4), (1024, 1.3e-3)]
)
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


# Nested files of the reference


def nested(**changes):
    """Return a configuration as the reference writes it, with some keys changed."""
    args = {
        "_evaluate": True,
        "micro_batch_size": 50,
        "device": "/device:IPU:0",
        "n_replicas": 1,
        "network": {"z_dim": 7, "encoder": {"name": "vcd"}, "decoder": {"name": "vcd"}},
        "save_checkpoints": False,
        "testing": {
            "micro_batch_size_test": 64,
            "n_iwae_samples_test": 200,
            "iwae_samples_test_micro_batch_size": 20,
            "n_epoch_freq_test": 1000,
            "mcmc": {"use_train_step_size_init": False, "hmc_step_size_init": 0.04},
        },
        "training": {
            "base_lr": {"decoder": 0.001, "encoder": {"mean": 0.002, "std": 0.003}},
            "control_variate": {
                "decay": 0.8,
                "use_control_variate": True,
                "use_local_control_variate": False,
            },
            "lr_kwargs": {"epoch_timescale": 20},
            "mcmc": {"n_burn_in_steps": 4, "n_leapfrog_steps": 3, "hmc_only": False},
            "n_epoch": 5,
            "optimiser_config": "vcd",
            "use_infeed": True,
        },
        "data": {"loading": {"set": "binarised_mnist"}, "n_validation": 0},
    }
    experiment = {"testing": False, "training": True, "validation": True}
    values = {"model": [{"args": args | changes, "flags": {"NAME": "x"}}]}
    return values | {"experiment": {"args": experiment}}


def start_from(tmp_path, values, **options):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(values))
    given = {"config": str(path), **options}
    return configure(VcdConfig, given, RUNS, command="vcd-train")[0]


def test_a_nested_configuration_of_the_reference_is_understood(tmp_path):
    config = start_from(tmp_path, nested())
    assert config.model.z_dim == 7 and config.model.control_variate == "global"
    assert (config.model.num_burn_in_steps, config.model.num_leapfrog_steps) == (4, 3)
    assert config.model.control_variate_decay == 0.8
    assert config.training.encoder_mean_learning_rate == 0.002
    assert (config.training.num_epochs, config.training.epoch_timescale) == (5, 20)
    assert config.likelihood.num_importance_samples == 200
    assert config.likelihood.test_step_size == 0.04
    assert (config.workflow.testing, config.workflow.validation) == (False, True)
    assert config.workflow.checkpoints is False and config.plan.micro_batch_size == 50
    assert config.data.resolved_dataset == "binarized-mnist"
    # A flag overrides it.
    assert start_from(tmp_path, nested(), num_epochs=2).training.num_epochs == 2
    off = nested(training={"control_variate": {"use_control_variate": False}})
    assert start_from(tmp_path, off).model.control_variate == "none"
    # The reference writes "" for the learning rate tuned for the batch size.
    tuned = nested(micro_batch_size=512, training={"base_lr": {"decoder": ""}})
    assert start_from(tmp_path, tuned).training.learning_rates(512)["decoder"] == 9e-4


def test_results_of_an_own_configuration_are_named_after_it(tmp_path):
    config = start_from(tmp_path, nested(), results_dir=tmp_path)
    assert config.run.run_dir == tmp_path / "mine"
    flat = start_from(tmp_path, {"num_epochs": 3}, results_dir=tmp_path)
    assert flat.run.run_dir == tmp_path / "mine"
    named = start_from(tmp_path, nested(), results_dir=tmp_path, run_name="other")
    assert named.run.run_dir == tmp_path / "other"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (nested(zdim=3), r"mine\.json: Unknown key zdim in model\[0\]\.args"),
        (nested(network={"encoder": {"name": "other"}}), "only 'vcd' exists here"),
        ({"model": []}, "a list of one model"),
        ({"model": [3]}, "must have a mapping args"),
        ({"model": [{}], "experiment": {"args": {"training": False}}}, "vcd evaluate RUN"),
        ({"model": [{}], "experiment": {"args": {"testin": 1}}}, "Did you mean testing"),
        (
            {"model": [{}], "experiment": {"args": {"checkpoint_path": "x"}}},
            "names a TensorFlow checkpoint",
        ),
    ],
    ids=["key", "network", "none", "number", "training", "experiment", "checkpoint"],
)
def test_what_a_nested_configuration_cannot_have_is_an_error(tmp_path, values, message):
    with pytest.raises(ConfigurationError, match=message):
        start_from(tmp_path, values)


@pytest.mark.parametrize("words", [["runs/a"], ["-r", "runs/a"], ["--results-dir=runs/a"]])
def test_a_trained_model_is_given_by_its_run_or_in_the_words_of_the_reference(words):
    config, _ = parse(SampleConfig, words, program="x")
    assert config.checkpoint_dir == Path("runs/a")
