"""Training that does not fit in memory is an error before the first update."""

import json

import pytest

from millrace.apps.cnn import program
from millrace.cli import main

WORDS = (
    *("cnn", "train", "--model", "toy_model", "--dataset", "mnist", "--quiet"),
    *("--synthetic-data", "host", "--weight-updates-per-epoch", "2", "--num-epochs", "1"),
    *("--validation", "False", "--global-batch-size", "256", "--micro-batch-size", "64"),
)


def run(path, *words):
    """Run the command; return its exit status."""
    with pytest.raises(SystemExit) as ended:
        main([*WORDS, *words, "--run-dir", str(path)])
    return ended.value.code


@pytest.fixture(scope="module")
def needed(tmp_path_factory):
    """The memory that the run needs."""
    path = tmp_path_factory.mktemp("memory") / "compiled"
    assert run(path, "--compile-only") == 0
    return json.loads((path / "summary.json").read_text())["memory_bytes"]


@pytest.mark.parametrize("words", [[], ["--compile-only"]], ids=" ".join)
def test_a_micro_batch_that_is_too_large_names_one_that_fits(
    words, needed, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(program, "memory_limit", lambda _: needed * 3 // 4)
    assert run(tmp_path / "run", *words) == 2
    assert not (tmp_path / "run").exists()
    output = capsys.readouterr().err
    assert "A micro-batch 64 needs" in output
    assert "largest power of two that fits is 32. Lower --micro-batch-size" in output


def test_a_run_that_just_fits_is_trained(needed, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "memory_limit", lambda _: needed)
    assert run(tmp_path / "run") == 0
