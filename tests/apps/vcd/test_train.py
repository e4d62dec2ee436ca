"""The commands as a user meets them, on a small model and the embedded digits."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from PIL import Image

from millrace.apps.vcd import program as vcd_program
from millrace.apps.vcd.config import TUNED_LEARNING_RATES, VcdConfig
from millrace.apps.vcd.data import binarize, load
from millrace.apps.vcd.shuffle import ShuffledIndices
from millrace.apps.vcd.train import plan_events
from millrace.checkpoint.store import checkpoints_in, restore
from millrace.cli import main
from millrace.config import ConfigurationError, build, load_named
from millrace.feeds.infeed import Infeed
from millrace.program.training import training_program

RUNS = Path(vcd_program.__file__).with_name("runs.yml")
SMALL = [
    *("--dataset", "digits", "--z-dim", "2", "--num-hidden", "8", "-b", "100"),
    *("--num-burn-in-steps", "2", "--num-leapfrog-steps", "2"),
    *("--independent-iterations", "20", "--num-epochs", "4", "-l", "0.01"),
    *("--num-importance-samples", "100", "--test-micro-batch-size", "180"),
    *("--num-test-burn-in-steps", "5", "--num-test-hmc-steps", "5"),
]


@pytest.fixture(scope="module")
def millrace_command():
    """Run a command in this process; returns the status and what was said."""
    logger = logging.getLogger("millrace")
    kept = logger.handlers, logger.level, logger.propagate

    def command(capsys, *words):
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        return left.value.code, capsys.readouterr().err

    yield command
    logger.handlers, logger.level, logger.propagate = kept


@pytest.fixture
def command(millrace_command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: millrace_command(capsys, *words)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run: four epochs of 14 updates, a checkpoint after each."""
    path = tmp_path_factory.mktemp("vcd") / "run"
    with pytest.raises(SystemExit) as left:
        main(["vcd", "train", *SMALL, "--run-dir", str(path), "-v", "--n-validation", "37"])
    assert left.value.code == 0
    summary = json.loads((path / "summary.json").read_text())
    return SimpleNamespace(path=path, summary=summary)


