"""``mr.vcd``: the commands of this application from Python."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.commands.calling import RunResult, call_command
from millrace.commands.signatures import takes_options_of
from millrace.run.options import Which

if TYPE_CHECKING:
    from millrace.apps.vcd.predictor import Generator
    from millrace.loop.callbacks import Callback
    from millrace.loop.progress import Writer

__all__ = ["evaluate", "load", "sample", "train"]


@takes_options_of("vcd train")
def train(
    *,
    data: Any = None,
    test_data: Any = None,
    callbacks: "list[Callback] | None" = None,
    tracker: "Sequence[str | Writer] | None" = None,
    **options: Any,
) -> "RunResult[Generator]":
    """Train a VAE refined by Markov chains on a dataset, or on arrays.

    ``data`` is an array of images, (images, height, width): bytes are binarized at half
    intensity, other values at 0.5. ``test_data`` has the same form; without it, nothing is
    tested after training.

    ``callbacks`` are called after log events, validations and checkpoints. ``tracker`` has
    names (tensorboard, wandb, mlflow, trackio) and objects that receive the log events.
    """
    if data is None and test_data is None:
        return call_command(
            "vcd train", options, load, callbacks=callbacks, tracker=tracker
        )
    from millrace.apps.vcd.data import hold_images

    held = hold_images(data, test_data)
    if test_data is None:
        options.setdefault("testing", False)
    return call_command(
        "vcd train", options, load, arrays=held, callbacks=callbacks, tracker=tracker
    )


@takes_options_of("vcd evaluate")
def evaluate(**options: Any) -> RunResult[None]:
    """Estimate the log-likelihood of images under a trained model."""
    return call_command("vcd evaluate", options, lambda _: None)


@takes_options_of("vcd sample")
def sample(**options: Any) -> RunResult[None]:
    """Save images of samples, reconstructions and chains of a trained model."""
    return call_command("vcd sample", options, lambda _: None)


def load(run: Path | str, which: Which = "best") -> "Generator":
    """Load a model that a run has trained.

    Args:
        run: A run directory, its folder of checkpoints, or one checkpoint.
        which: The best checkpoint, the last, or that after this number of updates.
    """
    from millrace.apps.vcd.predictor import load_generator

    return load_generator(run, which)
