"""A user-defined application as a command."""

import ast
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

import millrace as mr

EXAMPLE = Path(__file__).parents[2] / "examples" / "07_application.py"


def run(monkeypatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *args])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_a_wrong_option_is_one_line_and_status_2(monkeypatch, capsys):
    assert run(monkeypatch, "--num-epoks", "3") == 2
    errors = capsys.readouterr().err
    assert errors == "curve: Unknown option --num-epoks. Did you mean --num-epochs?\n"


def test_help_shows_the_docstrings_of_the_fields(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--help-all"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "Passes over the samples." in shown and "--virtual-devices" in shown


def test_an_application_has_a_run_directory_and_resumes(monkeypatch, tmp_path, capsys):
    args = ("--num-epochs", "5", "--run-dir", str(tmp_path / "run"), "--quiet")
    assert run(monkeypatch, *args) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["updates"] == 320
    assert summary["changed_options"]["num_epochs"] == 5
    assert summary["command"].startswith(f"python {EXAMPLE} --num-epochs 5")
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"python {EXAMPLE} --num-epochs 5 --quiet</pre>" in page
    assert run(monkeypatch, *args, "--resume") == 0


def test_weights_come_back_as_the_docstring_says(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "--num-epochs", "5", "--run-dir", "runs/curve", "--quiet") == 0
    assert run(monkeypatch, "--resume", "runs/curve") == 0
    lines = (ast.get_docstring(ast.parse(EXAMPLE.read_text())) or "").splitlines()
    code = [line.strip() for line in lines if line.startswith("    ")]
    assert len(code) == 2
    capsys.readouterr()
    names: dict = {"mr": mr}
    exec("\n".join(code), names)
    shown = capsys.readouterr()
    assert shown.out.startswith("(64, 1) 0.")
    assert re.match(r"using the best checkpoint: .*validation error 0\.", shown.err)
    fitted = names["fitted"]
    assert fitted.params.keys() == {"in", "bias", "out"} and fitted.update == 320
    assert fitted.config["num_epochs"] == 5 and fitted.predictor is None
    assert fitted.typed_config is None and fitted.model_state is None
    assert repr(fitted).startswith("LoadedRun('runs/curve', curve: the best checkpoint")


@pytest.mark.parametrize(
    ("existing", "args", "message"),
    [
        ("run/metrics.jsonl", (), "exists and is not empty"),
        (None, ("--resume",), "There is no run to resume"),
        ("run", (), "is a file, not a directory"),
    ],
)
def test_a_wrong_run_directory_is_one_line_and_status_2(
    monkeypatch, tmp_path, capsys, existing, args, message
):
    if existing is not None:
        (tmp_path / existing).parent.mkdir(exist_ok=True)
        (tmp_path / existing).write_text("command: curve\n")
    assert run(monkeypatch, "--run-dir", str(tmp_path / "run"), *args) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("curve: ") and errors.count("\n") == 1 and message in errors


def test_resuming_with_other_options_is_one_line_and_status_2(
    monkeypatch, tmp_path, capsys
):
    args = ("--run-dir", str(tmp_path / "run"), "--quiet", "--num-epochs", "5")
    assert run(monkeypatch, *args) == 0
    capsys.readouterr()
    assert run(monkeypatch, *args, "--resume", "--learning-rate", "0.1") == 2
    errors = capsys.readouterr().err
    assert errors.startswith("curve: ") and errors.count("\n") == 1
    assert "--learning-rate was 0.01" in errors
