"""``millrace schedule``: show a pipeline's timetable, its time and its memory."""

from rich.console import Console

from millrace.commands.schedule_options import ScheduleConfig
from millrace.config import writing
from millrace.drawing.quantities import (
    FORWARD_PASSES,
    count,
    percent,
    show_bytes,
    unit_for,
)
from millrace.drawing.timeline_text import print_timeline
from millrace.drawing.timelines import draw_timelines
from millrace.schedule.simulate import Simulation, simulate
from millrace.schedule.table import Table, build_table, peak_live


def show_schedule(config: ScheduleConfig) -> None:
    """Print what the devices of a pipeline do when, and draw it if asked to."""
    table = build_table(
        config.schedule,
        config.layout,
        config.num_micro_batches,
        training=not config.inference,
    )
    simulation = simulate(table, config.costs, config.link, execution=config.execution)
    facts = _facts(config, table, simulation)
    if config.out is not None:
        with writing(config.out):
            draw_timelines(
                [("", simulation.timeline)],
                config.out,
                title=_title(config, table),
                subtitle=f"{_subtitle(config)}; {facts['time']}",
                facts=facts,
                unit=None if config.stage_times else FORWARD_PASSES,
            )
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(_title(config, table))
    console.print(_subtitle(config))
    print_timeline(simulation.timeline, console, width=console.width)
    width = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"{name:<{width}}  {value}")
    if config.out is not None:
        console.print(f"{'drawing':<{width}}  {config.out}")


def _title(config: ScheduleConfig, table: Table) -> str:
    stages = table.stages
    shape = ", ".join(str(len(group)) for group in stages.groups)
    at = f" (side by side: {shape})" if stages.num_positions < stages.num_stages else ""
    what = "of inference" if config.inference else "per weight update"
    return (
        f"{table.schedule.capitalize()}: {count(stages.num_stages, 'stage')}{at} on "
        f"{count(stages.num_devices, 'device')}, "
        f"{count(table.num_micro_batches, 'micro-batch')} {what}"
    )


def _subtitle(config: ScheduleConfig) -> str:
    passes = "forward passes only"
    if not config.inference:
        passes = f"backward {config.backward_ratio:g} x forward"
    if config.recomputation:
        passes += " and recomputation"
    together = {
        "ticks": "at each tick, devices wait for the slowest",
        "free": "each device begins as soon as its inputs have arrived",
    }
    return f"{passes}; {together[config.execution]}"


def _facts(config: ScheduleConfig, table: Table, simulation: Simulation) -> dict[str, str]:
    unit = unit_for(simulation.seconds) if config.stage_times else FORWARD_PASSES
    facts = {
        "time": f"{unit.show(simulation.seconds)}, of which the busiest device works "
        f"{max(simulation.busy_seconds) * unit.per_second:.4g}",
        "idle": f"{percent(simulation.bubble_fraction)} of the devices' time",
    }
    if not config.inference:
        facts["held at most"] = (
            f"{', '.join(map(str, peak_live(table)))} micro-batches, by stage"
        )
    if any(simulation.peak_bytes):
        sizes = ", ".join(map(show_bytes, simulation.peak_bytes))
        facts["activations"] = f"{sizes} at most, by device"
    if config.micro_batch_size is not None:
        facts["throughput"] = _throughput(config, simulation)
    return facts


def _throughput(config: ScheduleConfig, simulation: Simulation) -> str:
    samples = config.micro_batch_size or 1
    samples *= config.num_micro_batches * config.num_replicas
    num_devices = config.num_replicas * config.layout.num_devices
    shares = f"{count(config.num_replicas, 'replica')} on {count(num_devices, 'device')}"
    return f"{samples / simulation.seconds:,.0f} samples/s with {shares}"
