"""The command line: ``millrace <application> <verb> [options]``, and small tools.

Only what is needed to read a command is imported here; the work is imported when the
command is known to be right.
"""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import millrace
from millrace.commands.registry import COMMANDS
from millrace.config import ConfigurationError, parse
from millrace.distributed.environment import add_launcher_replicas, is_follower
from millrace.distributed.signals import INTERRUPTED, exit_on_signals, interruptible
from millrace.output import drop_lost_output


def script() -> None:
    """Be the command: leave in order at whatever moment a signal comes."""
    exit_on_signals()
    drop_lost_output()
    try:
        main()
    except SystemExit as ended:
        if ended.code == INTERRUPTED and not _is_one_of_several():
            # Threads may still compile what is no longer wanted: Python would wait for
            # them, or crash on them.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise


def _is_one_of_several() -> bool:
    """Whether other processes wait for this one to take its leave."""
    group = sys.modules.get("millrace.distributed.coordination")
    return group is not None and group.num_processes() > 1


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status: 0 done, 1 failed, 2 a wrong command."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(words)
    except ConfigurationError as error:
        if not is_follower():  # of several processes, one says it
            print(f"millrace: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)


def _run(words: list[str]) -> int:
    applications = {name.split()[0] for name in COMMANDS if " " in name}
    asked = words[1:2] if words[:1] and words[0] in applications else words[:1]
    if not words or asked in (["-h"], ["--help"]):
        print(_usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"millrace {millrace.__version__}")
        return 0
    length = 1 if words[0] in COMMANDS else 2
    name, rest = " ".join(words[:length]), words[length:]
    if name not in COMMANDS:
        raise ConfigurationError(
            f"There is no command {name!r}. There is: {', '.join(COMMANDS)}. "
            "See millrace --help."
        )
    command = COMMANDS[name]
    if name == "launch":  # most of its words belong to another command
        return command.load_function()(rest)
    config_type = command.load_config_type()
    config, _ = parse(
        config_type,
        add_launcher_replicas(config_type, rest),
        program=f"millrace {name}",
        named_configs=command.named_configs_path(),
    )
    if not command.needs_run:
        return _answer(command.load_function(), config)
    from millrace.run.process import tune_memory_allocation

    tune_memory_allocation()
    from millrace.run.run import run_command

    return run_command(
        command.load_function(),
        config,
        command=name.replace(" ", "-"),
        command_line=shlex.join(["millrace", *words]),
    )


def _answer(function: Callable[[Any], int | None], config: Any) -> int:
    """Call a command that needs no run directory; it may return a status."""
    try:
        with interruptible():
            return function(config) or 0
    except ConfigurationError:
        raise
    except Exception as error:
        ours = type(error).__module__.startswith("millrace") or isinstance(error, OSError)
        if getattr(config, "debug", not ours):
            raise
        message = " ".join(str(error).split())
        if not ours:
            message = f"{type(error).__name__}: {message} (--debug shows where)"
        print(f"millrace: {message}", file=sys.stderr)
        return 1


def _usage() -> str:
    lines = [
        "millrace: whole training loops on the device.",
        "",
        "usage: millrace <application> <verb> [options]",
        "       millrace <application> <verb> --help",
        "",
    ]
    lines += [f"  {name:<22} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(lines)
