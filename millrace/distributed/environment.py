"""How a process learns about the other processes of its run. Imports nothing heavy.

``millrace launch`` sets MILLRACE_... variables, and so can a job of any cluster. Open MPI,
Slurm and Kubernetes set their own. JAX reads them where it finds what is needed.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from millrace.config import ConfigurationError, flat_options

COORDINATOR = "MILLRACE_COORDINATOR"
PROCESS_ID = "MILLRACE_PROCESS_ID"
NUM_PROCESSES = "MILLRACE_NUM_PROCESSES"
NUM_REPLICAS = "MILLRACE_NUM_REPLICAS"
"""Replicas in all processes together; overrides the option of the command."""
ELASTIC = "MILLRACE_ELASTIC"
"""PRESENT/ALL: processes of an elastic run that take part, and all it was started with."""
SLOT = "MILLRACE_SLOT"
"""Number of the process when all take part; it stays the same when others are absent."""
LAUNCHER_PIPE = "MILLRACE_LAUNCHER_PIPE"
"""File descriptor on which the launcher announces failed processes. End of file means that
the launcher is gone."""
LAUNCH_DIR = "MILLRACE_LAUNCH_DIR"
"""Folder of the launcher in which a run records its directory, for restarts."""
TIMEOUT = "MILLRACE_PATIENCE_SECONDS"
"""Seconds without a heartbeat after which a process is considered lost."""

DEFAULT_TIMEOUT = 30.0
TIMEOUT_RANGE = (5.0, 60.0)
"""Heartbeats come every second. JAX has its own, and aborts all processes without a useful
message after 100 s: ours must be faster."""
_FIRST_PORT, _NUM_PORTS = 61440, 4096
"""Ports of coordinators of Slurm, as JAX chooses them."""
_PORT_CONFLICT = "port-taken"
_INDIVISIBLE = "indivisible"
_PROGRESS = "progress"
_CAUSE = "cause"
_STARTED = "started"
_MISTAKE = "mistake"
_MISTAKE_SECONDS = 3.0
"""How long the other processes wait for process 0 to report the mistake that they found."""
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class StartError(RuntimeError):
    """The other processes of a run have not started in time."""


class ProcessInfo(NamedTuple):
    """The position of this process in its run."""

    coordinator: str | None
    """Host and port of process 0; None if JAX finds them."""
    process_id: int | None
    num_processes: int | None
    cluster: str | None = None
    """The cluster that started the processes, if any."""
    has_own_gpus: bool = False
    """Whether each process sees only the GPUs that are meant for it. Otherwise JAX gives it
    the GPU of its number on the machine."""

    @property
    def is_local(self) -> bool:
        """Whether all processes are on this machine, so that the loopback is enough."""
        host = (self.coordinator or "").rpartition(":")[0]
        return host in _LOOPBACK


def find_process_info(
    coordinator: str | None = None,
    process_id: int | None = None,
    num_processes: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> ProcessInfo | None:
    """Return the position of this process in its run; None for a single process.

    Args:
        coordinator: Value of ``--coordinator``, if given.
        process_id: Value of ``--process-id``, if given.
        num_processes: Value of ``--num-processes``, if given.
        environment: Environment variables (default: those of this process).
    """
    env = os.environ if environment is None else environment
    given = (coordinator, process_id, num_processes)
    if any(value is not None for value in given):
        return _check_process_info(*given)
    if any(name in env for name in (COORDINATOR, PROCESS_ID, NUM_PROCESSES)):
        return _read_variables(env)
    if int(env.get("OMPI_COMM_WORLD_SIZE") or "1") > 1:
        return _find_open_mpi(env)
    if "SLURM_STEP_NODELIST" in env and int(env.get("SLURM_NTASKS") or "1") > 1:
        return _find_slurm(env)
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        return ProcessInfo(None, None, None, "Kubernetes")
    return None


def _read_variables(env: Mapping[str, str]) -> ProcessInfo:
    """Return the position that MILLRACE_... variables describe."""
    names = (COORDINATOR, PROCESS_ID, NUM_PROCESSES)
    if missing := [name for name in names if name not in env]:
        raise ConfigurationError(
            f"{missing[0]} is not set. Set {', '.join(names)}, or none of them."
        )
    for name in names[1:]:
        if not env[name].isdecimal():
            raise ConfigurationError(f"{name} must be a number, got {env[name]!r}.")
    return _check_process_info(
        env[COORDINATOR], int(env[PROCESS_ID]), int(env[NUM_PROCESSES])
    )


def _check_process_info(
    coordinator: str | None, process_id: int | None, num_processes: int | None
) -> ProcessInfo:
    if coordinator is None or process_id is None or num_processes is None:
        raise ConfigurationError(
            "--coordinator, --process-id and --num-processes must be given together. "
            "Under millrace launch, Open MPI, Slurm and Kubernetes none of them is needed."
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(
            f"The coordinator must be HOST:PORT of process 0, got {coordinator!r}."
        )
    if not 0 <= process_id < num_processes:
        raise ConfigurationError(
            f"The process id must be from 0 to {num_processes - 1} with "
            f"{num_processes} processes, got {process_id}."
        )
    return ProcessInfo(coordinator, process_id, num_processes)


def _find_open_mpi(env: Mapping[str, str]) -> ProcessInfo:
    if "OMPI_MCA_orte_hnp_uri" in env:
        return ProcessInfo(None, None, None, "Open MPI")
    # Open MPI 5 dropped the variable from which JAX derives the coordinator's address.
    if (coordinator := env.get("JAX_COORDINATOR_ADDRESS")) is None:
        raise ConfigurationError(
            "This version of Open MPI does not publish the address of process 0. Pass it "
            "with `mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT ...`."
        )
    rank, size = env["OMPI_COMM_WORLD_RANK"], env["OMPI_COMM_WORLD_SIZE"]
    return ProcessInfo(coordinator, int(rank), int(size), "Open MPI")


def _find_slurm(env: Mapping[str, str]) -> ProcessInfo:
    if (coordinator := env.get("JAX_COORDINATOR_ADDRESS")) is None:
        # JAX would derive the port from the job alone, and two steps of it would collide.
        number = 31 * int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])
        port = env.get("JAX_COORDINATOR_PORT") or _FIRST_PORT + number % _NUM_PORTS
        coordinator = f"{find_first_host(env['SLURM_STEP_NODELIST'])}:{port}"
    rank, size = int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"])
    # With --gpus-per-task, Slurm shows a task its own GPUs only.
    has_own_gpus = "SLURM_GPUS_PER_TASK" in env
    return ProcessInfo(coordinator, rank, size, "Slurm", has_own_gpus=has_own_gpus)


def find_first_host(nodes: str) -> str:
    """Return the first host of a list in the format of Slurm.

    >>> find_first_host("node[007-010,12]-ib,login")
    'node007-ib'
    """
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)
    assert first is not None, "it may be empty"
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def get_timeout() -> float:
    """Return the seconds after which a process without heartbeats is considered lost."""
    text = os.environ.get(TIMEOUT, str(DEFAULT_TIMEOUT))
    least, most = TIMEOUT_RANGE
    with contextlib.suppress(ValueError):
        if least <= float(text) <= most:
            return float(text)
    raise ConfigurationError(
        f"{TIMEOUT} must be between {least:g} and {most:g} seconds, got {text!r}."
    )


def is_follower() -> bool:
    """Whether this is not process 0, which reports errors for all processes."""
    return _find_rank() != "0"


def _find_rank() -> str:
    names = (PROCESS_ID, "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
    ranks = (os.environ.get(name, "0") for name in names)
    return next((rank for rank in ranks if rank != "0"), "0")


def record_run_directory(path: Path) -> None:
    """Record the run directory for the launcher, in case it restarts the run."""
    folder = os.environ.get(LAUNCH_DIR)
    if folder is not None and get_recorded_run_directory() is None:
        (Path(folder) / "run-directory").write_text(str(path.absolute()))


def get_recorded_run_directory() -> Path | None:
    """Return the directory of this run before the launcher restarted it."""
    return find_run_directory(os.environ.get(LAUNCH_DIR, ""))


def find_run_directory(folder: str) -> Path | None:
    """Return the run directory that is recorded in the launcher's folder, if any."""
    record = Path(folder) / "run-directory"
    return Path(record.read_text()) if folder and record.exists() else None


