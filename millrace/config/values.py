"""Values from text: a YAML value or a word becomes what a field declares."""

import collections.abc
import os
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union

from millrace.config.checks import ConfigurationError, did_you_mean, shown
from millrace.config.yaml_text import compose

_TRUE = {"true", "t", "1", "yes", "y", "on"}
_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes, of usual file systems
_FALSE = {"false", "f", "0", "no", "n", "off"}


def converted(hint: Any, value: Any, option: str) -> Any:
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
        Path: _to_path,
    }.get(origin)
    try:
        if origin is list:
            if isinstance(value, str) and value.startswith("["):
                value = _yaml(value)
            items = value if isinstance(value, list | tuple) else [value]
            (item,) = typing.get_args(hint)
            return [converted(item, entry, option) for entry in items]
        if converter is None:
            raise ConfigurationError(f"{option} cannot be set from text.")
        return converter(value)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ConfigurationError):
            raise
        wanted = type_name(hint).lower() if origin is not bool else "true or false"
        limit = " in the range of 64 bits" if isinstance(error, OverflowError) else ""
        raise ConfigurationError(
            f"{option} takes {_article(wanted)}{limit}, got {shown(value)}."
        ) from error


def _article(wanted: str) -> str:
    names = {"int": "a whole number", "number": "a number", "dict": "a dictionary"}
    names |= {"path": "a path that a file can have"}
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
            return converted(arg, value, option)
        except ConfigurationError as error:
            errors.append(str(error))
    raise ConfigurationError(errors[0] if len(errors) == 1 else " Or: ".join(errors))


def _convert_literal(hint: Any, value: Any, option: str) -> Any:
    choices = typing.get_args(hint)
    word = _word(value)
    for choice in choices:
        if word.lower() == str(choice).lower():
            return choice
    names = [str(choice) for choice in choices]
    raise ConfigurationError(
        f"{option} must be one of {', '.join(names)}; got {shown(value)}."
        f"{did_you_mean(word, names)}"
    )


def _word(value: Any) -> str:
    """Return a value as a word of a command line; what cannot be one is cut short."""
    return shown(value) if isinstance(value, dict | list | int) else str(value)


def _yaml(text: str) -> Any:
    try:
        return compose(text, "the text")[0]
    except ConfigurationError as error:
        raise ValueError(text) from error


def _to_bool(value: Any) -> bool:
    word = _word(value).lower()
    if word in _TRUE | _FALSE:
        return word in _TRUE
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
    """Refuse what no file can be called, which would be an error wherever it is used."""
    text = _to_text(value)
    longest = max(map(len, map(os.fsencode, text.split("/"))))
    if "\0" in text or longest > _LONGEST_NAME or len(text) > _LONGEST_PATH:
        raise ValueError(text)
    return Path(text)


def _to_dict(value: Any) -> dict[str, Any]:
    loaded = _yaml(value) if isinstance(value, str) else value
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


def type_name(hint: Any) -> str:
    """Say what an option takes, as help and messages show it."""
    if typing.get_origin(hint) is Literal:
        return "{" + ",".join(map(str, typing.get_args(hint))) + "}"
    if typing.get_origin(hint) in (Union, types.UnionType):
        return "|".join(type_name(arg) for arg in typing.get_args(hint) if _is_text(arg))
    origin = typing.get_origin(hint) or hint
    return {int: "INT", float: "NUMBER", str: "TEXT", dict: "DICT", Path: "PATH"}.get(
        origin, "VALUE"
    )


def _is_text(hint: Any) -> bool:
    """Whether a value of this type can be written on a command line."""
    return hint is not type and typing.get_origin(hint) is not collections.abc.Callable


def without_none(hint: Any) -> Any:
    """Return what a value is where there is one."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        kept = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return kept[0] if len(kept) == 1 else Union[tuple(kept)]  # noqa: UP007
    return hint
