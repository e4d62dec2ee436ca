"""Train a CNN, validate it, or both. Read this file from top to bottom."""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.data import ImageData
from millrace.apps.cnn.evaluate import (
    ACCURACY,
    Validator,
    average_checkpoints,
    averaging_warnings,
    delete_checkpoints,
    find_checkpoints,
    report_target,
    validate_checkpoints,
)
from millrace.apps.cnn.learning import (
    fine_tuning_rows,
    learning_rate_warnings,
    learning_rows,
)
from millrace.apps.cnn.mistakes import report_predictions
from millrace.apps.cnn.models.pretrained import fit_pretrained, read_pretrained
from millrace.apps.cnn.preview import report_augmented
from millrace.apps.cnn.program import (
    build_metrics,
    build_model,
    build_program,
    check_memory,
    set_whitening,
    weight_shapes,
)
from millrace.checkpoint.store import checkpoints_in, restore_part
from millrace.config import ConfigurationError
from millrace.data.weights import find_weights
from millrace.feeds.infeed import Infeed
from millrace.loop.event_schedule import EventSchedule, schedule_events
from millrace.loop.staging import compile_calls
from millrace.nn.layers import Layer, Tree, init_layers, num_parameters
from millrace.numbers import format_bytes, format_duration
from millrace.program.compiling import compiling, peak_bytes
from millrace.program.ema import averaged_params
from millrace.program.step import TrainState, Weights
from millrace.program.training import TrainingProgram
from millrace.run.run import Run


def train(config: CnnConfig, run: Run) -> None:
    """Train and validate as configured; results go to the run directory."""
    if _is_finished_and_clean(config, run):
        return
    pretrained = _load_pretrained(config, run)
    with compiling(config.workflow.compiler_options()) as programs:
        images = data.load(config)
        model = build_model(config, images)
        validator = None
        if config.workflow.validation:
            views = config.workflow.test_time_augmentation
            metrics = build_metrics(model, images, views)
            validator = Validator(metrics, config, images.validation)
        if not config.workflow.training:
            assert validator is not None, "checked by WorkflowOptions"
            return _validate_only(config, run, images, model, validator)

        schedule = plan_events(config, len(images.training))
        program = build_program(config, images, model, schedule)  # loss, optimizer, plan
        params, model_state, notices = _init_weights(config, images, model, pretrained)
        _describe(config, run, program.devices, images, params, schedule, notices)
        state = program.init(params, model_state, seed=config.run.seed)
        num_batches = _batches_per_epoch(config, schedule, len(images.training))
        infeed = data.open_infeed(images, config, num_batches)
        weights = Weights(params, model_state)
        check_fit = functools.partial(
            check_memory, config, images, model, weights, schedule, programs
        )
        if config.workflow.compile_only:
            run.console.status("compiling")
            with infeed:
                compile_calls(program, state, infeed, schedule.updates_per_execution)
            check_fit()
            return _report_compilation(run, program, peak_bytes(programs))
        if config.workflow.profile_pipeline:
            _profile_pipeline(config, run, program, state, infeed)
        with data.reporting_corrupt_samples(images, run):
            state = _train(
                config, run, program, state, infeed, schedule, validator, check_fit
            )
            if run.summary["status"] == "completed":
                like = weight_shapes(config, images, model)
                with run.watching():
                    _validate_and_average(config, run, validator, like)
                whole = program.unpack_state(state)
                trained = Weights(averaged_params(whole), whole.model_state)
                report_predictions(config, run, images, model, trained)
                report_augmented(config, run, images)


def plan_events(config: CnnConfig, dataset_size: int) -> EventSchedule:
    """Return the schedule of the run in whole updates."""
    updates = config.workflow.weight_updates_per_epoch
    if updates == -1:
        updates = config.plan.batching.updates_per_epoch(dataset_size)
    return schedule_events(
        updates_per_epoch=updates,
        num_epochs=config.workflow.num_epochs,
        events_per_epoch=config.workflow.events_per_epoch,
        updates_per_execution=config.plan.updates_per_execution,
        first_epochs={"checkpoint": config.workflow.first_ckpt_epoch},
        # As in the application that the families come from.
        uneven=("log",) if config.logs_like_graphcore else (),
    )


