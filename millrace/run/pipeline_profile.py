"""A pipeline as it ran, beside the prediction from its own stages' times."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from millrace.config import ConfigurationError
from millrace.drawing.timelines import draw_timelines, themed_svg
from millrace.feeds.infeed import Infeed
from millrace.program.pipeline_program import PipelineProgram
from millrace.program.step import TrainState
from millrace.program.training import TrainingProgram
from millrace.report.sections import Drawing
from millrace.schedule.costs import Costs
from millrace.schedule.simulate import Simulation, simulate
from millrace.schedule.table import Table
from millrace.schedule.timeline import (
    Span,
    Timeline,
    begin_and_end,
    device_uses,
    idle_share,
)


class PipelineProfile(NamedTuple):
    """What one update through a pipeline looked like."""

    measured: list[Span]
    predicted: Simulation
    costs: Costs

    @property
    def facts(self) -> dict[str, Any]:
        """The figures that a summary reports."""
        start, end = begin_and_end(self.measured)
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
    """Watch the passes of one update on the infeed's next element; nothing changes."""
    if not isinstance(program, PipelineProgram):
        raise ConfigurationError(
            "profile_pipeline draws what devices do side by side; this plan has no "
            "pipeline, or has all of its stages on one device."
        )
    count = program.plan.batching.gradient_accumulation_count
    chunk = jax.tree.map(lambda x: np.stack([np.asarray(x)] * count), infeed.peek())
    measured = program.measure_spans(state, jax.device_put(chunk, program.chunk_sharding))
    costs = _costs(program.table, measured)
    return PipelineProfile(measured, simulate(program.table, costs), costs)


def draw_profile(profile: PipelineProfile, path: Path, title: str) -> None:
    """Draw the measured timeline below the predicted one."""
    draw_timelines(_timelines(profile), path, title=title)


def profile_part(profile: PipelineProfile, title: str) -> Drawing:
    """Return the same drawing for the report."""
    svg, style = themed_svg(_timelines(profile), title=title, within=".pipeline")
    return Drawing(title="Pipeline", svg=svg, style=style, within="pipeline")


def _timelines(profile: PipelineProfile) -> list[tuple[str, Timeline]]:
    return [
        ("predicted from the stages' median times", profile.predicted.timeline),
        ("measured", profile.measured),
    ]


def _costs(table: Table, measured: Sequence[Span]) -> Costs:
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for span in measured:
        seconds[span.kind, span.stage].append(span.end - span.start)
    stages = range(table.stages.num_stages)
    return Costs(
        forward=tuple(statistics.median(seconds["forward", s]) for s in stages),
        backward=tuple(statistics.median(seconds["backward", s]) for s in stages),
    )