def record_port_conflict() -> None:
    """Tell the launcher that another program uses the port of the coordinator."""
    if (folder := os.environ.get(LAUNCH_DIR)) is not None:
        (Path(folder) / _PORT_CONFLICT).touch()


def find_port_conflict(folder: str) -> Path | None:
    """Return the file that records a port conflict in the launcher's folder, if any."""
    record = Path(folder) / _PORT_CONFLICT
    return record if record.exists() else None


def get_present_share() -> tuple[int, int]:
    """Return how many processes of an elastic run take part, and how many there were."""
    present, _, all_processes = os.environ.get(ELASTIC, "1/1").partition("/")
    return int(present), int(all_processes)


def record_progress(update: int) -> None:
    """Tell the launcher that a checkpoint is complete."""
    if (folder := os.environ.get(LAUNCH_DIR)) is not None:
        with contextlib.suppress(OSError):
            (Path(folder) / _PROGRESS).write_text(str(update))


def read_progress(folder: str) -> str:
    """Return the update of the last checkpoint, for comparison; empty if there is none."""
    record = Path(folder) / _PROGRESS
    return record.read_text() if record.exists() else ""


def record_cause(process_id: int) -> None:
    """Tell the launcher which process is the reason that this one ends."""
    if (folder := os.environ.get(LAUNCH_DIR)) is not None:
        with contextlib.suppress(OSError), (Path(folder) / _CAUSE).open("x") as record:
            record.write(str(process_id))


