"""``mr.autoencoder``: the commands of this application in Python."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.commands.calling import RunResult, call_command, call_without_run
from millrace.commands.signatures import takes_options_of
from millrace.run.options import Which

if TYPE_CHECKING:
    from millrace.apps.autoencoder.predictor import Recommender
    from millrace.loop.callbacks import Callback
    from millrace.loop.progress import Writer

__all__ = ["convert", "export", "load", "sweep", "train", "validate"]


@takes_options_of("autoencoder train")
def train(
    *,
    data: Any = None,
    validation_data: Any = None,
    callbacks: "list[Callback] | None" = None,
    tracker: "Sequence[str | Writer] | None" = None,
    **options: Any,
) -> "RunResult[Recommender]":
    """Train a recommender on a file of ratings, or on arrays.

    ``data`` is ``(users, items, ratings)``, three arrays of the same length, or a table
    such as a DataFrame of pandas or polars with the columns user, item and rating, which
    may have any name that a header of a text file may have. ``validation_data`` has the
    same form. ``data="generated"`` and ``data="random"`` are as on the command
    line.

    ``callbacks`` are called after log events, validations and checkpoints. ``tracker`` has
    names (tensorboard, wandb, mlflow, trackio) and objects that receive the log events.
    """
    if isinstance(data, str):
        options["data"] = data
    elif data is not None or validation_data is not None:
        from millrace.apps.autoencoder.arrays import hold_ratings

        held = hold_ratings(data, validation_data)
        return call_command(
            "autoencoder train",
            options,
            load,
            arrays=held,
            callbacks=callbacks,
            tracker=tracker,
        )
    return call_command(
        "autoencoder train", options, load, callbacks=callbacks, tracker=tracker
    )


@takes_options_of("autoencoder validate")
def validate(**options: Any) -> RunResult[None]:
    """Measure rating errors and ranking of a trained recommender."""
    return call_command("autoencoder validate", options, lambda _: None)


@takes_options_of("autoencoder sweep")
def sweep(
    *,
    callbacks: "list[Callback] | None" = None,
    tracker: "Sequence[str | Writer] | None" = None,
    **options: Any,
) -> RunResult[None]:
    """Train one model per learning rate; ``summary["trials"]`` has the results.

    ``callbacks`` and ``tracker`` are as in ``train``; metrics are means over the models.
    """
    return call_command(
        "autoencoder sweep", options, lambda _: None, callbacks=callbacks, tracker=tracker
    )


@takes_options_of("autoencoder convert")
def convert(**options: Any) -> None:
    """Split ratings into training, validation and test files."""
    call_without_run("autoencoder convert", options)


@takes_options_of("autoencoder export")
def export(run: Path | str, **options: Any) -> None:
    """Write a recommender to a folder, for use without millrace.

    ``run`` is a run directory, or one of its checkpoints.
    """
    call_without_run("autoencoder export", {"run": run, **options})


def load(
    run: Path | str,
    which: Which = "best",
    *,
    data: Any = None,
    validation_data: Any = None,
) -> "Recommender":
    """Load a model that a run has trained.

    Args:
        run: A run directory, its folder of checkpoints, or one checkpoint.
        which: The best checkpoint, the last, or that after this number of updates.
        data: What ``train`` was given as ``data``, if the model was trained on arrays or a
            table and its training ratings are needed: with rows of items, or to recommend
            to the users in it.
        validation_data: What ``train`` was given as ``validation_data``.
    """
    from millrace.apps.autoencoder.predictor import load_recommender

    recommender = load_recommender(run, which)
    if data is not None:
        from millrace.apps.autoencoder.arrays import hold_again

        record = recommender.config.data.arrays
        recommender.kept["arrays"] = hold_again(record, data, validation_data)
    return recommender
