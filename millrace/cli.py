"""The command line: ``millrace <application> <verb> [options]``, and single commands.

Reading a command imports nothing heavy, so that ``--help`` and errors are immediate. Its
work is imported once the options are known to be valid.
"""

import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import millrace
from millrace.commands.registry import APPLICATIONS, COMMANDS
from millrace.commands.scripts import SCRIPTS, Script, find_script
from millrace.commands.usage import (
    format_application,
    format_unknown_command,
    format_usage,
)
from millrace.config import ConfigurationError, as_typed, parse
from millrace.distributed.environment import (
    StartError,
    add_launcher_replicas,
    format_mistake,
)
from millrace.distributed.progress import exit_now
from millrace.distributed.signals import (
    INTERRUPTED,
    end_if_unanswered,
    exit_on_signals,
    interruptible,
)
from millrace.output import drop_lost_output, error_line

_FAILED = 1


def script() -> None:
    """Run as a program of its own, which a signal may end at any time."""
    exit_on_signals()
    end_if_unanswered()
    drop_lost_output()
    try:
        main()
    except SystemExit as error:
        if error.code in (_FAILED, INTERRUPTED) and not _has_other_processes():
            # Threads may still be compiling, and devices computing an update: Python would
            # wait for them, or crash.
            sys.stdout.flush()
            sys.stderr.flush()
            exit_now(int(error.code))
        raise


def _has_other_processes() -> bool:
    """Whether other processes wait for this one to say goodbye in an exit handler."""
    coordination = sys.modules.get("millrace.distributed.coordination")
    return coordination is not None and coordination.num_processes() > 1


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status: 0 completed, 1 failed, 2 wrong command."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(args)
    except StartError as error:
        error_line(str(error))
        status = _FAILED
    except ValueError as error:
        is_wrong_command = isinstance(error, ConfigurationError)
        # The ratings, which some options depend on, may be damaged: a DatasetError.
        if not is_wrong_command and not type(error).__module__.startswith("millrace"):
            raise
        if (message := format_mistake(as_typed(str(error)))) is not None:
            print(f"millrace: {message}", file=sys.stderr)
        status = 2 if is_wrong_command else _FAILED
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)


def _run(args: list[str]) -> int:
    first = args[0] if args else ""
    if not args or first in ("-h", "--help", "--help-all"):
        print(format_usage())
        return 0 if args else 2
    if first in ("-V", "--version"):
        print(f"millrace {millrace.__version__}")
        return 0
    if first.startswith("-") and first.endswith(("complete", "completion")):
        from millrace.commands.completion import run_completion

        return run_completion(args)
    if first in APPLICATIONS and (args[1:2] or ["--help"])[0] in ("-h", "--help"):
        print(format_application(first))
        return 0
    if first in SCRIPTS:
        found = find_script(args)
        assert found is not None, "the name is in the table"
        return _run_command(SCRIPTS[first].command, found.arguments, args)
    length = 1 if first in COMMANDS else 2
    name, rest = " ".join(args[:length]), args[length:]
    if name not in COMMANDS:
        raise ConfigurationError(format_unknown_command(args))
    return _run_command(name, rest, args)


def _run_command(name: str, rest: list[str], args: list[str]) -> int:
    """Run a command; return its status.

    Args:
        name: The command.
        rest: Its arguments.
        args: All arguments of the process, which may name one of Graphcore's programs.
    """
    command, script = COMMANDS[name], SCRIPTS.get(args[0], Script(name))
    if name == "launch":  # most arguments belong to the command that it starts
        return command.load_function()(rest, resolve_launched)
    config_type = command.load_config_type()
    config, _ = parse(
        config_type,
        add_launcher_replicas(config_type, rest),
        program=f"millrace {args[0] if args[0] in SCRIPTS else name}",
        named_configs=command.named_configs_path(),
        command=name.replace(" ", "-"),
        defaults=script.defaults,
        epilog=_format_defaults(args[0], script.about),
    )
    if not command.needs_run:
        return _run_without_directory(command.load_function(), config)
    # Before JAX is imported with the rest.
    from millrace.run.process import tune_memory_allocation

    tune_memory_allocation()
    from millrace.run.run import run_command

    return run_command(
        command.load_function(),
        config,
        command=name.replace(" ", "-"),
        command_line=shlex.join(["millrace", *args]),
    )


def _format_defaults(script: str, about: str) -> str:
    """Return what ``--help`` says about the defaults of one of Graphcore's programs."""
    if not about:
        return ""
    text = f"{script} has the defaults of Graphcore's program, not those above: {about}"
    return "\n".join(["", *textwrap.wrap(text, 92), ""])


def resolve_launched(words: Sequence[str]) -> list[str]:
    """Return the command line of a process that the launcher starts.

    The name of our program may be left out. Graphcore's programs run as ``millrace`` runs
    them, unless there are files of these names.
    """
    first = words[0]
    if first in APPLICATIONS or first in COMMANDS:
        return ["millrace", *words]
    if (found := find_script(words)) is None:
        return list(words)
    if found.path is not None and len(found.path.parts) > 1:  # somebody else's file
        return list(words)
    if found.path is not None and found.path.exists():
        return [sys.executable, *words] if words[0] == found.script else list(words)
    return ["millrace", found.script, *found.arguments]


def _run_without_directory(function: Callable[[Any], int | None], config: Any) -> int:
    """Run a command that needs no run directory; it may return an exit status."""
    try:
        with interruptible():
            return function(config) or 0
    except ConfigurationError:
        raise
    except Exception as error:
        # Our own errors and those of files explain themselves; others are bugs.
        ours = type(error).__module__.startswith("millrace") or isinstance(error, OSError)
        if getattr(config, "debug", not ours):
            raise
        message = " ".join(str(error).split())
        if not ours:
            message = f"{type(error).__name__}: {message} (--debug shows the traceback)"
        print(f"millrace: {message}", file=sys.stderr)
        return 1
