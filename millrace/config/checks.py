"""The error of a wrong configuration, and checks that several packages share."""

import difflib
import math
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_REPR = reprlib.Repr()
_REPR.maxlevel = 3
_REPR.maxstring = _REPR.maxother = 120
_REPR.maxlong = 40


class ConfigurationError(ValueError):
    """The command or configuration is wrong; the message says what to change."""


def shown(value: Any) -> str:
    """Format a value for an error message; huge values are abbreviated.

    ``repr`` would first build the full text, which takes minutes for a hostile value.
    """
    try:
        return _REPR.repr(value)
    except ValueError:  # Python refuses to format an integer with more than 4,300 digits
        return f"an integer of {value.bit_length():,} bits"


def one_of(option: str, name: str, choices: Mapping[str, T]) -> T:
    """Return ``choices[name]``; raise an error that lists the choices if there is none."""
    if name not in list(choices):  # a list, because a wrong name may be unhashable
        raise ConfigurationError(
            f"{option} must be one of {', '.join(choices)}; got {shown(name)}."
            + did_you_mean(name if isinstance(name, str) else shown(name), choices)
        )
    return choices[name]


def check_keys(
    option: str,
    params: Mapping[str, Any],
    keys: Collection[str],
    optional: Collection[str] = (),
) -> None:
    """Raise if a dictionary does not have all of `keys`, or any but `optional` besides."""
    missing = [key for key in keys if key not in params]
    unknown = [str(key) for key in params if key not in (*keys, *optional)]
    if missing or unknown:
        needs = f"needs the keys {', '.join(keys)}" if keys else ""
        may_have = f"may have the keys {', '.join(optional)}" if optional else ""
        raise ConfigurationError(
            f"{option} {' and '.join(filter(None, (needs, may_have))) or 'has no keys'}; "
            f"got {', '.join(map(str, params)) or 'none'}."
            + "".join(
                did_you_mean(key, missing or [*keys, *optional]) for key in unknown[:1]
            )
        )


def number(
    option: str, value: Any, *, at_least: float = 0.0, below: float = math.inf
) -> float:
    """Return `value` as a float; raise if it is not a number in the range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not at_least <= value < below:
        limits = "" if at_least == -math.inf else f" of at least {at_least:g}"
        limits += "" if below == math.inf else f" and below {below:g}"
        raise ConfigurationError(f"{option} must be a number{limits}, got {shown(value)}.")
    return float(value)


def did_you_mean(name: str, choices: Collection[str]) -> str:
    """Return a sentence that suggests the most similar choice, or an empty string."""
    nearest = difflib.get_close_matches(name[:80], choices, n=1)
    return f" Did you mean {nearest[0]}?" if nearest else ""
