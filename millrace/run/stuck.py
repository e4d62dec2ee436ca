"""End a run that makes no progress, after writing what it is doing."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from millrace.distributed import coordination
from millrace.distributed.heartbeat import LOST
from millrace.distributed.progress import (
    Watch,
    exit_now,
    try_briefly,
    watched,
    write_stacks,
)
from millrace.output import error_line
from millrace.program.compiling import is_compiling


@contextlib.contextmanager
def watching_progress(
    timeout: float | None,
    folder: Path,
    record_failure: Callable[[str], None],
    *,
    has_long_calls: bool = False,
) -> Iterator[None]:
    """End this process if it makes no progress in the block for too long.

    With several processes, their heartbeats find out which one is stuck.

    Args:
        timeout: As for ``--stuck-timeout``.
        folder: Where to write what the threads of this process do.
        record_failure: Called with a description before this process ends.
        has_long_calls: Whether a call may take any time, as the user asked: without a
            timeout, the first one is not watched.
    """

    def end(line: str) -> None:
        path = write_stacks(0)

        def report() -> None:
            record_failure(f"Stuck: {line}")
            # Last, because the output may be what blocks this process.
            error_line(f"{line} What its threads do is in {path}." if path else line)

        try_briefly(report)
        exit_now(LOST)  # the main thread may be in C++, or blocked by its output

    excuses_first = has_long_calls and timeout is None
    with watched(timeout, folder, is_compiling, excuses_first_call=excuses_first):
        is_alone = coordination.num_processes() == 1 and timeout
        watch = Watch(end) if is_alone else None
        try:
            yield
        finally:
            if watch is not None:
                watch.close()
