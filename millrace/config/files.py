"""Read named configurations from YAML files."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from millrace.config.checks import ConfigurationError, did_you_mean
from millrace.config.yaml_text import MAX_LENGTH, compose

_CONFIG_FILES = (".json", ".yml", ".yaml")
_MAX_NAMES = 40


def load_named(path: str | Path | None, name: str) -> dict[str, Any]:
    """Return entry `name` of the YAML file at `path`; its keys may have - or _."""
    return read_named(path, name)[0]


def find_run_config(path: Path | None, name: str) -> Path | None:
    """Return the ``config.yml`` of the run directory `name`; None if it is an entry.

    Args:
        path: YAML file of named entries, which come first.
        name: Value of ``--config``.
    """
    config = Path(name) / "config.yml"
    if not exists(config) or (path is not None and name in _read(Path(path))[0]):
        return None
    return config


def read_named(path: str | Path | None, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return entry `name` of the YAML file at `path`, and the position of each key."""
    is_file = Path(name).suffix in _CONFIG_FILES
    if path is None and not is_file:
        raise ConfigurationError(
            f"--config {name} is neither a run directory nor a .yml file. An entry of a "
            "file needs --config-path FILE as well."
        )
    values, node = ({}, None) if path is None else _read(Path(path))
    entries = {str(key): entry for key, entry in values.items()}
    if is_own_file(path, name):
        values, node = _read(Path(name))
        return _normalize_keys(values), _find_positions(node, Path(name))
    if name not in entries and is_file:
        name = _entry_of_reference(name)
    if name not in entries:
        names = sorted(entries)
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        raise ConfigurationError(
            f"--config {name}: there is no such run, file or configuration."
            f"{did_you_mean(name, names)} Available entries of {path}: "
            f"{', '.join(names[:_MAX_NAMES])}{more}."
        )
    entry = entries[name] or {}
    if not isinstance(entry, dict):
        raise ConfigurationError(f"Entry {name} of {path} is not a mapping of options.")
    assert path is not None and node is not None, "otherwise there are no entries"
    nodes = [value for key, value in node.value if key.value == name]
    return _normalize_keys(entry), _find_positions(nodes[-1] if nodes else None, Path(path))


def is_own_file(path: str | Path | None, name: str) -> bool:
    """Whether `name` is a file with a single configuration, not an entry of `path`."""
    if Path(name).suffix not in _CONFIG_FILES:
        return False
    entries = {} if path is None else {str(key) for key in _read(Path(path))[0]}
    is_entry = name in entries or _entry_of_reference(name) in entries
    return name not in entries and (not is_entry or exists(Path(name)))


def _entry_of_reference(name: str) -> str:
    """Return the entry for -c configs/NAME_config.json of the reference of vcd."""
    return Path(name).stem.removesuffix("_config")


def _normalize_keys(entry: dict[Any, Any]) -> dict[str, Any]:
    return {str(key).replace("-", "_"): value for key, value in entry.items()}


def _find_positions(node: yaml.Node | None, path: Path) -> dict[str, str]:
    """Return the file and line of each key, also of merged ones."""
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {
        str(key.value).replace("-", "_"): f"{path}, line {key.start_mark.line + 1}"
        for key, _ in node.value
    }


def exists(path: Path) -> bool:
    """Whether a file exists; False for a name that no file can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping of plain values."""
    return _read(path)[0]


def _read(path: Path) -> tuple[dict[str, Any], Any]:
    entries, node = compose(_read_text(path), str(path))
    if not isinstance(entries, dict):
        raise ConfigurationError(f"{path} must contain a mapping at its top level.")
    return entries, node


def _read_text(path: Path) -> str:
    """Read a file, but not more of it than `compose` accepts: it may be endless."""
    try:
        with path.open("rb") as file:
            content = file.read(4 * MAX_LENGTH + 1)  # up to four bytes per character
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
            f"{path}, line {line}, is not plain YAML: it is not UTF-8 text."
        ) from error
    # JSON may be indented with tabs, YAML may not. Strings in JSON have no raw tabs.
    return text.replace("\t", " ") if path.suffix == ".json" else text


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a ConfigurationError that names `path` if it cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"Cannot write {path}: {error.strerror}.") from error
