"""Which cores a process may use: those of one NUMA node, so that its memory is near."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def cores_of_nodes(nodes: Path = _NODES) -> list[set[int]]:
    """Return the cores of each NUMA node that this process may use, in order."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    allowed = os.sched_getaffinity(0)
    found = []
    for path in sorted(nodes.glob("node[0-9]*"), key=lambda p: int(p.name[4:])):
        cores = read_list((path / "cpulist").read_text()) & allowed
        if cores:
            found.append(cores)
    return found


def read_list(text: str) -> set[int]:
    """Read a list of cores as the kernel writes it.

    >>> sorted(read_list("0-2,8"))
    [0, 1, 2, 8]
    """
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


@contextlib.contextmanager
def bound_to(cores: set[int] | None) -> Iterator[None]:
    """Have what is started inside run on these cores only."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # of this thread, from which a process inherits it
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
