"""What ``millrace launch`` can be told. Imports nothing heavy."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from millrace.config import ConfigurationError
from millrace.distributed.environment import DEFAULT_PATIENCE

_SWITCH_WORDS = {"yes", "no", "true", "false", "on", "off", "1", "0"}


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Start several processes of a command on this machine, as one run.

    The command comes last, after -- or as it is: millrace launch --num-instances 4 --
    millrace cnn train --config digits_demo.
    """

    num_instances: int = field(default=1, metadata={"aliases": ("-n",)})
    """Processes to start."""
    num_replicas: int | None = None
    """Copies of the model in all of them together, which the command is told (default:
    what the command asks for; one in each process where it does not)."""
    devices_per_replica: int = field(
        default=1, metadata={"aliases": ("--ipus-per-replica",)}
    )
    """Devices that a copy takes: the stages of its pipeline."""
    numa_aware: bool = False
    """Bind each process to the cores of one NUMA node, in turn."""
    max_restarts: int = 0
    """How often all processes are started again, from the last good checkpoint, when one
    fails."""
    patience: float = DEFAULT_PATIENCE
    """Seconds without a sign of life after which a process counts as lost."""
    port: int | None = None
    """The coordinator's, on the loopback (default: one that is free)."""

    def __post_init__(self) -> None:
        for name in ("num_instances", "devices_per_replica"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must be 0 or more, got {self.max_restarts}.")
        if not 5 <= self.patience <= 60:
            raise ValueError(
                f"patience must be between 5 and 60 seconds, got {self.patience:g}."
            )
        if self.port is not None and not 0 < self.port < 65536:
            raise ValueError(f"port must be between 1 and 65535, got {self.port}.")

    def replicas_per_instance(self, num_replicas: int) -> int:
        """Share the replicas out; they must come out even."""
        each, rest = divmod(num_replicas, self.num_instances)
        if rest or not each:
            raise ConfigurationError(
                f"{num_replicas} replicas cannot be shared evenly by "
                f"{self.num_instances} instances. Choose a multiple of it."
            )
        return each


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the launcher's own options from the command, which ``--`` may precede.

    Without it, the command starts at the first word that is neither an option nor an
    option's value. A switch takes a word such as yes or 1 for its value.
    """
    switches = {
        f"--{f.name.replace('_', '-')}"
        for f in fields(LaunchConfig)
        if f.type in (bool, "bool")
    } | {"--help", "-h"}
    place = 0
    while place < len(words):
        word = words[place]
        if word == "--":
            return list(words[:place]), list(words[place + 1 :])
        if not word.startswith("-"):
            return list(words[:place]), list(words[place:])
        place += 1
        follows = words[place].lower() if place < len(words) else ""
        if "=" in word or (
            word.replace("_", "-") in switches and follows not in _SWITCH_WORDS
        ):
            continue
        place += 1
    return list(words), []