def events_of(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def without_times(events):
    timed = ("time", "samples_per_second")
    return [{k: v for k, v in event.items() if k not in timed} for event in events]


def state_at(path, number=-1):
    checkpoint = checkpoints_in(path / "checkpoints")[number]
    config = dataclasses.replace(load_config(path), run_dir=None)
    pictures = load(config, num_validation=config.num_validation).training
    program = vcd_program.program_of(config, pictures, jax.devices())
    like = program.init(*vcd_program.init(config, pictures))
    return restore(checkpoint, like).state


def load_config(path):
    values = yaml.safe_load((path / "config.yml").read_text())
    del values["command"]
    return build(VcdConfig, values)


# A run and what it leaves


def test_a_run_learns_tests_and_leaves_its_results(trained):
    summary, events = trained.summary, events_of(trained.path)
    assert summary["status"] == "completed" and summary["updates"] == 4 * 14
    logged = [event for event in events if "train_elbo" in event]
    assert [event["update"] for event in logged] == [14, 28, 42, 56]
    assert logged[-1]["train_log_joint_end"] > logged[0]["train_log_joint_end"] + 2
    watched = [event["validation_elbo"] for event in events if "validation_elbo" in event]
    assert len(watched) == 4 and watched[-1] > watched[0]
    metrics = summary["metrics"]
    for split, count in (("test", 360), ("validation", 37)):
        assert -64 < metrics[f"{split}_log_likelihood"] < -10
        results = json.loads((trained.path / f"{split}_results.json").read_text())
        assert results["num_pictures"] == count and results["samples"] == 100
        kept = np.load(trained.path / f"{split}_log_likelihoods.npz")
        best = np.max([kept[name] for name in ("encoder", "hmc_mean", "hmc")], 0)
        assert best.mean() == pytest.approx(metrics[f"{split}_log_likelihood"], abs=1e-3)
    # The bound that is trained is below what importance sampling finds.
    assert metrics["test_log_likelihood"] > metrics["validation_elbo"]


def test_the_report_shows_the_pictures_evolve(trained):
    names = sorted(path.name for path in (trained.path / "pictures").iterdir())
    kinds = ("chain", "prior", "reconstructions")
    assert names == [f"{k}-{n:09d}.png" for k in kinds for n in (14, 28, 42, 56)]
    page = (trained.path / "report.html").read_text()
    assert page.count("<img ") == 12 and "after 56 updates" in page
    assert "http://" not in page and "https://" not in page  # nothing from elsewhere
    with Image.open(trained.path / "pictures" / names[0]) as picture:
        assert picture.mode == "L" and picture.size == (10 * (8 * 7 + 1), 8 * (8 * 7 + 1))


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(trained, command, tmp_path):
    """Control variates, step size, random key and order of samples included."""
    again = tmp_path / "again"
    shutil.copytree(trained.path, again)
    for late in checkpoints_in(again / "checkpoints")[1:]:
        shutil.rmtree(late)
    words = [*SMALL, "--run-dir", again, "-v", "--n-validation", "37", "--resume"]
    status, said = command("vcd", "train", *words)
    assert status == 0 and "Resuming after update 28" in said
    one, other = state_at(trained.path), state_at(again)
    assert int(one.update) == 56
    assert np.unique(one.model_state["control_variate"]["local"]).size > 100
    assert float(one.model_state["step_size"]) != pytest.approx(0.05)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert without_times(events_of(again)) == without_times(events_of(trained.path))


def test_a_trained_model_is_evaluated_and_drawn_by_itself(trained, command, tmp_path):
    words = ("-r", trained.path, "--num-importance-samples", "100", "--seed", "0")
    chains = ("--num-test-burn-in-steps", "5", "--num-test-hmc-steps", "5")
    batch = ("--test-micro-batch-size", "180")
    status, said = command(
        "vcd", "evaluate", *words, *chains, *batch, "--run-dir", tmp_path / "e"
    )
    assert status == 0 and "s left" in said
    summary = json.loads((tmp_path / "e" / "summary.json").read_text())
    found = summary["metrics"]
    for name, value in found.items():
        assert value == pytest.approx(trained.summary["metrics"][name], abs=1e-4)
    status, said = command(
        "vcd",
        "sample",
        *("-r", trained.path, "--num-rows", "3", "--num-columns", "4"),
        *("--num-steps", "5", "--run-dir", tmp_path / "s"),
    )
    assert status == 0
    sizes = {}
    for path in (tmp_path / "s" / "pictures").iterdir():
        with Image.open(path) as picture:
            sizes[path.name] = tuple(side // 57 for side in picture.size)
    assert sizes == {
        "prior-000000056.png": (4, 3),
        "reconstructions-000000056.png": (4, 4),
        "chain-000000056.png": (7, 3),  # original, start, and five steps
    }


@pytest.mark.slow
def test_repeats_have_seeds_and_directories_of_their_own(command, tmp_path):
    words = [*SMALL, "--num-epochs", "1", "--no-testing", "--pictures", "False"]
    words += ["--objective", "standard_kl", "-r", "results", "-n", "two"]
    status, _ = command("vcd", "train", *words, "-R", "2")
    assert status == 0
    path = tmp_path / "results" / "two"
    summary = json.loads((path / "summary.json").read_text())
    own = [
        json.loads((path / f"repeat-{n}" / "summary.json").read_text())["metrics"]
        for n in range(2)
    ]
    values = [metrics["train_elbo"] for metrics in own]
    assert values[0] != values[1]
    assert summary["metrics"]["train_elbo"] == pytest.approx(np.mean(values))
    assert summary["metrics"]["train_elbo_std"] == pytest.approx(np.std(values, ddof=1))
    assert "train_acceptance" not in own[0]  # the plain VAE has no chains


def test_without_hmc_steps_it_is_the_plain_vae_and_says_so(command, tmp_path):
    words = [*SMALL, "--num-epochs", "1", "--no-testing", "--pictures", "False"]
    words += ["--num-burn-in-steps", "0", "--run-dir", "plain"]
    status, said = command("vcd", "train", *words)
    assert status == 0
    assert "no HMC steps: instead of vcd this is the plain VAE" in said
    metrics = json.loads((tmp_path / "plain" / "summary.json").read_text())["metrics"]
    assert metrics["train_elbo"] < 0 and "train_vcd" not in metrics


# Replicas


def gradients_over(num_replicas, updates=500):
    """Mean gradient over many updates at the same weights, and its standard error."""
    config = VcdConfig(
        dataset="digits",
        z_dim=2,
        num_hidden=4,
        num_burn_in_steps=2,
        num_leapfrog_steps=2,
        control_variate="global",
        step_size_adaption="constant",
        micro_batch_size=16 // num_replicas,
        num_replicas=num_replicas,
    )
    rng = np.random.default_rng(0)
    pictures = binarize(rng.integers(0, 2, (16, 2, 2, 1)).astype(np.uint8), 0)

    def init(params):
        return jax.tree.map(jnp.zeros_like, (params, params))

    def update(gradients, state, params=None):
        total, squares = state
        total = jax.tree.map(jnp.add, total, gradients)
        squares = jax.tree.map(lambda s, g: s + g**2, squares, gradients)
        return jax.tree.map(jnp.zeros_like, gradients), (total, squares)

    program = training_program(
        vcd_program.loss_of(config, pictures),
        optax.GradientTransformation(init, update),
        config,
        devices=jax.devices(),
    )
    params, model_state = vcd_program.init(config, pictures)
    # Wide, so that the few huge gradients of a narrow q do not hide all others.
    params["encoder"]["std"]["output"]["bias"] = jnp.full(2, 1.0)
    params["encoder"]["std"]["output"]["kernel"] *= 0.05
    state = program.init(params, model_state, seed=num_replicas)
    infeed = Infeed(ShuffledIndices(16, 16, seed=0))
    state, info = program.run(state, infeed.chunk(updates, program.chunk_sharding).data)
    total, squares = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
        for tree in state.optimizer_state
    )
    mean = total / updates
    return mean, np.sqrt((squares / updates - mean**2) / updates), info


@pytest.mark.slow
def test_four_replicas_of_a_quarter_of_the_batch_are_one_of_all_of_it():
    (one, error1, info1), (four, error4, info4) = gradients_over(1), gradients_over(4)
    error = np.sqrt(error1**2 + error4**2)
    moved = error > 0  # some hidden units never fire
    assert moved.mean() > 0.5 and (np.abs(one) > 10 * error1)[moved].any()
    np.testing.assert_array_less(np.abs(one - four)[moved], 5 * error[moved])
    for name in ("elbo", "g", "acceptance", "loss"):
        values = [np.asarray(info[name], np.float64) for info in (info1, info4)]
        spread = np.sqrt(sum(v.var() / len(v) for v in values))
        assert abs(values[0].mean() - values[1].mean()) < 4.5 * spread, name


# Order of samples


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own():
    drawn = np.asarray(ShuffledIndices(20, 5, seed=3).make(0, 8, None)["index"])
    epochs = drawn.reshape(2, 20)
    assert (np.sort(epochs, 1) == np.arange(20)).all()
    assert (epochs[0] != epochs[1]).any()
    other = np.asarray(ShuffledIndices(20, 5, seed=4).make(0, 8, None)["index"])
    assert (other != drawn).any()


def test_the_order_goes_on_from_any_position_whatever_the_chunks():
    whole = np.asarray(ShuffledIndices(23, 5, seed=0).make(0, 12, None)["index"])
    infeed = Infeed(ShuffledIndices(23, 5, seed=0))
    infeed.seek(3)
    parts = []
    for size in (2, 6, 1):
        parts.append(np.asarray(infeed.chunk(size, None).data["index"]))
        infeed.took(size)
    assert infeed.position == 12
    np.testing.assert_array_equal(np.concatenate(parts), whole[3:])


# Configurations and mistakes


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
def test_the_named_configurations_are_the_references(name, updates, objective, variate):
    config = build(VcdConfig, load_named(RUNS, name))
    schedule = plan_events(config, 50_000)
    assert schedule.total_updates == updates and not schedule.warnings
    assert config.resolved_objective == objective and config.control_variate == variate
    assert config.run_name == name
    batch = config.batching.global_batch_size
    assert config.learning_rates(batch)["decoder"] == 5e-4
    if name in ("default", "plain_vae", "hoffman"):
        assert config.updates_per_decay(50_000, batch) == 15_000
        assert schedule.updates_per_execution == 500
        hmc = vcd_program.hmc_of(config)
        assert (hmc.total_steps, hmc.num_leapfrog_steps, hmc.adaption_rate) == (8, 5, 0.01)


@pytest.mark.parametrize(("batch", "rate"), TUNED_LEARNING_RATES.items())
def test_the_batch_experiment_has_a_tuned_learning_rate(batch, rate):
    values = load_named(RUNS, "bs_experiment") | {"micro_batch_size": batch}
    config = build(VcdConfig, values)
    assert config.learning_rates(batch) == {
        "encoder/mean": rate,
        "encoder/std": rate / 2,
        "decoder": rate,
    }
    assert vcd_program.hmc_of(config).adaption_rate == pytest.approx(batch / 10_000)


def test_a_batch_without_a_tuned_learning_rate_lists_those_that_have_one():
    values = load_named(RUNS, "bs_experiment") | {"micro_batch_size": 64}
    with pytest.raises(ConfigurationError, match=r"batch of 64.*16, 100, 128, 512, 1024"):
        build(VcdConfig, values)
    assert build(VcdConfig, values | {"learning_rate": 1e-3}).learning_rates(64)


def test_a_file_of_ones_own_is_a_configuration(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"num_epochs": 3, "control_variate": "none"}))
    assert load_named(RUNS, str(path)) == {"num_epochs": 3, "control_variate": "none"}
    assert load_named(RUNS, "configs/global_cv_config.json")["control_variate"] == "global"
    with pytest.raises(ConfigurationError, match=r"mine_too\.yml: No such file"):
        load_named(RUNS, str(tmp_path / "mine_too.yml"))