def _batches_per_epoch(
    config: CnnConfig, schedule: EventSchedule, dataset_size: int
) -> int:
    """Return the number of batches after which samples are shuffled again."""
    batching = config.plan.batching
    one_pass = batching.updates_per_epoch(dataset_size)
    updates = min(schedule.updates_per_epoch, one_pass)
    return updates * batching.gradient_accumulation_count


def _init_weights(
    config: CnnConfig,
    images: ImageData,
    model: list[Layer],
    pretrained: tuple[Path, Tree] | None,
) -> tuple[Tree, Tree, list[str]]:
    """Return the initial weights and model state, and notices about them."""
    example = np.zeros((1, *images.image_shape), np.float32)
    params, model_state = init_layers(model, jax.random.key(config.run.seed), example)
    if pretrained is None:
        return params, set_whitening(model_state, images), []
    return fit_pretrained(*pretrained, params, model_state)


def _load_pretrained(config: CnnConfig, run: Run) -> tuple[Path, Tree] | None:
    """Return a file of published weights and its arrays, and record where it is from."""
    if config.model.pretrained is None:
        return None
    found = find_weights(config.model.pretrained, run.console.line)
    run.summary["pretrained"] = {"source": found.source, "sha256": found.sha256}
    return found.path, read_pretrained(found.path)


def _train(
    config: CnnConfig,
    run: Run,
    program: TrainingProgram,
    state: TrainState,
    infeed: Infeed,
    schedule: EventSchedule,
    validator: Validator | None,
    on_compiled: Callable[[], None],
) -> TrainState:
    """Train to the end of the schedule, with checkpoints if they are on."""
    folder = _checkpoint_folder(config, run)
    if not config.run.resume and checkpoints_in(folder):
        raise ConfigurationError(
            f"{folder} has checkpoints of an earlier run. Choose another --checkpoint-dir, "
            "or continue that run with --resume."
        )
    # Validation or averaging after training needs every checkpoint.
    when = config.workflow.when_to_validate
    needs_all = when == "every" or config.recipe.averages_weights
    keep = sys.maxsize if needs_all else config.run.keep_checkpoints
    opened = run.checkpoints(best=ACCURACY, keep=keep, folder=folder)
    if not config.workflow.checkpoints:
        run.track_best(ACCURACY)
        opened = contextlib.nullcontext()
    with opened as checkpoints:
        return run.train(
            program,
            state,
            infeed,
            schedule,
            validate=validator if when == "during" else None,
            checkpoints=checkpoints,
            # Graphcore's application continues.
            stop_on_divergence=config.recipe.recipe == "modern",
            on_compiled=on_compiled,
        )


def _checkpoint_folder(config: CnnConfig, run: Run) -> Path:
    return config.workflow.checkpoint_dir or run.directory.checkpoints


def _validate_and_average(
    config: CnnConfig, run: Run, validator: Validator | None, like: Weights
) -> None:
    """Validate and average the checkpoints after training, as configured."""
    folder, when = _checkpoint_folder(config, run), config.workflow.when_to_validate
    events = run.directory.read_metrics()
    if validator is not None:
        if when != "during":
            paths = checkpoints_in(folder)[-1 if when == "last" else 0 :]
            events = validate_checkpoints(paths, validator, like, run, run.elapsed)
        run.summary["time_to_train_seconds"] = seconds = _time_to_train(run)
        run.closing_notes["time to train"] = format_duration(seconds)
    if config.recipe.averages_weights:
        average_checkpoints(config, run, folder, like, validator)
    report_target(config.workflow.target_accuracy, events, run)
    if config.workflow.clean_dir:
        delete_checkpoints(folder)


def _time_to_train(run: Run) -> float:
    """Return the time since training began, or what it was if nothing was left to do."""
    before = run.previous_summary()
    if any(before.get(name) != run.summary[name] for name in ("status", "updates")):
        return run.elapsed()
    return before.get("time_to_train_seconds", run.elapsed())


