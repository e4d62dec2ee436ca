"""Resuming: nothing is lost, and damage is reported."""

import json
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runner import batches, loss_fn, make_runner

import millrace as mr
from millrace.checkpoint.manifest import manifest_checksum
from millrace.checkpoint.store import MANIFEST_ERRORS, read_manifest
from millrace.loop.progress import SavedProgress


def test_a_resumed_run_logs_the_means_of_the_whole_interval(tmp_path):
    whole, state, _, checkpoints = make_runner(
        tmp_path / "whole", list(batches(range(12))), logs=1, checkpoint=4
    )
    expected = whole.run(state).metrics
    checkpoints.close()
    shutil.rmtree(tmp_path / "whole" / "checkpoints" / "update-000000012")
    again, state, _, checkpoints = make_runner(
        tmp_path / "whole", list(batches(range(12))), logs=1, checkpoint=4
    )
    assert again.run(state, resume=True).metrics == expected
    checkpoints.close()


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    path = tmp_path_factory.mktemp("ended") / "r"
    runner, state, _, checkpoints = make_runner(
        path, list(batches(range(12))), checkpoint=4
    )
    runner.run(state)
    checkpoints.close()
    return path


@pytest.fixture
def stopped(ended, tmp_path):
    """A run that ended after 9 of 12 updates, with checkpoints after 6 and 9."""
    shutil.copytree(ended, tmp_path / "r")
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "update-000000012")
    return tmp_path / "r"


def resume(path) -> list[dict]:
    runner, state, directory, checkpoints = make_runner(
        path, list(batches(range(12))), checkpoint=4
    )
    assert runner.run(state, resume=True).updates == 12
    checkpoints.close()
    return directory.read_metrics()


def read_stderr(capsys) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_resuming_an_intact_run_prints_no_warning(stopped, capsys):
    events = resume(stopped)
    assert [event["update"] for event in events] == [3, 6, 9, 12]
    assert read_stderr(capsys) == ""


def not_text(path) -> None:
    path.write_bytes(path.read_bytes().replace(b"seen", b"s\xffen", 1))


def no_event(path) -> None:
    _, rest = path.read_text().split("\n", 1)
    path.write_text("[]\n{}\n" + rest)


@pytest.mark.parametrize(
    ("damage", "left"),
    [(lambda path: path.write_text(""), 0), (not_text, 2), (no_event, 2)],
    ids=["emptied", "not text", "no event"],
)
def test_lost_log_events_are_reported_and_the_run_resumes(stopped, damage, left, capsys):
    damage(stopped / "metrics.jsonl")
    events = resume(stopped)
    assert [event["update"] for event in events] == [*[3, 6, 9][3 - left :], 12]
    warned = f"metrics.jsonl has only {left} of the 3 log events up to update 9"
    assert f"warning: {warned}" in read_stderr(capsys)


def test_a_checkpoint_whose_manifest_lacks_progress_is_set_aside(stopped, capsys):
    path = stopped / "checkpoints" / "update-000000009" / "manifest.json"
    manifest = json.loads(path.read_text()) | {"metrics": None}
    manifest.pop("checksum")
    manifest["checksum"] = manifest_checksum(manifest)
    path.write_text(json.dumps(manifest))
    events = resume(stopped)
    assert [event["update"] for event in events] == [3, 6, 9, 12]
    message = read_stderr(capsys)
    assert "update-000000009 is damaged" in message
    assert "It is set aside for an older one." in message


@pytest.mark.parametrize(
    "change",
    [
        *({"data_position": x} for x in (None, "9", -9, 1.5, ...)),
        *({"time": x} for x in (None, "soon", [], ...)),
        *({"metrics": x} for x in (None, [], {"a": None}, {"a": "text"}, ...)),
        *({"scores": x} for x in (5, {"a": []}, ...)),
        *({"since_log": x} for x in (None, {}, {"sums": {}, "newest": [], "updates": 1})),
        {"samples_per_element": "2"},
        {"num_events": None},
    ],
    ids=str,
)
def test_malformed_progress_in_a_manifest_counts_as_damage(ended, change):
    manifest = read_manifest(ended / "checkpoints" / "update-000000009")
    assert SavedProgress.read(manifest).data_position == 9
    changed = {n: v for n, v in (manifest | change).items() if v is not ...}
    with pytest.raises(MANIFEST_ERRORS):
        SavedProgress.read(changed)


def test_a_state_with_random_keys_and_empty_arrays_resumes_exactly(tmp_path):
    class Noise(NamedTuple):
        key: jax.Array
        nothing: jax.Array

    def init(params):
        return Noise(jax.random.key(7), jnp.zeros((0, 3)))

    def update(updates, state, params=None):
        key, use = jax.random.split(state.key)
        noisy = jax.tree.map(lambda u: u + jax.random.normal(use, u.shape), updates)
        return noisy, state._replace(key=key)

    optimizer = optax.chain(optax.GradientTransformation(init, update), optax.sgd(0.01))

    def run(path, *, resumes=False):
        runner, _, _, checkpoints = make_runner(
            path, list(batches(range(12))), checkpoint=2
        )
        program = mr.training_program(loss_fn, optimizer, mr.Plan(micro_batch_size=2))
        runner._program = program
        result = runner.run(program.init({"w": jnp.ones(1)}), resume=resumes)
        checkpoints.close()
        return result.state.params["w"]

    expected = run(tmp_path / "r")
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "update-000000012")
    np.testing.assert_array_equal(run(tmp_path / "r", resumes=True), expected)
