"""Shell completion: ``millrace --install-completion`` and what the shells call.

The script of a shell calls ``millrace --complete WORDS``, which prints one candidate per
line, with a description after a tab. So candidates are always those of the installed
version. A line that only says ``PATHS`` lets the shell complete file names.
"""

import os
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from millrace.commands.registry import APPLICATIONS, COMMANDS, Command
from millrace.config import (
    ConfigurationError,
    common_options,
    did_you_mean,
    field_docs,
    flat_options,
    load_yaml,
)
from millrace.config.help import SHOWN_ALIASES, config_flags, name_flags
from millrace.config.values import choices, type_name, without_none

COMPLETION_FLAGS = ("--complete", "--print-completion", "--install-completion")
PATHS = "PATHS"
_MAX_TEXT = 70
_HELP = {"--help": "common options", "--help-all": "all options"}
_TOP = {"--help": "all commands", "--version": "version of millrace"}

_BASH = """\
# Completion of millrace for bash.
_millrace() {
    local IFS=$'\\n' line
    local current="${COMP_WORDS[COMP_CWORD]}"
    local typed=("${COMP_WORDS[@]:1:COMP_CWORD}")
    COMPREPLY=()
    for line in $("${COMP_WORDS[0]}" --complete "${typed[@]}" 2>/dev/null); do
        if [ "$line" = PATHS ]; then
            compopt -o filenames 2>/dev/null
            COMPREPLY+=($(compgen -f -- "$current"))
        else
            COMPREPLY+=("${line%%$'\\t'*}")
        fi
    done
}
complete -F _millrace millrace
"""
_ZSH = """\
#compdef millrace
# Completion of millrace for zsh.
_millrace() {
    local -a candidates
    local line found ret=1
    found="$("${words[1]}" --complete "${(@)words[2,CURRENT]}" 2>/dev/null)"
    for line in "${(@f)found}"; do
        if [[ "$line" == PATHS ]]; then
            _files && ret=0
        elif [[ -n "$line" ]]; then
            candidates+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
        fi
    done
    (( ${#candidates} )) && _describe -V 'millrace' candidates && ret=0
    return ret
}
if (( ! $+functions[compdef] )); then
    autoload -Uz compinit && compinit
fi
compdef _millrace millrace
"""
_FISH = """\
# Completion of millrace for fish.
function __millrace_complete
    set -l words (commandline -opc) (commandline -ct)
    for line in ($words[1] --complete $words[2..-1] 2>/dev/null)
        if test "$line" = PATHS
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end
complete -c millrace -f -a '(__millrace_complete)'
"""


class _Shell(NamedTuple):
    script: str
    startup: str | None
    """File that must load the script; None if the shell finds it."""


SHELLS = {
    "bash": _Shell(_BASH, ".bashrc"),
    "zsh": _Shell(_ZSH, ".zshrc"),
    "fish": _Shell(_FISH, None),
}


def run_completion(args: list[str]) -> int:
    """Carry out one of the flags about completion; return the exit status."""
    flag, rest = args[0], args[1:]
    if flag not in COMPLETION_FLAGS:
        hint = did_you_mean(flag, COMPLETION_FLAGS)
        raise ConfigurationError(f"Unknown option {flag[:80]}.{hint}")
    if flag == "--complete":
        for value, text in complete(rest):
            print(f"{value}\t{text}" if text else value)
        return 0
    if len(rest) > 1 or (rest and rest[0] not in SHELLS):
        raise ConfigurationError(
            f"{flag} takes one of {', '.join(SHELLS)}; got {' '.join(rest)[:80]}."
        )
    name = rest[0] if rest else _current_shell(flag)
    if flag == "--print-completion":
        print(SHELLS[name].script, end="")
    else:
        print(install(name, Path.home()))
    return 0


def _current_shell(flag: str) -> str:
    name = Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise ConfigurationError(
            f"The shell is unknown: say {flag} {', '.join(SHELLS)[:-6]} or fish."
        )
    return name


def install(name: str, home: Path) -> str:
    """Install completion for a shell; return what was done.

    Args:
        name: The shell.
        home: The home directory of the user.
    """
    script, startup = SHELLS[name]
    if startup is None:
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        path = config / "fish" / "completions" / "millrace.fish"
    else:
        data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
        path = data / "millrace" / f"completion.{name}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
        if startup is not None:
            _add_line(home / startup, f'[ -f "{path}" ] && . "{path}"  # millrace')
    except OSError as error:
        raise ConfigurationError(
            f"Cannot write {error.filename}: {error.strerror}. Print the script with "
            f"millrace --print-completion {name}."
        ) from error
    loaded = f" and loaded by {home / startup}" if startup else ""
    return f"Completion for {name} is in {path}{loaded}. It works in new shells."


def _add_line(path: Path, line: str) -> None:
    """Append a line to a file, unless it is there already."""
    text = path.read_text() if path.exists() else ""
    if line not in text.splitlines():
        separator = "" if not text or text.endswith("\n") else "\n"
        with path.open("a") as file:
            file.write(f"{separator}{line}\n")


