"""Options of ``millrace launch``. Imports nothing heavy."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from millrace.config import ConfigurationError
from millrace.distributed.environment import DEFAULT_TIMEOUT, TIMEOUT_RANGE

_SWITCH_VALUES = {"yes", "no", "true", "false", "on", "off", "1", "0"}


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Start several processes of a command on this machine, as one run.

    The command comes last. A -- in front of it is optional:

      millrace launch --num-instances 4 -- millrace cnn train --config digits_demo
    """

    num_instances: int = field(default=1, metadata={"aliases": ("-n",)})
    """Number of processes."""
    num_replicas: int | None = None
    """Total number of replicas in all processes. Overrides --num-replicas of the command
    (default: its value, or one per process)."""
    devices_per_replica: int = field(
        default=1, metadata={"aliases": ("--ipus-per-replica",)}
    )
    """Devices per replica; more than one for pipelines."""
    numa_aware: bool = False
    """Pin each process to the cores of one NUMA node."""
    max_restarts: int = 0
    """Maximum number of restarts, from the last good checkpoint, after failures."""
    elastic: str | None = None
    """Smallest and largest number of processes, as MIN:MAX. MAX are started. If one is lost
    and fails again when it is restarted, the run continues from the last checkpoint with
    fewer, but at least MIN, and the same global batch."""
    return_after: float = 600.0
    """Seconds after which lost processes of an elastic run are started again; each failure
    doubles this time. 0 for never."""
    timeout: float = field(default=DEFAULT_TIMEOUT, metadata={"aliases": ("--patience",)})
    """Seconds without a heartbeat after which a process is considered lost."""
    port: int | None = None
    """Port of the coordinator on the loopback (default: any free port)."""

    def __post_init__(self) -> None:
        self._check_elastic()
        for name in ("num_instances", "devices_per_replica"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must be 0 or more, got {self.max_restarts}.")
        least, most = TIMEOUT_RANGE
        if not least <= self.timeout <= most:
            raise ValueError(
                f"timeout must be between {least:g} and {most:g} seconds, got "
                f"{self.timeout:g}."
            )
        if self.port is not None and not 0 < self.port < 65536:
            raise ValueError(f"port must be between 1 and 65535, got {self.port}.")

    def _check_elastic(self) -> None:
        if self.return_after < 0:
            raise ValueError(f"return_after must be 0 or more, got {self.return_after:g}.")
        if self.elastic is None:
            return
        parts = self.elastic.split(":")
        numbers = [int(part) for part in parts if part.isdecimal()]
        if len(parts) != 2 or len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
            raise ValueError(
                "elastic must be MIN:MAX, the least and the most processes, such as 2:4; "
                f"got {self.elastic}."
            )
        if self.num_instances not in (1, numbers[1]):
            raise ValueError(
                f"elastic {self.elastic} starts {numbers[1]} processes, but num_instances "
                f"is {self.num_instances}. Leave it out."
            )

    @property
    def process_range(self) -> tuple[int, int]:
        """The least and the most processes."""
        if self.elastic is None:
            return self.num_instances, self.num_instances
        least, most = self.elastic.split(":")
        return int(least), int(most)

    def replicas_per_process(self, num_replicas: int) -> int:
        """Return the replicas per process; all processes must have the same number."""
        _, num_processes = self.process_range
        count, rest = divmod(num_replicas, num_processes)
        if rest or not count:
            raise ConfigurationError(
                f"num_replicas ({num_replicas}) must be a multiple of the number of "
                f"processes ({num_processes})."
            )
        return count


def split_command(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into options of the launcher and the command to start.

    Without ``--``, the command starts at the first argument that is neither an option nor
    the value of one. A switch such as ``--numa-aware`` may have a value (yes, 1) or none.
    """
    switches = {
        f"--{f.name.replace('_', '-')}"
        for f in fields(LaunchConfig)
        if f.type in (bool, "bool")
    } | {"--help", "-h"}
    index = 0
    while index < len(args):
        arg = args[index]
        if arg == "--":
            return list(args[:index]), list(args[index + 1 :])
        if not arg.startswith("-"):
            return list(args[:index]), list(args[index:])
        index += 1
        following = args[index].lower() if index < len(args) else ""
        is_switch = arg.replace("_", "-") in switches and following not in _SWITCH_VALUES
        has_value = "=" in arg or (not arg.startswith("--") and len(arg) > len("-n"))
        if not has_value and not is_switch:
            index += 1  # the value of the option
    return list(args), []
