"""Turn named YAML configurations and command-line flags into frozen dataclasses.

A configuration is a dataclass whose fields carry their help as a docstring. Values
come from the dataclass, then from the named YAML entry, then from the flags; whatever
does not fit is a ``ConfigurationError`` before anything is compiled.
"""

import argparse
import ast
import collections.abc
import copy
import dataclasses
import difflib
import inspect
import itertools
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union

import yaml

T = TypeVar("T")

_CONFIG_FILES = (".json", ".yml", ".yaml")
_TRUE = {"true", "t", "1", "yes", "y", "on"}
_FALSE = {"false", "f", "0", "no", "n", "off"}


class ConfigurationError(ValueError):
    """The command or configuration is wrong; the message says what to change."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows an option's own name and short ones; other spellings are in the docs."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        words = action.option_strings
        long = [word for word in words if word.startswith("--")]
        shown = copy.copy(action)
        shown.option_strings = [word for word in words if word not in long[1:]]
        return super()._format_action_invocation(shown)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours: one line, with the nearest option."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(re.sub(r"^argument \S+: (?=--)", "", message))


def parse(
    config_type: type[T],
    argv: Sequence[str],
    *,
    program: str,
    named_configs: Path | None = None,
) -> tuple[T, dict[str, Any]]:
    """Return the configuration that `argv` asks for, and the values it set explicitly.

    Args:
        config_type: A frozen dataclass.
        argv: The words after the command's name.
        program: How the command is called, for ``--help``.
        named_configs: The YAML file that ``--config NAME`` looks in by default.
    """
    parser = _parser(config_type, program, named_configs)
    flags, unknown = parser.parse_known_args([_hyphenate(word) for word in argv])
    if unknown:
        raise ConfigurationError(_unknown_option(unknown[0], parser))
    return configure(config_type, vars(flags), named_configs)


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
    values = dict(load_named(path, str(name))) if name else {}
    own = getattr(config_type, "named_without", ())
    values = {
        _field_name(config_type, key): value
        for key, value in values.items()
        if key not in own
    }
    values = _overridden(config_type, values, given)
    return build(config_type, values), values


def build(config_type: type[T], values: Mapping[str, Any]) -> T:
    """Make `config_type` from plain `values`, checking names and types."""
    known = _fields(config_type)
    hints = typing.get_type_hints(config_type)
    checked = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigurationError(_unknown_key(name, known))
        checked[name] = _convert(hints[name], value, _option(name))
    if (translated := getattr(config_type, "translated", None)) is not None:
        checked = translated(checked)
    missing = [
        name.upper() if field.metadata.get("positional") else _option(name)
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


def one_of(option: str, name: str, choices: Mapping[str, T]) -> T:
    """Return the choice called `name`, or say which there are."""
    if name not in list(choices):  # a list, because a mistaken name may be unhashable
        raise ConfigurationError(
            f"{option} must be one of {', '.join(choices)}; got {name!r}."
            + did_you_mean(str(name), choices)
        )
    return choices[name]


def check_keys(option: str, params: Mapping[str, Any], keys: Collection[str]) -> None:
    """Refuse a dictionary that has not exactly these `keys`."""
    missing = [key for key in keys if key not in params]
    unknown = [str(key) for key in params if key not in keys]
    if missing or unknown:
        raise ConfigurationError(
            f"{option} needs the keys {', '.join(keys)}; "
            f"got {', '.join(map(str, params)) or 'none'}."
            + "".join(did_you_mean(key, missing or keys) for key in unknown[:1])
        )


def number(
    option: str, value: Any, *, at_least: float = 0.0, below: float = math.inf
) -> float:
    """Return `value` as a float if it is a number in the range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not at_least <= value < below:
        limits = "" if at_least == -math.inf else f" of at least {at_least:g}"
        limits += "" if below == math.inf else f" and below {below:g}"
        raise ConfigurationError(f"{option} must be a number{limits}, got {value!r}.")
    return float(value)


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """Suggest the choice nearest to a mistaken word, if one is near."""
    nearest = difflib.get_close_matches(word, choices, n=1)
    return f" Did you mean {nearest[0]}?" if nearest else ""


def as_plain(config: Any) -> dict[str, Any]:
    """Return a dataclass as plain YAML-able values, for ``config.yml``."""
    return {name: _plain(getattr(config, name)) for name in _fields(type(config))}


