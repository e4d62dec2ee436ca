"""The user's own line in errors, from a command and from Python."""

import json
import runpy
import sys
import textwrap
from pathlib import Path

import pytest

from millrace.user_code import find_user_line, noting_user_line

SCRIPT = '''
from dataclasses import dataclass
import jax.numpy as jnp
import numpy as np
import optax
import millrace as mr

@dataclass(frozen=True, kw_only=True)
class Config:
    """An application with a bug."""
    run: mr.RunOptions = mr.RunOptions()

def loss_fn(params, model_state, batch, key):
    y = batch["x"] @ params["w"]
    return y.mean(), (model_state, {})

program = mr.training_program(loss_fn, optax.sgd(0.1), mr.Plan(micro_batch_size=4))
source = mr.ArraySource({"x": np.ones((8, 5), np.float32)})

def state():
    return program.init({"w": jnp.ones((3, 2))}, {}, seed=0)

def train(config, run):
    schedule = mr.schedule_events(
        updates_per_epoch=2, num_epochs=1, events_per_epoch={"log": 1}
    )
    run.train(program, state(), mr.Infeed(mr.Stream(source, 4)), schedule)

try:
    mr.train(program, state(), infeed=mr.Infeed(mr.Stream(source, 4)), updates=2)
except TypeError as error:
    print("note:", error.__notes__[-1])
mr.run_as_command(train, Config, name="buggy")
'''
PLACE = 'my_app.py:14 in loss_fn: y = batch["x"] @ params["w"]'


def test_a_bug_in_a_loss_is_shown_with_its_line(tmp_path, monkeypatch, capsys):
    script = tmp_path / "my_app.py"
    script.write_text(SCRIPT)
    args = ["my_app.py", "--run-dir", str(tmp_path / "run"), "--quiet"]
    monkeypatch.setattr(sys, "argv", args)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr()
    assert f"note:   {PLACE}" in printed.out
    assert ended.value.code == 1
    first, second, *_ = printed.err.splitlines()
    assert first.startswith("millrace: TypeError: dot_general requires")
    assert first.endswith("(--debug shows the traceback)")
    assert second == f"  {PLACE}"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["error_line"] == PLACE


def raise_in_library():
    json.loads("{")


def test_the_line_is_the_last_one_outside_installed_packages():
    with pytest.raises(ValueError) as caught:
        raise_in_library()
    line = find_user_line(caught.value)
    assert line is not None
    assert (line.function, line.source) == ("raise_in_library", 'json.loads("{")')
    assert str(line).startswith("test_user_code.py:")


def test_the_cause_of_an_error_comes_first():
    with pytest.raises(RuntimeError) as caught:
        try:
            raise_in_library()
        except ValueError as error:
            raise RuntimeError("reading failed") from error
    line = find_user_line(caught.value)
    assert line is not None and line.function == "raise_in_library"


def test_a_cell_of_a_notebook_is_named():
    import linecache

    text = textwrap.dedent("def f():\n    return 1 / 0\n")
    name = "/tmp/ipykernel_7/123.py"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space: dict = {}
    exec(compile(text, name, "exec"), space)
    with pytest.raises(ZeroDivisionError) as caught:
        space["f"]()
    assert str(find_user_line(caught.value)) == "notebook cell:2 in f: return 1 / 0"


def test_a_note_is_added_once():
    with pytest.raises(ValueError) as caught, noting_user_line(), noting_user_line():
        raise_in_library()
    assert len(caught.value.__notes__) == 1


def test_errors_of_this_package_alone_have_no_line():
    from millrace.config import values

    with pytest.raises(ValueError) as caught:
        values.convert(int, "x", "--number")
    line = find_user_line(caught.value)
    assert line is not None and Path(line.path) == Path(__file__)  # only this caller
