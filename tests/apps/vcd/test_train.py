"""The commands as a user runs them, with a small model and the embedded digits."""

import json
import logging
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml
from PIL import Image

from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.data import load_images
from millrace.apps.vcd.program import build_program, init_state
from millrace.checkpoint.store import checkpoints_in, restore
from millrace.cli import main
from millrace.config import build
from millrace.loop.progress import TIMED

SMALL = [
    *("--dataset", "digits", "--z-dim", "2", "--num-hidden", "8", "-b", "100"),
    *("--num-burn-in-steps", "2", "--num-leapfrog-steps", "2"),
    *("--independent-iterations", "20", "--num-epochs", "4", "-l", "0.01"),
    *("--num-importance-samples", "100", "--test-micro-batch-size", "180"),
    *("--num-test-burn-in-steps", "5", "--num-test-hmc-steps", "5"),
]


@pytest.fixture(scope="module")
def millrace_command():
    """Run a command in this process; return its status and its messages."""
    logger = logging.getLogger("millrace")
    kept = logger.handlers, logger.level, logger.propagate

    def command(capsys, *arguments):
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        return left.value.code, capsys.readouterr().err

    yield command
    logger.handlers, logger.level, logger.propagate = kept


@pytest.fixture
def command(millrace_command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: millrace_command(capsys, *arguments)


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
    timed = TIMED
    return [{k: v for k, v in event.items() if k not in timed} for event in events]


def state_at(path, number=-1):
    checkpoint = checkpoints_in(path / "checkpoints")[number]
    config = load_config(path)
    images = load_images(config.data, num_validation=config.workflow.num_held_out).training
    program = build_program(config, images, jax.devices())
    like = program.init(*init_state(config, images))
    return restore(checkpoint, like).state


def load_config(path):
    values = yaml.safe_load((path / "config.yml").read_text())
    del values["command"]
    return build(VcdConfig, values)


# Runs and their results


def test_a_run_trains_tests_and_writes_its_results(trained):
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
    # The bound that is trained is lower than the estimate by importance sampling.
    assert metrics["test_log_likelihood"] > metrics["validation_elbo"]


def test_the_report_shows_how_the_images_evolve(trained):
    names = sorted(path.name for path in (trained.path / "pictures").iterdir())
    kinds = ("chain", "prior", "reconstructions")
    assert names == [f"{k}-{n:09d}.png" for k in kinds for n in (14, 28, 42, 56)]
    page = (trained.path / "report.html").read_text()
    assert page.count("<img ") == 12 and "after 56 updates" in page
    assert not re.search(r'(?:src|href)="?https?:', page)  # self-contained
    with Image.open(trained.path / "pictures" / names[0]) as image:
        assert image.mode == "L" and image.size == (10 * 62 + 6, 8 * 62 + 6)


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(trained, command, tmp_path):
    """This includes control variates, step size, random key and sample order."""
    again = tmp_path / "again"
    shutil.copytree(trained.path, again)
    for late in checkpoints_in(again / "checkpoints")[1:]:
        shutil.rmtree(late)
    arguments = [*SMALL, "--run-dir", again, "-v", "--n-validation", "37", "--resume"]
    status, output = command("vcd", "train", *arguments)
    assert status == 0 and "Resuming after update 28" in output
    one, other = state_at(trained.path), state_at(again)
    assert int(one.update) == 56
    assert np.unique(one.model_state["control_variate"]["local"]).size > 100
    assert float(one.model_state["step_size"]) != pytest.approx(0.05)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert without_times(events_of(again)) == without_times(events_of(trained.path))


def test_evaluate_and_sample_work_on_a_trained_model(trained, command, tmp_path):
    arguments = (trained.path, "--num-importance-samples", "100", "--seed", "0")
    chains = ("--num-test-burn-in-steps", "5", "--num-test-hmc-steps", "5")
    batch = ("--test-micro-batch-size", "180")
    status, output = command(
        "vcd", "evaluate", *arguments, *chains, *batch, "--run-dir", tmp_path / "e"
    )
    assert status == 0 and "s left" in output
    summary = json.loads((tmp_path / "e" / "summary.json").read_text())
    found = summary["metrics"]
    for name, value in found.items():
        assert value == pytest.approx(trained.summary["metrics"][name], abs=1e-4)
    status, output = command(
        "vcd",
        "sample",
        *(trained.path, "--num-rows", "3", "--num-columns", "4"),
        *("--num-steps", "5", "--run-dir", tmp_path / "s"),
    )
    assert status == 0
    sizes = {}
    for path in (tmp_path / "s" / "pictures").iterdir():
        with Image.open(path) as image:
            sizes[path.name] = tuple(side // 57 for side in image.size)
    assert sizes == {
        "prior-000000056.png": (4, 3),
        "reconstructions-000000056.png": (4, 4),
        "chain-000000056.png": (7, 3),  # original, start, and five steps
    }


@pytest.mark.slow
def test_repeats_have_their_own_seeds_and_directories(command, tmp_path):
    arguments = [*SMALL, "--num-epochs", "1", "--no-testing", "--pictures", "False"]
    arguments += ["--objective", "standard_kl", "-r", "results", "-n", "two"]
    status, _ = command("vcd", "train", *arguments, "-R", "2")
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


def test_without_hmc_steps_a_warning_says_that_this_is_a_plain_vae(command, tmp_path):
    arguments = [*SMALL, "--num-epochs", "1", "--no-testing", "--pictures", "False"]
    arguments += ["--num-burn-in-steps", "0", "--run-dir", "plain"]
    status, output = command("vcd", "train", *arguments)
    assert status == 0
    assert "no HMC steps, so this trains a plain VAE (standard_kl) instead of vcd" in output
    metrics = json.loads((tmp_path / "plain" / "summary.json").read_text())["metrics"]
    assert metrics["train_elbo"] < 0 and "train_vcd" not in metrics


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train -c nope", "default, digits_demo"),
        ("train -c bs_experiment -b 64", "16, 100, 128, 512, 1024"),
        ("train --leapfrog 3", "Unknown option --leapfrog"),
        ("train --num-leapfrog-steps 0", "--num-leapfrog-steps must be at least 1"),
        ("train --acceptance-target 1.5", "--acceptance-target must be between 0 and 1"),
        ("train --num-importance-samples 70", "a multiple of importance_group_size (50)"),
        ("train --pipeline-splits 2", "too small for a pipeline"),
        ("train --device cpu --only-ipu", "contradict"),
        ("train -r results --run-dir here", "not both"),
        ("train --dataset digits --device tpu", "JAX finds no tpu on this machine"),
        pytest.param(
            *("train --dataset digits --only-ipu", "JAX finds no accelerator"),
            marks=pytest.mark.cpu("the message is about a machine without accelerators"),
        ),
        ("train --dataset digits -v", "1437 training images"),
        ("train", "millrace data fetch binarized-mnist"),
        ("evaluate", "RUN is required"),
        ("evaluate -r .", "There are no checkpoints in ."),
        ("sample -r . --num-rows 0", "--num-rows must be at least 1"),
    ],
)
def test_a_mistake_prints_one_line_and_exits_with_2(
    arguments, message, command, tmp_path, monkeypatch
):
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path / "cache"))
    status, errors = command("vcd", *arguments.split())
    assert status == 2, errors
    assert message in errors
    assert len(errors.splitlines()) <= 2 and "Traceback" not in errors
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "runs"])


def test_truncated_data_fails_the_run_with_a_one_line_error(command, tmp_path):
    row = " ".join("01" * 392) + "\n"
    (tmp_path / "binarized_mnist_train.amat").write_text(row * 3 + "0 1 0")
    (tmp_path / "binarized_mnist_test.amat").write_text(row)
    status, errors = command("vcd", "train", "--data-dir", ".", "--run-dir", "run")
    assert status == 1 and "has 3 numbers in line 4, expected 784" in errors
    assert "Traceback" not in errors
