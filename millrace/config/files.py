"""Configurations in YAML files, by name."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from millrace.config.checks import ConfigurationError

_CONFIG_FILES = (".json", ".yml", ".yaml")


def load_named(path: str | Path | None, name: str) -> dict[str, Any]:
    """Return entry `name` of the YAML file at `path`; its keys use either - or _."""
    if path is None:
        raise ConfigurationError("--config needs --config-path FILE with this command.")
    entries = {str(key): entry for key, entry in load_yaml(Path(path)).items()}
    if name not in entries and Path(name).suffix in _CONFIG_FILES:
        # The references name theirs configs/NAME_config.json.
        known = Path(name).stem.removesuffix("_config")
        if Path(name).exists() or known not in entries:
            entries = {name: load_yaml(Path(name))}
        else:
            name = known
    if name not in entries:
        raise ConfigurationError(
            f"--config {name}: {path} has no such entry. It has: "
            f"{', '.join(sorted(entries))}."
        )
    entry = entries[name] or {}
    if not isinstance(entry, dict):
        raise ConfigurationError(f"Entry {name} of {path} is not a mapping of options.")
    return {str(key).replace("-", "_"): value for key, value in entry.items()}


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; tags that would build objects are refused."""
    try:
        entries = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigurationError(
            f"Cannot read the configuration file {path}: {error.strerror}."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} is not a plain YAML file: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(entries, dict):
        raise ConfigurationError(f"{path} must hold a mapping at its top level.")
    return entries


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file that cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"Cannot write {path}: {error.strerror}.") from error
