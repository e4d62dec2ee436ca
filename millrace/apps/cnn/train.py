"""Train a CNN, validate it, or both. Read from top to bottom: this is the application."""

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn import data
from millrace.apps.cnn.averaging import average_checkpoints, warnings_about
from millrace.apps.cnn.config import CnnConfig, device, ipu
from millrace.apps.cnn.data import ImageData
from millrace.apps.cnn.evaluate import (
    ACCURACY,
    Validator,
    delete_checkpoints,
    find_checkpoints,
    report_target,
    time_span,
    validate_checkpoints,
)
from millrace.apps.cnn.feeding import announce, corrupt_samples_reported, open_infeed
from millrace.apps.cnn.memory import check_memory
from millrace.apps.cnn.mistakes import report_predictions
from millrace.apps.cnn.models.pretrained import fit_pretrained, read_pretrained
from millrace.apps.cnn.program import metrics_of, model_of, program_of, warnings_about_rate
from millrace.checkpoint.store import checkpoints_in, restore_part
from millrace.config import ConfigurationError
from millrace.feeds.infeed import Infeed
from millrace.loop.event_schedule import EventSchedule, schedule_events
from millrace.loop.staging import compile_calls
from millrace.nn.layers import Layer, Tree, init_layers, init_shapes, num_parameters
from millrace.program.compiling import compiling
from millrace.program.memory import peak_bytes
from millrace.program.step import TrainState, Weights
from millrace.program.training import TrainingProgram
from millrace.report.sections import save_part
from millrace.run.pipeline_profile import draw_profile, profile_part, profile_pipeline
from millrace.run.run import Run


def train(config: CnnConfig, run: Run) -> None:
    """Train and validate as `config` says; results go to the run directory."""
    if _cleaned_up(config, run):
        return
    pretrained = read_pretrained(config.pretrained) if config.pretrained else {}
    with compiling(device.compiler_options(config)) as programs:
        images = data.load(config)
        model = model_of(config, images)
        validator = None
        if config.validation:
            validator = Validator(metrics_of(model, images), config, images.validation)
        if not config.training:
            assert validator is not None, "WorkflowOptions sees to it"
            with corrupt_samples_reported(images, run):
                return _validate_only(config, run, images, model, validator)
        schedule = plan_events(config, len(images.training))
        program = program_of(config, images, model, schedule)
        params, model_state, notes = _first_weights(config, images, model, pretrained)
        _describe(config, run, program.devices, images, params, schedule)
        for note in notes:
            run.console.line(note)
        state = program.init(params, model_state, seed=config.seed)
        batches = _batches_per_epoch(config, schedule, len(images.training))
        infeed = open_infeed(images, config, batches)
        fits = functools.partial(
            check_memory, config, images, model, (params, model_state), schedule
        )
        if config.compile_only:
            run.console.status("compiling")
            with infeed:
                compile_calls(program, state, infeed, schedule.updates_per_execution)
            fits(peak_bytes(programs), program.devices[0])
            return _report_compilation(run, program, peak_bytes(programs))
        if config.profile_pipeline:
            _profile_pipeline(config, run, program, state, infeed)
        with corrupt_samples_reported(images, run):
            state = _train(
                config,
                run,
                program,
                state,
                infeed,
                schedule,
                validator,
                lambda: fits(peak_bytes(programs), program.devices[0]),
            )
            if run.summary["status"] == "completed":
                report_predictions(config, run, images, model, program.unpack_state(state))


def _first_weights(
    config: CnnConfig, images: ImageData, model: list[Layer], pretrained: Tree
) -> tuple[Tree, Tree, list[str]]:
    """Return weights and model state to start from, and what to say of them."""
    example = np.zeros((1, *images.image_shape), np.float32)
    params, model_state = init_layers(model, jax.random.key(config.seed), example)
    if config.pretrained is None:
        return params, model_state, []
    return fit_pretrained(config.pretrained, pretrained, params, model_state)


def _train(
    config: CnnConfig,
    run: Run,
    program: TrainingProgram,
    state: TrainState,
    infeed: Infeed,
    schedule: EventSchedule,
    validator: Validator | None,
    when_compiled: Callable[[], None],
) -> TrainState:
    folder = _checkpoint_folder(config, run)
    whole = program.unpack_state(state)
    like = Weights(*_shapes((whole.params, whole.model_state)))
    # To be validated or averaged afterwards, every checkpoint must still be there.
    all_needed = config.validates == "every" or config.averages_weights
    keep = sys.maxsize if all_needed else config.keep_checkpoints
    opened = run.checkpoints(best=ACCURACY, keep=keep, folder=folder)
    with opened if config.checkpoints else contextlib.nullcontext() as checkpoints:
        state = run.train(
            program,
            state,
            infeed,
            schedule,
            validate=validator if config.validates == "during" else None,
            checkpoints=checkpoints,
            when_compiled=when_compiled,
        )
    if run.summary["status"] != "completed":
        return state
    events = run.directory.read_metrics()
    if validator is not None:
        if config.validates != "during":
            paths = checkpoints_in(folder)[-1 if config.validates == "last" else 0 :]
            events = validate_checkpoints(paths, validator, like, run, run.elapsed)
        run.summary["time_to_train_seconds"] = seconds = _time_to_train(run)
        run.closing_facts["time to train"] = time_span(seconds)
    if config.averages_weights:
        average_checkpoints(config, run, folder, like, validator, run.elapsed)
    report_target(config.target_accuracy, events, run)
    if config.clean_dir:
        delete_checkpoints(folder)
    return state


