"""Shell completion, in real shells as far as they are installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.commands.completion import PATHS, SHELLS, complete, install
from millrace.commands.registry import COMMANDS
from millrace.config import flat_options
from millrace.config.help import SHOWN_ALIASES


def values(line: str) -> list[str]:
    return [value for value, _ in complete(line.split(" "))]


def test_commands_and_verbs_are_completed():
    assert values("cn") == ["cnn"]
    assert {"cnn", "vcd", "bench", "--version"} <= set(values(""))
    assert values("cnn v") == ["validate", "verify-dataset"]
    assert values("launch --num-instances 2 cnn tr") == ["train"]


def test_options_are_completed_with_common_ones_first():
    found = values("cnn train --")
    assert found[0] == "--config"
    assert found.index("--num-epochs") < found.index("--wandb-tags")
    assert "--epochs" in found and "--help-all" in found
    assert "--half-partials" not in found and "--arrays" not in found


def test_only_usual_aliases_are_completed():
    options = flat_options(COMMANDS["cnn train"].load_config_type())
    aliases = {a for o in options.values() for a in o.metadata.get("aliases", ())}
    offered = aliases.intersection(values("cnn train --"))
    assert {"--lr", "--epochs"} <= offered <= set(SHOWN_ALIASES)
    assert offered < aliases


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cnn train --dataset ci", ["cifar10", "cifar100"]),
        ("cnn train --config dig", ["digits_demo", PATHS]),
        ("cnn train --run-dir ru", [PATHS]),
        ("cnn train --num_epochs ", []),
        ("cnn configs digits", ["digits_demo"]),
        ("data fetch x", []),
        ("frobnicate x", []),
    ],
)
def test_values_are_completed(line, expected):
    found = values(line)
    if not expected:
        assert not any(value.startswith("x") for value in found)
    else:
        assert found == expected


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home directory with ``millrace`` on the path."""
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    program = tmp_path / "bin" / "millrace"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m millrace "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return tmp_path


def run_shell(*command: str, cwd: Path) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


BASH = """
. ~/.bashrc
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _millrace; echo "${COMPREPLY[@]}"; }
complete -p millrace
ask millrace cnn tr
ask millrace cnn train --dataset cifar1
ask millrace cnn train --run-dir ru
"""


def test_bash_completes_commands_choices_and_paths(home):
    assert "works in new shells" in install("bash", home)
    install("bash", home)  # twice changes nothing
    assert (home / ".bashrc").read_text().count("millrace") == 3  # a path twice, a comment
    (home / "runs").mkdir()
    printed = run_shell("bash", "--norc", "-c", BASH, cwd=home).splitlines()
    assert printed == [
        "complete -F _millrace millrace",
        "train",
        "cifar10 cifar100",
        "runs",
    ]


ZSH = """
. ~/.zshrc
_describe() { print -l -- ${(P)3} }
_files() { print FILES }
words=(millrace cnn tr); CURRENT=3; _millrace
words=(millrace cnn train --run-dir ru); CURRENT=5; _millrace
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes_commands_and_paths(home):
    install("zsh", home)
    printed = run_shell("zsh", "-f", "-c", ZSH, cwd=home).splitlines()
    assert printed == ["train:train an image classifier", "FILES"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_commands_choices_and_paths(home):
    assert str(home / ".config/fish/completions/millrace.fish") in install("fish", home)
    (home / "runs").mkdir()
    ask = "complete -C'millrace cnn tr'; complete -C'millrace cnn train --run-dir ru'"
    lines = run_shell("fish", "-c", ask, cwd=home).splitlines()
    assert lines[0] == "train\ttrain an image classifier"
    assert lines[1].split("\t")[0] == "runs/"


@pytest.mark.parametrize("name", SHELLS)
def test_a_script_is_printed_for_every_shell(name, capsys):
    from millrace.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", name])
    assert ended.value.code == 0
    assert "--complete" in capsys.readouterr().out


def test_an_unknown_shell_is_a_mistake(capsys, monkeypatch):
    from millrace.cli import main

    monkeypatch.setenv("SHELL", "/bin/tcsh")
    for args in (["--install-completion", "tcsh"], ["--install-completion"]):
        with pytest.raises(SystemExit) as ended:
            main(args)
        assert ended.value.code == 2
        assert "bash, zsh" in capsys.readouterr().err


def test_help_into_a_closed_pipe_prints_no_error(home):
    line = "(sleep 0.4; millrace cnn train --help-all) | true; echo ${PIPESTATUS[0]}"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=home)
    assert (ended.stdout, ended.stderr) == ("0\n", "")
