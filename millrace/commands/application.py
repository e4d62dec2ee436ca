"""An application of your own as a command: options in, a run directory out."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from millrace.config import ConfigurationError, parse
from millrace.distributed.environment import is_follower, with_replicas
from millrace.output import drop_lost_output
from millrace.run.options import RunOptions
from millrace.run.process import tune_memory_allocation


def run_as_command(
    function: Callable[[Any, Any], None],
    config_type: type[RunOptions],
    *,
    name: str,
    argv: Sequence[str] | None = None,
    named_configs: Path | None = None,
) -> NoReturn:
    """Read the command line, run `function` in a run directory, and exit with its status.

    Args:
        function: ``(config, run)``: does the work; `run` is what it works with.
        config_type: A frozen dataclass that derives from `RunOptions`.
        name: What the command is called.
        argv: The words after it (default: this process's).
        named_configs: A YAML file of named configurations for ``--config``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    drop_lost_output()
    try:
        told = with_replicas(config_type, words)
        config, _ = parse(config_type, told, program=name, named_configs=named_configs)
        tune_memory_allocation()
        from millrace.run.run import run_command

        command_line = shlex.join([name, *words])
        sys.exit(run_command(function, config, command=name, command_line=command_line))
    except ConfigurationError as error:
        if not is_follower():  # of several processes, one says it
            print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
