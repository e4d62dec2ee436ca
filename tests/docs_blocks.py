"""Runs the code blocks of the documentation as a reader would, in the order of the page.

All ``python`` blocks of a page share one process. ``console`` blocks have commands after
``$ ``, each followed by its output; numbers may differ, and a line of ``…`` matches any
lines. Run as a program, this module updates the outputs in pages:
``python tests/docs_blocks.py docs/first_run.md``.
"""

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
    removed = ("XLA_FLAGS", "MILLRACE_DATA")
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


def run_python(codes: list[str], folder: Path) -> str:
    """Run the Python blocks of a page in one process; return their output."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(codes)],
        cwd=folder,
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def outputs_match(expected: list[str], printed: list[str]) -> bool:
    """Whether the output is that of the page, except for numbers."""
    pattern = "".join(
        r"(?:.*\n)*" if line.strip() == "…" else re.escape(_plain(line)) + "\n"
        for line in expected
    )
    return (
        re.fullmatch(pattern, "".join(_plain(line) + "\n" for line in printed)) is not None
    )


def _plain(line: str) -> str:
    return " ".join(_NUMBER.sub("0", line).split())


def rewrite(page: Path) -> None:
    """Replace the output of the commands of a page with the actual output."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def update(match: re.Match[str]) -> str:
            block = Block(match[1], match[2])
            if block.language != "console":
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
