"""Time and memory to read a text file of ratings, at two sizes, and to open it again.

Lines are user, tab, item, tab, rating in random order, with the numbers of users and items
of MovieLens 25M. Each measurement is a new process with an empty cache, which then opens
the file again from the cache.

``--texts`` instead compares integer identifiers with text ones, alternating: ``u138262``
with ``B000032569``, and identifiers of 28 characters, all with the same ratings; with
polars, which reads and numbers the short text identifiers, if it is installed.

Target: the time per line grows by at most a quarter from the small to the large file; text
identifiers take at most 1.5 times the CPU time of integers.
"""

import importlib.util
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

from millrace.data.ratings.identifiers import CodedIds
from millrace.data.ratings.reading import STARS, load_ratings, read_events
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


def write_texts(folder: Path, num_lines: int) -> dict[str, Path]:
    """Write the same random ratings with integer and with text identifiers."""
    generator = np.random.default_rng(0)
    users, items = (generator.integers(0, n, num_lines, np.int32) for n in (_USERS, _ITEMS))
    stars = generator.integers(1, 11, num_lines, np.int8) / np.float32(2)
    letters = np.array(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"))
    long = ["".join(row) for row in letters[generator.integers(0, 32, (_USERS, 28))]]
    asins = np.array([f"B{n:09}" for n in range(1, _ITEMS + 1)])
    ids = {
        "integers": (np.arange(1, _USERS + 1), np.arange(1, _ITEMS + 1)),
        "text": (np.array([f"u{n}" for n in range(1, _USERS + 1)]), asins),
        "long text": (np.array(long), asins),
    }
    paths = {name: folder / f"{name}.txt" for name in ids}
    for name, (user_ids, item_ids) in ids.items():
        coded = CodedIds(user_ids, users), CodedIds(item_ids, items)
        write_ratings(paths[name], *coded, stars, np.arange(num_lines))
    return paths


def measure_parsing_here(path: Path) -> None:
    """Parse lines and number identifiers; print the time as JSON."""
    before = time.process_time()
    read_events(path, STARS)
    print(json.dumps({"cpu_seconds": time.process_time() - before}))


def measure_polars_here(path: Path) -> None:
    """Read and number identifiers with polars; print the time as JSON."""
    import polars

    before = time.process_time()
    frame = polars.read_csv(path, separator="\t", has_header=False)
    codes = [frame[n].cast(polars.Categorical).to_physical() for n in frame.columns[:2]]
    assert len(codes[0]) == len(frame)
    print(json.dumps({"cpu_seconds": time.process_time() - before}))


def compare_texts(num_lines: int, rounds: int) -> Result:
    """Measure integer and text identifiers in turn."""
    with tempfile.TemporaryDirectory(prefix="ratings-reading-") as folder:
        paths = write_texts(Path(folder), num_lines)
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        measured: dict[str, list[float]] = {name: [] for name in paths}
        has_polars = importlib.util.find_spec("polars") is not None
        for _ in range(rounds):
            for name, path in paths.items():
                measured[name].append(measure(path, "--parse")["cpu_seconds"])
            if has_polars:
                seconds = measure(paths["text"], "--polars")["cpu_seconds"]
                measured.setdefault("text, polars", []).append(seconds)
    ratio = statistics.median(measured["text"]) / statistics.median(measured["integers"])
    return Result(
        name="ratings_reading_texts",
        table=[
            {
                "identifiers": name,
                "text, MB": f"{sizes.get(name, sizes['text']) / 1e6:.0f}",
                "CPU s": format_spread(seconds),
            }
            for name, seconds in measured.items()
        ],
        ratio_name=f"CPU time of {num_lines:,} lines with text / with integers",
        ratio=ratio,
        target=1.5,
        at_least=False,
        explanation=(
            "CPU time, user and system, to parse the lines and number users and items, "
            "without sorting them into a matrix. polars reads the same file and numbers "
            "users and items, in any order, and does not check the ratings."
        ),
        numbers={"measured": measured},
    )


def measure_here(path: Path) -> None:
    """Read once from text and once from the cache; print time and memory as JSON."""
    times = [time.perf_counter()]
    for _ in range(2):
        ratings = load_ratings(path)
        times.append(time.perf_counter())
    cpu_seconds = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = {
        "seconds": times[1] - times[0],
        "again_seconds": times[2] - times[1],
        "cpu_seconds": cpu_seconds,
        "peak_bytes": peak,
        "num_ratings": ratings.num_ratings,
    }
    print(json.dumps(figures))


def measure(path: Path, *options: str) -> dict[str, float]:
    """Measure in a new process with an empty cache; return the figures."""
    with tempfile.TemporaryDirectory(dir=path.parent) as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--file", str(path), *options],
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
    parser.add_argument("--parse", action="store_true", help="only parse it")
    parser.add_argument("--polars", action="store_true", help="read it with polars")
    parser.add_argument(
        "--texts", type=int, nargs="?", const=3_000_000, help="compare this many lines"
    )
    args = parser.parse_args()
    if args.parse:
        return measure_parsing_here(args.file)
    if args.polars:
        return measure_polars_here(args.file)
    if args.texts:
        return publish(compare_texts(args.texts, args.rounds), args)
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
