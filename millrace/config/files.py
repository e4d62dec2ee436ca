"""Configurations in YAML files, by name."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from millrace.config.checks import ConfigurationError
from millrace.config.yaml_text import MAX_LENGTH, compose

_CONFIG_FILES = (".json", ".yml", ".yaml")
_MAX_NAMES = 40


def load_named(path: str | Path | None, name: str) -> dict[str, Any]:
    """Return entry `name` of the YAML file at `path`; its keys use either - or _."""
    return read_named(path, name)[0]


def read_named(path: str | Path | None, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return entry `name` of the YAML file at `path`, and where each of its keys stands."""
    if path is None:
        raise ConfigurationError("--config needs --config-path FILE with this command.")
    path = Path(path)
    found, node = _read(path)
    entries = {str(key): entry for key, entry in found.items()}
    if name not in entries and Path(name).suffix in _CONFIG_FILES:
        # The references name theirs configs/NAME_config.json.
        known = Path(name).stem.removesuffix("_config")
        if known not in entries or is_there(Path(name)):
            found, node = _read(Path(name))
            return _options(found), _places(node, Path(name))
        name = known
    if name not in entries:
        raise ConfigurationError(_no_entry(path, name, sorted(entries)))
    entry = entries[name] or {}
    if not isinstance(entry, dict):
        raise ConfigurationError(f"Entry {name} of {path} is not a mapping of options.")
    within = [value for key, value in node.value if key.value == name]
    return _options(entry), _places(within[-1] if within else None, path)


def _options(entry: dict[Any, Any]) -> dict[str, Any]:
    return {str(key).replace("-", "_"): value for key, value in entry.items()}


def _places(node: yaml.Node | None, path: Path) -> dict[str, str]:
    """Say where each key of a mapping stands; merged keys stand where they are written."""
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {
        str(key.value).replace("-", "_"): f"{path}, line {key.start_mark.line + 1}"
        for key, _ in node.value
    }


def _no_entry(path: Path, name: str, names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return (
        f"--config {name}: {path} has no such entry. It has: "
        f"{', '.join(names[:_MAX_NAMES])}{more}."
    )


def is_there(path: Path) -> bool:
    """Whether a file exists; a name that no file can have does not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; tags that would build objects are refused."""
    return _read(path)[0]


def _read(path: Path) -> tuple[dict[str, Any], Any]:
    entries, node = compose(_text(path), str(path))
    if not isinstance(entries, dict):
        raise ConfigurationError(f"{path} must hold a mapping at its top level.")
    return entries, node


def _text(path: Path) -> str:
    """Read a file as far as `compose` takes it."""
    try:
        with path.open("rb") as file:
            content = file.read(4 * MAX_LENGTH + 1)  # a character takes up to four bytes
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"Cannot read the configuration file {path}: {reason}."
        ) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{path}, line {line}, is not plain YAML: it is not text in UTF-8."
        ) from error
    # Tabs may indent JSON, but not YAML; inside JSON's text they are escaped.
    return text.replace("\t", " ") if path.suffix == ".json" else text


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file that cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"Cannot write {path}: {error.strerror}.") from error
