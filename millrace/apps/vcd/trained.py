"""A trained model, found again from what its run has left."""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from millrace.apps.vcd import data
from millrace.apps.vcd import program as vcd_program
from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.config.commands import CheckpointOptions
from millrace.apps.vcd.data import BinaryPictures
from millrace.checkpoint.store import restore_part
from millrace.config import ConfigurationError, replace_options
from millrace.program.step import Weights
from millrace.run.saved import find_run


class Trained(NamedTuple):
    """A model and its pictures."""

    params: Any
    config: VcdConfig
    """As it was trained."""
    pictures: BinaryPictures
    path: Path
    update: int
    step_size: float
    """The chains', as training had left it when it last reported."""
    description: str


def load_trained(options: CheckpointOptions) -> Trained:
    """Read the newest checkpoint of a run, and the pictures the options ask for."""
    saved = find_run(options.checkpoint_dir, command="vcd train")
    saved.check_command("vcd-train")
    path = saved.newest()
    config = saved.build_config(VcdConfig, without=("results_dir",))
    if options.dataset_path is not None:
        config = replace_options(config, dataset_path=options.dataset_path)
    held_out = config.num_validation if config.validation else 0
    split = data.load(config, num_validation=held_out)
    pictures = getattr(split, options.split)
    if pictures is None:
        raise ConfigurationError(
            "There is no validation split: the model was trained without --validation."
        )
    like = jax.eval_shape(lambda: vcd_program.weights_of(config, pictures.num_pixels))
    restored = restore_part(path, Weights(like))
    manifest = restored.manifest
    return Trained(
        jax.device_put(restored.state.params),
        config,
        pictures,
        path,
        manifest["update"],
        float(manifest["metrics"].get("train_step_size", config.step_size)),
        f"{split.name}, {len(pictures):,} {options.split} pictures",
    )
