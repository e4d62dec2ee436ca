"""A trained model, found again from what its run has left."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax

from millrace.apps.vcd import data
from millrace.apps.vcd import program as vcd_program
from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.config.commands import CheckpointOptions
from millrace.apps.vcd.data import BinaryPictures
from millrace.checkpoint.store import checkpoints_in, restore_part
from millrace.config import ConfigurationError, build, load_yaml


class Weights(NamedTuple):
    """The part of a training state that makes the model."""

    params: Any


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
    path, directory = _find(options.checkpoint_dir)
    config = _training_config(directory, options.dataset_path)
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


def _find(given: Path) -> tuple[Path, Path]:
    """Return the checkpoint and the directory of its run."""
    if given.name.startswith("update-") and given.is_dir():
        return given, given.parent.parent
    paths = checkpoints_in(given / "checkpoints") or checkpoints_in(given)
    if not paths:
        raise ConfigurationError(
            f"There are no checkpoints in {given}. Give the directory of a run of "
            "`millrace vcd train` that wrote some, or one of its checkpoints."
        )
    return paths[-1], paths[-1].parent.parent


def _training_config(directory: Path, dataset_path: Path | None) -> VcdConfig:
    values = load_yaml(directory / "config.yml")
    if (command := values.pop("command", None)) != "vcd-train":
        raise ConfigurationError(f"{directory} holds a run of {command}, not of vcd-train.")
    # Where it was run and what it showed is not the model's.
    for name in ("run_dir", "results_dir", "resume"):
        values.pop(name, None)
    config = build(VcdConfig, values)
    if dataset_path is not None:
        config = dataclasses.replace(config, dataset_path=dataset_path)
    return config
