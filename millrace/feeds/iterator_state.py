"""The state of an iterator that can say where it is, as JSON in a checkpoint.

Iterators of grain have ``get_state`` and ``set_state``. Streaming datasets of Hugging Face
and stateful loaders of PyTorch have ``state_dict`` and ``load_state_dict``.
"""

import base64
import logging
from collections.abc import Callable, Iterator
from typing import Any

_log = logging.getLogger("millrace")

_BYTES, _TUPLE = "bytes in base64", "tuple"


def open_at(dataset: Any, state: Any) -> Iterator[Any] | None:
    """Return an iterator that continues from a state; None if the dataset cannot."""
    if hasattr(dataset, "load_state_dict"):
        dataset.load_state_dict(state)
        return iter(dataset)
    iterator = iter(dataset)
    if not hasattr(iterator, "set_state"):
        return None
    iterator.set_state(state)  # pyright: ignore[reportAttributeAccessIssue]
    return iterator


def find_state_getter(dataset: Any, iterator: Any) -> Callable[[], Any] | None:
    """Return a function that returns the current state; None if there is none."""
    if hasattr(iterator, "get_state") and hasattr(iterator, "set_state"):
        return iterator.get_state
    if hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
        return dataset.state_dict
    return None


def encode_state(state: Any) -> Any:
    """Return a state as JSON values; None, with a warning, if it has other objects."""
    try:
        return _encode(state)
    except TypeError as error:
        _log.warning(
            "The position of the dataset is not saved, because its state has %s. A "
            "resumed run reads the dataset from its start up to there.",
            error,
        )
        return None


def decode_state(saved: Any) -> Any:
    """Return the state that ``encode_state`` encoded."""
    if isinstance(saved, list):
        return [decode_state(value) for value in saved]
    if not isinstance(saved, dict):
        return saved
    if saved.keys() == {_BYTES}:
        return base64.b64decode(saved[_BYTES])
    if saved.keys() == {_TUPLE}:
        return tuple(decode_state(value) for value in saved[_TUPLE])
    return {name: decode_state(value) for name, value in saved.items()}


def _encode(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {_TUPLE: [_encode(each) for each in value]}
    if isinstance(value, list):
        return [_encode(each) for each in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _encode(each) for name, each in value.items()}
    raise TypeError(f"a {type(value).__name__}")
