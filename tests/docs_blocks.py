"""Runs the code blocks of the documentation as a reader would who copies one of them.

A ``python`` block is a script in an empty folder. If its first line is a comment such as
``# After the commands above``, its folder is that of the commands or the script before it.
``console`` blocks have commands after ``$ ``, each followed by its output; numbers may
differ, and a line of ``…`` matches any lines. All commands of a page share a folder.

Run as a program, this module updates the outputs in pages:
``python tests/docs_blocks.py docs/first_run.md``.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CONTINUES = re.compile(r"# After .*\babove\b")
_RARE = re.compile(r"  input_wait [\d.]+")
_OPTIONAL = re.compile(r"^import (datasets|grain|tensorflow|torch)\b", re.MULTILINE)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?|\b(?:nan|inf)\b")


class Block(NamedTuple):
    """A fenced block: its language and its text."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [Block(language, text) for language, text in _FENCE.findall(page.read_text())]


def split_commands(block: Block) -> list[tuple[str, list[str]]]:
    """Split a console block into commands and the output of each."""
    commands: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        elif commands and commands[-1][0].endswith("\\"):
            commands[-1] = (commands[-1][0][:-1] + line.strip(), [])
        elif commands:
            commands[-1][1].append(line)
    return commands


def user_environment() -> dict[str, str]:
    """Return the environment of a user: one CPU device, no colors."""
    removed = ("XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "MILLRACE_DATA", "COLUMNS")
    inherited = {k: v for k, v in os.environ.items() if k not in removed}
    return inherited | {"JAX_PLATFORMS": "cpu", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}


def run_command(command: str, folder: Path) -> list[str]:
    """Run a command of a page and return the lines it prints, on either stream."""
    arguments = shlex.split(command)
    millrace = [sys.executable, "-c", "from millrace.cli import main; main()"]
    program = millrace + arguments[1:] if arguments[0] == "millrace" else arguments
    result = subprocess.run(
        program,
        cwd=folder,
        env=user_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, f"$ {command}\n{result.stdout}"
    return result.stdout.rstrip("\n").splitlines()


# Scripts share a process, because importing JAX takes longer than most of them.
_RUN_SCRIPTS = """
import os, runpy, sys
scripts, sys.argv = sys.argv[1:], sys.argv[:1]
for script in scripts:
    os.chdir(os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")
"""


def run_scripts(scripts: list[Path]) -> str:
    """Run scripts, each in its folder and a namespace of its own; return their output."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", _RUN_SCRIPTS, *scripts],
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def run_python(code: str, folder: Path) -> str:
    """Run one Python block in a folder and return its output."""
    script = folder / "block.py"
    script.write_text(code)
    return run_scripts([script])


def write_scripts(page: list[Block], commands: Path) -> list[Path]:
    """Write the Python blocks of a page as scripts, in the folders where they should run.

    Args:
        page: The blocks of the page.
        commands: The folder in which the commands of the page ran.
    """
    scripts: list[Path] = []
    folder = commands
    for number, block in enumerate(page):
        if block.language == "console":
            folder = commands
        if block.language != "python" or not _has_packages(block):
            continue
        if not _CONTINUES.match(block.text):
            folder = commands.parent / f"block_{number}"
            folder.mkdir()
        scripts.append(folder / f"block_{number}.py")
        scripts[-1].write_text(block.text)
    return scripts


def _has_packages(block: Block) -> bool:
    """Whether the data libraries that a block imports are installed here."""
    return all(map(importlib.util.find_spec, _OPTIONAL.findall(block.text)))


_XLA_NOTICE = re.compile(r"[IWE]\d{4} .* cpu_aot_loader\.cc")
"""Printed by XLA of jax 0.10.0 when a program comes from the cache of the tests."""


def outputs_match(expected: list[str], printed: list[str]) -> bool:
    """Whether the output is that of the page, except for numbers."""
    pattern = "".join(
        r"(?:.*\n)*" if line.strip() == "…" else re.escape(_plain(line)) + "\n"
        for line in expected
    )
    lines = [_plain(line) + "\n" for line in printed if not _XLA_NOTICE.match(line)]
    return re.fullmatch(pattern, "".join(lines)) is not None


def _plain(line: str) -> str:
    """Return a line without its numbers, and without what depends on the machine."""
    return " ".join(_NUMBER.sub("0", _RARE.sub("", line)).split())


def rewrite(page: Path) -> None:
    """Replace the output of the commands of a page with the actual output."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def update(match: re.Match[str]) -> str:
            block = Block(match[1], match[2])
            if block.language != "console" or not split_commands(block):
                return match[0]
            lines = []
            for line in block.text.splitlines():
                if line.startswith("$ ") or (lines and lines[-1].endswith("\\")):
                    lines.append(line)
            shown, command = [], ""
            for line in lines:
                shown.append(line)
                command += line.removeprefix("$ ").removesuffix("\\").strip() + " "
                if not line.endswith("\\"):
                    shown += run_command(command, folder)
                    command = ""
            return "```console\n" + "\n".join(shown) + "\n```"

        page.write_text(_FENCE.sub(update, page.read_text()))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        rewrite(Path(argument))
