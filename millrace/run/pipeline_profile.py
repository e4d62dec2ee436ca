"""Measure one update of a pipeline and compare it with the simulated schedule."""

import operator
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from millrace.config import ConfigurationError
from millrace.drawing.timelines import draw_timelines, timelines_svg
from millrace.feeds.infeed import Infeed
from millrace.program.pipeline_program import PipelineProgram
from millrace.program.step import TrainState
from millrace.program.training import TrainingProgram
from millrace.report.sections import SvgFigure
from millrace.schedule.simulate import Costs, Simulation, simulate
from millrace.schedule.table import Table
from millrace.schedule.timeline import (
    Span,
    Timeline,
    device_uses,
    idle_share,
    time_range,
)


class PipelineProfile(NamedTuple):
    """The measured and the predicted timeline of one update."""

    measured: list[Span]
    predicted: Simulation
    costs: Costs

    @property
    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` reports about the pipeline."""
        start, end = time_range(self.measured)
        return {
            "forward_seconds": list(self.costs.forward),
            "backward_seconds": list(self.costs.backward),
            "measured_seconds": end - start,
            "measured_idle": idle_share(device_uses(self.measured)),
            "predicted_seconds": self.predicted.seconds,
            "predicted_idle": self.predicted.bubble_fraction,
        }


def profile_pipeline(
    program: TrainingProgram, state: TrainState, infeed: Infeed
) -> PipelineProfile:
    """Time the passes of one update on the next element; the state does not change."""
    if not isinstance(program, PipelineProgram):
        raise ConfigurationError(
            "profile_pipeline needs a pipeline over several devices; this plan has none, "
            "or has all of its stages on one device."
        )
    count = program.plan.batching.gradient_accumulation_count
    chunk = jax.tree.map(lambda x: np.stack([np.asarray(x)] * count), infeed.peek())
    measured = program.measure_spans(state, jax.device_put(chunk, program.chunk_sharding))
    costs = _median_costs(program.table, measured)
    return PipelineProfile(measured, simulate(program.table, costs), costs)


def draw_profile(profile: PipelineProfile, path: Path, title: str) -> None:
    """Draw the measured timeline below the predicted one."""
    draw_timelines(_label_timelines(profile), path, title=title)


def profile_section(profile: PipelineProfile, title: str) -> SvgFigure:
    """Return the drawing of ``draw_profile`` as a section of the report."""
    svg = timelines_svg(_label_timelines(profile), title=title)
    return SvgFigure(title="Pipeline", svg=svg)


def _label_timelines(profile: PipelineProfile) -> list[tuple[str, Timeline]]:
    return [
        ("predicted from median stage times", profile.predicted.timeline),
        ("measured", profile.measured),
    ]


def _median_costs(table: Table, measured: Sequence[Span]) -> Costs:
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for span in measured:
        seconds[span.kind, span.stage].append(span.end - span.start)
    stages = range(table.stages.num_stages)
    forward, backward, weights = (
        tuple(statistics.median(seconds[kind, stage] or [0.0]) for stage in stages)
        for kind in ("forward", "backward", "weights")
    )
    whole = tuple(map(operator.add, backward, weights))
    return Costs(forward=forward, backward=whole, weight_gradient=weights)
