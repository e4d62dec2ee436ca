"""Processes with different options, software or data report it and stop."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from launched import environment

from millrace.config import ConfigurationError, build
from millrace.distributed import coordination
from millrace.distributed.coordination import check_same, check_same_data, check_same_start
from millrace.distributed.hardware import find_free_port
from millrace.plan import Plan
from millrace.run.console import Console
from millrace.run.directory import RunDirectory
from millrace.run.options import RunOptions
from millrace.run.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Options like those of an application."""

    rate: float = 0.1
    data_dir: Path | None = None
    num_workers: int = dataclasses.field(default=2, metadata={"may_differ": True})
    plan: Plan = Plan()
    run: RunOptions = RunOptions()


class Both:
    """Two processes; the second one makes its calls after the first."""

    def __init__(self, monkeypatch):
        self.values = {}
        self.number = 0
        monkeypatch.setattr(coordination, "num_processes", lambda: 2)
        monkeypatch.setattr(coordination, "broadcast", self.broadcast)
        monkeypatch.setattr(coordination, "gather", lambda _, value: [[], value])

    def broadcast(self, name, value):
        if self.number == 0:
            self.values[name] = value
        return self.values[name]

    def call(self, function, *values):
        """Call `function` in process 0, then in process 1, each with its own values."""
        for self.number, value in enumerate(values):
            function(*value)


@pytest.fixture
def both(monkeypatch):
    return Both(monkeypatch)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 5}, "Process 1 differs from process 0: seed is 5 instead of 0."),
        ({"rate": 0.2}, "rate is 0.2 instead of 0.1"),
        ({"resume": True, "run_dir": Path("x")}, "resume is true instead of false"),
        ({"data_dir": Path("/data")}, 'data_dir is "a path" instead of null'),
    ],
)
def test_an_option_that_differs_is_named(both, changed, message):
    with pytest.raises(ConfigurationError) as caught:
        both.call(check_same_start, (Config(), "x"), (build(Config, changed), "x"))
    assert message in str(caught.value)


def test_options_of_one_process_or_machine_may_differ(both):
    one = Config(
        data_dir=Path("/scratch/node0"), run=RunOptions(process_id=0, num_processes=2)
    )
    other = Config(
        data_dir=Path("/scratch/node1"),
        num_workers=8,
        run=RunOptions(
            process_id=1,
            num_processes=2,
            run_dir=Path("elsewhere"),
            quiet=True,
            virtual_devices=3,
        ),
    )
    both.call(check_same_start, (one, "x"), (other, "x"))


def test_another_command_is_a_difference(both):
    with pytest.raises(ConfigurationError, match='command is "vcd-train" instead of "cnn-'):
        both.call(check_same_start, (Config(), "cnn-train"), (Config(), "vcd-train"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("versions", lambda: {"jax": "9.9"}, 'the version of jax is "9.9" instead of "'),
        (
            "_source_digest",
            lambda: "other",
            'the source code of millrace is "other" instead',
        ),
    ],
)
def test_other_software_is_a_difference(both, monkeypatch, name, value, message):
    both.call(check_same_start, (Config(), "x"))
    monkeypatch.setattr(coordination, name, value)
    both.number = 1
    with pytest.raises(ConfigurationError, match=message):
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


def test_only_the_first_of_many_differences_are_named(both):
    values = [({f"option {n}": number for n in range(9)},) for number in (0, 1)]
    with pytest.raises(ConfigurationError) as caught:
        both.call(lambda own: check_same("x", own, "Do."), *values)
    assert str(caught.value).count("option") == 5


def test_nan_equals_nan(both):
    values = [({"scale": float("nan")},)] * 2
    both.call(lambda own: check_same("x", own, "Do."), *values)


def test_data_may_have_another_path_but_not_another_size(both):
    here = {"dataset": "imagenet from /data/imagenet, 1,000 training samples"}
    there = {"dataset": "imagenet from /scratch/17/im, 1,000 training samples"}
    less = {"dataset": "imagenet from /data/imagenet, 999 training samples"}
    both.call(check_same_data, (here,), (there,))
    with pytest.raises(ConfigurationError, match=r"999 training samples.*the same data"):
        both.call(check_same_data, (here,), (less,))


def test_describing_a_run_compares_its_data(both, tmp_path):
    run = Run(RunOptions(), RunDirectory(tmp_path), Console(quiet=True), [], "x")

    def describe(count):
        run.describe(jax.devices(), Plan(), None, dataset=f"{count} samples")

    both.call(describe, (10,), (10,))
    with pytest.raises(ConfigurationError, match="9 samples"):
        both.call(describe, (10,), (9,))


def test_processes_started_by_hand_with_different_options_all_exit_with_status_2(tmp_path):
    args = [sys.executable, "-m", "millrace", "cnn", "train", "--config", "digits_demo"]
    args += ["--num-replicas", "2", "--run-dir", str(tmp_path / "run")]
    args += ["--num-processes", "2", "--coordinator", f"127.0.0.1:{find_free_port()}"]
    both = [
        subprocess.Popen(
            [*args, "--process-id", str(number), "--seed", str(7 + number)],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=90)[1] for process in both]
    for process, errors in zip(both, outputs, strict=True):
        assert process.returncode == 2
        assert "Process 1 differs from process 0: --seed is 8 instead of 7." in errors
        assert "Traceback" not in errors
    assert not (tmp_path / "run").exists()
