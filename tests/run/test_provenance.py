"""Metadata of a run: options, phases, memory, machine and versions."""

import json
import subprocess
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import pytest

import millrace
from millrace.run.console import Phase
from millrace.run.options import RunOptions
from millrace.run.provenance import (
    add_previous_times,
    describe_machine,
    find_commit,
    get_changed_options,
    measure_memory,
    run_metadata,
    write_phases,
)
from millrace.versions import versions


@dataclass(frozen=True, kw_only=True)
class Config:
    size: int = 3
    names: list[str] = field(default_factory=list)
    run: RunOptions = RunOptions()


@dataclass(frozen=True, kw_only=True)
class WithRequired:
    path: str
    size: int = 3
    run: RunOptions = RunOptions()


def test_changed_options_are_those_that_differ_from_their_defaults():
    assert get_changed_options(Config()) == {}
    assert get_changed_options(Config(size=4, run=RunOptions(seed=0))) == {"size": 4}
    assert get_changed_options(Config(names=["a"])) == {"names": ["a"]}


def test_required_options_count_as_changed():
    assert get_changed_options(WithRequired(path="x")) == {"path": "x"}
    assert get_changed_options(WithRequired(path="x", size=5)) == {"path": "x", "size": 5}


def test_changed_options_do_not_include_how_the_run_was_started(tmp_path):
    options = RunOptions(run_dir=tmp_path, resume=True, quiet=True, profile=True)
    assert get_changed_options(Config(run=options)) == {}


def test_metadata_sums_the_seconds_of_each_activity():
    phases = [Phase("a", 0, 1.5), Phase("b", 1.5, 2), Phase("a", 2, 3)]
    metadata = run_metadata(Config(), phases, [])
    assert metadata["seconds"] == {"a": 2.5, "b": 0.5}
    assert json.loads(json.dumps(metadata)) == metadata


def test_a_resumed_run_keeps_its_earlier_phases(tmp_path):
    def read_phases():
        return json.loads((tmp_path / "report" / "phases.json").read_text())

    first = [Phase("compiling", 0, 2), Phase("training", 2, 9), Phase("lost", 9, 9.5)]
    write_phases(tmp_path, first, resumed=False)
    # The last checkpoint was at 9 s: the clock continues from there.
    write_phases(tmp_path, [Phase("training", 9, 12)], resumed=True)
    assert [name for name, _, _ in read_phases()] == ["compiling", "training", "training"]
    write_phases(tmp_path, [Phase("training", 0, 1), Phase("x", 1, 1)], resumed=False)
    assert read_phases() == [["training", 0, 1]]  # phases without duration are skipped


def test_the_times_of_a_resumed_run_include_those_before():
    before = {"wall_seconds": 10.0, "seconds": {"compiling": 2.0, "training": 7.0}}
    before["compile_seconds"] = 1.5
    summary = {"wall_seconds": 4.0, "seconds": {"training": 3.0, "validating": 0.5}}
    summary["compile_seconds"] = 1.0
    add_previous_times(summary, before)
    assert summary == {
        "wall_seconds": 14.0,
        "compile_seconds": 2.5,
        "seconds": {"compiling": 2.0, "training": 10.0, "validating": 0.5},
    }
    add_previous_times(summary, {})  # killed before it wrote one
    assert summary["wall_seconds"] == 14.0


def test_memory_is_that_of_the_largest_program():
    small, large = (
        jax.jit(lambda x: x + 1).lower(jnp.zeros(n, jnp.float32)).compile()
        for n in (100, 10_000)
    )
    used = measure_memory([small, large])
    assert used["program_bytes"] >= 80_000  # 40,000 in, 40,000 out
    assert used["host_peak_bytes"] > 50 << 20


def test_a_run_without_programs_does_not_look_for_devices(monkeypatch):
    monkeypatch.delattr(jax, "local_devices")
    assert list(measure_memory([])) == ["host_peak_bytes"]


def test_the_machine_includes_variables_that_change_results(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--odd")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = describe_machine()
    assert machine["XLA_FLAGS"] == "--odd"
    assert "CUDA_VISIBLE_DEVICES" not in machine
    assert "cores of" in machine["processor"]


def test_the_commit_is_found_in_a_git_checkout(tmp_path, monkeypatch):
    file = tmp_path / "millrace" / "run" / "provenance.py"
    file.parent.mkdir(parents=True)
    file.write_text("first")
    monkeypatch.setattr("millrace.run.provenance.__file__", str(file))
    assert find_commit() is None

    def git(*arguments):
        names = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        command = ["git", "-C", str(tmp_path), *names, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "One")
    assert find_commit() == git("rev-parse", "HEAD").strip()
    file.write_text("second")
    assert find_commit() == git("rev-parse", "HEAD").strip() + ", with changes"


@pytest.mark.parametrize("text", ["", "{}", "[1, [2]]", '[["a", "b", 1]]', "[" * 10**5])
def test_malformed_earlier_phases_do_not_end_a_resumed_run(tmp_path, text):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "phases.json").write_text(text)
    write_phases(tmp_path, [Phase("training", 1.0, 2.0)], resumed=True)
    found = json.loads((tmp_path / "report" / "phases.json").read_text())
    assert found == [["training", 1.0, 2.0]]


@pytest.mark.parametrize("seconds", [None, [], {"training": "long"}, {"training": None}])
def test_a_malformed_previous_summary_does_not_end_a_resumed_run(seconds):
    summary = {"wall_seconds": 1.0, "compile_seconds": 2.0, "seconds": {"training": 3.0}}
    add_previous_times(summary, {"wall_seconds": "text", "seconds": seconds})
    assert summary["wall_seconds"] == 1.0
    assert summary["seconds"] == {"training": 3.0}


def test_versions_include_the_main_dependencies():
    found = versions()
    assert found["jax"] == jax.__version__
    assert found["millrace"] == millrace.__version__
    assert {"python", "jaxlib", "optax", "orbax-checkpoint", "numpy"} <= set(found)
