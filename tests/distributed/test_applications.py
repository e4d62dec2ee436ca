"""Applications give the same weights in one process and in several."""

import subprocess
import sys
from pathlib import Path

import pytest
from last_checkpoint import assert_same_results
from launched import environment, summary

CNN = (
    *("cnn", "train", "--model", "cifar_resnet8", "--dataset", "cifar10"),
    *("--synthetic-data", "host", "--weight-updates-per-epoch", "3", "--num-epochs", "2"),
    *("--micro-batch-size", "2", "--gradient-accumulation-count", "2"),
    *("--validation", "False", "--dbn-replica-group-size", "4"),
)
PIPELINE = (
    *("cnn", "train", "--config", "digits_demo", "--num-epochs", "1"),
    *("--micro-batch-size", "8", "--pipeline-splits", "2"),
    *("--gradient-accumulation-count", "4"),
)
AUTOENCODER = (
    *("autoencoder", "train", "--data", "generated", "--num-users", "200"),
    *("--num-items", "40", "--size", "128", "--batch-size", "32", "--epochs", "2"),
    *("--batches-per-step", "2", "--precision", "32.32"),
)
VCD = (
    *("vcd", "train", "--dataset", "digits", "--num-epochs", "2"),
    *("--micro-batch-size", "25", "--z-dim", "2", "--num-hidden", "8"),
    *("--num-hmc-steps", "2", "--num-burn-in-steps", "1", "--num-leapfrog-steps", "2"),
    *("--testing", "False", "--pictures", "False"),
)
APPLICATIONS = {"cnn": CNN, "autoencoder": AUTOENCODER, "vcd": VCD, "pipeline": PIPELINE}
REPLICAS = {"pipeline": 2}


def run(*args: str) -> str:
    done = subprocess.run(
        args,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


MILLRACE = (sys.executable, "-m", "millrace")


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    """Return the directory of an application's run on four devices of one process."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "run"
            replicas = str(REPLICAS.get(name, 4))
            own = ("--virtual-devices", "4", "--num-replicas", replicas)
            run(*MILLRACE, *APPLICATIONS[name], *own, "--run-dir", str(made[name]))
        return made[name]

    return directory


@pytest.mark.slow
@pytest.mark.parametrize("instances", [2, 4])
@pytest.mark.parametrize("name", ["cnn", "autoencoder", "vcd"])
def test_an_application_in_several_processes_gives_the_weights_of_one(
    name, instances, tmp_path, in_one_process
):
    directory = tmp_path / "run"
    own = ("launch", "--num-instances", str(instances), "--num-replicas", "4", "--")
    run(*MILLRACE, *own, "millrace", *APPLICATIONS[name], "--run-dir", str(directory))
    assert_same_results(directory, in_one_process(name))


@pytest.mark.slow
def test_pipelines_within_processes_are_replicated_across_them(tmp_path, in_one_process):
    directory = tmp_path / "run"
    own = ("--num-instances", "2", "--num-replicas", "2", "--ipus-per-replica", "2")
    run(*MILLRACE, "launch", *own, "millrace", *PIPELINE, "--run-dir", str(directory))
    assert_same_results(directory, in_one_process("pipeline"))


@pytest.mark.slow
def test_the_models_of_a_sweep_are_divided_among_processes(tmp_path):
    args = ("autoencoder", "sweep", *AUTOENCODER[2:], "--base-learning-rates", "14,16")
    alone, both = tmp_path / "alone", tmp_path / "both"
    run(*MILLRACE, *args, "--run-dir", str(alone))
    launch = ("launch", "--num-instances", "2", "--", "millrace")
    run(*MILLRACE, *launch, *args, "--run-dir", str(both))
    trials = [summary(directory)["trials"] for directory in (alone, both)]
    for ours, theirs in zip(*trials, strict=True):
        for name in ("base_learning_rate", "rmse", "validation_rmse"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)
    run(*MILLRACE, *launch, *args, "--run-dir", str(both), "--resume")
