"""Code blocks of the documentation: run as a reader would, in the order of the page.

``python`` blocks of a page share one process; ``console`` blocks have commands after
``$ `` and below each what it prints, in which numbers may differ and a line of ``…``
stands for any lines. Run as a program, this writes the outputs into pages anew:
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
    """A fenced block: its language and its lines."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [Block(language, text) for language, text in _FENCE.findall(page.read_text())]


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """Part a console block into commands and what is printed after each."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found and found[-1][0].endswith("\\"):
            found[-1] = (found[-1][0][:-1] + line.strip(), [])
        elif found:
            found[-1][1].append(line)
    return found


def environment() -> dict[str, str]:
    """A user's: one CPU device, no colors, plain width."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "MILLRACE_DATA")}
    return kept | {"JAX_PLATFORMS": "cpu", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}


def run_command(command: str, folder: Path) -> list[str]:
    """Run a command of a page and return what it prints, on either stream."""
    words = shlex.split(command)
    millrace = [sys.executable, "-c", "from millrace.cli import main; main()"]
    program = millrace + words[1:] if words[0] == "millrace" else words
    done = subprocess.run(
        program,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout}"
    return done.stdout.rstrip("\n").splitlines()


def run_python(codes: list[str], folder: Path) -> str:
    """Run the Python blocks of a page in one process; return what they print."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(codes)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def alike(told: list[str], printed: list[str]) -> bool:
    """Whether a page shows what is printed, numbers aside."""
    pattern = "".join(
        r"(?:.*\n)*" if line.strip() == "…" else re.escape(_plain(line)) + "\n"
        for line in told
    )
    return (
        re.fullmatch(pattern, "".join(_plain(line) + "\n" for line in printed)) is not None
    )


def _plain(line: str) -> str:
    return " ".join(_NUMBER.sub("0", line).split())


def rewrite(page: Path) -> None:
    """Write into a page what its commands print; what a page shortens stays short."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def renewed(match: re.Match[str]) -> str:
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

        page.write_text(_FENCE.sub(renewed, page.read_text()))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        rewrite(Path(argument))
