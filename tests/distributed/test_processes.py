"""Several processes train like one, and leave the same files."""

import json
import re

import jax
import numpy as np
import orbax.checkpoint
import pytest
from launched import (
    alone,
    assert_same_history,
    assert_same_weights,
    events,
    final_weights,
    finish,
    launched,
    listening_addresses,
    pid_of,
    run,
    start,
    summary,
    wait_for,
)

LOOPBACK = "0100007F"  # 127.0.0.1 in the format of /proc


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two") / "run"
    return directory, run(launched(directory, 2))


def test_two_processes_of_two_devices_give_the_weights_of_one_of_four(
    two_by_two, undisturbed
):
    assert_same_weights(two_by_two[0], undisturbed)
    assert_same_history(two_by_two[0], undisturbed)


def test_every_sample_is_read_and_validated_exactly_once(two_by_two):
    """Checks sums over the ids: 64 of 70 in an epoch, and all 13 in a validation."""
    logged = [event for event in events(two_by_two[0]) if "train_ids" in event]
    for first in range(0, len(logged), 8):
        # A micro-batch of 2 reports its sum, and an update the mean of its 4 sums.
        total = sum(4 * event["train_ids"] for event in logged[first : first + 8])
        left_out = sum(range(70)) - total
        assert 15 <= left_out <= sum(range(64, 70))
    validated = [e["validation_id"] for e in events(two_by_two[0]) if "validation_id" in e]
    assert validated == [6.0] * 5


def test_output_lines_have_a_process_number_and_only_process_0_shows_progress(two_by_two):
    lines = two_by_two[1].splitlines()
    assert all(re.match(r"\[[01]\] ", line) for line in lines), lines
    others = [line for line in lines if line.startswith("[1]")]
    assert len(others) == 1 and "process 1 of 2" in others[0]
    assert any(line.startswith("[0] epoch 5 ") for line in lines)


def test_the_processes_write_one_checkpoint_that_orbax_alone_reads(two_by_two):
    folder = sorted((two_by_two[0] / "checkpoints").iterdir())[-1]
    manifest = json.loads((folder / "manifest.json").read_text())
    shares = [folder / "state" / f"ocdbt.process_{process}" for process in range(2)]
    for share in shares:  # an array is not stored in both
        names = {path.relative_to(folder).as_posix() for path in share.rglob("d/*")}
        assert names and names <= manifest["files"].keys()
    found = orbax.checkpoint.PyTreeCheckpointer().restore(folder / "state")
    final = final_weights(two_by_two[0])
    assert len(jax.tree.leaves(found)) == len(final)
    for name, array in zip(manifest["arrays"], final, strict=True):
        np.testing.assert_array_equal(find(found, name), array)
    assert summary(two_by_two[0])["status"] == "completed"


def find(tree, name):
    """Return the array of a name in a manifest, such as ``.params['a']``."""
    for field, key, index in re.findall(r"\.(\w+)|\['(\w+)'\]|\[(\d+)\]", name):
        tree = tree[int(index)] if index else tree[field or key]
    return tree


@pytest.mark.slow
def test_a_run_of_four_replicas_continues_with_two_in_one_process(tmp_path, undisturbed):
    """Interrupted in two processes; only the global batch stays the same."""
    directory = tmp_path / "run"
    process = start(launched(directory, 2, "--delay", "0.05"))
    wait_for(directory, 9, process)
    addresses = [listening_addresses(pid_of(number, process)) for number in range(2)]
    assert all(addresses)
    assert all(address.endswith(LOOPBACK) for some in addresses for address in some)
    process.terminate()
    output = finish(process, 130)
    assert output.count("SIGTERM") == 1, output  # process 0 reports for all
    assert summary(directory)["status"] == "interrupted"
    stopped = summary(directory)["updates"]
    assert 9 <= stopped < 40
    args = ("--virtual-devices", "2", "--num-replicas", "2", "--global-batch-size", "8")
    output = run(alone(directory, *args, "--resume"))
    assert f"Resuming after update {stopped}." in output
    assert_same_weights(directory, undisturbed)
    assert_same_history(directory, undisturbed)
    assert summary(directory)["status"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize("resumed_on", [1, 2, 4])
def test_a_run_stopped_in_four_processes_continues_in_another_number(
    tmp_path, undisturbed, resumed_on
):
    directory = tmp_path / "run"
    process = start(launched(directory, 4, "--delay", "0.05"))
    wait_for(directory, 9, process)
    process.terminate()
    finish(process, 130)
    if resumed_on == 1:
        run(alone(directory, "--virtual-devices", "4", "--num-replicas", "4", "--resume"))
    else:
        run(launched(directory, resumed_on, "--resume"))
    assert_same_weights(directory, undisturbed)
    assert_same_history(directory, undisturbed)


@pytest.mark.slow
def test_two_launches_at_once_do_not_interfere(tmp_path, undisturbed):
    both = [start(launched(tmp_path / name, 2)) for name in ("one", "other")]
    for process in both:
        finish(process)
    for name in ("one", "other"):
        assert_same_weights(tmp_path / name, undisturbed)


@pytest.mark.slow
def test_processes_find_one_another_from_options_alone(tmp_path, undisturbed):
    from millrace.distributed.hardware import find_free_port

    directory = tmp_path / "run"
    args = ("--virtual-devices", "2", "--num-replicas", "4", "--num-processes", "2")
    where = ("--coordinator", f"127.0.0.1:{find_free_port()}")
    both = [
        start(alone(directory, *args, *where, "--process-id", str(number)))
        for number in range(2)
    ]
    for process in both:
        finish(process)
    assert_same_weights(directory, undisturbed)