def _time_to_train(run: Run) -> float:
    """Return the run's clock, or what it showed at the end if that was before a resume."""
    before = run.summary_before()
    if any(before.get(name) != run.summary[name] for name in ("status", "updates")):
        return run.elapsed()
    return before.get("time_to_train_seconds", run.elapsed())


def _profile_pipeline(
    config: CnnConfig, run: Run, program: TrainingProgram, state: TrainState, infeed: Infeed
) -> None:
    run.console.status("watching the pipeline")
    profile = profile_pipeline(program, state, infeed)
    path = run.directory.path / "pipeline.html"
    title = f"{config.model_title}, {config.pipeline_schedule}"
    draw_profile(profile, path, title)
    save_part(run.directory.path, "0-pipeline", profile_part(profile, title))
    run.summary["pipeline"] = facts = profile.facts
    run.closing_facts["pipeline"] = (
        f"an update took {1e3 * facts['measured_seconds']:.1f} ms in the stages, idle "
        f"{facts['measured_idle']:.0%} of it; predicted "
        f"{1e3 * facts['predicted_seconds']:.1f} ms and {facts['predicted_idle']:.0%}"
    )


def _validate_only(
    config: CnnConfig, run: Run, images: ImageData, model: list[Layer], validator: Validator
) -> None:
    started = time.perf_counter()
    paths = find_checkpoints(config)
    params, model_state = init_shapes(model, np.zeros((1, *images.image_shape), np.float32))
    weights = jnp.dtype(config.types.weights)
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, weights), params)
    _describe(config, run, validator.devices, images, params, None)
    events = validate_checkpoints(
        paths,
        validator,
        Weights(params, model_state),
        run,
        lambda: time.perf_counter() - started,
    )
    report_target(config.target_accuracy, events, run)
    newest, _ = restore_part(paths[-1], Weights(params, model_state))
    report_predictions(config, run, images, model, newest)
    run.closing_facts["checkpoints"] = f"{len(events)} validated"
    run.summary["status"] = "completed"
    if config.clean_dir:
        delete_checkpoints(paths[0].parent)


def _cleaned_up(config: CnnConfig, run: Run) -> bool:
    """Tell whether the run to resume is over, and clean_dir has left nothing to go on."""
    before = run.summary_before()
    over = config.resume and config.clean_dir and before.get("status") == "completed"
    if over:
        run.console.line("The run is complete, and clean_dir has deleted its checkpoints.")
        run.summary |= before
    return over


def _checkpoint_folder(config: CnnConfig, run: Run) -> Path:
    folder = config.checkpoint_dir or run.directory.checkpoints
    if not config.resume and checkpoints_in(folder):
        raise ConfigurationError(
            f"There are checkpoints of an earlier run in {folder}. Choose another "
            "--checkpoint-dir, or continue that run with --resume."
        )
    return folder


def _describe(
    config: CnnConfig,
    run: Run,
    devices: list[Any],
    images: ImageData,
    params: Any,
    schedule: EventSchedule | None,
) -> None:
    run.describe(
        devices,
        config,
        schedule,
        model=f"{config.model_title}, {num_parameters(params):,} parameters",
        dataset=data.describe(images, config),
    )
    for warn in (warnings_about, warnings_about_rate):
        for warning in warn(config, schedule) if schedule else ():
            run.console.warning(warning)
    announce(images, config, run)
    for line in ipu.lines_about(config):
        run.console.line(line)
    for line in device.lines_about(config, devices[0].platform):
        run.console.line(line)


def _report_compilation(run: Run, program: TrainingProgram, num_bytes: int) -> None:
    run.summary |= {
        "status": "completed",
        "compile_seconds": program.compile_seconds,
        "memory_bytes": num_bytes,
    }
    run.closing_facts["memory"] = f"{num_bytes / 2**20:,.1f} MiB on each device"


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def plan_events(config: CnnConfig, dataset_size: int) -> EventSchedule:
    """Work out the run in whole updates."""
    updates = config.weight_updates_per_epoch
    if updates == -1:
        updates = config.batching.updates_per_epoch(dataset_size)
    return schedule_events(
        updates_per_epoch=updates,
        num_epochs=config.num_epochs,
        events_per_epoch=config.events_per_epoch,
        updates_per_execution=config.updates_per_execution,
        first_epochs={"checkpoint": config.first_ckpt_epoch},
        # As the application that the families come from does it.
        uneven=("log",) if config.is_family else (),
    )


def _batches_per_epoch(
    config: CnnConfig, schedule: EventSchedule, dataset_size: int
) -> int:
    """After how many batches the order is drawn anew: never more than there are."""
    batching = config.batching
    whole = batching.updates_per_epoch(dataset_size)
    updates = min(schedule.updates_per_epoch, whole)
    return updates * batching.gradient_accumulation_count
