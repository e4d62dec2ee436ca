"""What a run remembers does not grow with the number of updates and log lines."""

import gc
import itertools
import tracemalloc
from pathlib import Path

import pytest
from small_runner import batches, make_runner

from millrace.loop.throughput import Throughput
from millrace.run.console import Console


def grown_bytes(work) -> int:
    """Bytes of Python's that `work` still holds, the second time it is called."""
    work()
    gc.collect()
    tracemalloc.start()
    try:
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_the_speed_of_a_run_is_measured_in_constant_memory():
    throughput = Throughput()
    throughput.start()

    def calls():
        for _ in range(20_000):
            throughput.add(32, execution_ends=True)

    assert grown_bytes(calls) < 10_000


def test_lines_are_printed_in_constant_memory(capsys):
    console = Console()

    def lines():
        for number in range(1_000):
            console.line(f"update {number}  loss {1 / (number + 1):.4g}")
            console.advance(number, {"loss": 0.5}, 10.0)
        capsys.readouterr()

    assert grown_bytes(lines) < 50_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_a_run_of_many_log_lines_does_not_grow(tmp_path):
    updates, warm = 40_000, 10_000
    seen = {}

    class Watch:
        def write(self, event):
            if event["update"] in (warm, updates):
                gc.collect()
                seen[event["update"]] = resident_bytes()

        def close(self):
            pass

    endless = batches(itertools.repeat(1.0))
    runner, state, _, _ = make_runner(tmp_path, endless, updates=updates, logs=updates)
    runner._writers.append(Watch())
    runner.run(state)
    assert seen[updates] - seen[warm] < 3e6  # 100 bytes a line
