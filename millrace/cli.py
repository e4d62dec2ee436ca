"""The command line: ``millrace <application> <verb> [options]``.

Only what is needed to read a command is imported here; the work is imported when the
command is known to be right.
"""

import importlib
import shlex
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import millrace
from millrace.config import ConfigurationError, parse


class Command(NamedTuple):
    """A command: where its configuration, its function and its named runs are."""

    config: str
    function: str
    named_configs: str | None
    summary: str


_COMMANDS = {
    ("cnn", "train"): Command(
        "millrace.apps.cnn.config:CnnConfig",
        "millrace.apps.cnn.train:train",
        "millrace.apps.cnn:runs.yml",
        "train an image classifier",
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status: 0 done, 1 failed, 2 a wrong command."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(words)
    except ConfigurationError as error:
        print(f"millrace: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _run(words: list[str]) -> int:
    applications = {application for application, _ in _COMMANDS}
    asked = words[1:2] if words[:1] and words[0] in applications else words[:1]
    if not words or asked in (["-h"], ["--help"]):
        print(_usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"millrace {millrace.__version__}")
        return 0
    key = (words[0], words[1] if len(words) > 1 else "")
    if key not in _COMMANDS:
        known = ", ".join(" ".join(command) for command in _COMMANDS)
        raise ConfigurationError(
            f"There is no command {' '.join(key).strip()!r}. There is: {known}. "
            "See millrace --help."
        )
    command = _COMMANDS[key]
    config, _ = parse(
        _load(command.config),
        words[2:],
        program=f"millrace {key[0]} {key[1]}",
        named_configs=_resource(command.named_configs),
    )
    from millrace.host.process import tune_memory_allocation

    tune_memory_allocation()
    from millrace.host.run import run_command

    return run_command(
        _load(command.function),
        config,
        command="-".join(key),
        command_line=shlex.join(["millrace", *words]),
    )


def _load(place: str):
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def _resource(place: str | None) -> Path | None:
    if place is None:
        return None
    package, name = place.split(":")
    return Path(str(resources.files(package) / name))


def _usage() -> str:
    lines = [
        "millrace: whole training loops on the device.",
        "",
        "usage: millrace <application> <verb> [options]",
        "       millrace <application> <verb> --help",
        "",
    ]
    lines += [
        f"  {' '.join(key):<20} {command.summary}" for key, command in _COMMANDS.items()
    ]
    return "\n".join(lines)
