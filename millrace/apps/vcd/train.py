"""Train a VCD model, then measure it. Read from top to bottom: this is the application."""

import contextlib
import dataclasses
import json
import statistics
from typing import Any

import jax

from millrace.apps.vcd import data
from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.data import PictureData
from millrace.apps.vcd.devices import chosen_devices
from millrace.apps.vcd.evaluate import measure
from millrace.apps.vcd.monitoring import ELBO, Watch
from millrace.apps.vcd.program import init, program_of
from millrace.apps.vcd.shuffle import ShuffledIndices
from millrace.distributed import coordination
from millrace.distributed.interrupts import INTERRUPTED
from millrace.feeds.infeed import Infeed
from millrace.loop.event_schedule import EventSchedule, schedule_events
from millrace.nn.layers import num_parameters
from millrace.program.step import TrainState
from millrace.run.run import Run, run_command


class RepeatFailed(RuntimeError):
    """One of the repeats of a run did not come to its end."""


def train(config: VcdConfig, run: Run) -> None:
    """Train and test as `config` says; results go to the run directory."""
    if config.repeats > 1:
        return _repeat(config, run)
    with chosen_devices(config) as devices:
        held_out = config.num_validation if config.validation else 0
        pictures = data.load(config, num_validation=held_out)
        schedule = plan_events(config, len(pictures.training))
        program = program_of(config, pictures.training, devices)
        params, model_state = init(config, pictures.training)
        _describe(config, run, program.devices, pictures, params, schedule)
        state = program.init(params, model_state, seed=config.seed)
        batches = ShuffledIndices(
            len(pictures.training), config.batching.samples_per_step, seed=config.seed
        )
        infeed = Infeed(batches)
        opened = run.checkpoints(best=ELBO, keep=config.keep_checkpoints)
        with opened if config.checkpoints else contextlib.nullcontext() as checkpoints:
            state = run.train(
                program,
                state,
                infeed,
                schedule,
                validate=Watch(config, pictures, program.devices, run.directory.path),
                checkpoints=checkpoints,
            )
        if run.summary["status"] == "completed":
            _measure(config, run, pictures, program.unpack_state(state))


def plan_events(config: VcdConfig, num_samples: int) -> EventSchedule:
    """Work out the run in whole updates."""
    return schedule_events(
        updates_per_epoch=config.batching.updates_per_epoch(num_samples),
        num_epochs=config.num_epochs,
        events_per_epoch=config.events_per_epoch,
        updates_per_execution=config.updates_per_execution,
    )


def _describe(
    config: VcdConfig,
    run: Run,
    devices: list[Any],
    pictures: PictureData,
    params: Any,
    schedule: EventSchedule,
) -> None:
    chains = (
        f"{config.num_burn_in_steps} + {config.num_hmc_steps} HMC steps of "
        f"{config.num_leapfrog_steps} leapfrog steps"
    )
    name = config.resolved_objective
    run.describe(
        devices,
        config,
        schedule,
        model=f"z of {config.z_dim} dims, {num_parameters(params):,} parameters",
        objective=name if name == "standard_kl" else f"{name}, {chains}",
        dataset=pictures.describe(),
    )
    if name != config.objective:
        run.console.warning(
            f"There are no HMC steps: instead of {config.objective} this is the plain VAE "
            "(standard_kl)."
        )


def _measure(config: VcdConfig, run: Run, pictures: PictureData, state: TrainState) -> None:
    """Estimate log-likelihoods of what was not trained on."""
    if not coordination.is_first():
        return  # on one device, and the result is the first process's to write
    params = jax.device_put(jax.device_get(state.params))  # of many replicas' copies, one
    wanted = {
        "test": pictures.test if config.testing else None,
        "validation": pictures.validation,
    }
    for split, some in wanted.items():
        if some is None:
            continue
        run.summary["status"] = "failed"  # until it is done
        found = measure(params, some, config, config.seed, run, split)
        run.summary["metrics"] |= found.metrics(split)
        run.summary["status"] = "completed"


def _repeat(config: VcdConfig, run: Run) -> None:
    """Run with one seed after the other, each in a directory of its own."""
    found: list[dict[str, float]] = []
    for number in range(config.repeats):
        path = run.directory.home / f"repeat-{number}"
        again = config.resume and (path / "config.yml").exists()
        own = dataclasses.replace(
            config,
            repeats=1,
            seed=config.seed + number,
            run_dir=path,
            results_dir=None,
            resume=again,
            virtual_devices=None,  # this process has them already
        )
        command = f"{run.summary['command']} (repeat {number})"
        status = run_command(train, own, command="vcd-train", command_line=command)
        if status == INTERRUPTED:
            run.summary["status"] = "interrupted"
            return
        if status:
            raise RepeatFailed(f"Repeat {number} failed; what there is lies in {path}.")
        summary = json.loads((path / "summary.json").read_text())
        run.summary["device"] = summary["device"]
        found.append(summary["metrics"])
        _report_repeats(run, found)
    run.summary["status"] = "completed"


def _report_repeats(run: Run, found: list[dict[str, float]]) -> None:
    """Report means and standard deviations of the metrics over the repeats so far."""
    run.summary["repeats"] = found
    names = [name for name, value in found[0].items() if isinstance(value, float)]
    for name in names:
        values = [metrics[name] for metrics in found]
        run.summary["metrics"][name] = statistics.fmean(values)
        if len(values) > 1:
            run.summary["metrics"][f"{name}_std"] = statistics.stdev(values)
