"""Asynchronous validation: training does not wait, and no result is lost."""

import json
import shutil
import threading

import jax.numpy as jnp
import pytest
from small_runner import batches, make_runner

from millrace.checkpoint.store import checkpoints_in, read_manifest
from millrace.loop.evaluate import AsyncValidation

FOUR = {"logs": 4, "checkpoint": 4, "validations": 4}


def snapshot(state):
    return int(state.update), jnp.copy(state.params["w"])


def read_weight(copied):
    update, weight = copied
    return {"update": float(update), "weight": float(weight[0])}


def run(path, values, validate, **how):
    runner, state, directory, checkpoints = make_runner(
        path, values, validate=validate, **FOUR
    )
    try:
        result = runner.run(state, **how)
    finally:
        checkpoints.close()
    return result, directory.read_metrics()


def validations(events):
    return {
        event["update"]: (event["validation_update"], event["validation_weight"])
        for event in events
        if "validation_weight" in event
    }


def test_training_continues_during_a_validation(tmp_path):
    continued = threading.Event()

    def report(update):
        if update > 6:  # the first validation is after six
            continued.set()

    def wait_for_training(copied):
        assert continued.wait(20), "training waited for its validation"
        return read_weight(copied)

    runner, state, directory, checkpoints = make_runner(
        tmp_path / "r",
        batches(range(12)),
        validate=AsyncValidation(snapshot, wait_for_training),
        validations=2,
        logs=4,
    )
    runner._writers.append(CallbackWriter(report))
    runner.run(state)
    checkpoints.close()
    assert list(validations(directory.read_metrics())) == [6, 12]


class CallbackWriter:
    """A writer that calls a function with the update of each event."""

    def __init__(self, report):
        self.report = report

    def write(self, event):
        self.report(event["update"])

    def close(self):
        pass


def test_async_validation_gives_the_same_metrics_as_synchronous(tmp_path):
    def validate_now(state):
        return read_weight(snapshot(state))

    found = []
    for name, validate in (
        ("sync", validate_now),
        ("async", AsyncValidation(snapshot, read_weight)),
    ):
        result, events = run(tmp_path / name, batches(range(12)), validate)
        folders = checkpoints_in(tmp_path / name / "checkpoints")
        scores = [read_manifest(folder)["scores"] for folder in folders]
        found.append((result.metrics, validations(events), scores))
    assert found[0] == found[1]
    assert [update for update, _ in found[1][1].values()] == [3, 6, 9, 12]


def test_an_error_in_validation_ends_the_run_without_its_checkpoint(tmp_path):
    def fail(copied):
        if copied[0] == 6:
            raise RuntimeError("diverged")
        return read_weight(copied)

    with pytest.raises(RuntimeError, match="diverged"):
        run(tmp_path / "r", batches(range(12)), AsyncValidation(snapshot, fail))
    names = [path.name for path in checkpoints_in(tmp_path / "r" / "checkpoints")]
    assert names == ["update-000000003"]


def test_a_validation_that_was_saved_but_not_logged_is_logged_on_resume(tmp_path):
    path = tmp_path / "r"
    _, whole = run(path, batches(range(12)), AsyncValidation(snapshot, read_weight))
    for folder in checkpoints_in(path / "checkpoints")[1:]:
        shutil.rmtree(folder)
    kept = [event for event in whole if "validation_weight" not in event]
    lines = "".join(json.dumps(event) + "\n" for event in kept)
    (path / "metrics.jsonl").write_text(lines)
    _, again = run(
        path, batches(range(12)), AsyncValidation(snapshot, read_weight), resume=True
    )
    first = checkpoints_in(path / "checkpoints")[0]
    assert validations(again) == {
        update: found
        for update, found in validations(whole).items()
        if update >= read_manifest(first)["update"]
    }
