"""The memory of a run does not grow with the number of updates and log lines."""

import gc
import itertools
import tracemalloc
from pathlib import Path

import pytest
from small_runner import batches, make_runner

from millrace.loop.progress import Throughput
from millrace.run.console import Console


def leaked_bytes(work) -> int:
    """Return the bytes that a second call of `work` allocates and does not free."""
    work()
    gc.collect()
    tracemalloc.start()
    try:
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_throughput_is_measured_in_constant_memory():
    throughput = Throughput()
    throughput.start()

    def calls():
        for _ in range(20_000):
            throughput.add(32, execution_ends=True)

    assert leaked_bytes(calls) < 10_000


@pytest.mark.slow
def test_lines_are_printed_in_constant_memory(capsys):
    console = Console()

    def lines():
        for number in range(1_000):
            console.line(f"update {number}  loss {1 / (number + 1):.4g}")
            console.advance(number, {"loss": 0.5}, 10.0)
        capsys.readouterr()

    assert leaked_bytes(lines) < 50_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_the_memory_of_a_run_does_not_grow_with_log_lines(tmp_path):
    updates, warmed_up = 40_000, 10_000
    memory = {}

    class MemoryWriter:
        def write(self, event):
            if event["update"] in (warmed_up, updates):
                gc.collect()
                memory[event["update"]] = resident_bytes()

        def close(self):
            pass

    endless = batches(itertools.repeat(1.0))
    runner, state, _, _ = make_runner(tmp_path, endless, updates=updates, logs=updates)
    runner._writers.append(MemoryWriter())
    runner.run(state)
    assert memory[updates] - memory[warmed_up] < 3e6  # 100 bytes per line
