"""What a process is told about the others it runs with. Imports nothing heavy.

Ours come as MILLRACE_... variables; Open MPI, Slurm and Kubernetes have their own, which
JAX reads. Here they are only looked for, to know whether there is more than one process.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from millrace.config import ConfigurationError, flat_options

COORDINATOR = "MILLRACE_COORDINATOR"
PROCESS_ID = "MILLRACE_PROCESS_ID"
NUM_PROCESSES = "MILLRACE_NUM_PROCESSES"
NUM_REPLICAS = "MILLRACE_NUM_REPLICAS"
"""Copies of the model in all processes together; what a command is told is overridden."""
LAUNCHER_PIPE = "MILLRACE_LAUNCHER_PIPE"
"""A file descriptor on which the launcher tells of lost instances; closed: it is gone."""
LAUNCH_DIR = "MILLRACE_LAUNCH_DIR"
"""A folder of the launcher's, in which a run notes its directory for a restart."""
PATIENCE = "MILLRACE_PATIENCE_SECONDS"
"""How long a process may be silent before the others take it for lost."""

DEFAULT_PATIENCE = 30.0
_TAKEN_PORT = "port-taken"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class ProcessInfo(NamedTuple):
    """This process among the others."""

    coordinator: str | None
    """Host and port of process 0; None where JAX finds out by itself."""
    process_id: int | None
    num_processes: int | None
    cluster: str | None = None
    """Who started the processes, where it was not us."""

    @property
    def is_local(self) -> bool:
        """Whether all processes are on this machine, and nothing need be seen outside."""
        host = (self.coordinator or "").rpartition(":")[0]
        return host in _LOOPBACK


def find_process_info(
    coordinator: str | None = None,
    process_id: int | None = None,
    num_processes: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> ProcessInfo | None:
    """Return this process's place; None if it is the only one.

    Args:
        coordinator: Given on the command line, as the next two.
        process_id: From 0.
        num_processes: How many there are.
        environment: Where the variables are; by default this process's.
    """
    env = os.environ if environment is None else environment
    given = (coordinator, process_id, num_processes)
    if any(value is not None for value in given):
        return _checked(*given)
    if COORDINATOR in env:
        return ProcessInfo(env[COORDINATOR], int(env[PROCESS_ID]), int(env[NUM_PROCESSES]))
    if int(env.get("OMPI_COMM_WORLD_SIZE") or "1") > 1:
        return _under_open_mpi(env)
    if "SLURM_STEP_NODELIST" in env and int(env.get("SLURM_NTASKS") or "1") > 1:
        return ProcessInfo(None, None, None, "Slurm")
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        return ProcessInfo(None, None, None, "Kubernetes")
    return None


def _checked(
    coordinator: str | None, process_id: int | None, num_processes: int | None
) -> ProcessInfo:
    if coordinator is None or process_id is None or num_processes is None:
        raise ConfigurationError(
            "--coordinator, --process-id and --num-processes go together: give all three, "
            "or leave them to millrace launch, Open MPI, Slurm or Kubernetes."
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(
            f"--coordinator must be HOST:PORT of process 0, got {coordinator!r}."
        )
    if not 0 <= process_id < num_processes:
        raise ConfigurationError(
            f"--process-id must be from 0 to {num_processes - 1}, as there are "
            f"{num_processes} processes; got {process_id}."
        )
    return ProcessInfo(coordinator, process_id, num_processes)


def _under_open_mpi(env: Mapping[str, str]) -> ProcessInfo:
    if "OMPI_MCA_orte_hnp_uri" in env:
        return ProcessInfo(None, None, None, "Open MPI")
    # From version 5 on Open MPI no longer says where its launcher is.
    if (coordinator := env.get("JAX_COORDINATOR_ADDRESS")) is None:
        raise ConfigurationError(
            "This Open MPI does not say where process 0 is. Say it with "
            "`mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT ...`."
        )
    rank, size = env["OMPI_COMM_WORLD_RANK"], env["OMPI_COMM_WORLD_SIZE"]
    return ProcessInfo(coordinator, int(rank), int(size), "Open MPI")


def patience_seconds() -> float:
    """How long a process may be silent."""
    return float(os.environ.get(PATIENCE, DEFAULT_PATIENCE))


def is_follower() -> bool:
    """Whether this is another process than the first, which does the talking."""
    return any(
        os.environ.get(name, "0") != "0"
        for name in (PROCESS_ID, "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
    )


def noted_run_directory() -> Path | None:
    """Return the directory that this run had before the launcher restarted it."""
    if (folder := os.environ.get(LAUNCH_DIR)) is None:
        return None
    note = Path(folder) / "run-directory"
    return Path(note.read_text()) if note.exists() else None


def note_run_directory(path: Path) -> None:
    """Tell the launcher where the run is, should it be started again."""
    folder = os.environ.get(LAUNCH_DIR)
    if folder is not None and noted_run_directory() is None:
        (Path(folder) / "run-directory").write_text(str(path.absolute()))


def note_taken_port() -> None:
    """Tell the launcher that another program listens where the coordinator should."""
    if (folder := os.environ.get(LAUNCH_DIR)) is not None:
        (Path(folder) / _TAKEN_PORT).touch()


def noted_taken_port(folder: str) -> Path | None:
    """Return the note of that in the launcher's folder, if there is one."""
    note = Path(folder) / _TAKEN_PORT
    return note if note.exists() else None


def with_replicas(config_type: Any, words: Sequence[str]) -> list[str]:
    """Return a command's words with the number of replicas that the launcher gives it."""
    number = os.environ.get(NUM_REPLICAS)
    if number is None or "num_replicas" not in flat_options(config_type):
        return list(words)
    if getattr(config_type, "replicas_of_each_process", False):
        number = str(int(number) // int(os.environ.get(NUM_PROCESSES, "1")))
    asked = given_replicas(words)
    if asked not in (None, number) and not is_follower():
        print(
            f"millrace: {asked} replicas are asked for, but millrace launch has "
            f"{number}; that is used.",
            file=sys.stderr,
        )
    return [*words, "--num-replicas", number]


def given_replicas(words: Sequence[str]) -> str | None:
    """Return the number of replicas that a command's words ask for, if they do."""
    found = None
    for place, word in enumerate(words):
        name, equals, value = word.replace("_", "-").partition("=")
        if name in ("--num-replicas", "--replicas"):
            found = value if equals else "".join(words[place + 1 : place + 2])
    return found
