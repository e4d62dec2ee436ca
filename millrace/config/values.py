"""Convert YAML values and command-line arguments to the types of fields."""

import collections.abc
import os
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union

from millrace.config.checks import ConfigurationError, did_you_mean, shown
from millrace.config.yaml_text import compose

_TRUE = {"true", "t", "1", "yes", "y", "on"}
_FALSE = {"false", "f", "0", "no", "n", "off"}
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095  # NAME_MAX and PATH_MAX - 1 on Linux
_DESCRIPTIONS = {
    "INT": "an integer",
    "NUMBER": "a number",
    "TEXT": "text",
    "DICT": "a dictionary",
    "PATH": "a valid path",
    "BOOL": "true or false",
    "VALUE": "a list",
}


def convert(hint: Any, value: Any, option: str) -> Any:
    """Convert a YAML value or a command-line argument to the type `hint`.

    Args:
        hint: The type of the field.
        value: The value to convert.
        option: Name of the option, for errors.
    """
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
        Path: _to_path,
    }.get(origin)
    try:
        if origin is list:
            if isinstance(value, str) and value.startswith("["):
                value = _load_yaml(value)
            items = value if isinstance(value, list | tuple) else [value]
            (item,) = typing.get_args(hint)
            return [convert(item, entry, option) for entry in items]
        if converter is None:
            raise ConfigurationError(f"{option} can only be set from Python.")
        return converter(value)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ConfigurationError):
            raise
        limit = " that fits in 64 bits" if isinstance(error, OverflowError) else ""
        raise ConfigurationError(
            f"{option} must be {_DESCRIPTIONS[type_name(hint)]}{limit}, got {shown(value)}."
        ) from error


def _convert_union(hint: Any, value: Any, option: str) -> Any:
    args = typing.get_args(hint)
    if type(None) in args and (value is None or value in ("None", "none", "null")):
        return None
    errors = []
    for arg in args:
        if arg is type(None) or not _is_settable(arg):
            continue
        try:
            return convert(arg, value, option)
        except ConfigurationError as error:
            errors.append(str(error))
    raise ConfigurationError(errors[0] if len(errors) == 1 else " Or: ".join(errors))


def _convert_literal(hint: Any, value: Any, option: str) -> Any:
    choices = typing.get_args(hint)
    text = _format(value)
    for choice in choices:
        if text.lower() == str(choice).lower():
            return choice
    names = [str(choice) for choice in choices]
    raise ConfigurationError(
        f"{option} must be one of {', '.join(names)}; got {shown(value)}."
        f"{did_you_mean(text, names)}"
    )


def _format(value: Any) -> str:
    """Format a value as on a command line; values that may be huge are abbreviated."""
    return shown(value) if isinstance(value, dict | list | int) else str(value)


def _load_yaml(text: str) -> Any:
    try:
        return compose(text, "the text")[0]
    except ConfigurationError as error:
        raise ValueError(text) from error


def _to_bool(value: Any) -> bool:
    text = _format(value).lower()
    if text in _TRUE | _FALSE:
        return text in _TRUE
    raise ValueError(value)


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    if not -(2**63) <= (number := int(value)) < 2**63:
        raise OverflowError(value)
    return number


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


def _to_path(value: Any) -> Path:
    """Convert to a path; raise if no file can have it, before something else does."""
    text = _to_text(value)
    longest = max(map(len, map(os.fsencode, text.split("/"))))
    if "\0" in text or longest > _MAX_NAME_BYTES or len(text) > _MAX_PATH_BYTES:
        raise ValueError(text)
    return Path(text)


def _to_dict(value: Any) -> dict[str, Any]:
    loaded = _load_yaml(value) if isinstance(value, str) else value
    if not isinstance(loaded, dict):
        raise TypeError(value)
    return {str(key): _parse_numbers(item) for key, item in loaded.items()}


def _parse_numbers(item: Any) -> Any:
    """Convert text such as 1e-5, which is not a number in YAML because it has no dot."""
    if isinstance(item, list):
        return [_parse_numbers(entry) for entry in item]
    if isinstance(item, dict):
        return {str(key): _parse_numbers(entry) for key, entry in item.items()}
    if isinstance(item, str):
        try:
            return float(item)
        except ValueError:
            return item
    return item


def type_name(hint: Any) -> str:
    """Return the name of a type in ``--help``."""
    if typing.get_origin(hint) is Literal:
        return "{" + ",".join(map(str, typing.get_args(hint))) + "}"
    if typing.get_origin(hint) in (Union, types.UnionType):
        return "|".join(
            type_name(arg) for arg in typing.get_args(hint) if _is_settable(arg)
        )
    origin = typing.get_origin(hint) or hint
    names = {int: "INT", float: "NUMBER", str: "TEXT", dict: "DICT", Path: "PATH"}
    return (names | {bool: "BOOL"}).get(origin, "VALUE")


def choices(hint: Any) -> list[str]:
    """Return the values that a type allows, as text; empty if they are not listed."""
    inner = without_none(hint)
    if typing.get_origin(inner) is list:
        (inner,) = typing.get_args(inner)
    parts = typing.get_args(inner) if _is_union(inner) else (inner,)
    literals = [part for part in parts if typing.get_origin(part) is Literal]
    return [str(choice) for part in literals for choice in typing.get_args(part)]


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (Union, types.UnionType)


def _is_settable(hint: Any) -> bool:
    """Whether a value of this type can be given on a command line."""
    return hint is not type and typing.get_origin(hint) is not collections.abc.Callable


def without_none(hint: Any) -> Any:
    """Return the type without None."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        kept = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return kept[0] if len(kept) == 1 else Union[tuple(kept)]  # noqa: UP007
    return hint
