"""Build configurations from options by name, and flatten them again.

A configuration is a frozen dataclass. A field whose type is itself a dataclass is a
*section*: ``config.plan``, ``config.data``. On the command line, in YAML files and in
``config.yml`` everything is flat, so the names of all options must differ.
"""

import contextlib
import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from millrace.config.checks import ConfigurationError, did_you_mean
from millrace.config.files import (
    find_run_config,
    is_own_file,
    load_yaml,
    read_named,
)
from millrace.config.runs import locate, open_run
from millrace.config.values import convert
from millrace.storage.address import display, is_url

T = TypeVar("T")

_MISSING = dataclasses.MISSING

Defaults = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Returns the defaults of another program, given the options that are set."""


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
        if duplicates := sorted(added.keys() & options):
            raise ConfigurationError(
                f"{config_type.__name__} has two options {duplicates[0]}, one of them in "
                f"{field.name}: rename yours."
            )
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
    config_type: type[T],
    options: Mapping[str, Any],
    named_configs: Path | None = None,
    *,
    command: str | None = None,
    defaults: Defaults | None = None,
) -> tuple[T, dict[str, Any]]:
    """Build a configuration from options; also return the values that were set.

    A run that is resumed keeps its own options, and `options` override them.

    Args:
        config_type: A frozen dataclass. It may define ``check_given(given)``, which raises
            if options that were given contradict each other.
        options: Values by option name or alias. ``config`` names an entry or a run to start
            from, and ``config_path`` the file of the entry. A class may define
            ``start_from_named(named, given) -> named``, which changes the options of the
            entry, and ``read_file(values, name) -> values``, which changes those of a file
            with a single configuration.
        named_configs: Default YAML file of named configurations.
        command: The command, such as ``cnn-train``: a run of another one is refused.
        defaults: Returns options that replace the defaults of the dataclass, given those
            that are set. A run that is resumed has its own.
    """
    given = {option_name(config_type, key): value for key, value in options.items()}
    if (check := getattr(config_type, "check_given", None)) is not None:
        check(given)
    name, path = given.pop("config", None), given.pop("config_path", named_configs)
    name = str(open_run(name)) if is_url(name) else name
    named = _load_named_options(config_type, path, str(name), command) if name else {}
    if name and (start := getattr(config_type, "start_from_named", None)) is not None:
        named = start(named, given)
    values = _locate_runs(config_type, _override(config_type, named, given))
    values = _separate_resume(values)
    if values.get("resume") is True and values.get("run_dir") is not None:
        saved = load_saved_options(config_type, Path(values["run_dir"]), command)
        values = saved | _normalize_given(config_type, values)
        return build(config_type, values, expand=not saved), values
    if defaults is not None:
        values = _override(config_type, defaults(values), values)
    return build(config_type, values), values


def _locate_runs(config_type: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with working copies in place of addresses of runs."""
    known = flat_options(config_type)
    return {
        name: locate(value, known[name].hint, known[name].metadata, flag(name))
        if name in known
        else value
        for name, value in values.items()
    }


