"""Dataclasses from options by name, and options from dataclasses."""

import dataclasses
import functools
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from millrace.config.checks import ConfigurationError, did_you_mean
from millrace.config.files import read_named
from millrace.config.values import converted

T = TypeVar("T")


def configure(
    config_type: type[T], options: Mapping[str, Any], named_configs: Path | None = None
) -> tuple[T, dict[str, Any]]:
    """Return the configuration that options ask for, and the values it set explicitly.

    Args:
        config_type: A frozen dataclass.
        options: Fields by name or by another of their spellings; ``config`` names an
            entry to start from, ``config_path`` the file it is in.
        named_configs: The YAML file that it is in by default.
    """
    given = {_field_name(config_type, key): value for key, value in options.items()}
    name, path = given.pop("config", None), given.pop("config_path", named_configs)
    values = _overridden(
        config_type, _named(config_type, path, str(name)) if name else {}, given
    )
    return build(config_type, values), values


def _named(config_type: Any, path: Path | None, name: str) -> dict[str, Any]:
    """Return the options of a named entry; a mistake is said with its file and line."""
    values, places = read_named(path, name)
    own = getattr(config_type, "named_without", ())
    named = {}
    for key, value in values.items():
        if key in own:
            continue
        try:
            field_name, _ = _checked(config_type, key, value)
        except ConfigurationError as error:
            raise ConfigurationError(f"{places.get(key, path)}: {error}") from error
        named[field_name] = value
    return named


def build(config_type: type[T], values: Mapping[str, Any]) -> T:
    """Make `config_type` from plain `values`, checking names and types."""
    known = fields_of(config_type)
    checked = dict(_checked(config_type, *given) for given in values.items())
    if (translated := getattr(config_type, "translated", None)) is not None:
        checked = translated(checked)
    missing = [
        name.upper() if field.metadata.get("positional") else option_of(name)
        for name, field in known.items()
        if name not in checked
        and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigurationError(f"{' and '.join(missing)} must be given.")
    try:
        return config_type(**checked)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _checked(config_type: Any, key: str, value: Any) -> tuple[str, Any]:
    """Return an option's field and its value in the field's type."""
    name = _field_name(config_type, key)
    if name not in (known := fields_of(config_type)):
        raise ConfigurationError(
            f"There is no option {name[:80]}.{did_you_mean(name, known)}"
        )
    hint = _type_hints(config_type)[name]
    return name, converted(hint, value, option_of(name))


@functools.cache
def _type_hints(config_type: Any) -> dict[str, Any]:
    return typing.get_type_hints(config_type)


def as_plain(config: Any) -> dict[str, Any]:
    """Return a dataclass as plain YAML-able values, for ``config.yml``."""
    return {name: _plain(getattr(config, name)) for name in fields_of(type(config))}


def plain_defaults(config_type: Any) -> dict[str, Any]:
    """Return the options that have a default, as plain values."""
    missing = dataclasses.MISSING
    found = {}
    for name, field in fields_of(config_type).items():
        if field.default is not missing:
            found[name] = _plain(field.default)
        elif field.default_factory is not missing:
            found[name] = _plain(field.default_factory())
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def fields_of(config_type: Any) -> dict[str, dataclasses.Field]:
    """Return a dataclass's fields by name."""
    return {field.name: field for field in dataclasses.fields(config_type)}


def option_of(name: str) -> str:
    """Return a field as it is written on a command line."""
    return "--" + name.replace("_", "-")


def _field_name(config_type: Any, key: str) -> str:
    """Resolve an alias used as a YAML key."""
    for field in dataclasses.fields(config_type):
        aliases = field.metadata.get("aliases", ())
        if key.replace("_", "-") in {alias.lstrip("-") for alias in aliases}:
            return field.name
    return key


def _overridden(
    config_type: Any, values: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Let `given` win, also where one of the two has an option that stands for others."""
    meanings = {
        field.name: set(field.metadata.get("stands_for", ()))
        for field in dataclasses.fields(config_type)
    }
    replaced = set().union(*(meanings.get(name, ()) for name in given))
    kept = {
        name: value
        for name, value in values.items()
        if name not in replaced and not meanings.get(name, set()) & set(given)
    }
    return kept | given
