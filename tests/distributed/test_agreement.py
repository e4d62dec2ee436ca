"""Processes of a run that were given different things say so, and stop."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from launched import environment

from millrace.config import ConfigurationError
from millrace.distributed import agreement, coordination
from millrace.distributed.agreement import (
    check_same_data,
    check_same_start,
    refuse_differences,
)
from millrace.distributed.ports import free_port
from millrace.plan import Plan
from millrace.run.console import Console
from millrace.run.directory import RunDirectory
from millrace.run.options import RunOptions
from millrace.run.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunOptions, Plan):
    """Options like those of an application."""

    rate: float = 0.1
    data_dir: Path | None = None
    num_workers: int = dataclasses.field(default=2, metadata={"may_differ": True})


class Both:
    """Two processes, of which the second one calls after the first."""

    def __init__(self, monkeypatch):
        self.told = {}
        self.number = 0
        monkeypatch.setattr(coordination, "num_processes", lambda: 2)
        monkeypatch.setattr(coordination, "broadcast", self.broadcast)
        monkeypatch.setattr(coordination, "gather", lambda _, value: [[], value])

    def broadcast(self, name, value):
        if self.number == 0:
            self.told[name] = value
        return self.told[name]

    def call(self, function, *values):
        """Call it in the first process and in the second, each with its own values."""
        for self.number, value in enumerate(values):
            function(*value)


@pytest.fixture
def both(monkeypatch):
    return Both(monkeypatch)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 5}, "Process 1 differs from process 0: seed is 5 there and 0 in process"),
        ({"rate": 0.2}, "rate is 0.2 there and 0.1"),
        ({"resume": True, "run_dir": Path("x")}, "resume is true there and false"),
        ({"data_dir": Path("/data")}, 'data_dir is "a path" there and null'),
    ],
)
def test_an_option_that_differs_is_named(both, changed, said):
    with pytest.raises(ConfigurationError) as caught:
        both.call(check_same_start, (Config(), "x"), (Config(**changed), "x"))
    assert said in str(caught.value)


def test_what_concerns_one_process_or_machine_may_differ(both):
    one = Config(data_dir=Path("/scratch/node0"), process_id=0, num_processes=2)
    other = Config(
        data_dir=Path("/scratch/node1"),
        process_id=1,
        num_processes=2,
        run_dir=Path("elsewhere"),
        quiet=True,
        num_workers=8,
        virtual_devices=3,
    )
    both.call(check_same_start, (one, "x"), (other, "x"))


def test_another_command_is_a_difference(both):
    with pytest.raises(ConfigurationError, match='command is "vcd-train" there and "cnn-'):
        both.call(check_same_start, (Config(), "cnn-train"), (Config(), "vcd-train"))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("versions", lambda: {"jax": "9.9"}, 'the version of jax is "9.9" there and "'),
        ("_source_digest", lambda: "other", 'the source code of millrace is "other" there'),
    ],
)
def test_other_software_is_a_difference(both, monkeypatch, name, value, said):
    both.call(check_same_start, (Config(), "x"))
    monkeypatch.setattr(agreement, name, value)
    both.number = 1
    with pytest.raises(ConfigurationError, match=said):
        check_same_start(Config(), "x")


def test_another_setting_of_jax_is_a_difference(both):
    both.call(check_same_start, (Config(), "x"))
    both.number = 1
    with (
        jax.default_matmul_precision("float32"),
        pytest.raises(
            ConfigurationError, match='jax_default_matmul_precision is "float32"'
        ),
    ):
        check_same_start(Config(), "x")


def test_of_many_differences_some_are_named(both):
    values = [({f"option {n}": number for n in range(9)},) for number in (0, 1)]
    with pytest.raises(ConfigurationError) as caught:
        both.call(lambda own: refuse_differences("x", own, "Do."), *values)
    assert str(caught.value).count("option") == 5


def test_nan_is_the_same_as_nan(both):
    values = [({"scale": float("nan")},)] * 2
    both.call(lambda own: refuse_differences("x", own, "Do."), *values)


def test_data_of_another_size_is_a_difference_and_another_path_is_not(both):
    here = {"dataset": "imagenet from /data/imagenet, 1,000 training samples"}
    there = {"dataset": "imagenet from /scratch/17/im, 1,000 training samples"}
    less = {"dataset": "imagenet from /data/imagenet, 999 training samples"}
    both.call(check_same_data, (here,), (there,))
    with pytest.raises(ConfigurationError, match=r"999 training samples.*the same data"):
        both.call(check_same_data, (here,), (less,))


def test_a_run_that_describes_itself_compares_its_data(both, tmp_path):
    run = Run(RunOptions(), RunDirectory(tmp_path), Console(quiet=True), [], "x")

    def describe(count):
        run.describe(jax.devices(), Plan(), None, dataset=f"{count} samples")

    both.call(describe, (10,), (10,))
    with pytest.raises(ConfigurationError, match="9 samples"):
        both.call(describe, (10,), (9,))


def test_processes_started_by_hand_with_other_options_all_stop_with_status_2(tmp_path):
    words = [sys.executable, "-m", "millrace", "cnn", "train", "--config", "digits_demo"]
    words += ["--num-replicas", "2", "--run-dir", str(tmp_path / "run")]
    words += ["--num-processes", "2", "--coordinator", f"127.0.0.1:{free_port()}"]
    both = [
        subprocess.Popen(
            [*words, "--process-id", str(number), "--seed", str(7 + number)],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for process in both:
        _, said = process.communicate(timeout=90)
        assert process.returncode == 2
        assert "Process 1 differs from process 0: seed is 8 there and 7 in" in said
        assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
