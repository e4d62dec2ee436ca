"""Run several processes as threads of this one, for tests that need no devices."""

import collections
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from millrace.distributed import coordination

_rank = threading.local()


def as_processes(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Return ``work(rank)`` of each process; they can gather and broadcast."""
    values: dict[Any, dict[int, Any]] = collections.defaultdict(dict)
    counts: collections.Counter = collections.Counter()
    barrier = threading.Barrier(count, timeout=60)

    def gather(name: str, value: Any) -> list[Any]:
        counts[name, _rank.number] += 1
        key = name, counts[name, _rank.number]
        values[key][_rank.number] = value
        barrier.wait()
        return [values[key][rank] for rank in range(count)]

    def process(rank: int) -> Any:
        _rank.number = rank
        return work(rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordination, "num_processes", lambda: count)
        patch.setattr(coordination, "process_id", lambda: _rank.number)
        patch.setattr(coordination, "gather", gather)
        patch.setattr(coordination, "broadcast", lambda name, value: gather(name, value)[0])
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(process, range(count)))
