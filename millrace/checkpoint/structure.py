"""The structure of trees of arrays as JSON, from which they are rebuilt without a model.

Dictionaries, lists, tuples and named tuples are rebuilt. Other containers, such as the
modules of a library, need an example of the same structure.
"""

import ast
import collections
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

_ARRAY = re.compile(r"(.+?)\[([\d, ]*)\]")
_KEY = re.compile(r"\.(\w+)|\[((?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\]])*)\]")
_KEY_IMPLEMENTATIONS = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}


class UnknownContainerError(ValueError):
    """A container cannot be rebuilt; the message is its class."""


def describe_structure(tree: Any) -> Any:
    """Return the containers of a tree as JSON: ``[kind, children]``, 0 for an array."""
    if tree is None:
        return None
    if isinstance(tree, dict) and type(tree) in (dict, collections.OrderedDict):
        kind = "dict" if type(tree) is dict else "ordered dict"
        if all(isinstance(key, str | int) for key in tree):
            # Pairs, because the keys of JSON are text; in the order of the leaves.
            keys = sorted(tree) if type(tree) is dict else list(tree)
            return [kind, [[key, describe_structure(tree[key])] for key in keys]]
    if type(tree) in (list, tuple):
        return [type(tree).__name__, [describe_structure(child) for child in tree]]
    if isinstance(tree, tuple) and (fields := getattr(tree, "_fields", None)) is not None:
        children = [describe_structure(child) for child in tree]
        return ["named tuple", _name_class(tree), list(fields), children]
    if jax.tree_util.all_leaves([tree]):
        return 0
    return ["other", _name_class(tree)]


def _name_class(tree: Any) -> str:
    return f"{type(tree).__module__}:{type(tree).__qualname__}"


def rebuild(structure: Any, leaves: Iterator[Any]) -> Any:
    """Undo ``describe_structure`` with the given leaves, in their order."""
    match structure:
        case None:
            return None
        case 0:
            return next(leaves)
        case ["dict", list(pairs)]:
            return {key: rebuild(child, leaves) for key, child in pairs}
        case ["ordered dict", list(pairs)]:
            children = [(key, rebuild(child, leaves)) for key, child in pairs]
            return collections.OrderedDict(children)
        case ["list", list(children)]:
            return [rebuild(child, leaves) for child in children]
        case ["tuple", list(children)]:
            return tuple(rebuild(child, leaves) for child in children)
        case ["named tuple", str(name), list(fields), list(children)]:
            cls = _find_class(name, fields)
            return cls(*(rebuild(child, leaves) for child in children))
        case ["other", str(name)]:
            raise UnknownContainerError(name.replace(":", "."))
    raise ValueError(f"the structure {str(structure)[:80]} is unknown")


def _find_class(name: str, fields: Sequence[str]) -> Any:
    """Return a class of named tuples; only modules of this package are imported."""
    module_name, _, qualified = name.partition(":")
    if module_name.split(".")[0] == "millrace":
        importlib.import_module(module_name)
    found: Any = sys.modules.get(module_name)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    is_class = isinstance(found, type) and issubclass(found, tuple)
    if not is_class or list(getattr(found, "_fields", ())) != list(fields):
        raise UnknownContainerError(name.replace(":", "."))
    return found


def parse_array(text: str) -> jax.ShapeDtypeStruct:
    """Read a shape and type as the manifest has them, such as ``float32[3, 4]``."""
    match = _ARRAY.fullmatch(text)
    if match is None:
        raise ValueError(f"the array {text[:80]} is unknown")
    shape = tuple(int(size) for size in match[2].split(",") if size.strip())
    if match[1].startswith("key<"):
        implementation = _KEY_IMPLEMENTATIONS.get(match[1][4:-1], match[1][4:-1])
        key = jax.eval_shape(lambda: jax.random.key(0, impl=implementation))
        return jax.ShapeDtypeStruct(shape, key.dtype)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(match[1]))


# Checkpoints of earlier versions have only the names of their arrays.


def rebuild_from_names(arrays: dict[str, Any]) -> Any:
    """Rebuild dictionaries and lists from names such as ``['layer'][0]``.

    Tuples come back as lists, and empty containers are missing.
    """
    if list(arrays) in ([], [""]):
        return arrays.get("")
    root: dict[Any, Any] = {}
    for name, array in arrays.items():
        keys = [_parse_key(match, name) for match in _KEY.finditer(name)]
        node = root
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = array
    return _lists_from_numbers(root)


def _parse_key(match: re.Match[str], name: str) -> Any:
    if match[1] is not None:
        raise UnknownContainerError(f"with the field {match[1]}")
    try:
        return ast.literal_eval(match[2])
    except (SyntaxError, ValueError):
        raise UnknownContainerError(f"at {name}") from None


def _lists_from_numbers(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    children = {key: _lists_from_numbers(child) for key, child in node.items()}
    if list(children) == list(range(len(children))):
        return list(children.values())
    return children