def complete(words: list[str]) -> list[tuple[str, str]]:
    """Return the candidates for the last word, each with a description.

    Args:
        words: The words after ``millrace``, up to and including the one that is typed.
    """
    *before, current = words or [""]
    command, rest = _find_command(before)
    if command is None:
        return _matching(_name_candidates(before), current)
    try:
        return _matching(_command_candidates(*command, rest, current), current)
    except (ConfigurationError, OSError):  # a damaged file of configurations
        return []


def _matching(candidates: Iterable[tuple[str, str]], current: str) -> list[tuple[str, str]]:
    return [c for c in candidates if c[0] == PATHS or c[0].startswith(current)]


def _find_command(words: list[str]) -> tuple[tuple[str, Command] | None, list[str]]:
    """Return the command that the words begin with, and the other words."""
    for length in (1, 2):
        name = " ".join(words[:length])
        if len(words) >= length and name in COMMANDS:
            if name == "launch" and (inner := _find_launched(words[1:])) is not None:
                return inner
            return (name, COMMANDS[name]), words[length:]
    return None, words


def _find_launched(words: list[str]) -> tuple[tuple[str, Command], list[str]] | None:
    """Return the command that ``millrace launch`` starts, if it is typed already."""
    for start in range(len(words)):
        for length in (1, 2):
            name = " ".join(words[start : start + length])
            if name in COMMANDS:
                return (name, COMMANDS[name]), words[start + length :]
    return None


def _name_candidates(before: list[str]) -> Iterable[tuple[str, str]]:
    if not before:
        yield from ((name, entry.summary) for name, entry in APPLICATIONS.items())
        for name, command in COMMANDS.items():
            if " " not in name:
                yield name, command.summary
        yield from _TOP.items()
        yield from ((flag, "completion in the shell") for flag in COMPLETION_FLAGS[1:])
    elif before[0] in COMPLETION_FLAGS[1:]:
        yield from ((name, "") for name in SHELLS)
    elif len(before) == 1:
        for name, command in COMMANDS.items():
            if name.startswith(f"{before[0]} "):
                yield name.split()[1], command.summary


def _command_candidates(
    name: str, command: Command, before: list[str], current: str
) -> Iterable[tuple[str, str]]:
    config_type = command.load_config_type()
    values = _values_by_flag(command, config_type)
    for word in reversed(before):
        if word.startswith("-"):
            found = list(values.get(_normalize(word), lambda: [])())
            if found and not current.startswith("-"):
                return found
            break
    if current.startswith("-"):
        return _option_candidates(command, config_type)
    if name == "launch":
        return _name_candidates([word for word in before if word in APPLICATIONS][-1:])
    return _argument_candidates(command, config_type)


def _normalize(word: str) -> str:
    return word.replace("_", "-") if word.startswith("--") else word


def _values_by_flag(
    command: Command, config_type: Any
) -> dict[str, Callable[[], Iterable[tuple[str, str]]]]:
    """Return what can follow each flag that takes a value."""
    path = command.named_configs_path()
    values: dict[str, Callable[[], Iterable[tuple[str, str]]]] = {}
    for entry in config_flags(config_type, path):
        is_file = "--config-path" in entry.names
        for flag in entry.names:
            values[flag] = lambda p=path, f=is_file: [(PATHS, "")] if f else _configs(p)
    for name, option in flat_options(config_type).items():
        flags = ("--" + name.replace("_", "-"), *option.metadata.get("aliases", ()))
        for flag in flags:
            values[flag] = lambda o=option: _option_values(o)
    return values


def _configs(path: Path | None) -> Iterable[tuple[str, str]]:
    if path is not None:
        yield from ((str(name), "") for name in load_yaml(path))
    yield PATHS, ""


def _option_values(option: Any) -> Iterable[tuple[str, str]]:
    if listed := choices(option.hint):
        return [(choice, "") for choice in listed]
    return [(PATHS, "")] if "PATH" in type_name(without_none(option.hint)) else []


def _option_candidates(command: Command, config_type: Any) -> Iterable[tuple[str, str]]:
    """Yield common options first, then the others that have an effect."""
    docs, common = field_docs(config_type), common_options(config_type)
    for entry in config_flags(config_type, command.named_configs_path()):
        yield entry.names[-1 if len(entry.names) == 1 else 1], entry.text
    options = flat_options(config_type)
    for wanted in (True, False):
        for name, option in options.items():
            skipped = {"hidden", "without_effect", "positional"} & option.metadata.keys()
            if (name in common) == wanted and not skipped:
                doc = name_flags(docs.get(name, ""), name, options)
                text = textwrap.shorten(doc, _MAX_TEXT, placeholder="…")
                yield "--" + name.replace("_", "-"), text
                for alias in option.metadata.get("aliases", ()):
                    if alias in SHOWN_ALIASES:
                        yield alias, text
    yield from _HELP.items()


def _argument_candidates(command: Command, config_type: Any) -> Iterable[tuple[str, str]]:
    """Yield what a command takes without a flag; if that is nothing, its options."""
    if command.configs_of is not None:
        return [c for c in _configs(COMMANDS[command.configs_of].named_configs_path())][:-1]
    for option in flat_options(config_type).values():
        if option.metadata.get("positional"):
            return _option_values(option)
    return _option_candidates(command, config_type)
