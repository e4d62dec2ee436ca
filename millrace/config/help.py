"""The text of ``--help`` and ``--help-all``, made from the fields of a configuration.

``--help`` shows the common options of a command. A configuration lists them in
``common_options``; without such a list, they are its own options and the common options of
its sections. A section that has no list is shown in full. Hidden options, which can only be
set from Python, are never shown.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import linecache
import re
import shutil
import textwrap
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from millrace.config.building import (
    Option,
    flag,
    flat_options,
    positional_name,
    section_types,
)
from millrace.config.values import choices, type_name, without_none

_TEXT_COLUMN = 26
_MIN_WIDTH, _MAX_WIDTH = 60, 100
_MAX_METAVAR = 24
"""Longer lists of choices move from the name of an option to its text."""

SHOWN_ALIASES = ("--epochs", "--lr", "--model", "--batch-size", "--data-dir")
"""Aliases that ``--help`` shows, because other tools use them; the rest are spellings of
programs whose command lines work here."""

_WITHOUT_EFFECT = "Options of command lines written for IPUs, without effect here"


class ConfigFlag(NamedTuple):
    """One of the two flags that choose a named configuration."""

    names: tuple[str, ...]
    metavar: str
    text: str
    is_common: bool


def config_flags(config_type: Any, named_configs: Path | None) -> list[ConfigFlag]:
    """Return the flags of a command that can start from a named configuration or a run."""
    if named_configs is None and "run_dir" not in flat_options(config_type):
        return []
    start = "this named configuration, " if named_configs is not None else ""
    default = f" (default: {named_configs.name})" if named_configs is not None else ""
    return [
        ConfigFlag(
            ("-c", "--config", "--config-name", "--config-file"),
            "NAME" if named_configs is not None else "RUN",
            f"Start from {start}the options of a run directory, or a .yml or .json file "
            "with a single configuration.",
            is_common=True,
        ),
        ConfigFlag(
            ("--config-path",),
            "FILE",
            f"YAML file of named configurations{default}.",
            is_common=False,
        ),
    ]


def common_options(config_type: Any) -> set[str]:
    """Return the names of the options that ``--help`` shows."""
    options = {
        name
        for name, option in flat_options(config_type).items()
        if not option.metadata.get("hidden") and not option.metadata.get("without_effect")
    }
    listed = getattr(config_type, "common_options", None)
    if listed is not None:
        return options & set(listed)
    for section in section_types(config_type).values():
        if hasattr(section, "common_options"):
            options -= flat_options(section).keys() - common_options(section)
    return options


def format_help(
    config_type: Any, program: str, named_configs: Path | None = None, *, full: bool
) -> str:
    """Return the help of a command.

    Args:
        config_type: Its configuration dataclass.
        program: Its name, such as ``millrace cnn train``.
        named_configs: YAML file of named configurations, if it has one.
        full: Whether to show all options, or only common ones.
    """
    options = flat_options(config_type)
    visible = {n for n, option in options.items() if not option.metadata.get("hidden")}
    shown = visible if full else common_options(config_type)
    docs = field_docs(config_type)
    texts = getattr(config_type, "default_texts", {})
    flags = config_flags(config_type, named_configs)
    arguments: list[tuple[str, str]] = []
    groups = {
        "arguments": arguments,
        "": [("-h, --help", "Show the common options, or all with --help-all.")],
    }
    groups[""] += [
        (f"{', '.join(entry.names[:2])} {entry.metavar}", entry.text)
        for entry in flags
        if full or entry.is_common
    ]
    for title, section in group_options(config_type).items():
        for name, option in section.items():
            doc = name_flags(docs.get(name, ""), name, options)
            entries = _describe(name, option, doc, full, texts)
            if name in shown and positional_name(name, option):
                arguments += entries
            elif name in shown:
                groups.setdefault(title, []).extend(entries)
    lines = [f"usage: {_format_usage(program, options)}", ""]
    lines += _wrap_paragraphs(inspect.getdoc(config_type) or "")
    for title, entries in groups.items():
        if entries:
            lines += ["", f"{title or 'options'}:"]
            lines += [line for entry in entries for line in _format_entry(*entry)]
    if shown != visible:
        total = sum(
            o.metadata.get("positional") is not True
            for n, o in options.items()
            if n in visible
        )
        lines += ["", f"--help-all shows all {total + len(flags)} options."]
    return "\n".join(lines) + "\n"


def name_flags(text: str, name: str, options: Mapping[str, Option]) -> str:
    """Return the text on an option with other options as flags: ``--num-epochs``.

    Keys of a dictionary and choices, which may have the names of options, stay.
    """
    hint = options[name].hint
    if typing.get_origin(without_none(hint)) is dict:
        return text
    known = options.keys() - {name, *choices(hint)}
    return re.sub(
        r"(?<![\w./-])[a-z]\w*_\w+(?![\w/])",
        lambda word: flag(word[0]) if word[0] in known else word[0],
        text,
    )


def _wrap_paragraphs(text: str) -> list[str]:
    """Wrap each paragraph of a docstring; indented ones, such as commands, stay."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        kept = paragraph.startswith(" ")
        wrapped = paragraph.splitlines() if kept else textwrap.wrap(paragraph, _width())
        lines += ["", *wrapped] if lines else wrapped
    return lines


