"""What the benchmarks share: a model to train, interleaved timing, a dated report."""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from millrace.bench.facts import session_facts

import millrace as mr
from millrace.report.plots import Plot

_RESULTS = Path(__file__).parent / "results"
_PAUSE = 0.3
"""Seconds between two variants: threads of the one before may wait busily for a while."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What one benchmark found."""

    name: str
    table: Sequence[Mapping[str, str]]
    """Rows, each with the same columns."""
    ratio_name: str
    ratio: float | None
    """None where this machine cannot tell."""
    target: float
    at_least: bool = True
    """Whether the ratio should be at least the target, or at most."""
    explanation: str
    """Where the time goes."""
    numbers: dict[str, Any]
    """What ``--out`` keeps, in SI units."""
    drawing: str = ""
    """An SVG that the report shows."""

    @property
    def verdict(self) -> str:
        """Say the ratio, its target, and whether it is met."""
        bound = f"target at {'least' if self.at_least else 'most'} {self.target:g}"
        if self.ratio is None:
            return f"{self.ratio_name}: not measurable on this machine ({bound})"
        met = self.ratio >= self.target if self.at_least else self.ratio <= self.target
        reached = "met" if met else "NOT MET"
        return f"{self.ratio_name}: {self.ratio:.3g} ({bound}: {reached})"


def parser(description: str | None, *, rounds: int = 7) -> argparse.ArgumentParser:
    """Make a parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, default=rounds, help="(default: %(default)s)")
    made.add_argument("--report", action="store_true", help="write benchmarks/results/…")
    made.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    made.add_argument("--commit", help="for a copy without .git: what was measured")
    return made


def add_sizes(options: argparse.ArgumentParser, sizes: Mapping[str, int]) -> None:
    """Add an option for every size, with its default for this machine."""
    for name, value in sizes.items():
        option = f"--{name.replace('_', '-')}"
        options.add_argument(option, type=int, default=value, help="(default: %(default)s)")


def on_gpu() -> bool:
    """Tell which defaults of size apply."""
    return jax.default_backend() != "cpu"


def init_mlp(sizes: Sequence[int]) -> list[np.ndarray]:
    """Make weights for dense layers of these sizes; all layers of a shape are alike."""
    drawn = {
        shape: np.random.default_rng(0).standard_normal(shape, np.float32)
        for shape in set(itertools.pairwise(sizes))
    }
    return [
        drawn[shape] * np.float32(shape[0] ** -0.5) for shape in itertools.pairwise(sizes)
    ]


def mlp_loss(params: Any, model_state: Any, batch: Any, key: Any) -> Any:
    """Regress batch["y"] on batch["x"], which may be of any numeric type."""
    del key
    hidden = batch["x"].astype(jnp.float32)
    for weights in params[:-1]:
        hidden = jax.nn.relu(hidden @ weights)
    return jnp.mean((hidden @ params[-1] - batch["y"]) ** 2), (model_state, {})


def mlp_stream(micro_batch: int, features: int, outputs: int) -> mr.Stream:
    """Shuffle samples of eight-bit features; 32 batches make an epoch."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2, (32 * micro_batch, features), np.uint8)
    y = rng.standard_normal((32 * micro_batch, outputs), np.float32)
    return mr.Stream(mr.ArraySource({"x": x, "y": y}), micro_batch)


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Time one call, from when its arguments are there until its results are."""
    jax.block_until_ready(arguments)
    started = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - started


def interleave(
    variants: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Measure the variants in turn, round after round; the first round is dropped.

    Each value goes to standard error as it comes: a run that is cut off has said something.
    """
    measured: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, measure in variants.items():
            time.sleep(_PAUSE)
            value = measure()
            print(f"round {number} of {rounds}: {name}: {value:.6g}", file=sys.stderr)
            if number:
                measured[name].append(value)
    return measured


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the rounds' own ratios: drift of the machine cancels."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """Write a median with the lowest and highest value."""
    shown = [f"{scale * v:.{digits}f}" for v in (min(values), max(values))]
    return f"{scale * statistics.median(values):.{digits}f} ({' to '.join(shown)})"


def publish(
    result: Result, args: argparse.Namespace, measured_on: Mapping[str, str] | None = None
) -> None:
    """Print the result; write the report and the numbers if asked for.

    Args:
        result: What was found.
        args: Of ``parser``.
        measured_on: Facts that replace this machine's, where another one did the work.
    """
    table = "\n".join(table_lines(result.table))
    print(f"{table}\n\n{result.verdict}\n\n{result.explanation}")
    facts = _facts(args.commit)
    if measured_on:
        facts = {**facts, "hardware": measured_on["device"], **measured_on}
    if args.report:
        device = facts["device"].replace(" ", "-")
        path = _RESULTS / f"{facts['date']}-{result.name}-{device}.md"
        path.parent.mkdir(exist_ok=True)
        text = _markdown(result, facts, table)
        if result.drawing:
            drawn = Plot(result.name, result.drawing).save(path.with_suffix(".svg"))
            text += f"\n![{result.name}]({drawn.name})\n"
        path.write_text(text)
        print(f"\nwritten to {path}")
    if args.out:
        kept = facts | {"ratio": result.ratio, "target": result.target} | result.numbers
        args.out.write_text(json.dumps(kept, indent=1) + "\n")


def table_lines(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a Markdown table of these rows."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = [
        {name: name for name in widths},
        {n: "-" * w for n, w in widths.items()},
        *rows,
    ]
    return [
        f"| {' | '.join(line[name].ljust(width) for name, width in widths.items())} |"
        for line in lines
    ]


def _markdown(result: Result, facts: dict[str, str], table: str) -> str:
    shown = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return (
        f"# {result.name} on {facts['device']}\n\n{shown}\n\n{table}\n\n"
        f"**{result.verdict}**\n\n{result.explanation}\n"
    )


def _facts(commit: str | None) -> dict[str, str]:
    facts = session_facts(jax.devices()[0], commit)
    return facts | {"command": " ".join(["python", *sys.argv])}
