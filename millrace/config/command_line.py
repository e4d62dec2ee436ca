"""Read options from a command line."""

import argparse
import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from millrace.config.building import (
    Defaults,
    Option,
    configure,
    flag,
    flat_options,
    format_required,
    positional_name,
)
from millrace.config.checks import ConfigurationError, did_you_mean, shown
from millrace.config.files import exists, load_yaml
from millrace.config.help import config_flags, format_help
from millrace.config.spelling import record_spelling
from millrace.config.values import choices, convert, type_name, without_none
from millrace.storage.address import is_url

T = TypeVar("T")

_ARGPARSE_MESSAGES = (
    (r"argument \S+: (?=--)", ""),  # our own message, from `convert`
    (r"argument (?:-\w/)?(--[^/\s]+)\S*: expected one argument", r"\1 needs a value."),
    (r"argument (\S+): ignored explicit argument (.*)", r"\1 takes no value, got \2."),
    (r"ambiguous option: (\S+) could match (.*)", r"\1 is ambiguous. It could be \2."),
)
"""Patterns of argparse messages, and their replacements."""
_REQUIRED = "the following arguments are required: "


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises a ConfigurationError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        for pattern, replacement in _ARGPARSE_MESSAGES:
            message = re.sub(f"^{pattern}", replacement, message)
        if message.startswith(_REQUIRED):
            message = format_required(message.removeprefix(_REQUIRED).split(", "))
        raise ConfigurationError(message)


def parse(
    config_type: type[T],
    argv: Sequence[str],
    *,
    program: str,
    named_configs: Path | None = None,
    command: str | None = None,
    defaults: Defaults | None = None,
    epilog: str = "",
) -> tuple[T, dict[str, Any]]:
    """Build a configuration from a command line; also return the values that were set.

    Args:
        config_type: A frozen dataclass.
        argv: Arguments of the command.
        program: Name of the command, for ``--help``.
        named_configs: Default YAML file of named configurations, for ``--config``.
        command: The command in ``config.yml`` of its runs, such as ``cnn-train``.
        defaults: Options that replace the defaults of the dataclass; see ``configure``.
        epilog: More text for ``--help``.
    """
    parser = _build_parser(config_type, program, named_configs, epilog)
    words = [_hyphenate(arg) for arg in argv]
    record_spelling(parser, argv, words)
    flags, unknown = parser.parse_known_args(words)
    if unknown and unknown[0].startswith("-"):
        raise ConfigurationError(_format_unknown(unknown[0], parser))
    if unknown:
        raise ConfigurationError(
            _format_unexpected(unknown[0], config_type, program, named_configs)
        )
    options = _merge_positionals(config_type, vars(flags))
    return configure(
        config_type, options, named_configs, command=command, defaults=defaults
    )


def _merge_positionals(config_type: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with those that were given without their flag."""
    for name, option in flat_options(config_type).items():
        if (title := positional_name(name, option)) in options:
            if name in options:
                raise ConfigurationError(f"Give {title} or {flag(name)}, not both.")
            options[name] = options.pop(title)
    return options


def _hyphenate(arg: str) -> str:
    """Accept ``--config_path`` for ``--config-path``, like the reference programs."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def _format_unknown(arg: str, parser: argparse.ArgumentParser) -> str:
    name = arg if arg.isprintable() and len(arg) <= 80 else shown(arg)
    options = [option for action in parser._actions for option in action.option_strings]
    hint = did_you_mean(arg.split("=")[0], options) or f" See {parser.prog} --help."
    return f"Unknown option {name}.{hint}"


def _format_unexpected(
    arg: str, config_type: Any, program: str, named_configs: Path | None
) -> str:
    """Return a message about an argument without an option; it says what to type."""
    name = arg if arg.isprintable() and len(arg) <= 80 else shown(arg)
    found = [
        f"{flag(option_name)} {arg}"
        for option_name, option in flat_options(config_type).items()
        if arg in choices(option.hint) and not option.metadata.get("positional")
    ]
    if named_configs is not None and arg in load_yaml(named_configs):
        found.append(f"--config {arg}")
    if not found and exists(Path(arg)):
        found = [f"{flag(n)} {arg}" for n in _path_options(config_type, Path(arg))]
    hint = f" Did you mean {' or '.join(found[:3])}?" if found else ""
    return f"Unexpected argument {name}.{hint or f' See {program} --help.'}"


def _path_options(config_type: Any, path: Path) -> list[str]:
    """Return the options that a path without an option was probably meant for."""
    options = flat_options(config_type)
    if (path / "config.yml").is_file():
        names = ("checkpoint", "restore_path", "run_dir")
    elif path.is_dir():
        names = ("dataset_path", "run_dir")
    else:
        names = ("training_data_file", "pretrained")
    return [name for name in names if name in options][:1]


def _build_parser(
    config_type: Any, program: str, named_configs: Path | None, epilog: str = ""
) -> argparse.ArgumentParser:
    parser = _Parser(prog=program, add_help=False, argument_default=argparse.SUPPRESS)
    for names, full in ((("-h", "--help"), False), (("--help-all",), True)):
        text = functools.partial(
            format_help, config_type, program, named_configs, full=full
        )
        parser.add_argument(*names, action=_PrintAndExit, const=_Help(text, epilog))
    for entry in config_flags(config_type, named_configs):
        dest = "config" if "--config" in entry.names else "config_path"
        parser.add_argument(*entry.names, dest=dest)
    for name, option in flat_options(config_type).items():
        if not option.metadata.get("hidden"):
            _add_option(parser, name, option)
    return parser


class _Help(NamedTuple):
    """The help of a command, formatted when it is asked for."""

    text: Callable[[], str]
    epilog: str

    def __call__(self) -> str:
        return self.text() + self.epilog


class _PrintAndExit(argparse.Action):
    """Prints the text that `const` returns, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(self.const(), end="")
        parser.exit()


def _add_option(parser: argparse.ArgumentParser, name: str, option: Option) -> None:
    settings = _get_argparse_settings(option.hint, flag(name))
    title = positional_name(name, option)
    if option.metadata.get("positional") is True:
        names, settings["metavar"] = (name,), title
        if option.default is not dataclasses.MISSING:
            settings.setdefault("nargs", "?")
    else:
        if title is not None:
            # Without a type: argparse would convert its mark for a missing argument.
            parser.add_argument(title, nargs="?")
        names = (flag(name), *option.metadata.get("aliases", ()))
        settings["dest"] = name
        if (bare := option.metadata.get("bare")) is not None:
            settings |= {"nargs": "?", "const": bare}
        if option.metadata.get("repeatable"):
            settings["action"] = "extend"
    parser.add_argument(*names, **settings)
    for negation in option.metadata.get("negations", ()):
        parser.add_argument(negation, dest=name, action="store_const", const=False)


def _get_argparse_settings(hint: Any, option: str) -> dict[str, Any]:
    """Return how argparse should parse an option of type `hint`."""

    def converter(item_hint: Any) -> Callable[[str], Any]:
        def convert_argument(arg: str) -> Any:
            if is_url(arg):
                return arg  # converted later: not every option may be in object storage
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
