"""The spec: named benchmarks, each a command of ours. Imports nothing heavy."""

import dataclasses
import fnmatch
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from millrace.config import ConfigurationError, build, did_you_mean, load_yaml

COMMANDS = (
    "cnn train",
    "cnn validate",
    "autoencoder train",
    "autoencoder sweep",
    "vcd train",
)
"""What can be measured."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A benchmark."""

    name: str
    command: str
    """What is measured, as it would be typed after ``millrace``."""
    about: str = ""
    """What is special about it, in a line."""
    groups: list[str] = field(default_factory=list)
    """Names that it can be asked for by, together with others."""
    batch_sizes: list[int] = field(default_factory=list)
    """Makes one entry of each, NAME_b1 and so on, with this batch size."""
    needs: str = ""
    """The platform it is for, where the others would take too long: gpu."""
    peer: bool = True
    """Whether PyTorch should do it too, where it can and is asked to."""
    random_data: bool = False
    """Of vcd: random pictures in place of the data set's, which take as long."""
    reference: str = ""
    """Whose command it is, if not ours."""
    file: Path | None = None
    """The spec that has it."""

    def __post_init__(self) -> None:
        try:
            application = self.application
        except ValueError as error:
            raise ConfigurationError(
                f"the command cannot be read, {str(error).lower()}: {self.command}"
            ) from error
        if application not in COMMANDS:
            raise ConfigurationError(
                f"{application!r} cannot be measured. What can: {', '.join(COMMANDS)}."
            )
        if self.needs not in ("", "gpu", "cpu"):
            raise ConfigurationError(f"needs must be gpu or cpu, got {self.needs!r}.")

    @property
    def place(self) -> str:
        """Where it stands, for an error."""
        return f"{self.file}: benchmark {self.name}" if self.file else "The command"

    @property
    def application(self) -> str:
        """The first two words of the command."""
        return " ".join(shlex.split(self.command)[:2])

    @property
    def words(self) -> list[str]:
        """The options of the command; $NAME is taken from the environment."""
        return [os.path.expandvars(word) for word in shlex.split(self.command)[2:]]

    def expanded(self) -> "list[Entry]":
        """Return an entry for each batch size, or this one."""
        option = "-b" if self.application == "vcd train" else "--batch-size"
        return [
            dataclasses.replace(
                self,
                name=f"{self.name}_b{size}",
                command=f"{self.command} {option} {size}",
                batch_sizes=[],
            )
            for size in self.batch_sizes
        ] or [self]


def shipped_spec() -> Path:
    """Return where the spec that comes with millrace lies."""
    return Path(str(resources.files("millrace.bench") / "spec.yml"))


def load_spec(path: Path | None) -> list[Entry]:
    """Read all entries of a spec."""
    path = path or shipped_spec()
    entries: list[Entry] = []
    for name, values in load_yaml(path).items():
        entries += _entry(path, str(name), values).expanded()
    return entries


def _entry(path: Path, name: str, values: Any) -> Entry:
    own = ("name", "file")
    known = [f.name for f in dataclasses.fields(Entry) if f.name not in own]
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}: benchmark {name} is not a mapping of options.")
    for key in values:
        if key not in known:
            raise ConfigurationError(
                f"{path}: benchmark {name} has an unknown option {key}."
                f"{did_you_mean(str(key), known)} There is: {', '.join(known)}."
            )
    if not values.get("command"):
        raise ConfigurationError(f"{path}: benchmark {name} has no command.")
    try:
        return build(Entry, {**values, "name": name, "file": path})
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: benchmark {name}: {error}") from error


def select(entries: Sequence[Entry], names: Sequence[str]) -> list[Entry]:
    """Return the entries that are asked for, in the spec's order; all without names."""
    groups = {group for entry in entries for group in entry.groups}
    asked: set[str] = set()
    for name in names:
        found = {
            e.name for e in entries if name in e.groups or fnmatch.fnmatchcase(e.name, name)
        }
        if not found:
            known = [entry.name for entry in entries]
            raise ConfigurationError(
                f"There is no benchmark {name}.{did_you_mean(name, [*known, *groups])} "
                f"There is: {', '.join(known)}; and the groups {', '.join(sorted(groups))}."
            )
        asked |= found
    return [entry for entry in entries if not names or entry.name in asked]
