"""``mr.cnn``: the commands of this application, from Python."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.commands.calling import RunResult, call_command, call_without_run
from millrace.commands.signatures import takes_options_of
from millrace.run.options import Which

if TYPE_CHECKING:
    from millrace.apps.cnn.predictor import TrainedCnn
    from millrace.loop.callbacks import Callback
    from millrace.loop.progress import Writer

__all__ = ["export", "load", "train", "validate"]


@takes_options_of("cnn train")
def train(
    *,
    data: Any = None,
    validation_data: Any = None,
    callbacks: "list[Callback] | None" = None,
    tracker: "Sequence[str | Writer] | None" = None,
    **options: Any,
) -> "RunResult[TrainedCnn]":
    """Train an image classifier on a dataset, or on arrays.

    ``data`` is ``(images, labels)`` or an ``ArraySource`` of ``image`` and ``label``.
    Images have the shape (images, height, width, channels) or (images, height, width),
    bytes or floats; labels are class numbers or names. ``validation_data`` has the same
    form; without it, nothing is validated.

    ``callbacks`` are called after log events, validations and checkpoints. ``tracker`` has
    names (tensorboard, wandb, mlflow, trackio) and objects that receive the log events.
    """
    if data is None and validation_data is None:
        return call_command(
            "cnn train", options, load, callbacks=callbacks, tracker=tracker
        )
    from millrace.apps.cnn.arrays import hold_images

    held = hold_images(data, validation_data)
    if validation_data is None:
        options.setdefault("validation", False)
    return call_command(
        "cnn train", options, load, arrays=held, callbacks=callbacks, tracker=tracker
    )


@takes_options_of("cnn validate")
def validate(**options: Any) -> RunResult[None]:
    """Measure inference: throughput, latency and accuracy."""
    return call_command("cnn validate", options, lambda _: None)


@takes_options_of("cnn export")
def export(run: Path | str, **options: Any) -> None:
    """Write a trained model to a folder, for use without millrace.

    ``run`` is a run directory, or one of its checkpoints.
    """
    call_without_run("cnn export", {"run": run, **options})


def load(run: Path | str, which: Which = "best") -> "TrainedCnn":
    """Load a model that a run has trained.

    Args:
        run: A run directory, its folder of checkpoints, or one checkpoint.
        which: The best checkpoint, the last, or that after this number of updates.
    """
    from millrace.apps.cnn.predictor import load_trained

    return load_trained(run, which)