def _format_usage(program: str, options: dict[str, Option]) -> str:
    arguments = []
    for name, option in options.items():
        if title := positional_name(name, option):
            required = option.default is dataclasses.MISSING
            several = "..." if typing.get_origin(without_none(option.hint)) is list else ""
            text = title + several
            arguments.append(text if required else f"[{text}]")
    return " ".join([program, *arguments, "[options]"])


def _describe(
    name: str, option: Option, doc: str, full: bool, default_texts: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Return how to type an option and what it does; one more entry per negation.

    A configuration may say in ``default_texts`` what defaults depend on.
    """
    first, rest = _split_sentence(" ".join(doc.split()), full)
    metavar, one_of = type_name(without_none(option.hint)), ""
    if metavar.startswith("{") and len(metavar) > _MAX_METAVAR:
        listed = choices(option.hint)
        metavar = "NAME"
        if not all(choice in (doc if full else first) for choice in listed):
            one_of = f" One of {', '.join(listed)}."
    text = first + one_of + (rest if full else "")
    # An empty list or dictionary is not worth showing, nor that something is off.
    if name in default_texts:
        text += f" (default: {default_texts[name]})"
    elif "(default: " in text:
        pass  # the text says what it depends on
    elif option.default not in (dataclasses.MISSING, None, [], {}, "") and (
        full or option.default != 0
    ):
        values = option.default if isinstance(option.default, list) else [option.default]
        text += f" (default: {' '.join(map(str, values))})"
    entries = [(_invoke(name, option, metavar, full), text)]
    for negation in option.metadata.get("negations", ()) if full else ():
        entries.append((negation, f"Same as {flag(name)} False."))
    return entries


def _invoke(name: str, option: Option, metavar: str, full: bool) -> str:
    inner = without_none(option.hint)
    if title := positional_name(name, option):
        has_flag = option.metadata["positional"] is not True
        return f"{title}, {flag(name)} {metavar}" if full and has_flag else title
    aliases = option.metadata.get("aliases", ())
    short = [alias for alias in aliases if not alias.startswith("--")]
    names = [*short, flag(name), *(alias for alias in aliases if alias in SHOWN_ALIASES)]
    value = metavar
    if inner is bool:
        value = "[BOOL]" if full else ""
    elif option.metadata.get("bare") is not None:
        value = f"[{metavar}]"
    elif typing.get_origin(inner) is list:
        (item,) = typing.get_args(inner)
        value = f"[{type_name(item)} ...]"
    return f"{', '.join(names)} {value}".rstrip()


def _split_sentence(text: str, full: bool) -> tuple[str, str]:
    """Split a text after its first sentence, or first clause if nothing else is shown.

    >>> _split_sentence("Passes (default: 60; 2 for noise). More of it.", full=True)
    ('Passes (default: 60; 2 for noise).', ' More of it.')
    >>> _split_sentence("Passes (default: 60; 2 for noise). More of it.", full=False)
    ('Passes (default: 60).', ' 2 for noise). More of it.')
    """
    open_at: list[int] = []
    for place, character in enumerate(text):
        rest = text[place + 1 :]
        if character == "(":
            open_at.append(place)
        elif character == ")" and open_at:
            open_at.pop()
        elif character == "." and not open_at and rest.startswith(" "):
            return text[: place + 1], rest
        elif character == ";" and not full:
            if not open_at:
                return text[:place] + ".", rest
            if text.startswith("(default:", open_at[-1]):
                return text[:place] + ").", rest
    return text, ""


def _format_entry(invocation: str, text: str) -> list[str]:
    head = f"  {invocation}"
    indent = " " * _TEXT_COLUMN
    lines = textwrap.wrap(
        text,
        _width(),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    if lines and len(head) <= _TEXT_COLUMN - 2:
        return [head.ljust(_TEXT_COLUMN) + lines[0].lstrip(), *lines[1:]]
    return [head, *lines]


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns - 1, _MIN_WIDTH), _MAX_WIDTH)


def group_options(config_type: Any) -> dict[str, dict[str, Option]]:
    """Group options by heading: the command's own, bases and sections, without effect."""
    options = flat_options(config_type)
    groups: dict[str, dict[str, Option]] = {}
    last = {n: o for n, o in options.items() if o.metadata.get("without_effect")}
    left = {name: option for name, option in options.items() if name not in last}
    for cls in (*config_type.__mro__, *section_types(config_type).values()):
        names = dict.fromkeys(  # a section may redefine a field of its base
            name
            for base in ((cls,) if cls in config_type.__mro__ else cls.__mro__)
            for name in inspect.get_annotations(base)
            # A section may have an option of its own name, such as data in data.
            if name in left and (left[name].section is None) == (cls in config_type.__mro__)
        )
        if names:
            title = (inspect.getdoc(cls) or "").split("\n")[0].rstrip(".")
            title = "" if cls is config_type else title
            groups[title] = {name: left.pop(name) for name in names}
    return groups | ({_WITHOUT_EFFECT: last} if last else {})


def field_docs(config_type: Any) -> dict[str, str]:
    """Return the docstring under the field of each option, bases and sections included."""
    docs: dict[str, str] = {}
    for section in section_types(config_type).values():
        docs |= field_docs(section)
    for cls in reversed(config_type.__mro__):
        if dataclasses.is_dataclass(cls):
            docs |= _class_field_docs(cls)
    return docs


def _class_field_docs(cls: Any) -> dict[str, str]:
    # Python drops strings under fields, so they are read from the source code.
    docs = {}
    for statement, following in itertools.pairwise(_find_statements(cls)):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[statement.target.id] = str(following.value.value)
    return docs


def _find_statements(cls: Any) -> list[ast.stmt]:
    """Return the body of a class; empty if its source code is not available."""
    try:
        found = _parse_classes(inspect.getsourcefile(cls) or "").get(cls.__name__, [])
        if len(found) == 1:
            return found[0].body
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        return typing.cast(ast.ClassDef, tree).body
    except (OSError, TypeError, SyntaxError):  # typed into an interpreter
        return []


@functools.cache
def _parse_classes(path: str) -> dict[str, list[ast.ClassDef]]:
    """Return the classes in a file by name; ``inspect.getsource`` parses for each."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for node in ast.walk(ast.parse("".join(linecache.getlines(path)))):
        if isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, []).append(node)
    return classes
