"""What a run tells of itself: options, phases, memory and machine."""

import json
import subprocess
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import pytest

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


@dataclass(frozen=True, kw_only=True)
class Config(RunOptions):
    size: int = 3
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Demanding(RunOptions):
    path: str
    size: int = 3


def test_only_options_that_are_not_as_by_default_are_told():
    assert get_changed_options(Config()) == {}
    assert get_changed_options(Config(size=4, seed=0)) == {"size": 4}
    assert get_changed_options(Config(names=["a"])) == {"names": ["a"]}


def test_an_option_that_has_to_be_given_is_told():
    assert get_changed_options(Demanding(path="x")) == {"path": "x"}
    assert get_changed_options(Demanding(path="x", size=5)) == {"path": "x", "size": 5}


def test_where_a_run_is_kept_is_not_among_them(tmp_path):
    assert get_changed_options(Config(run_dir=tmp_path, resume=True)) == {}


def test_an_account_adds_up_what_was_done():
    phases = [Phase("a", 0, 1.5), Phase("b", 1.5, 2), Phase("a", 2, 3)]
    account = run_metadata(Config(), phases, [])
    assert account["seconds"] == {"a": 2.5, "b": 0.5}
    assert json.loads(json.dumps(account)) == account


def test_a_resumed_run_keeps_what_it_had_done_before(tmp_path):
    def kept():
        return json.loads((tmp_path / "report" / "phases.json").read_text())

    first = [Phase("compiling", 0, 2), Phase("training", 2, 9), Phase("lost", 9, 9.5)]
    write_phases(tmp_path, first, resumed=False)
    # The last checkpoint was at 9 s: the clock goes on from there.
    write_phases(tmp_path, [Phase("training", 9, 12)], resumed=True)
    assert [name for name, _, _ in kept()] == ["compiling", "training", "training"]
    write_phases(tmp_path, [Phase("training", 0, 1), Phase("x", 1, 1)], resumed=False)
    assert kept() == [["training", 0, 1]]  # and what took no time is left out


def test_the_times_of_a_resumed_run_are_those_of_all_its_parts():
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
    add_previous_times(summary, {})  # killed before it could write one
    assert summary["wall_seconds"] == 14.0


def test_the_memory_of_the_largest_program_is_told():
    small, large = (
        jax.jit(lambda x: x + 1).lower(jnp.zeros(n, jnp.float32)).compile()
        for n in (100, 10_000)
    )
    used = measure_memory([small, large])
    assert used["program_bytes"] >= 80_000  # 40,000 in, 40,000 out
    assert used["host_peak_bytes"] > 50 << 20


def test_variables_that_change_what_is_computed_are_told(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--odd")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    facts = describe_machine()
    assert facts["XLA_FLAGS"] == "--odd"
    assert "CUDA_VISIBLE_DEVICES" not in facts
    assert "cores of" in facts["processor"]


def test_the_commit_is_told_where_the_package_lies_in_a_checkout(tmp_path, monkeypatch):
    file = tmp_path / "millrace" / "host" / "account.py"
    file.parent.mkdir(parents=True)
    file.write_text("first")
    monkeypatch.setattr("millrace.run.provenance.__file__", str(file))
    assert find_commit() is None

    def git(*words):
        names = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        command = ["git", "-C", str(tmp_path), *names, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "One")
    assert find_commit() == git("rev-parse", "HEAD").strip()
    file.write_text("second")
    assert find_commit() == git("rev-parse", "HEAD").strip() + ", with changes"


@pytest.mark.parametrize("text", ["", "{}", "[1, [2]]", '[["a", "b", 1]]', "[" * 10**5])
def test_odd_phases_of_an_earlier_part_do_not_end_a_resumed_run(tmp_path, text):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "phases.json").write_text(text)
    write_phases(tmp_path, [Phase("training", 1.0, 2.0)], resumed=True)
    found = json.loads((tmp_path / "report" / "phases.json").read_text())
    assert found == [["training", 1.0, 2.0]]


@pytest.mark.parametrize("seconds", [None, [], {"training": "long"}, {"training": None}])
def test_an_odd_account_of_an_earlier_part_does_not_end_a_resumed_run(seconds):
    summary = {"wall_seconds": 1.0, "compile_seconds": 2.0, "seconds": {"training": 3.0}}
    add_previous_times(summary, {"wall_seconds": "text", "seconds": seconds})
    assert summary["wall_seconds"] == 1.0
    assert summary["seconds"] == {"training": 3.0}
