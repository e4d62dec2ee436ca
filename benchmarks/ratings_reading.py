"""How long text of ratings takes to read, at two sizes: seconds, memory, and again.

Lines are user, tab, item, tab, rating in random order, as many users and items as MovieLens
25M has. Every reading is a process of its own, with nothing kept from before; then the same
process opens what was kept.
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
from reporting import Result, parser, publish, spread

from millrace.data.ratings.chunks import CodedIds
from millrace.data.ratings.reading import load_ratings
from millrace.data.ratings.split import write_ratings

_USERS, _ITEMS = 162_541, 59_047
_MOST_SECONDS, _MOST_BYTES = 60, 3e9


def write(path: Path, num_lines: int) -> None:
    """Write ratings by chance."""
    generator = np.random.default_rng(0)
    users, items = (
        CodedIds(np.arange(1, size + 1), generator.integers(0, size, num_lines, np.int32))
        for size in (_USERS, _ITEMS)
    )
    stars = generator.integers(1, 11, num_lines, np.int8) / np.float32(2)
    write_ratings(path, users, items, stars, np.arange(num_lines))


def measure_here(path: Path) -> None:
    """Read once from text and once from what was kept, and print what it took."""
    times = [time.perf_counter()]
    for _ in range(2):
        ratings = load_ratings(path)
        times.append(time.perf_counter())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {
        "seconds": times[1] - times[0],
        "again_seconds": times[2] - times[1],
        "cpu_seconds": time.process_time(),
        "peak_bytes": peak,
        "num_ratings": ratings.num_ratings,
    }
    print(json.dumps(found))


def measure(path: Path) -> dict[str, float]:
    """Measure in a new process with an empty cache."""
    with tempfile.TemporaryDirectory(dir=path.parent) as kept:
        done = subprocess.run(
            [sys.executable, __file__, "--file", str(path)],
            env=os.environ | {"MILLRACE_DATA": kept},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    return json.loads(done.stdout)


def main() -> None:
    """Measure and report."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--small", type=int, default=5_000_000, help="lines")
    options.add_argument("--large", type=int, default=25_000_000, help="lines")
    options.add_argument("--file", type=Path, help="only read this file, in this process")
    args = options.parse_args()
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
                "s to read": spread(column(num_lines, "seconds")),
                "CPU s": spread(column(num_lines, "cpu_seconds")),
                "s to open again": spread(column(num_lines, "again_seconds")),
                "peak memory, GB": f"{max(column(num_lines, 'peak_bytes')) / 1e9:.2f}",
            }
            for num_lines in measured
        ],
        ratio_name=f"time per line at {large:,} lines / at {small:,}",
        ratio=ratio,
        target=1.25,
        at_least=False,
        explanation=(
            f"The slowest reading of {large:,} lines took {slowest:.1f} s (target "
            f"{_MOST_SECONDS}: {'met' if slowest <= _MOST_SECONDS else 'NOT MET'}) and at "
            f"most {peak / 1e9:.2f} GB (target {_MOST_BYTES / 1e9:g}: "
            f"{'met' if peak <= _MOST_BYTES else 'NOT MET'}). Reading is parsing, "
            "numbering users and items, sorting, and writing what is kept. To open it "
            "again, the text and what was kept are hashed; the arrays are mapped."
        ),
        numbers={"measured": {str(n): rounds for n, rounds in measured.items()}},
    )


if __name__ == "__main__":
    main()
