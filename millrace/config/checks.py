"""What is wrong with a configuration, and the checks that applications share."""

import difflib
import math
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlong = 40


class ConfigurationError(ValueError):
    """The command or configuration is wrong; the message says what to change."""


def shown(value: Any) -> str:
    """Return a value for a message; a huge one is cut without being written out first."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # a number with more digits than Python writes
        return f"a number of {value.bit_length():,} bits"


def one_of(option: str, name: str, choices: Mapping[str, T]) -> T:
    """Return the choice called `name`, or say which there are."""
    if name not in list(choices):  # a list, because a mistaken name may be unhashable
        raise ConfigurationError(
            f"{option} must be one of {', '.join(choices)}; got {shown(name)}."
            + did_you_mean(name if isinstance(name, str) else shown(name), choices)
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
        raise ConfigurationError(f"{option} must be a number{limits}, got {shown(value)}.")
    return float(value)


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """Suggest the choice nearest to a mistaken word, if one is near."""
    nearest = difflib.get_close_matches(word[:80], choices, n=1)
    return f" Did you mean {nearest[0]}?" if nearest else ""
