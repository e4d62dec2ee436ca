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
from millrace.config.values import converted

T = TypeVar("T")

_MISSING = dataclasses.MISSING


class Option(NamedTuple):
    """An option of a configuration: one field, its own or a section's."""

    field: dataclasses.Field
    hint: Any
    """The type that the field declares."""
    section: str | None
    """The attribute that holds it; None for the configuration's own fields."""
    default: Any
    """Its value if it is not given; ``dataclasses.MISSING`` if it must be."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the field says besides its type: aliases, may_change and so on."""
        return self.field.metadata


@functools.cache
def flat_options(config_type: Any) -> dict[str, Option]:
    """Return all options of a configuration by name, those of its sections included."""
    hints = typing.get_type_hints(config_type)
    options: dict[str, Option] = {}
    for field in dataclasses.fields(config_type):
        if not dataclasses.is_dataclass(hints[field.name]):
            found = {field.name: Option(field, hints[field.name], None, _default(field))}
        else:
            section = _default(field)
            found = {
                name: option._replace(section=field.name, default=getattr(section, name))
                for name, option in flat_options(hints[field.name]).items()
            }
        twice = sorted(found.keys() & options)
        assert not twice, f"{config_type.__name__} has more than one {', '.join(twice)}"
        options |= found
    return options


def section_types(config_type: Any) -> dict[str, Any]:
    """Return the classes of a configuration's sections by attribute name."""
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
    """Return the configuration for some options, and the values that were set explicitly.

    Args:
        config_type: A frozen dataclass.
        options: Values by option name or alias; ``config`` names an entry to start from,
            ``config_path`` the file it is in.
        named_configs: The YAML file of named configurations to use by default.
    """
    given = {_option_name(config_type, key): value for key, value in options.items()}
    name, path = given.pop("config", None), given.pop("config_path", named_configs)
    values = _overridden(
        config_type, _named(config_type, path, str(name)) if name else {}, given
    )
    return build(config_type, values), values


def _named(config_type: Any, path: Path | None, name: str) -> dict[str, Any]:
    """Return the options of a named entry; errors name the file and the line."""
    values, places = read_named(path, name)
    own = getattr(config_type, "named_without", ())
    named = {}
    for key, value in values.items():
        if key in own:
            continue
        try:
            option_name, _ = _checked(config_type, key, value)
        except ConfigurationError as error:
            raise ConfigurationError(f"{places.get(key, path)}: {error}") from error
        named[option_name] = value
    return named


def build(config_type: type[T], values: Mapping[str, Any]) -> T:
    """Make a configuration from plain values, checking names and types.

    A class may define ``expand_options(values) -> values``, which replaces options that
    stand for others before anything is built.
    """
    options = flat_options(config_type)
    checked = dict(_checked(config_type, *given) for given in values.items())
    if (expand := getattr(config_type, "expand_options", None)) is not None:
        checked = expand(checked)
    missing = [
        name.upper() if option.metadata.get("positional") else flag(name)
        for name, option in options.items()
        if name not in checked and option.default is _MISSING
    ]
    if missing:
        raise ConfigurationError(f"{' and '.join(missing)} must be given.")
    defaults = {field.name: field for field in dataclasses.fields(cast(Any, config_type))}
    with _as_configuration_error():
        own = _by_field(config_type, checked, lambda section: _default(defaults[section]))
        return config_type(**own)


def replace_options(config: T, **changes: Any) -> T:
    """Return a configuration with some options changed, whichever section they are in."""
    with _as_configuration_error():
        own = _by_field(type(config), changes, lambda section: getattr(config, section))
        return dataclasses.replace(cast(Any, config), **own)


def _by_field(
    config_type: Any, values: Mapping[str, Any], section_like: Callable[[str], Any]
) -> dict[str, Any]:
    """Sort flat values into the fields of a configuration, and rebuild its sections."""
    options = flat_options(config_type)
    own: dict[str, Any] = {}
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section = options[name].section
        (own if section is None else by_section.setdefault(section, {}))[name] = value
    for section, given in by_section.items():
        own[section] = dataclasses.replace(section_like(section), **given)
    return own


@contextlib.contextmanager
def _as_configuration_error() -> Iterator[None]:
    """Turn the ValueError of a dataclass that checks itself into ours."""
    try:
        yield
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _checked(config_type: Any, key: str, value: Any) -> tuple[str, Any]:
    """Return an option's name and its value in the type that its field declares."""
    name = _option_name(config_type, key)
    if name not in (known := flat_options(config_type)):
        raise ConfigurationError(
            f"There is no option {name[:80]}.{did_you_mean(name, known)}"
        )
    return name, converted(known[name].hint, value, flag(name))


def option_value(config: Any, name: str) -> Any:
    """Return the value of an option, whichever section it is in."""
    section = flat_options(type(config))[name].section
    return getattr(config if section is None else getattr(config, section), name)


def as_plain(config: Any) -> dict[str, Any]:
    """Flatten a configuration into plain values, as ``config.yml`` holds them."""
    return {name: _plain(option_value(config, name)) for name in flat_options(type(config))}


def plain_defaults(config_type: Any) -> dict[str, Any]:
    """Return the options that have a default, as plain values."""
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
    """Return an option as it is written on a command line."""
    return "--" + name.replace("_", "-")


def _option_name(config_type: Any, key: str) -> str:
    """Resolve an alias used as a YAML key."""
    for name, option in flat_options(config_type).items():
        aliases = option.metadata.get("aliases", ())
        if key.replace("_", "-") in {alias.lstrip("-") for alias in aliases}:
            return name
    return key


def _overridden(
    config_type: Any, values: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Let `given` win, also where one of the two has an option that stands for others."""
    meanings = {
        name: set(option.metadata.get("stands_for", ()))
        for name, option in flat_options(config_type).items()
    }
    replaced = set().union(*(meanings.get(name, ()) for name in given))
    kept = {
        name: value
        for name, value in values.items()
        if name not in replaced and not meanings.get(name, set()) & set(given)
    }
    return kept | given
