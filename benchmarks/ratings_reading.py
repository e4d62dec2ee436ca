"""Time and memory to read a text file of ratings, at two sizes, and to open it again.

Lines are user, tab, item, tab, rating in random order, with the numbers of users and items
of MovieLens 25M. Each measurement is a new process with an empty cache, which then opens
the file again from the cache.

Target: the time per line grows by at most a quarter from the small to the large file.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import Result, build_parser, format_met, format_spread, publish

from millrace.data.ratings.chunks import CodedIds
from millrace.data.ratings.reading import load_ratings
from millrace.data.ratings.split import write_ratings

_USERS, _ITEMS = 162_541, 59_047
_MAX_SECONDS, _MAX_BYTES = 60, 3e9


def write(path: Path, num_lines: int) -> None:
    """Write random ratings."""
    generator = np.random.default_rng(0)
    users, items = (
        CodedIds(np.arange(1, size + 1), generator.integers(0, size, num_lines, np.int32))
        for size in (_USERS, _ITEMS)
    )
    stars = generator.integers(1, 11, num_lines, np.int8) / np.float32(2)
    write_ratings(path, users, items, stars, np.arange(num_lines))


def measure_here(path: Path) -> None:
    """Read once from text and once from the cache; print time and memory as JSON."""
    times = [time.perf_counter()]
    for _ in range(2):
        ratings = load_ratings(path)
        times.append(time.perf_counter())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = {
        "seconds": times[1] - times[0],
        "again_seconds": times[2] - times[1],
        "cpu_seconds": time.process_time(),
        "peak_bytes": peak,
        "num_ratings": ratings.num_ratings,
    }
    print(json.dumps(figures))


def measure(path: Path) -> dict[str, float]:
    """Measure in a new process with an empty cache; return the figures."""
    with tempfile.TemporaryDirectory(dir=path.parent) as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--file", str(path)],
            env=os.environ | {"MILLRACE_DATA": cache},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    return json.loads(done.stdout)


def main() -> None:
    """Measure and report."""
    parser = build_parser(__doc__, rounds=3)
    parser.add_argument("--small", type=int, default=5_000_000, help="lines")
    parser.add_argument("--large", type=int, default=25_000_000, help="lines")
    parser.add_argument("--file", type=Path, help="read only this file, in this process")
    args = parser.parse_args()
    if args.file:
        return measure_here(args.file)
    measured: dict[int, list[dict[str, float]]] = {args.small: [], args.large: []}
    sizes = {}
    with tempfile.TemporaryDirectory(prefix="ratings-reading-") as folder:
        paths = {num_lines: Path(folder) / f"{num_lines}.txt" for num_lines in measured}
        for num_lines, path in paths.items():
            write(path, num_lines)
            sizes[num_lines] = path.stat().st_size
        for _ in range(args.rounds):
            for num_lines, path in paths.items():
                measured[num_lines].append(measure(path))
    publish(_result(measured, sizes), args)


def _result(measured: dict[int, list[dict[str, float]]], sizes: dict[int, int]) -> Result:
    small, large = measured

    def column(num_lines: int, name: str) -> list[float]:
        return [round_[name] for round_ in measured[num_lines]]

    ratio = statistics.median(
        (b / large) / (a / small)
        for a, b in zip(column(small, "seconds"), column(large, "seconds"), strict=True)
    )
    slowest, peak = max(column(large, "seconds")), max(column(large, "peak_bytes"))
    return Result(
        name="ratings_reading",
        table=[
            {
                "lines": f"{num_lines:,}",
                "text, MB": f"{sizes[num_lines] / 1e6:.0f}",
                "s to read": format_spread(column(num_lines, "seconds")),
                "CPU s": format_spread(column(num_lines, "cpu_seconds")),
                "s to open again": format_spread(column(num_lines, "again_seconds")),
                "peak memory, GB": f"{max(column(num_lines, 'peak_bytes')) / 1e9:.2f}",
            }
            for num_lines in measured
        ],
        ratio_name=f"time per line at {large:,} lines / at {small:,}",
        ratio=ratio,
        target=1.25,
        at_least=False,
        explanation=(
            f"The slowest read of {large:,} lines took {slowest:.1f} s (target "
            f"{_MAX_SECONDS}: {format_met(slowest <= _MAX_SECONDS)}) and at "
            f"most {peak / 1e9:.2f} GB (target {_MAX_BYTES / 1e9:g}: "
            f"{format_met(peak <= _MAX_BYTES)}). Reading consists of "
            "parsing, numbering users and items, sorting, and writing the cache. Opening "
            "again hashes the text and the cache, and maps the arrays."
        ),
        numbers={"measured": {str(n): rounds for n, rounds in measured.items()}},
    )


if __name__ == "__main__":
    main()