def plain_defaults(config_type: Any) -> dict[str, Any]:
    """Return the options that have a default, as plain values."""
    missing = dataclasses.MISSING
    found = {}
    for name, field in _fields(config_type).items():
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


def _fields(config_type: Any) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(config_type)}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _hyphenate(word: str) -> str:
    """Accept ``--config_path`` for ``--config-path``, as the references' texts do."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


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


def _unknown_key(name: str, known: Mapping[str, Any]) -> str:
    return f"There is no option {name}.{did_you_mean(name, known)}"


def _unknown_option(word: str, parser: argparse.ArgumentParser) -> str:
    options = [option for action in parser._actions for option in action.option_strings]
    hint = did_you_mean(word.split("=")[0], options) or f" See {parser.prog} --help."
    return f"There is no option {word}.{hint}"


def _parser(
    config_type: Any, program: str, named_configs: Path | None
) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program,
        usage=" ".join([program, *_positionals(config_type), "[options]"]),
        description=inspect.getdoc(config_type),
        argument_default=argparse.SUPPRESS,
        formatter_class=_Help,
    )
    if named_configs is not None:
        parser.add_argument(
            *("-c", "--config", "--config-name", "--config-file"),
            dest="config",
            metavar="NAME",
            help="start from this named configuration, or from a file of your own that "
            "holds just one (.yml or .json)",
        )
        parser.add_argument(
            "--config-path",
            metavar="FILE",
            help=f"YAML file of named configurations (default: {named_configs.name})",
        )
    hints = typing.get_type_hints(config_type)
    helps = field_docs(config_type)
    for title, section in _sections(config_type).items():
        group = parser.add_argument_group(title) if title else parser
        for name, field in section.items():
            text = " ".join(helps.get(name, "").split())
            if (default := _default(field)) is not None:
                text += f" (default: {default})"
            arguments = _argument(hints[name], _option(name))
            if field.metadata.get("positional"):
                words, arguments["metavar"] = (name,), name.upper()
            else:
                words = (_option(name), *field.metadata.get("aliases", ()))
                arguments["dest"] = name
                if (bare := field.metadata.get("bare")) is not None:
                    arguments |= {"nargs": "?", "const": bare}
            group.add_argument(*words, help=text.replace("%", "%%"), **arguments)
            for word in field.metadata.get("negations", ()):
                meaning = f"The same as {_option(name)} False."
                group.add_argument(
                    word, dest=name, action="store_const", const=False, help=meaning
                )
    return parser


def _positionals(config_type: Any) -> list[str]:
    """The words a command takes without an option's name in front."""
    return [
        name.upper()
        for name, field in _fields(config_type).items()
        if field.metadata.get("positional")
    ]


def _sections(config_type: Any) -> dict[str, dict[str, dataclasses.Field]]:
    """Fields by the class that declares them: the command's own, then its bases'."""
    left = _fields(config_type)
    sections = {}
    for cls in config_type.__mro__:
        names = [name for name in inspect.get_annotations(cls) if name in left]
        if names:
            title = (inspect.getdoc(cls) or "").split("\n")[0].rstrip(".")
            title = "" if cls is config_type else title
            sections[title] = {name: left.pop(name) for name in names}
    return sections


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory() or None
    return None if field.default is dataclasses.MISSING else field.default


def _argument(hint: Any, option: str) -> dict[str, Any]:
    """Say how argparse should read an option of this type."""

    def word_to(wanted: Any) -> Callable[[str], Any]:
        def convert(word: str) -> Any:
            try:
                return _convert(wanted, word, option)
            except ConfigurationError as error:  # argparse would hide a ValueError
                raise argparse.ArgumentTypeError(str(error)) from error

        return convert

    inner = _without_none(hint)
    if inner is bool:
        return {"nargs": "?", "const": True, "type": word_to(hint), "metavar": "BOOL"}
    if typing.get_origin(inner) is list:
        (item,) = typing.get_args(inner)
        return {"nargs": "*", "type": word_to(item), "metavar": _metavar(item)}
    return {"type": word_to(hint), "metavar": _metavar(inner)}


