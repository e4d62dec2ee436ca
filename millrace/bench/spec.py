"""The spec: named benchmarks, each a command of millrace. Imports nothing heavy."""

import dataclasses
import fnmatch
import os
import shlex
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from millrace.bench.reference import is_reference, read_reference
from millrace.commands.scripts import SCRIPTS, Script
from millrace.config import ConfigurationError, build, did_you_mean, load_yaml, parse

COMMANDS = (
    "cnn train",
    "cnn validate",
    "autoencoder train",
    "autoencoder sweep",
    "vcd train",
)
"""Commands that can be measured."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A benchmark of the spec."""

    name: str
    command: str
    """Command to measure, without the leading ``millrace``. It may be one of Graphcore's
    programs, which has its own defaults: ``train.py ...``."""
    about: str = ""
    """What the entry is for, in one line."""
    groups: list[str] = field(default_factory=list)
    """Names that select this entry together with others."""
    batch_sizes: list[int] = field(default_factory=list)
    """Replaces the entry with one per batch size: NAME_b1 and so on."""
    needs: str = ""
    """Platform that the entry needs, because it would take too long elsewhere."""
    peer: bool = True
    """Whether ``--peer torch`` includes the entry."""
    random_data: bool = False
    """For vcd: random images instead of the dataset; they take as long."""
    reference: str = ""
    """Origin of a command that is not ours."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Lines of Graphcore's documents that the entry stands for: ``line``, and optionally
    ``changed`` (what one device made necessary) and ``published`` figures."""
    env: dict[str, Any] = field(default_factory=dict)
    """Environment variables to set."""
    file: Path | None = None
    """The spec file."""

    def __post_init__(self) -> None:
        try:
            application = self.application
        except ValueError as error:
            raise ConfigurationError(
                f"cannot parse the command, {str(error).lower()}: {self.command}"
            ) from error
        if application not in COMMANDS:
            raise ConfigurationError(
                f"{application!r} cannot be measured. Commands that can: "
                f"{', '.join(COMMANDS)}."
            )
        if self.needs not in ("", "gpu", "cpu"):
            raise ConfigurationError(f"needs must be gpu or cpu, got {self.needs!r}.")

    @property
    def script(self) -> Script | None:
        """Graphcore's program that the command is, if it is one."""
        return SCRIPTS.get(shlex.split(self.command)[0])

    @property
    def application(self) -> str:
        """The application and verb of the command, such as ``cnn train``."""
        if self.script is not None:
            return self.script.command
        return " ".join(shlex.split(self.command)[:2])

    @property
    def arguments(self) -> list[str]:
        """The remaining arguments, with $NAME replaced from the environment."""
        words = shlex.split(self.command)[1 if self.script else 2 :]
        return [_expand(word, {**os.environ, **self.env}) for word in words]

    def expand(self) -> "list[Entry]":
        """Return one entry per batch size, or the entry itself if it lists none."""
        option = "-b" if self.application == "vcd train" else "--batch-size"
        return [
            dataclasses.replace(
                self,
                name=f"{self.name}_b{size}",
                command=f"{self.command} {option} {size}",
                batch_sizes=[],
                lines=[{**n, "line": f"{n['line']}, batch {size}"} for n in self.lines],
            )
            for size in self.batch_sizes
        ] or [self]


def _expand(word: str, environment: Mapping[str, Any]) -> str:
    return string.Template(word).safe_substitute(environment)


def load_spec(path: Path | None) -> list[Entry]:
    """Load the entries of a spec (default: the one that comes with millrace)."""
    path = path or Path(str(resources.files("millrace.bench") / "spec.yml"))
    entries: list[Entry] = []
    for name, values in load_yaml(path).items():
        if is_reference(values):
            entries += _build_reference(path, str(name), values)
        else:
            entries += _build_entry(path, str(name), values).expand()
    return entries


def _build_reference(path: Path, name: str, values: Any) -> list[Entry]:
    try:
        found = list(read_reference(name, values))
        return [build(Entry, {**entry, "file": path}) for entry in found]
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: benchmark {name}: {error}") from error


def _build_entry(path: Path, name: str, values: Any) -> Entry:
    own = ("name", "file")
    known = [f.name for f in dataclasses.fields(Entry) if f.name not in own]
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}: benchmark {name} is not a mapping of options.")
    for key in values:
        if key not in known:
            raise ConfigurationError(
                f"{path}: benchmark {name} has an unknown option {key}."
                f"{did_you_mean(str(key), known)} Known options: {', '.join(known)}."
            )
    if not values.get("command"):
        raise ConfigurationError(f"{path}: benchmark {name} has no command.")
    try:
        return build(Entry, {**values, "name": name, "file": path})
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: benchmark {name}: {error}") from error


def select_entries(entries: Sequence[Entry], names: Sequence[str]) -> list[Entry]:
    """Return the entries that match a name, in the order of the spec; all without names."""
    groups = {group for entry in entries for group in entry.groups}
    selected: set[str] = set()
    for name in names:
        matching = {
            e.name for e in entries if name in e.groups or fnmatch.fnmatchcase(e.name, name)
        }
        if not matching:
            known = [entry.name for entry in entries]
            raise ConfigurationError(
                f"There is no benchmark {name}.{did_you_mean(name, [*known, *groups])} "
                f"Groups: {', '.join(sorted(groups))}. --list shows the entries."
            )
        selected |= matching
    return [entry for entry in entries if not names or entry.name in selected]


def parse_command(entry: Entry) -> Any:
    """Return the configuration of the command of an entry."""
    place = f"{entry.file}: benchmark {entry.name}" if entry.file else "The command"
    program = f"millrace {entry.application}"
    config_type, named_configs = _load_config_type(entry.application)
    try:
        config, _ = parse(
            config_type,
            entry.arguments,
            program=program,
            named_configs=named_configs,
            defaults=entry.script.defaults if entry.script else None,
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}") from error
    if entry.application == "cnn validate" and len(config.batch_size) != 1:
        raise ConfigurationError(
            f"{place}: the command must have one batch size; batch_sizes creates an entry "
            "for each."
        )
    return config


def _load_config_type(application: str) -> tuple[Any, Path | None]:
    """Return the configuration type of a command and its file of named configurations.

    The registry of commands knows them as well, but it names ``bench``, too: importing it
    here would be a cycle.
    """
    match application:
        case "cnn train":
            from millrace.apps.cnn.config import CnnConfig as config_type
        case "cnn validate":
            from millrace.apps.cnn.config.commands import ValidateConfig

            return ValidateConfig, None
        case "autoencoder train":
            from millrace.apps.autoencoder.config import AutoencoderConfig as config_type
        case "autoencoder sweep":
            from millrace.apps.autoencoder.config.commands import SweepConfig as config_type
        case _:
            from millrace.apps.vcd.config import VcdConfig as config_type
    package = resources.files(f"millrace.apps.{application.split()[0]}")
    return config_type, Path(str(package / "runs.yml"))
