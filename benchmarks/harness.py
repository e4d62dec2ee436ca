"""Options, interleaved timing and dated reports for the scripts in this folder.

The scripts measure what ``millrace bench`` does not: the cost of a feature, or accuracy on
real data. Speed of the applications, also compared with PyTorch, is in its spec.
"""

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

import millrace as mr
from millrace.bench.measuring import collect_facts
from millrace.bench.reporting import format_table
from millrace.report.plots import Plot

_RESULTS = Path(__file__).parent / "results"
_PAUSE = 0.3
"""Seconds between variants: threads of the previous one may still spin."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one script."""

    name: str
    table: Sequence[Mapping[str, str]]
    """Rows, all with the same columns."""
    ratio_name: str
    ratio: float | None
    """None if this machine cannot measure it."""
    target: float
    at_least: bool = True
    """Whether the target is a lower bound; otherwise it is an upper bound."""
    explanation: str
    """Where the time goes."""
    numbers: dict[str, Any]
    """Raw numbers for ``--out``, in SI units."""
    drawing: str = ""
    """SVG to show in the report."""

    @property
    def verdict(self) -> str:
        """The ratio, its target, and whether it is met."""
        bound = f"target at {'least' if self.at_least else 'most'} {self.target:g}"
        if self.ratio is None:
            return f"{self.ratio_name}: not measurable on this machine ({bound})"
        met = self.ratio >= self.target if self.at_least else self.ratio <= self.target
        return f"{self.ratio_name}: {self.ratio:.3g} ({bound}: {format_met(met)})"


def format_met(met: bool) -> str:
    """Return whether a target was met, in words."""
    return "met" if met else "NOT MET"


# Options


def build_parser(description: str | None, *, rounds: int = 7) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="(default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="write benchmarks/results/…")
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    parser.add_argument("--commit", help="commit to report if there is no .git")
    return parser


def add_sizes(parser: argparse.ArgumentParser, sizes: Mapping[str, int]) -> None:
    """Add an option for every size; `sizes` has the defaults."""
    for name, value in sizes.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=value, help="(default: %(default)s)")


def on_gpu() -> bool:
    """Whether the default device is an accelerator."""
    return jax.default_backend() != "cpu"


# A model to train


def init_mlp(sizes: Sequence[int]) -> list[np.ndarray]:
    """Return weights for dense layers of these sizes; equal shapes get equal weights."""
    drawn = {
        shape: np.random.default_rng(0).standard_normal(shape, np.float32)
        for shape in set(itertools.pairwise(sizes))
    }
    return [
        drawn[shape] * np.float32(shape[0] ** -0.5) for shape in itertools.pairwise(sizes)
    ]


def mlp_loss(params: Any, model_state: Any, batch: Any, key: Any) -> Any:
    """Regress batch["y"] on batch["x"], which may have any numeric type."""
    del key
    hidden = batch["x"].astype(jnp.float32)
    for weights in params[:-1]:
        hidden = jax.nn.relu(hidden @ weights)
    return jnp.mean((hidden @ params[-1] - batch["y"]) ** 2), (model_state, {})


def build_mlp_stream(micro_batch: int, features: int, outputs: int) -> mr.Stream:
    """Return a shuffled stream of 8-bit features with 32 batches per epoch."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2, (32 * micro_batch, features), np.uint8)
    y = rng.standard_normal((32 * micro_batch, outputs), np.float32)
    return mr.Stream(mr.ArraySource({"x": x, "y": y}), micro_batch)


# Timing


def time_call(function: Callable[..., Any], *arguments: Any) -> float:
    """Return the seconds of one call, from ready arguments to ready results."""
    jax.block_until_ready(arguments)
    started = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - started


def interleave(
    variants: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Measure the variants in turn, round after round, and drop the first round.

    Each value is printed to standard error at once, so that an interrupted run is not lost.
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
    """Return the median over rounds of the ratio, which cancels drift of the machine."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


# Report


def format_spread(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """Return a median with the lowest and highest value."""
    bounds = [f"{scale * v:.{digits}f}" for v in (min(values), max(values))]
    return f"{scale * statistics.median(values):.{digits}f} ({' to '.join(bounds)})"


def publish(
    result: Result, args: argparse.Namespace, measured_on: Mapping[str, str] | None = None
) -> None:
    """Print the result, and write the report and the numbers if the options ask for it.

    Args:
        result: The result.
        args: Options of ``build_parser``.
        measured_on: Facts that replace those of this machine if another one measured.
    """
    table = "\n".join(format_table(result.table))
    print(f"{table}\n\n{result.verdict}\n\n{result.explanation}")
    facts = collect_facts(jax.devices()[0], args.commit)
    facts["command"] = " ".join(["python", *sys.argv])
    if measured_on:
        facts = {**facts, "hardware": measured_on["device"], **measured_on}
    if args.report:
        device = facts["device"].replace(" ", "-")
        path = _RESULTS / f"{facts['date']}-{result.name}-{device}.md"
        path.parent.mkdir(exist_ok=True)
        text = _format_markdown(result, facts, table)
        if result.drawing:
            drawing = Plot(result.name, result.drawing).save(path.with_suffix(".svg"))
            text += f"\n![{result.name}]({drawing.name})\n"
        path.write_text(text)
        print(f"\nreport  {path}")
    if args.out:
        numbers = facts | {"ratio": result.ratio, "target": result.target} | result.numbers
        args.out.write_text(json.dumps(numbers, indent=1) + "\n")


def _format_markdown(result: Result, facts: dict[str, str], table: str) -> str:
    lines = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return (
        f"# {result.name} on {facts['device']}\n\n{lines}\n\n{table}\n\n"
        f"**{result.verdict}**\n\n{result.explanation}\n"
    )