def _validate_only(
    config: CnnConfig, run: Run, images: ImageData, model: list[Layer], validator: Validator
) -> None:
    """Validate the checkpoints of an earlier run."""
    started = time.perf_counter()
    like = weight_shapes(config, images, model)
    with data.reporting_corrupt_samples(images, run):
        paths = find_checkpoints(config)
        _describe(config, run, validator.devices, images, like.params, None)
        events = validate_checkpoints(
            paths, validator, like, run, lambda: time.perf_counter() - started
        )
        report_target(config.workflow.target_accuracy, events, run)
        newest, _ = restore_part(paths[-1], like)
        report_predictions(config, run, images, model, newest)
    run.closing_notes["checkpoints"] = f"{len(events)} validated"
    run.summary["status"] = "completed"
    if config.workflow.clean_dir:
        delete_checkpoints(paths[0].parent)


def _is_finished_and_clean(config: CnnConfig, run: Run) -> bool:
    """Whether the run to resume is complete, and clean_dir has deleted its checkpoints."""
    before = run.previous_summary()
    is_clean = config.run.resume and config.workflow.clean_dir
    if not is_clean or before.get("status") != "completed":
        return False
    run.console.line("The run is complete, and clean_dir has deleted its checkpoints.")
    run.summary |= before
    return True


def _describe(
    config: CnnConfig,
    run: Run,
    devices: list[Any],
    images: ImageData,
    params: Any,
    schedule: EventSchedule | None,
    notices: Sequence[str] = (),
) -> None:
    """Print the facts of the run, warnings and notices."""
    augmentation = {}
    if schedule is not None:
        augmentation["augmentation"] = data.describe_augmentation(config)
    run.describe(
        devices,
        config.plan,
        schedule,
        model=f"{config.model_title}, {num_parameters(params):,} parameters",
        dataset=data.describe(images, config),
        **augmentation,
        **(learning_rows(config, schedule) if schedule is not None else {}),
        **(fine_tuning_rows(config, params) if schedule is not None else {}),
    )
    warnings = [images.warning] if images.warning else []
    if schedule is not None:
        warnings += averaging_warnings(config, schedule)
        warnings += learning_rate_warnings(config, schedule)
    for warning in warnings:
        run.console.warning(warning)
    if config.data.synthetic and not config.workflow.validation:
        run.console.line(
            "Validation is skipped, because synthetic images are random. Validate anyway "
            "with --validation True."
        )
    on_platform = config.workflow.platform_notices(devices[0].platform)
    for notice in (
        *config.graphcore.notices(),
        *config.model.notices(),
        *config.cache_notices(),
        *on_platform,
        *notices,
    ):
        run.console.line(notice)


def _report_compilation(run: Run, program: TrainingProgram, num_bytes: int) -> None:
    run.summary |= {
        "status": "completed",
        "compile_seconds": program.compile_seconds,
        "memory_bytes": num_bytes,
    }
    run.closing_notes["memory"] = f"{format_bytes(num_bytes)} on each device"


def _profile_pipeline(
    config: CnnConfig, run: Run, program: TrainingProgram, state: TrainState, infeed: Infeed
) -> None:
    """Measure one update in the pipeline, and draw it next to the prediction."""
    # Imported here because most runs do not profile.
    from millrace.report.sections import save_section
    from millrace.run.pipeline_profile import (
        draw_profile,
        profile_pipeline,
        profile_section,
    )

    run.console.status("profiling the pipeline")
    profile = profile_pipeline(program, state, infeed)
    title = f"{config.model_title}, {config.plan.pipeline_schedule}"
    draw_profile(profile, run.directory.path / "pipeline.html", title)
    save_section(run.directory.path, "0-pipeline", profile_section(profile, title))
    run.summary["pipeline"] = facts = profile.summary
    run.closing_notes["pipeline"] = (
        f"an update took {1e3 * facts['measured_seconds']:.1f} ms in the stages, idle "
        f"{facts['measured_idle']:.0%} of it; predicted "
        f"{1e3 * facts['predicted_seconds']:.1f} ms and {facts['predicted_idle']:.0%}"
    )
