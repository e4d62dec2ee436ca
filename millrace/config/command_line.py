"""Options on a command line: what a dataclass takes, shown and read."""

import argparse
import ast
import copy
import dataclasses
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from millrace.config.building import Option, configure, flag, flat_options, section_types
from millrace.config.checks import ConfigurationError, did_you_mean, shown
from millrace.config.values import converted, type_name, without_none

T = TypeVar("T")


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


def _hyphenate(word: str) -> str:
    """Accept ``--config_path`` for ``--config-path``, as the references' texts do."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _unknown_option(word: str, parser: argparse.ArgumentParser) -> str:
    options = [option for action in parser._actions for option in action.option_strings]
    hint = did_you_mean(word.split("=")[0], options) or f" See {parser.prog} --help."
    named = word if word.isprintable() and len(word) <= 80 else shown(word)
    return f"There is no option {named}.{hint}"


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
    helps = field_docs(config_type)
    for title, section in _sections(config_type).items():
        group = parser.add_argument_group(title) if title else parser
        for name, option in section.items():
            text = " ".join(helps.get(name, "").split())
            if (default := _shown_default(option)) is not None:
                text += f" (default: {default})"
            arguments = _argument(option.hint, flag(name))
            if option.metadata.get("positional"):
                words, arguments["metavar"] = (name,), name.upper()
            else:
                words = (flag(name), *option.metadata.get("aliases", ()))
                arguments["dest"] = name
                if (bare := option.metadata.get("bare")) is not None:
                    arguments |= {"nargs": "?", "const": bare}
            group.add_argument(*words, help=text.replace("%", "%%"), **arguments)
            for word in option.metadata.get("negations", ()):
                meaning = f"The same as {flag(name)} False."
                group.add_argument(
                    word, dest=name, action="store_const", const=False, help=meaning
                )
    return parser


def _positionals(config_type: Any) -> list[str]:
    """The words a command takes without an option's name in front."""
    return [
        name.upper()
        for name, option in flat_options(config_type).items()
        if option.metadata.get("positional")
    ]


def _sections(config_type: Any) -> dict[str, dict[str, Option]]:
    """Group options for the help: the command's own, those of its bases, its sections."""
    left = dict(flat_options(config_type))
    sections: dict[str, dict[str, Option]] = {}
    for cls in (*config_type.__mro__, *section_types(config_type).values()):
        names = dict.fromkeys(  # a section may redefine a field of its base
            name
            for base in ((cls,) if cls in config_type.__mro__ else cls.__mro__)
            for name in inspect.get_annotations(base)
            if name in left
        )
        if names:
            title = (inspect.getdoc(cls) or "").split("\n")[0].rstrip(".")
            title = "" if cls is config_type else title
            sections[title] = {name: left.pop(name) for name in names}
    return sections


def _shown_default(option: Option) -> Any:
    """Return a default for the help; an empty list or dictionary is not worth showing."""
    default = option.default
    if default is dataclasses.MISSING or default == [] or default == {}:
        return None
    return default


def _argument(hint: Any, option: str) -> dict[str, Any]:
    """Say how argparse should read an option of this type."""

    def word_to(wanted: Any) -> Callable[[str], Any]:
        def convert(word: str) -> Any:
            try:
                return converted(wanted, word, option)
            except ConfigurationError as error:  # argparse would hide a ValueError
                raise argparse.ArgumentTypeError(str(error)) from error

        return convert

    inner = without_none(hint)
    if inner is bool:
        return {"nargs": "?", "const": True, "type": word_to(hint), "metavar": "BOOL"}
    if typing.get_origin(inner) is list:
        (item,) = typing.get_args(inner)
        return {"nargs": "*", "type": word_to(item), "metavar": type_name(item)}
    return {"type": word_to(hint), "metavar": type_name(inner)}


def field_docs(config_type: Any) -> dict[str, str]:
    """Return the docstring under each option's field, bases and sections included."""
    docs: dict[str, str] = {}
    for section in section_types(config_type).values():
        docs |= field_docs(section)
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
