"""A run that is resumed with more epochs equals one that had them from the start."""

import json

import jax
import pytest
import yaml
from small_runner import batches, make_runner

from millrace.cli import main
from millrace.loop.progress import TIMED


def status(arguments):
    with pytest.raises(SystemExit) as left:
        main(arguments.split())
    return left.value.code


def history(run):
    """Return the log events without the values that depend on the clock."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k not in TIMED} for x in lines]


def assert_same(found, expected):
    """Compare bits on a CPU, and values up to rounding on a GPU.

    There the autoencoder sums in another order: it pads batches to the largest of the run.
    """
    if jax.default_backend() == "cpu":
        assert found == expected
    assert len(found) == len(expected)
    for event, other in zip(found, expected, strict=True):
        assert event == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize(
    ("train", "option"),
    [
        ("cnn train --config digits_demo --deterministic --quiet", "num_epochs"),
        (
            "autoencoder train --data generated --num-users 64 --num-items 30 --size 128 "
            "--batch-size 16 --precision 32.32 --learning-rate-decay 1 --steps-per-log 1 "
            "--learning-rate-schedule= --no-dense-refeeding --deterministic --quiet",
            "epochs",
        ),
    ],
    ids=["cnn", "autoencoder"],
)
def test_a_run_trains_for_more_epochs(train, option, tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = f"--{option.replace('_', '-')}"
    assert status(f"{train} {more} 3 --run-dir {whole}") == 0
    assert status(f"{train} {more} 1 --run-dir {parts}") == 0
    assert status(f"{train} {more} 3 --run-dir {parts} --resume") == 0
    assert_same(history(parts), history(whole))
    assert yaml.safe_load((parts / "config.yml").read_text())[option] == 3
    summary = json.loads((parts / "summary.json").read_text())
    assert f"{option} 3; " in summary["facts"]["extended"]
    capsys.readouterr()
    assert status(f"{train} {more} 2 --run-dir {parts} --resume") == 2
    assert "epochs was 3" in capsys.readouterr().err


def test_the_shorter_run_may_end_inside_an_execution_of_the_longer_one(tmp_path):
    weights = []
    for path, lengths in (("whole", [20]), ("parts", [12, 20])):
        for resume, updates in enumerate(lengths):
            runner, state, _, checkpoints = make_runner(
                tmp_path / path, list(batches(range(20))), updates=updates, logs=0
            )
            result = runner.run(state, resume=bool(resume))
            checkpoints.close()
        assert int(result.state.update) == 20
        weights.append(float(result.state.params["w"][0]))
    assert weights[0] == weights[1]
