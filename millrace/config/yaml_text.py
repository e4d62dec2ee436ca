"""YAML that comes from outside: plain values only, within limits, errors with a line."""

import re
from typing import Any, ClassVar

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from millrace.config.checks import ConfigurationError

MAX_LENGTH = 250_000
"""Twenty times the longest file that comes with the package; it is read in a second."""
_MAX_DEPTH = 40
_MAX_VALUES = 10_000
"""With every alias counted as what it stands for, and long text as several values."""
_TEXT_PER_VALUE = 64
_PREFIX = "tag:yaml.org,2002:"
_TAGS = ("null", "bool", "int", "float", "str", "seq", "map")

_READ_AS_VALUES = {_PREFIX + tag for tag in ("null", "bool", "int", "float")}


class _Loader(yaml.SafeLoader):
    """A safe loader that bounds what a file may ask for.

    It reads a number as YAML 1.2 does, where ``1:30`` is not 90 and ``010`` is not 8: what
    is not plainly a decimal number stays text, and the option's own type reads it as it
    would read a word of the command line. A date stays text as well.
    """

    yaml_constructors: ClassVar = {
        _PREFIX + tag: yaml.SafeLoader.yaml_constructors[_PREFIX + tag] for tag in _TAGS
    } | {None: yaml.SafeLoader.yaml_constructors[None]}
    yaml_implicit_resolvers: ClassVar = {
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag.removeprefix(_PREFIX) in ("null", "bool", "merge")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._deepest = self._count = 0
        self._sizes: dict[int, tuple[int, int]] = {}
        """Values and levels of every finished node, by identity."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        """Compose one node and count it; an alias counts as the node it stands for."""
        if self.check_event(yaml.AliasEvent):
            return self._compose_alias(parent, index)
        mark = self.peek_event().start_mark
        before, outer = self._count, self._deepest
        self._depth += 1
        self._deepest = self._depth
        self._add(1, mark)
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode):
            self._add(len(node.value) // _TEXT_PER_VALUE, mark)
        self._sizes[id(node)] = self._count - before, self._deepest - self._depth
        self._deepest = max(outer, self._deepest)
        self._depth -= 1
        return node

    def _compose_alias(self, parent: Any, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        node = super().compose_node(parent, index)
        if id(node) not in self._sizes:
            raise ComposerError(
                None, None, f"*{event.anchor} contains itself", event.start_mark
            )
        values, levels = self._sizes[id(node)]
        self._deepest = max(self._deepest, self._depth + 1 + levels)
        self._add(values, event.start_mark)
        return node

    def _add(self, values: int, mark: Any) -> None:
        self._count += values
        if self._count > _MAX_VALUES:
            problem = f"the values up to here are more than {_MAX_VALUES:,}"
        elif self._deepest > _MAX_DEPTH:
            problem = f"this is nested more than {_MAX_DEPTH} levels deep"
        else:
            return
        raise ComposerError(None, None, problem, mark)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping; its keys are text, and each may stand only once."""
        node = super().compose_mapping_node(anchor)
        node.value = [(_as_text(key), value) for key, value in node.value]
        seen = set()
        for key, _ in node.value:
            if key.tag == _PREFIX + "str":
                if key.value in seen:
                    problem = f"the key {key.value[:40]!r} is here a second time"
                    raise ComposerError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct a value; say where the one is that cannot be."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError, KeyError) as error:
            tag = node.tag.removeprefix(_PREFIX)
            problem = f"{str(node.value)[:40]!r} cannot be read as {tag}"
            raise ConstructorError(None, None, problem, node.start_mark) from error


def _as_text(key: yaml.Node) -> yaml.Node:
    """Keep a key as it is written: options and entries may be called ``on`` or ``1.50``."""
    if isinstance(key, yaml.ScalarNode) and key.tag in _READ_AS_VALUES:
        return yaml.ScalarNode(_PREFIX + "str", key.value, key.start_mark, key.end_mark)
    return key


def _construct_text(loader: _Loader, node: Any) -> str:
    text = loader.construct_scalar(node)
    if "\0" in text:
        problem = "text cannot contain a NUL character"
        raise ConstructorError(None, None, problem, node.start_mark)
    # JSON writes one character outside the basic plane as an escaped pair.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _construct_int(loader: _Loader, node: Any) -> int:
    return int(loader.construct_scalar(node))


def _construct_float(loader: _Loader, node: Any) -> float:
    return float(re.sub(r"^([-+]?)\.(?=[a-zA-Z])", r"\1", loader.construct_scalar(node)))


_Loader.add_constructor(_PREFIX + "str", _construct_text)
_Loader.add_constructor(_PREFIX + "int", _construct_int)
_Loader.add_constructor(_PREFIX + "float", _construct_float)
_Loader.add_implicit_resolver(
    _PREFIX + "int", re.compile(r"^(?:0|-?[1-9][0-9]*)$"), "-0123456789"
)
_Loader.add_implicit_resolver(
    _PREFIX + "float",
    re.compile(
        r"""^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+][0-9]+)?
        |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    "-+0123456789.",
)


def compose(text: str, source: str) -> tuple[Any, yaml.Node | None]:
    """Return the value of a YAML text, and its nodes, which know their lines.

    Args:
        text: The YAML, or JSON.
        source: What it is called in an error, such as the file.
    """
    if len(text) > MAX_LENGTH:
        raise ConfigurationError(
            f"{source} is longer than {MAX_LENGTH:,} characters, which is too much for a "
            "configuration."
        )
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    except yaml.YAMLError as error:
        raise ConfigurationError(_described(error, text, source)) from error
    except (ValueError, OverflowError) as error:  # an escape such as \\UFFFFFFFF
        line = 1 if loader is None else loader.line + 1
        raise ConfigurationError(
            f"{source}, line {line}, is not plain YAML: {error}."
        ) from error


def _described(error: yaml.YAMLError, text: str, source: str) -> str:
    """Say in one line where the text is wrong, and how."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        problem = f"the character {chr(error.character)!r} is not allowed"
        return f"{source}, line {line}, is not plain YAML: {problem}."
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        line = error.problem_mark.line + 1
        problem = " ".join(f"{error.context or ''} {error.problem or ''}".split())
        return f"{source}, line {line}, is not plain YAML: {problem[:200]}."
    return f"{source} is not plain YAML: {' '.join(str(error).split())[:200]}."