def _separate_resume(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ``resume RUN`` by ``resume True`` and ``run_dir RUN``."""
    if (resume := values.get("resume")) is None:
        return dict(values)
    run_dir = values.get("run_dir")
    resume = convert(bool | Path, resume, flag("resume"))
    if not isinstance(resume, Path):
        return {**values, "resume": resume}
    if run_dir is not None and Path(run_dir) != resume:
        raise ConfigurationError(
            f"--resume names the run {display(resume)}, but --run-dir is "
            f"{display(Path(run_dir))}. Give the run once: --resume RUN."
        )
    return {**values, "resume": True, "run_dir": resume}


def load_saved_options(
    config_type: Any, run: Path, command: str | None = None
) -> dict[str, Any]:
    """Return the options in the ``config.yml`` of a run that apply to a later command.

    Options about one start of the run, marked ``transient``, are left out, as are those of
    other versions. Without the file, there are none.

    Args:
        config_type: The configuration dataclass of the command.
        run: The run directory.
        command: The command, such as ``cnn-train``: a run of another one is refused.
    """
    if not (path := open_run(run) / "config.yml").is_file():
        return {}
    saved = load_yaml(path)
    if command is not None and saved.get("command") != command:
        raise ConfigurationError(
            f"{display(run)} holds a run of {saved.get('command')}, not of {command}."
        )
    known = flat_options(config_type)
    named = {option_name(config_type, key): value for key, value in saved.items()}
    return {
        name: value
        for name, value in named.items()
        if name in known and not known[name].metadata.get("transient")
    }


def _normalize_given(config_type: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return given options as ``config.yml`` has them, without others they stand for."""
    converted = dict(_convert_option(config_type, *item) for item in given.items())
    expand = getattr(config_type, "expand_options", None)
    if expand is None:
        return converted
    known = flat_options(config_type)
    may_change = {n for n, option in known.items() if option.metadata.get("may_change")}
    try:
        expanded = expand(dict(converted))
    except ConfigurationError:
        # What it misses may be among the options of the run. What may change is checked.
        expanded = converted | expand(
            {n: converted[n] for n in converted.keys() & may_change}
        )
    # What a recipe fills in without being asked is not given.
    usual = expand({})
    return {
        name: value
        for name, value in expanded.items()
        if name in converted or (name in may_change and value != usual.get(name))
    }


def _load_named_options(
    config_type: Any, path: Path | None, name: str, command: str | None
) -> dict[str, Any]:
    """Return the options of a named entry or a run; errors name the file and the line."""
    run_config = find_run_config(path, name)
    values, positions = read_named(path, name if run_config is None else str(run_config))
    read_file = getattr(config_type, "read_file", None)
    if read_file is not None and is_own_file(path, name):
        try:
            values = read_file(values, name)
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}: {error}") from error
    skipped = set(getattr(config_type, "named_without", ()))
    if (of_run := values.pop("command", None)) is not None:
        skipped |= _options_of_one_run(config_type)
        if command is not None and of_run != command:
            names = [str(each).replace("-", " ", 1) for each in (of_run, command)]
            raise ConfigurationError(
                f"--config {name} has the options of {names[0]}, not of {names[1]}."
            )
    named = {}
    for key, value in values.items():
        if option_name(config_type, key) in skipped:
            continue
        try:
            known_name, _ = _convert_option(config_type, key, value)
        except ConfigurationError as error:
            raise ConfigurationError(f"{positions.get(key, path)}: {error}") from error
        named[known_name] = value
    return named


def _options_of_one_run(config_type: Any) -> set[str]:
    """Return the options in ``config.yml`` that a new run must not take over.

    Shorthands are among them: the options that they stand for are in the file as well.
    """
    return {
        name
        for name, option in flat_options(config_type).items()
        if option.metadata.get("transient") or option.metadata.get("shorthand")
    }


def build(config_type: type[T], values: Mapping[str, Any], *, expand: bool = True) -> T:
    """Build a configuration from plain values; check names and types.

    A class may define ``expand_options(values) -> values``, which replaces options that
    stand for others before anything is built.

    Args:
        config_type: A frozen dataclass.
        values: Values by option name or alias.
        expand: Whether to call ``expand_options``; the options of a saved run have been
            expanded already.
    """
    options = flat_options(config_type)
    converted = dict(_convert_option(config_type, *item) for item in values.items())
    expand_options = getattr(config_type, "expand_options", None)
    if expand and expand_options is not None:
        converted = expand_options(converted)
    missing = [
        positional_name(name, option) or flag(name)
        for name, option in options.items()
        if name not in converted and option.default is _MISSING
    ]
    if missing:
        raise ConfigurationError(format_required(missing))
    fields = {field.name: field for field in dataclasses.fields(cast(Any, config_type))}
    with _as_configuration_error():
        own = _build_fields(
            config_type, converted, lambda section: _default(fields[section])
        )
        return config_type(**own)


def format_required(names: Sequence[str]) -> str:
    """Return a message about options or arguments that are missing."""
    verb = "is" if len(names) == 1 else "are"
    return f"{' and '.join(names)} {verb} required."


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
    hint = known[name].hint
    value = locate(value, hint, known[name].metadata, flag(name))
    return name, convert(hint, value, flag(name))


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
    return display(value) if isinstance(value, Path) else str(value)


def positional_name(name: str, option: Option) -> str | None:
    """Return the name of an argument without a flag in ``--help``; None if it has one.

    ``positional`` is True for an argument that has no flag, or names one that also has.
    """
    positional = option.metadata.get("positional")
    return name.upper() if positional is True else positional


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