def _metavar(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "{" + ",".join(map(str, typing.get_args(hint))) + "}"
    if typing.get_origin(hint) in (Union, types.UnionType):
        return "|".join(_metavar(arg) for arg in typing.get_args(hint) if _is_text(arg))
    origin = typing.get_origin(hint) or hint
    return {int: "INT", float: "NUMBER", str: "TEXT", dict: "DICT", Path: "PATH"}.get(
        origin, "VALUE"
    )


def _is_text(hint: Any) -> bool:
    """Whether a value of this type can be written on a command line."""
    return hint is not type and typing.get_origin(hint) is not collections.abc.Callable


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (Union, types.UnionType):
        kept = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return kept[0] if len(kept) == 1 else Union[tuple(kept)]  # noqa: UP007
    return hint


def _convert(hint: Any, value: Any, option: str) -> Any:
    """Bring a YAML value or a command-line word to the type the field declares."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return _convert_union(hint, value, option)
    if typing.get_origin(hint) is Literal:
        return _convert_literal(hint, value, option)
    origin = typing.get_origin(hint) or hint
    converter = {
        bool: _to_bool,
        int: _to_int,
        float: _to_float,
        str: _to_text,
        dict: _to_dict,
        Path: lambda v: Path(_to_text(v)),
    }.get(origin)
    try:
        if origin is list:
            if isinstance(value, str) and value.startswith("["):
                value = yaml.safe_load(value)
            items = value if isinstance(value, list | tuple) else [value]
            (item,) = typing.get_args(hint)
            return [_convert(item, entry, option) for entry in items]
        if converter is None:
            raise ConfigurationError(f"{option} cannot be set from text.")
        return converter(value)
    except (TypeError, ValueError, yaml.YAMLError) as error:
        if isinstance(error, ConfigurationError):
            raise
        wanted = _metavar(hint).lower() if origin is not bool else "true or false"
        raise ConfigurationError(
            f"{option} takes {_article(wanted)}, got {value!r}."
        ) from error


def _article(wanted: str) -> str:
    names = {"int": "a whole number", "number": "a number", "dict": "a dictionary"}
    return names.get(wanted, wanted)


def _convert_union(hint: Any, value: Any, option: str) -> Any:
    args = typing.get_args(hint)
    if type(None) in args and (value is None or value in ("None", "none", "null")):
        return None
    errors = []
    for arg in args:
        if arg is type(None) or not _is_text(arg):
            continue
        try:
            return _convert(arg, value, option)
        except ConfigurationError as error:
            errors.append(str(error))
    raise ConfigurationError(errors[0] if len(errors) == 1 else " Or: ".join(errors))


def _convert_literal(hint: Any, value: Any, option: str) -> Any:
    choices = typing.get_args(hint)
    for choice in choices:
        if str(value).lower() == str(choice).lower():
            return choice
    names = [str(choice) for choice in choices]
    raise ConfigurationError(
        f"{option} must be one of {', '.join(names)}; got {value!r}."
        f"{did_you_mean(str(value), names)}"
    )


def _to_bool(value: Any) -> bool:
    word = str(value).lower()
    if word in _TRUE | _FALSE:
        return word in _TRUE
    raise ValueError(value)


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(value)
    if isinstance(value, str) and value.count("/") == 1:  # 1/3, as in --logs-per-epoch
        numerator, denominator = value.split("/")
        if float(denominator) == 0:
            raise ValueError(value)
        return float(numerator) / float(denominator)
    return float(value)


def _to_text(value: Any) -> str:
    if value is None or isinstance(value, dict | list | bool):
        raise TypeError(value)
    return str(value)


def _to_dict(value: Any) -> dict[str, Any]:
    loaded = yaml.safe_load(value) if isinstance(value, str) else value
    if not isinstance(loaded, dict):
        raise TypeError(value)
    return {str(key): _number(item) for key, item in loaded.items()}


def _number(item: Any) -> Any:
    """YAML reads 1e-5 (no dot) as text; a dictionary of options means the number."""
    if isinstance(item, list):
        return [_number(entry) for entry in item]
    if isinstance(item, dict):
        return {str(key): _number(entry) for key, entry in item.items()}
    if isinstance(item, str):
        try:
            return float(item)
        except ValueError:
            return item
    return item


def field_docs(config_type: Any) -> dict[str, str]:
    """Return the docstring under each field, the base classes' included."""
    docs: dict[str, str] = {}
    for cls in reversed(config_type.__mro__):
        if dataclasses.is_dataclass(cls):
            docs |= _class_field_docs(cls)
    return docs


def _class_field_docs(cls: Any) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(cls))
    (tree,) = ast.parse(source).body
    docs = {}
    body = typing.cast(ast.ClassDef, tree).body
    for statement, following in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[statement.target.id] = str(following.value.value)
    return docs
