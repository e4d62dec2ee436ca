"""Build configurations from options by name, and flatten them again.

A configuration is a frozen dataclass. A field whose type is itself a dataclass is a
*section*: ``config.plan``, ``config.data``. On the command line, in YAML files and in
``config.yml`` everything is flat, so the names of all options must differ.
"""

import contextlib
import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from millrace.config.checks import ConfigurationError, did_you_mean
from millrace.config.files import read_named
from millrace.config.values import convert

T = TypeVar("T")

_MISSING = dataclasses.MISSING


class Option(NamedTuple):
    """An option: a field of a configuration or of one of its sections."""

    field: dataclasses.Field
    hint: Any
    """Type of the field."""
    section: str | None
    """Attribute of the configuration that holds it; None for a field of its own."""
    default: Any
    """Default value; ``dataclasses.MISSING`` for a required option."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata of the field, such as ``aliases`` and ``may_change``."""
        return self.field.metadata


@functools.cache
def flat_options(config_type: Any) -> dict[str, Option]:
    """Return all options of a configuration and its sections by name."""
    hints = typing.get_type_hints(config_type)
    options: dict[str, Option] = {}
    for field in dataclasses.fields(config_type):
        if not dataclasses.is_dataclass(hints[field.name]):
            added = {field.name: Option(field, hints[field.name], None, _default(field))}
        else:
            section = _default(field)
            added = {
                name: option._replace(section=field.name, default=getattr(section, name))
                for name, option in flat_options(hints[field.name]).items()
            }
        duplicates = sorted(added.keys() & options)
        assert not duplicates, f"{config_type.__name__} has duplicate options {duplicates}"
        options |= added
    return options


def section_types(config_type: Any) -> dict[str, Any]:
    """Return the classes of the sections of a configuration by attribute."""
    hints = typing.get_type_hints(config_type)
    names = [field.name for field in dataclasses.fields(config_type)]
    return {name: hints[name] for name in names if dataclasses.is_dataclass(hints[name])}


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not _MISSING:
        return field.default_factory()
    return field.default


def configure(
    config_type: type[T], options: Mapping[str, Any], named_configs: Path | None = None
) -> tuple[T, dict[str, Any]]:
    """Build a configuration from options; also return the values that were set.

    Args:
        config_type: A frozen dataclass.
        options: Values by option name or alias. ``config`` names an entry to start from,
            and ``config_path`` its file.
        named_configs: Default YAML file of named configurations.
    """
    given = {option_name(config_type, key): value for key, value in options.items()}
    name, path = given.pop("config", None), given.pop("config_path", named_configs)
    named = _load_named_options(config_type, path, str(name)) if name else {}
    values = _override(config_type, named, given)
    return build(config_type, values), values


def _load_named_options(config_type: Any, path: Path | None, name: str) -> dict[str, Any]:
    """Return the options of a named entry; errors name the file and the line."""
    values, positions = read_named(path, name)
    # A command may share a file with another one whose options it lacks.
    ignored = getattr(config_type, "named_without", ())
    named = {}
    for key, value in values.items():
        if key in ignored:
            continue
        try:
            option_name, _ = _convert_option(config_type, key, value)
        except ConfigurationError as error:
            raise ConfigurationError(f"{positions.get(key, path)}: {error}") from error
        named[option_name] = value
    return named


def build(config_type: type[T], values: Mapping[str, Any]) -> T:
    """Build a configuration from plain values; check names and types.

    A class may define ``expand_options(values) -> values``, which replaces options that
    stand for others before anything is built.
    """
    options = flat_options(config_type)
    converted = dict(_convert_option(config_type, *item) for item in values.items())
    if (expand := getattr(config_type, "expand_options", None)) is not None:
        converted = expand(converted)
    missing = [
        name.upper() if option.metadata.get("positional") else flag(name)
        for name, option in options.items()
        if name not in converted and option.default is _MISSING
    ]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigurationError(f"{' and '.join(missing)} {verb} required.")
    fields = {field.name: field for field in dataclasses.fields(cast(Any, config_type))}
    with _as_configuration_error():
        own = _build_fields(
            config_type, converted, lambda section: _default(fields[section])
        )
        return config_type(**own)


def replace_options(config: T, **changes: Any) -> T:
    """Return a copy of a configuration with some options of any section replaced."""
    with _as_configuration_error():
        own = _build_fields(type(config), changes, lambda section: getattr(config, section))
        return dataclasses.replace(cast(Any, config), **own)


def _build_fields(
    config_type: Any, values: Mapping[str, Any], get_section: Callable[[str], Any]
) -> dict[str, Any]:
    """Return the fields of a configuration that flat values set, sections included.

    Args:
        config_type: The configuration dataclass.
        values: Values by option name.
        get_section: Returns the section in which the values are replaced.
    """
    options = flat_options(config_type)
    own: dict[str, Any] = {}
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section = options[name].section
        (own if section is None else by_section.setdefault(section, {}))[name] = value
    for section, given in by_section.items():
        own[section] = dataclasses.replace(get_section(section), **given)
    return own


@contextlib.contextmanager
def _as_configuration_error() -> Iterator[None]:
    """Convert the ValueError of a dataclass that checks itself."""
    try:
        yield
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _convert_option(config_type: Any, key: str, value: Any) -> tuple[str, Any]:
    """Return the name of an option and its value, converted to the type of the field."""
    name = option_name(config_type, key)
    if name not in (known := flat_options(config_type)):
        raise ConfigurationError(f"Unknown option {name[:80]}.{did_you_mean(name, known)}")
    return name, convert(known[name].hint, value, flag(name))


def option_value(config: Any, name: str) -> Any:
    """Return the value of an option of any section."""
    section = flat_options(type(config))[name].section
    return getattr(config if section is None else getattr(config, section), name)


def as_plain(config: Any) -> dict[str, Any]:
    """Flatten a configuration into plain values, as in ``config.yml``."""
    return {name: _plain(option_value(config, name)) for name in flat_options(type(config))}


def plain_defaults(config_type: Any) -> dict[str, Any]:
    """Return the defaults of all options that have one, as plain values."""
    return {
        name: _plain(option.default)
        for name, option in flat_options(config_type).items()
        if option.default is not _MISSING
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def flag(name: str) -> str:
    """Return the command-line flag of an option."""
    return "--" + name.replace("_", "-")


def option_name(config_type: Any, key: str) -> str:
    """Return the name of an option that may be given by an alias."""
    for name, option in flat_options(config_type).items():
        aliases = option.metadata.get("aliases", ())
        if key.replace("_", "-") in {alias.lstrip("-") for alias in aliases}:
            return name
    return key


def _override(
    config_type: Any, values: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Override `values` by `given`.

    An option that stands for others overrides them, and is overridden by each of them.
    """
    stands_for = {
        name: set(option.metadata.get("stands_for", ()))
        for name, option in flat_options(config_type).items()
    }
    replaced = set().union(*(stands_for.get(name, ()) for name in given))
    kept = {
        name: value
        for name, value in values.items()
        if name not in replaced and not stands_for.get(name, set()) & set(given)
    }
    return kept | given
