"""Read options from a command line, and show them in ``--help``."""

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
from millrace.config.values import convert, type_name, without_none

T = TypeVar("T")

_ARGPARSE_MESSAGES = (
    (r"argument \S+: (?=--)", ""),  # our own message, from `convert`
    (r"argument (?:-\w/)?(--[^/\s]+)\S*: expected one argument", r"\1 needs a value."),
    (r"argument (\S+): ignored explicit argument (.*)", r"\1 takes no value, got \2."),
    (r"ambiguous option: (\S+) could match (.*)", r"\1 is ambiguous. It could be \2."),
    (r"the following arguments are required: (.*)", r"\1 is required."),
)
"""Patterns of argparse messages, and their replacements."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows the name of an option and its short form, but no other aliases."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = action.option_strings
        long = [name for name in names if name.startswith("--")]
        visible = copy.copy(action)
        visible.option_strings = [name for name in names if name not in long[1:]]
        return super()._format_action_invocation(visible)


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises a ConfigurationError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        for pattern, replacement in _ARGPARSE_MESSAGES:
            message = re.sub(f"^{pattern}", replacement, message)
        raise ConfigurationError(message)


def parse(
    config_type: type[T],
    argv: Sequence[str],
    *,
    program: str,
    named_configs: Path | None = None,
) -> tuple[T, dict[str, Any]]:
    """Build a configuration from a command line; also return the values that were set.

    Args:
        config_type: A frozen dataclass.
        argv: Arguments of the command.
        program: Name of the command, for ``--help``.
        named_configs: Default YAML file of named configurations, for ``--config``.
    """
    parser = _build_parser(config_type, program, named_configs)
    flags, unknown = parser.parse_known_args([_hyphenate(arg) for arg in argv])
    if unknown:
        raise ConfigurationError(_format_unknown(unknown[0], parser))
    return configure(config_type, vars(flags), named_configs)


def _hyphenate(arg: str) -> str:
    """Accept ``--config_path`` for ``--config-path``, like the reference programs."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def _format_unknown(arg: str, parser: argparse.ArgumentParser) -> str:
    name = arg if arg.isprintable() and len(arg) <= 80 else shown(arg)
    if not arg.startswith("-"):
        return f"Unexpected argument {name}. See {parser.prog} --help."
    options = [option for action in parser._actions for option in action.option_strings]
    hint = did_you_mean(arg.split("=")[0], options) or f" See {parser.prog} --help."
    return f"Unknown option {name}.{hint}"


def _build_parser(
    config_type: Any, program: str, named_configs: Path | None
) -> argparse.ArgumentParser:
    options = flat_options(config_type)
    positionals = [n.upper() for n, o in options.items() if o.metadata.get("positional")]
    parser = _Parser(
        prog=program,
        usage=" ".join([program, *positionals, "[options]"]),
        description=inspect.getdoc(config_type),
        argument_default=argparse.SUPPRESS,
        formatter_class=_Help,
    )
    if named_configs is not None:
        parser.add_argument(
            *("-c", "--config", "--config-name", "--config-file"),
            dest="config",
            metavar="NAME",
            help="start from this named configuration, or from a .yml or .json file with a "
            "single configuration",
        )
        parser.add_argument(
            "--config-path",
            metavar="FILE",
            help=f"YAML file of named configurations (default: {named_configs.name})",
        )
    docs = field_docs(config_type)
    for title, section in _group_options(config_type).items():
        group = parser.add_argument_group(title) if title else parser
        for name, option in section.items():
            _add_option(group, name, option, docs.get(name, ""))
    return parser


def _add_option(group: Any, name: str, option: Option, doc: str) -> None:
    help_text = " ".join(doc.split())
    # An empty list or dictionary is not worth showing.
    if option.default is not dataclasses.MISSING and option.default not in (None, [], {}):
        help_text += f" (default: {option.default})"
    settings = _get_argparse_settings(option.hint, flag(name))
    if option.metadata.get("positional"):
        names, settings["metavar"] = (name,), name.upper()
    else:
        names = (flag(name), *option.metadata.get("aliases", ()))
        settings["dest"] = name
        if (bare := option.metadata.get("bare")) is not None:
            settings |= {"nargs": "?", "const": bare}
    group.add_argument(*names, help=help_text.replace("%", "%%"), **settings)
    for negation in option.metadata.get("negations", ()):
        meaning = f"Same as {flag(name)} False."
        group.add_argument(
            negation, dest=name, action="store_const", const=False, help=meaning
        )


def _group_options(config_type: Any) -> dict[str, dict[str, Option]]:
    """Group options by heading: first the command's own, then bases and sections."""
    left = dict(flat_options(config_type))
    groups: dict[str, dict[str, Option]] = {}
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
    return groups


def _get_argparse_settings(hint: Any, option: str) -> dict[str, Any]:
    """Return how argparse should parse an option of type `hint`."""

    def converter(item_hint: Any) -> Callable[[str], Any]:
        def convert_argument(arg: str) -> Any:
            try:
                return convert(item_hint, arg, option)
            except ConfigurationError as error:
                # argparse replaces the message of a ValueError by its own.
                raise argparse.ArgumentTypeError(str(error)) from error

        return convert_argument

    inner = without_none(hint)
    if inner is bool:
        return {"nargs": "?", "const": True, "type": converter(hint), "metavar": "BOOL"}
    if typing.get_origin(inner) is list:
        (item,) = typing.get_args(inner)
        return {"nargs": "*", "type": converter(item), "metavar": type_name(item)}
    return {"type": converter(hint), "metavar": type_name(inner)}


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