def pop_cause(folder: str) -> int | None:
    """Return the process for which others have ended, if any; forgets it."""
    record = Path(folder) / _CAUSE
    text = record.read_text() if record.exists() else ""
    record.unlink(missing_ok=True)
    return int(text) if text else None


def record_start(process_id: int) -> None:
    """Tell the other processes of a launcher that this one is about to join them."""
    if (folder := os.environ.get(LAUNCH_DIR)) is not None:
        with contextlib.suppress(OSError):
            (Path(folder) / f"{_STARTED}-{process_id}").touch()


def find_missing(num_processes: int) -> list[int]:
    """Return the processes of a launcher that have not started; empty without one."""
    if (folder := os.environ.get(LAUNCH_DIR)) is None:
        return []
    found = {path.name for path in Path(folder).glob(f"{_STARTED}-*")}
    return [rank for rank in range(num_processes) if f"{_STARTED}-{rank}" not in found]


def forget_starts(folder: str) -> None:
    """Forget what processes have recorded at their start, before they start again."""
    for record in [*Path(folder).glob(f"{_STARTED}-*"), Path(folder) / _MISTAKE]:
        record.unlink(missing_ok=True)


def format_mistake(message: str) -> str | None:
    """Return what this process prints about a mistake in the command, if anything.

    Process 0 reports what all processes have found. Once they have joined, they find the
    same. Before, a process of a launcher waits for what process 0 reports, and one of a
    cluster says which it is.
    """
    # It imports JAX, which a wrong option must not.
    coordination = sys.modules.get("millrace.distributed.coordination")
    has_joined = coordination is not None and coordination.num_processes() > 1
    folder = os.environ.get(LAUNCH_DIR)
    if not is_follower():
        if folder is not None:
            with contextlib.suppress(OSError):
                (Path(folder) / _MISTAKE).write_text(message)
        return message
    if has_joined:
        return None
    if folder is None:
        return f"process {_find_rank()}: {message}"
    return None if _is_reported(Path(folder) / _MISTAKE, message) else message


def _is_reported(record: Path, message: str) -> bool:
    """Whether process 0 of a launcher reports the same mistake, a little later perhaps."""
    deadline = time.monotonic() + _MISTAKE_SECONDS
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            if record.exists() and record.read_text() == message:
                return True
            time.sleep(0.05)
    return False


def record_indivisible() -> None:
    """Tell the launcher that this number of processes cannot share the global batch."""
    if (folder := os.environ.get(LAUNCH_DIR)) is not None:
        (Path(folder) / _INDIVISIBLE).touch()


def pop_indivisible(folder: str) -> bool:
    """Whether the processes could not share the global batch; forgets it."""
    record = Path(folder) / _INDIVISIBLE
    found = record.exists()
    record.unlink(missing_ok=True)
    return found


def add_launcher_replicas(config_type: Any, args: Sequence[str]) -> list[str]:
    """Append the launcher's number of replicas to the arguments of a command."""
    number = os.environ.get(NUM_REPLICAS)
    if number is None or "num_replicas" not in flat_options(config_type):
        return list(args)
    if getattr(config_type, "replicas_of_each_process", False):
        number = str(int(number) // int(os.environ.get(NUM_PROCESSES, "1")))
    requested = find_num_replicas(args)
    if requested not in (None, number) and not is_follower():
        print(
            f"millrace: --num-replicas is {requested}, but millrace launch sets it to "
            f"{number}. Using {number}.",
            file=sys.stderr,
        )
    return [*args, "--num-replicas", number]


def find_num_replicas(args: Sequence[str]) -> str | None:
    """Return the number of replicas in the arguments of a command, if given."""
    found = None
    for index, arg in enumerate(args):
        name, equals, value = arg.replace("_", "-").partition("=")
        if name in ("--num-replicas", "--replicas"):
            found = value if equals else "".join(args[index + 1 : index + 2])
    return found
