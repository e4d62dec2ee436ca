"""``millrace vcd train``: train a model, then estimate its log-likelihood."""

import contextlib
import json
import statistics
from typing import Any

import jax

from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.data import ImageSplits, ShuffledIndices, load_images
from millrace.apps.vcd.evaluate import chosen_devices, measure
from millrace.apps.vcd.monitoring import Monitor
from millrace.apps.vcd.predictor import ELBO
from millrace.apps.vcd.program import build_program, init_state
from millrace.checkpoint.store import Checkpoints
from millrace.config import replace_options
from millrace.distributed import coordination
from millrace.distributed.signals import INTERRUPTED
from millrace.feeds.infeed import Infeed
from millrace.loop.event_schedule import EventSchedule, schedule_events
from millrace.nn.layers import num_parameters
from millrace.run.run import Run, run_command


class RepeatFailed(RuntimeError):
    """One of the repeats of a run failed."""


def train(config: VcdConfig, run: Run) -> None:
    """Train and test a model; results go to the run directory."""
    if config.workflow.repeats > 1:
        return _train_repeatedly(config, run)
    with chosen_devices(config.devices) as devices:
        images = load_images(config.data, num_validation=config.workflow.num_held_out)
        schedule = build_schedule(config, len(images.training))
        program = build_program(config, images.training, devices)
        params, model_state = init_state(config, images.training)
        _describe(config, run, program.devices, images, params, schedule)
        # The images are constants of the program; the infeed only selects them by index.
        batch_size = config.plan.batching.samples_per_step
        batches = ShuffledIndices(len(images.training), batch_size, seed=config.run.seed)
        with _open_checkpoints(config, run) as checkpoints:
            state = run.train(
                program,
                program.init(params, model_state, seed=config.run.seed),
                Infeed(batches),
                schedule,
                validate=Monitor(config, images, program.devices, run.directory.path),
                checkpoints=checkpoints,
                # That of vcd has a gradient, but hardly a meaning.
                loss_falls=config.model.resolved_objective != "vcd",
            )
        if run.summary["status"] == "completed":
            _test(config, run, images, program.unpack_state(state).params)


def build_schedule(config: VcdConfig, num_samples: int) -> EventSchedule:
    """Return the schedule of the run, in whole updates."""
    return schedule_events(
        updates_per_epoch=config.plan.batching.updates_per_epoch(num_samples),
        num_epochs=config.training.num_epochs,
        events_per_epoch=config.events_per_epoch,
        updates_per_execution=config.plan.updates_per_execution,
    )


def _describe(
    config: VcdConfig,
    run: Run,
    devices: list[Any],
    images: ImageSplits,
    params: Any,
    schedule: EventSchedule,
) -> None:
    model = config.model
    objective = model.resolved_objective
    chains = (
        f"{model.num_burn_in_steps} + {model.num_hmc_steps} HMC steps of "
        f"{model.num_leapfrog_steps} leapfrog steps"
    )
    run.describe(
        devices,
        config.plan,
        schedule,
        model=f"z of {model.z_dim} dims, {num_parameters(params):,} parameters",
        objective=objective if objective == "standard_kl" else f"{objective}, {chains}",
        dataset=images.describe(),
        optimizer=_describe_optimizer(config),
    )
    if objective != model.objective:
        run.console.warning(
            f"There are no HMC steps, so this trains a plain VAE (standard_kl) instead of "
            f"{model.objective}."
        )


def _describe_optimizer(config: VcdConfig) -> str:
    """Return the optimizer and the learning rates at the start."""
    training = config.training
    rates = training.learning_rates(config.plan.batching.global_batch_size)
    return (
        f"rmsprop, learning rate {rates['decoder']:g} (decoder), "
        f"{rates['encoder/mean']:g} (encoder mean) and {rates['encoder/std']:g} (encoder "
        f"std), x {training.learning_rate_decay:g} in steps"
    )


def _open_checkpoints(
    config: VcdConfig, run: Run
) -> contextlib.AbstractContextManager[Checkpoints | None]:
    if not config.workflow.checkpoints:
        run.track_best(ELBO)
        return contextlib.nullcontext()
    return run.checkpoints(best=ELBO, keep=config.run.keep_checkpoints)


def _test(config: VcdConfig, run: Run, images: ImageSplits, params: Any) -> None:
    """Estimate the log-likelihoods of the test and validation images."""
    if not coordination.is_first():
        return  # one device is enough, and only the first process writes results
    params = jax.device_put(jax.device_get(params))  # from all replicas to one device
    splits = {
        "test": images.test if config.workflow.testing else None,
        "validation": images.validation,
    }
    for split, split_images in splits.items():
        if split_images is None:
            continue
        run.summary["status"] = "failed"  # until this is done
        result = measure(
            params, split_images, config.likelihood, config.run.seed, run, split
        )
        run.summary["metrics"] |= result.metrics(split)
        run.summary["status"] = "completed"


def _train_repeatedly(config: VcdConfig, run: Run) -> None:
    """Train with one seed after the other, each in its own run directory."""
    results: list[dict[str, float]] = []
    for number in range(config.workflow.repeats):
        path = run.directory.home / f"repeat-{number}"
        own = replace_options(
            config,
            repeats=1,
            seed=config.run.seed + number,
            run_dir=path,
            results_dir=None,
            resume=config.run.resume and (path / "config.yml").exists(),
            virtual_devices=None,  # this process already has them
        )
        command = f"{run.summary['command']} (repeat {number})"
        status = run_command(train, own, command="vcd-train", command_line=command)
        if status == INTERRUPTED:
            run.summary["status"] = "interrupted"
            return
        if status:
            raise RepeatFailed(f"Repeat {number} failed; partial results are in {path}.")
        summary = json.loads((path / "summary.json").read_text())
        run.summary["device"] = summary["device"]
        results.append(summary["metrics"])
        _summarize_repeats(run, results)
    run.summary["status"] = "completed"


def _summarize_repeats(run: Run, results: list[dict[str, float]]) -> None:
    """Write means and standard deviations over the repeats so far to the summary."""
    run.summary["repeats"] = results
    names = [name for name, value in results[0].items() if isinstance(value, float)]
    for name in names:
        values = [metrics[name] for metrics in results]
        run.summary["metrics"][name] = statistics.fmean(values)
        if len(values) > 1:
            run.summary["metrics"][f"{name}_std"] = statistics.stdev(values)
