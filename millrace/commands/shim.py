"""``millrace shim``: write programs with the names of Graphcore's, which run ours."""

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from millrace.commands.scripts import SCRIPTS
from millrace.config import ConfigurationError, writing

_PROGRAM = '''\
#!{python}
"""{name} of Graphcore's examples: millrace {command}, with the defaults of {name}."""

import os
import sys

# Written by `millrace shim`, with the Python that has millrace: `python3` may be another.
PYTHON = {python!r}
os.execv(PYTHON, [PYTHON, "-m", "millrace", {name!r}, *sys.argv[1:]])
'''
_ENABLE = """\
# Puts the programs of this folder on the path: source enable.sh
export PATH={folder}:"$PATH"
export PYTHONPATH={folder}"${{PYTHONPATH:+:$PYTHONPATH}}"
"""
_MARK = "Written by `millrace shim`"


@dataclass(frozen=True, kw_only=True)
class ShimConfig:
    """Write programs that make the commands of Graphcore's documents work as they are.

    DIR gets train.py, validation.py, main.py, autoencoder_main.py,
    autoencoder_benchmark.py, verify_dataset.py, poprun and the module examples_utils, all
    with the defaults of Graphcore's programs, and enable.sh, which puts them on the path.
    """

    dir: Path = field(metadata={"positional": True})
    """Folder to write to; created if needed. Other files of these names are kept."""

    def __post_init__(self) -> None:
        if self.dir.exists() and not self.dir.is_dir():
            raise ValueError(f"DIR must be a folder; {self.dir} is a file.")


def write_shims(config: ShimConfig) -> None:
    """Write the programs, and print how to use them."""
    folder = config.dir
    files = {_place(name): _format_program(name) for name in SCRIPTS}
    files |= {Path("examples_utils") / "__init__.py": f'"""{_MARK}."""\n'}
    files |= {Path("enable.sh"): _ENABLE.format(folder=shlex.quote(str(folder.absolute())))}
    for name in files:
        _check_ours(folder / name)
    with writing(folder):
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755 if text.startswith("#!") else 0o644)
    print(
        f"{len(SCRIPTS)} programs are in {folder}. Work there, or put them on the path:\n"
        f"  source {shlex.quote(str(folder / 'enable.sh'))}"
    )


def _place(name: str) -> Path:
    """Return the file of a program; a module has one that Python runs."""
    return Path(name) / "__main__.py" if name == "examples_utils" else Path(name)


def _format_program(name: str) -> str:
    command = SCRIPTS[name].command
    return _PROGRAM.format(name=name, command=command, python=sys.executable)


def _check_ours(path: Path) -> None:
    """Raise if there is a file that somebody else has written."""
    if not path.exists() or path.name == "enable.sh":
        return
    if not path.is_file() or _MARK not in path.read_text(errors="replace"):
        raise ConfigurationError(
            f"{path} exists and was not written by millrace shim. Choose another folder, "
            "or move the file away."
        )
