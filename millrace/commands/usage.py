"""What ``millrace`` and ``millrace APPLICATION`` print, and suggestions for typos."""

import difflib
import itertools

from millrace.commands.registry import APPLICATIONS, COMMANDS
from millrace.config import did_you_mean

_OPTIONS = ("--help", "--version", "--install-completion", "--print-completion")


def format_usage() -> str:
    """Return the help of ``millrace``: all commands."""
    lines = [
        "Train with the whole loop compiled into one program on the device.",
        "",
        "usage: millrace <application> <verb> [options]",
        "       millrace <command> [options]",
        "",
        "commands (add --help for their options):",
    ]
    lines += [f"  {name:<22} {command.summary}" for name, command in COMMANDS.items()]
    lines += [
        "",
        "millrace cnn, vcd, autoencoder or data shows examples.",
        "millrace --install-completion completes commands and options in your shell.",
    ]
    return "\n".join(lines)


def format_application(name: str) -> str:
    """Return the help of an application: its commands and examples."""
    application = APPLICATIONS[name]
    verbs = {
        command.split()[1]: entry.summary
        for command, entry in COMMANDS.items()
        if command.startswith(f"{name} ")
    }
    width = max(map(len, verbs)) + 2
    lines = [application.summary, "", f"usage: millrace {name} <command> [options]", ""]
    lines += ["commands (add --help for their options):"]
    lines += [f"  {verb:<{width}}{summary}" for verb, summary in verbs.items()]
    lines += ["", "examples:"]
    for example in application.examples:
        lines += [f"  {example}"]
    return "\n".join(lines)


def format_unknown_command(args: list[str]) -> str:
    """Return a message about a command that does not exist, with the nearest one."""
    words = list(itertools.takewhile(lambda arg: not arg.startswith("-"), args[:2]))
    known = {word for name in (*COMMANDS, *APPLICATIONS) for word in name.split()}
    has_two = len(words) == 2 and bool(known.intersection(words))
    name = " ".join(words if has_two else args[:1])[:80]
    found = [f"'{suggestion}'" for suggestion in suggest_commands(words)]
    if not words:  # an option
        name = args[0][:80] if args[0].isprintable() else ascii(args[0][:80])
        hint = did_you_mean(args[0], _OPTIONS) or " See millrace --help."
        return f"Unknown option {name}.{hint}"
    if not found:
        page = f"millrace {words[0]}" if words[0] in APPLICATIONS else "millrace"
        return f"Unknown command {name!r}. See {page} --help."
    listed = " or ".join([", ".join(found[:-1])] * (len(found) > 1) + found[-1:])
    return f"Unknown command {name!r}. Did you mean {listed}?"


def suggest_commands(words: list[str]) -> list[str]:
    """Return the commands that are most similar to what was typed, best first.

    Args:
        words: The first two words, or the only one.
    """
    first, second = (*words[:2], "", "")[:2]
    verbs = {name.split()[-1] for name in COMMANDS}
    if first in APPLICATIONS and second:
        own = [name for name in COMMANDS if name.startswith(f"{first} ")]
        near = _nearest(second, [name.split()[1] for name in own])
        if near:
            return [f"{first} {near}"]
        return [name for name in COMMANDS if name.split()[-1] == second]
    if f"{second} {first}" in COMMANDS:
        return [f"{second} {first}"]
    if second and (near := _nearest(f"{first} {second}", list(COMMANDS))):
        return [near]
    if (near := _nearest(first, [*verbs, *APPLICATIONS])) is None:
        return []
    if near in APPLICATIONS:
        return [near]
    return [name for name in COMMANDS if name.split()[-1] == near]


def _nearest(word: str, choices: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word[:80], choices, n=1)), None)
