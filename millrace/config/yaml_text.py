"""Parse YAML from untrusted files: plain values, size limits, errors with line numbers.

Aliases let a short file expand to billions of values, and deep nesting overflows the stack
of the parser. Both are refused while the file is parsed, before anything is built.
"""

import re
from typing import Any, ClassVar

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from millrace.config.checks import ConfigurationError

MAX_LENGTH = 250_000
"""Characters of a file: 20 times our longest one, and parsed within a second."""
_MAX_DEPTH = 40
_MAX_VALUES = 10_000
"""An alias counts as all values that it stands for, and long text as several values."""
_CHARACTERS_PER_VALUE = 64
_PREFIX = "tag:yaml.org,2002:"
_TAGS = ("null", "bool", "int", "float", "str", "seq", "map")
_NON_TEXT_TAGS = {_PREFIX + tag for tag in ("null", "bool", "int", "float")}


class _Loader(yaml.SafeLoader):
    """A safe loader with limits.

    Numbers follow YAML 1.2, where ``1:30`` is not 90 and ``010`` is not 8: everything but a
    plain decimal number stays text, and so do dates. The type of the option converts that
    text like an argument of a command line.
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
        """Number of values and depth of every complete node, by ``id``."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        """Compose a node and count its values."""
        if self.check_event(yaml.AliasEvent):
            return self._compose_alias(parent, index)
        mark = self.peek_event().start_mark
        before, outer = self._count, self._deepest
        self._depth += 1
        self._deepest = self._depth
        self._add(1, mark)
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode):
            self._add(len(node.value) // _CHARACTERS_PER_VALUE, mark)
        self._sizes[id(node)] = self._count - before, self._deepest - self._depth
        self._deepest = max(outer, self._deepest)
        self._depth -= 1
        return node

    def _compose_alias(self, parent: Any, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        node = super().compose_node(parent, index)
        if id(node) not in self._sizes:
            # The node is not complete, so this alias is inside it.
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
            problem = f"it has more than {_MAX_VALUES:,} values"
        elif self._deepest > _MAX_DEPTH:
            problem = f"it is nested more than {_MAX_DEPTH} levels deep"
        else:
            return
        raise ComposerError(None, None, problem, mark)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping with unique keys, which are text."""
        node = super().compose_mapping_node(anchor)
        node.value = [(_make_text(key), value) for key, value in node.value]
        seen = set()
        for key, _ in node.value:
            if key.tag == _PREFIX + "str":
                if key.value in seen:
                    problem = f"the key {key.value[:40]!r} is a duplicate"
                    raise ComposerError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct a value; errors have its line."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError, KeyError) as error:
            tag = node.tag.removeprefix(_PREFIX)
            problem = f"{str(node.value)[:40]!r} is not a valid {tag}"
            raise ConstructorError(None, None, problem, node.start_mark) from error


def _make_text(key: yaml.Node) -> yaml.Node:
    """Return a key as text: options and entries may be named ``on`` or ``1.50``."""
    if isinstance(key, yaml.ScalarNode) and key.tag in _NON_TEXT_TAGS:
        return yaml.ScalarNode(_PREFIX + "str", key.value, key.start_mark, key.end_mark)
    return key


def _construct_text(loader: _Loader, node: Any) -> str:
    text = loader.construct_scalar(node)
    if "\0" in text:
        problem = "text cannot contain a NUL character"
        raise ConstructorError(None, None, problem, node.start_mark)
    # JSON escapes a character outside the basic plane as a surrogate pair: join them.
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
    """Return the value of a YAML or JSON text, and its node, which has line numbers.

    Args:
        text: YAML or JSON.
        source: Name of the text in errors, such as its file.
    """
    if len(text) > MAX_LENGTH:
        raise ConfigurationError(
            f"{source} is longer than {MAX_LENGTH:,} characters, the limit for a "
            "configuration."
        )
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    except yaml.YAMLError as error:
        raise ConfigurationError(_format_error(error, text, source)) from error
    except (ValueError, OverflowError) as error:  # an escape such as \\UFFFFFFFF
        line = 1 if loader is None else loader.line + 1
        raise ConfigurationError(
            f"{source}, line {line}, is not plain YAML: {error}."
        ) from error


def _format_error(error: yaml.YAMLError, text: str, source: str) -> str:
    """Return an error of the parser as one line, with its position."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        problem = f"the character {chr(error.character)!r} is not allowed"
        return f"{source}, line {line}, is not plain YAML: {problem}."
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        line = error.problem_mark.line + 1
        problem = " ".join(f"{error.context or ''} {error.problem or ''}".split())
        return f"{source}, line {line}, is not plain YAML: {problem[:200]}."
    return f"{source} is not plain YAML: {' '.join(str(error).split())[:200]}."
