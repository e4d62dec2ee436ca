"""``millrace launch``: separate its options from the command that it starts."""

from collections.abc import Sequence

from millrace.config import ConfigurationError, parse
from millrace.distributed.launcher import Launcher
from millrace.distributed.options import LaunchConfig, split_command


def launch(args: Sequence[str]) -> int:
    """Start the processes that `args` describe; return the exit status."""
    own, command = split_command(args)
    config, _ = parse(LaunchConfig, own, program="millrace launch")
    if not command:
        raise ConfigurationError(
            "launch needs a command to start: millrace launch --num-instances 2 -- "
            "millrace cnn train ..."
        )
    return Launcher(config, command).run()
