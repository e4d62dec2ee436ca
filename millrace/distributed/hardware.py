"""GPUs, CPU cores and ports of this machine, found without importing JAX."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from millrace.config import ConfigurationError


def uses_gpu(variables: Mapping[str, str]) -> bool:
    """Whether JAX would run on GPUs with these environment variables."""
    platforms = variables.get("JAX_PLATFORMS", "")
    allowed = not platforms or "cuda" in platforms or "gpu" in platforms
    return allowed and bool(visible_gpus(variables))


def visible_gpus(variables: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES, or the indices of all GPUs."""
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [entry.strip() for entry in visible.split(",") if entry.strip()]
    return [str(index) for index, _ in enumerate(devices.glob("nvidia[0-9]*"))]


def assign_gpus(
    number: int, num_processes: int, per_process: int, variables: Mapping[str, str]
) -> str:
    """Return the CUDA_VISIBLE_DEVICES of process `number`."""
    gpus = visible_gpus(variables)
    if num_processes * per_process > len(gpus):
        raise ConfigurationError(
            f"{num_processes} processes with {per_process} devices each need "
            f"{num_processes * per_process} GPUs, but there are {len(gpus)}. Start fewer "
            "processes, or set JAX_PLATFORMS=cpu."
        )
    return ",".join(gpus[number * per_process : (number + 1) * per_process])


def numa_cores(nodes: Path = Path("/sys/devices/system/node")) -> list[set[int]]:
    """Return the cores of each NUMA node that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    allowed = os.sched_getaffinity(0)
    paths = sorted(nodes.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    cores = [parse_cpu_list((path / "cpulist").read_text()) & allowed for path in paths]
    return [node for node in cores if node]


def parse_cpu_list(text: str) -> set[int]:
    """Parse a list of cores in the format of the Linux kernel.

    >>> sorted(parse_cpu_list("0-2,8"))
    [0, 1, 2, 8]
    """
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


@contextlib.contextmanager
def pin_to_cores(cores: set[int] | None) -> Iterator[None]:
    """Run processes started in this context on `cores` only; None pins nothing."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # affects this thread; child processes inherit it
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def find_free_port() -> int:
    """Find a free port. Another program may still take it before we listen on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get_port_error(host: str, port: int) -> str | None:
    """Return why this process cannot listen on a port, or None if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # gRPC sets it too: connections in TIME_WAIT do not block a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
            probe.listen(1)
        except OSError as error:
            return os.strerror(error.errno or 0)
    return None
