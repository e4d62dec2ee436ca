"""Real signatures for functions that take the options of a command as keywords.

``inspect.signature``, ``help()`` and completion in notebooks show the options, with their
types, defaults and help texts. Type checkers read the same from ``api.pyi``, which
``docs/write_stubs.py`` writes.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from millrace.commands.registry import COMMANDS
from millrace.config import common_options, field_docs, flat_options

P = ParamSpec("P")
R = TypeVar("R")

_ATTRIBUTE = "__millrace_command__"


def takes_options_of(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a function with ``**options`` the signature and the docs of a command.

    Args:
        name: The command, such as ``cnn train``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = inspect.signature(function)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        taken = {parameter.name for parameter in kept}
        options = [p for p in option_parameters(name) if p.name not in taken]
        target: Any = function
        target.__signature__ = own.replace(parameters=[*kept, *options])
        target.__doc__ = f"{inspect.getdoc(function)}\n\n{_format_options(name, taken)}"
        setattr(target, _ATTRIBUTE, name)
        return function

    return decorate


def option_parameters(name: str) -> list[inspect.Parameter]:
    """Return the options of a command as keyword parameters, common ones first."""
    command = COMMANDS[name]
    config_type = command.load_config_type()
    common = common_options(config_type)
    parameters = []
    if command.named_configs is not None:
        for option in ("config", "config_path"):
            parameters.append(_parameter(option, str | None, None))
    options = {
        name: option
        for name, option in flat_options(config_type).items()
        if not option.metadata.get("hidden")
    }
    for option_name in sorted(options, key=lambda name: _rank(name, options, common)):
        option = options[option_name]
        empty = option.default is dataclasses.MISSING
        default = inspect.Parameter.empty if empty else option.default
        parameters.append(_parameter(option_name, option.hint, default))
    return parameters


def _rank(name: str, options: dict[str, Any], common: set[str]) -> int:
    if options[name].default is dataclasses.MISSING:
        return 0
    if options[name].metadata.get("without_effect"):
        return 3
    return 1 if name in common else 2


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=hint)


def _format_options(name: str, taken: set[str]) -> str:
    """Return the options as the ``Args`` of a docstring."""
    docs = field_docs(COMMANDS[name].load_config_type())
    docs["config"] = f"Named configuration to start from; see millrace {name} --help."
    docs["config_path"] = "YAML file of named configurations."
    lines = [f"The options are those of ``millrace {name}``.", "", "Args:"]
    for parameter in option_parameters(name):
        if parameter.name not in taken:
            text = " ".join(docs.get(parameter.name, "").split())
            lines.append(f"    {parameter.name}: {text}")
    return "\n".join(lines)
