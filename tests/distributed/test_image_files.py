"""Image files in several processes with data workers: the batches of one without."""

import pytest
from image_files import write_folders
from launched import (
    alone,
    assert_same_history,
    assert_same_weights,
    events,
    finish,
    launched,
    run,
    start,
    summary,
    wait_for,
)


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Return the options for 72 images in class folders."""
    folder = write_folders(tmp_path_factory.mktemp("images"), 3, 24)
    return "--images", str(folder), "--num-epochs", "2"


@pytest.fixture(scope="module")
def expected(options, tmp_path_factory):
    """Return the directory of a run in one process without data workers."""
    directory = tmp_path_factory.mktemp("expected") / "run"
    run(alone(directory, *options, "--virtual-devices", "4", "--num-replicas", "4"))
    sums = [event["train_ids"] for event in events(directory) if "train_ids" in event]
    assert len(set(sums)) == len(sums) == 16  # updates of two epochs; all differ
    return directory


@pytest.mark.slow
def test_two_processes_with_workers_continue_in_one_with_others_in_mid_epoch(
    options, expected, tmp_path
):
    directory = tmp_path / "run"
    slow = ("--delay", "0.2", "--num-workers", "1")
    process = start(launched(directory, 2, *options, *slow))
    wait_for(directory, 3, process)
    process.terminate()
    finish(process, 130)
    stopped = summary(directory)["updates"]
    assert 3 <= stopped < 16
    if stopped % 8 == 0:
        pytest.skip("it stopped at the end of an epoch")
    own = ("--virtual-devices", "4", "--num-replicas", "4", "--num-workers", "4")
    output = run(alone(directory, *options, *own, "--resume"))
    assert f"Resuming after update {stopped}." in output
    assert_same_weights(directory, expected)
    assert_same_history(directory, expected)


@pytest.mark.slow
def test_one_process_continues_in_two_with_workers_in_mid_epoch(
    options, expected, tmp_path
):
    directory = tmp_path / "run"
    own = ("--virtual-devices", "4", "--num-replicas", "4")
    process = start(alone(directory, *options, *own, "--delay", "0.2"))
    wait_for(directory, 3, process)
    process.terminate()
    finish(process, 130)
    run(launched(directory, 2, *options, "--num-workers", "1", "--resume"))
    assert_same_weights(directory, expected)
    assert_same_history(directory, expected)
