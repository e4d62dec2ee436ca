"""``millrace schedule``: show the schedule of a pipeline, its time and its memory."""

from rich.console import Console

from millrace.commands.schedule_options import ScheduleConfig
from millrace.config import writing
from millrace.drawing.timeline_text import print_timeline
from millrace.drawing.timelines import draw_timelines
from millrace.numbers import (
    FORWARD_PASSES,
    choose_time_unit,
    format_bytes,
    format_percent,
    pluralize,
)
from millrace.schedule.simulate import Simulation, simulate
from millrace.schedule.table import Table, build_table, peak_live


def show_schedule(config: ScheduleConfig) -> None:
    """Print the timeline of a pipeline, and draw it if there is a file for it."""
    table = build_table(
        config.schedule,
        config.placement,
        config.num_micro_batches,
        training=not config.inference,
    )
    simulation = simulate(table, config.costs, config.link, execution=config.execution)
    title, subtitle = _title(config, table), _subtitle(config)
    facts = _facts(config, table, simulation)
    if config.out is not None:
        with writing(config.out):
            draw_timelines(
                [("", simulation.timeline)],
                config.out,
                title=title,
                subtitle=f"{subtitle}; {facts['time']}",
                facts=facts,
                unit=None if config.stage_times else FORWARD_PASSES,
            )
        facts["drawing"] = str(config.out)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(title)
    console.print(subtitle)
    print_timeline(simulation.timeline, console, width=console.width)
    width = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"{name:<{width}}  {value}")


def _title(config: ScheduleConfig, table: Table) -> str:
    stages = table.stages
    shape = ", ".join(str(len(group)) for group in stages.groups)
    concurrent = stages.num_positions < stages.num_stages
    per = "of inference" if config.inference else "per weight update"
    return (
        f"{table.schedule.capitalize()}: {pluralize(stages.num_stages, 'stage')}"
        f"{f' (concurrent: {shape})' if concurrent else ''} on "
        f"{pluralize(stages.num_devices, 'device')}, "
        f"{pluralize(table.num_micro_batches, 'micro-batch')} {per}"
    )


def _subtitle(config: ScheduleConfig) -> str:
    passes = "forward passes only"
    if not config.inference:
        passes = f"backward {config.backward_ratio:g} x forward"
    if config.recomputation:
        passes += " and recomputation"
    waiting = {
        "ticks": "at each tick, devices wait for the slowest",
        "free": "each device starts as soon as its inputs have arrived",
    }
    return f"{passes}; {waiting[config.execution]}"


def _facts(config: ScheduleConfig, table: Table, simulation: Simulation) -> dict[str, str]:
    unit = choose_time_unit(simulation.seconds) if config.stage_times else FORWARD_PASSES
    total, busiest = simulation.seconds, max(simulation.busy_seconds) * unit.per_second
    facts = {
        "time": f"{unit.format(total)}; the busiest device works {busiest:.4g}",
        "idle": f"{format_percent(simulation.bubble_fraction)} of device time",
    }
    if not config.inference:
        peaks = ", ".join(map(str, peak_live(table)))
        facts["held at most"] = f"{peaks} micro-batches, by stage"
    if any(simulation.peak_bytes):
        sizes = ", ".join(map(format_bytes, simulation.peak_bytes))
        facts["activations"] = f"at most {sizes}, by device"
    if config.micro_batch_size is not None:
        facts["throughput"] = _throughput(config, simulation)
    return facts


def _throughput(config: ScheduleConfig, simulation: Simulation) -> str:
    samples = config.micro_batch_size or 1
    samples *= config.num_micro_batches * config.num_replicas
    num_devices = config.num_replicas * config.placement.num_devices
    replicas = pluralize(config.num_replicas, "replica")
    return (
        f"{samples / simulation.seconds:,.0f} samples/s with {replicas} on "
        f"{pluralize(num_devices, 'device')}"
    )