def test_an_unknown_key_is_named_with_the_nearest(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text("num_leapfrog_step: 3\n")
    with pytest.raises(
        ConfigurationError, match=r"num_leapfrog_step\..*num_leapfrog_steps"
    ):
        build(VcdConfig, load_named(RUNS, str(path)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train -c nope", "default, digits_demo"),
        ("train -c bs_experiment -b 64", "16, 100, 128, 512, 1024"),
        ("train --leapfrog 3", "There is no option --leapfrog"),
        ("train --num-leapfrog-steps 0", "num_leapfrog_steps must be at least 1"),
        ("train --acceptance-target 1.5", "acceptance_target must be between 0 and 1"),
        ("train --num-importance-samples 70", "a multiple of importance_group_size (50)"),
        ("train --pipeline-splits 2", "too small to be a pipeline"),
        ("train --device cpu --only-ipu", "contradict"),
        ("train -r results --run-dir here", "not both"),
        ("train --dataset digits --device tpu", "There is no tpu here"),
        pytest.param(
            *("train --dataset digits --only-ipu", "JAX finds none here"),
            marks=pytest.mark.cpu("it says that there is nothing else"),
        ),
        ("train --dataset digits -v", "1437 training pictures"),
        ("train", "millrace data fetch binarized-mnist"),
        ("evaluate", "--checkpoint-dir must be given"),
        ("evaluate -r .", "There are no checkpoints in ."),
        ("sample -r . --num-rows 0", "num_rows must be at least 1"),
    ],
)
def test_a_mistake_is_a_plain_line_and_status_2(
    words, said, command, tmp_path, monkeypatch
):
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path / "cache"))
    status, errors = command("vcd", *words.split())
    assert status == 2, errors
    assert said in errors
    assert len(errors.splitlines()) <= 2 and "Traceback" not in errors
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "runs"])


def test_data_that_is_not_whole_fails_the_run_with_a_plain_line(command, tmp_path):
    row = " ".join("01" * 392) + "\n"
    (tmp_path / "binarized_mnist_train.amat").write_text(row * 3 + "0 1 0")
    (tmp_path / "binarized_mnist_test.amat").write_text(row)
    status, errors = command("vcd", "train", "--data-dir", ".", "--run-dir", "run")
    assert status == 1 and "has 3 numbers in line 4, expected 784" in errors
    assert "Traceback" not in errors
