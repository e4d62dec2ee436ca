"""Slurm starts the processes of a run, and starts a job again that had to make room."""

import shlex
import tempfile
import time
from pathlib import Path

import pytest
import slurm_cluster
from last_checkpoint import assert_same_results
from launched import (
    DIGITS,
    alone,
    assert_same_history,
    assert_same_weights,
    summary,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    if (reason := slurm_cluster.why_not()) is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        made = slurm_cluster.Cluster(Path(folder))
        yield made
        made.close()


@pytest.mark.parametrize("count", [2, 4])
def test_an_application_under_srun_gives_the_weights_of_one_process(
    count, cluster, tmp_path, digits
):
    own = ("--virtual-devices", str(4 // count), "--run-dir", str(tmp_path / "run"))
    output = cluster.call("srun", "--ntasks", str(count), *DIGITS, *own)
    assert "validation_accuracy" in summary(tmp_path / "run")["metrics"], output
    assert_same_results(tmp_path / "run", digits)


def test_a_single_task_of_a_larger_job_is_one_process(cluster, tmp_path):
    own = ("--virtual-devices", "4", "--run-dir", str(tmp_path / "run"))
    inner = shlex.join(["srun", "--ntasks", "1", *alone(tmp_path / "run", *own[:2])])
    cluster.call("salloc", "--ntasks", "2", "sh", "-c", inner)
    assert summary(tmp_path / "run")["status"] == "completed"


def test_two_steps_of_a_job_do_not_interfere(cluster, tmp_path, undisturbed):
    own = ("--virtual-devices", "2", "--num-replicas", "4")
    steps = [
        shlex.join(["srun", "--ntasks=2", "--exact", *alone(tmp_path / name, *own)])
        for name in ("one", "other")
    ]
    cluster.call("salloc", "--ntasks", "4", "sh", "-c", f"{steps[0]} & {steps[1]}; wait")
    for name in ("one", "other"):
        assert_same_weights(tmp_path / name, undisturbed)


JOB = Path(__file__).parents[2] / "examples" / "slurm" / "job.sh"


def submit(cluster, directory) -> str:
    """Submit the job of the examples, which trains slowly; return its number."""
    own = ("--virtual-devices", "2", "--num-replicas", "4", "--delay", "0.2")
    options = ("--ntasks=2", f"--output={directory}.log")
    command = ("sbatch", "--parsable", *options, str(JOB), *alone(directory, *own))
    return cluster.call(*command).strip()


def wait_for_update(directory, update):
    path = directory / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (path.exists() and f'"update": {update},' in path.read_text()):
        assert time.monotonic() < deadline, Path(f"{directory}.log").read_text()
        time.sleep(0.1)


def check_continued(cluster, job, directory, undisturbed):
    """Check that the job starts again, and ends like a run that was never interrupted."""
    cluster.wait_for(job, "COMPLETED", restarts=1)
    output = Path(f"{directory}.log").read_text()
    assert "Resuming after update" in output
    assert_same_weights(directory, undisturbed)
    assert_same_history(directory, undisturbed)


def test_a_job_that_is_requeued_ends_with_the_same_weights(cluster, tmp_path, undisturbed):
    directory = tmp_path / "run"
    job = submit(cluster, directory)
    wait_for_update(directory, 9)
    assert cluster.call("scontrol", "requeue", job) == ""
    check_continued(cluster, job, directory, undisturbed)


def test_a_job_that_makes_room_for_another_one_ends_with_the_same_weights(
    cluster, tmp_path, undisturbed
):
    directory = tmp_path / "run"
    job = submit(cluster, directory)
    wait_for_update(directory, 9)
    urgent = ("srun", "--quiet", "--partition=high", "--exclusive", "echo", "urgent")
    assert cluster.call(*urgent) == "urgent\n"
    check_continued(cluster, job, directory, undisturbed)


def test_a_job_that_is_asked_to_stop_requeues_itself(cluster, tmp_path, undisturbed):
    """As ``--signal`` does before the time limit, after which Slurm would end the job."""
    directory = tmp_path / "run"
    job = submit(cluster, directory)
    wait_for_update(directory, 9)
    cluster.call("scancel", "--signal=TERM", job)
    check_continued(cluster, job, directory, undisturbed)


def test_a_canceled_job_stays_canceled_and_leaves_a_checkpoint(cluster, tmp_path):
    directory = tmp_path / "run"
    job = submit(cluster, directory)
    wait_for_update(directory, 9)
    cluster.call("scancel", job)
    cluster.wait_for(job, "CANCELLED")
    wait_until_interrupted(directory)
    time.sleep(8)  # a requeued job would start again
    assert cluster.show(job)["JobState"] == "CANCELLED"
    assert summary(directory)["status"] == "interrupted"


def wait_until_interrupted(directory):
    deadline = time.monotonic() + 60
    while not (directory / "summary.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
