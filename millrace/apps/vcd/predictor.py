"""A trained model: load it, draw samples, reconstruct images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.data import BinaryImages, load_images
from millrace.apps.vcd.model import decode, encode
from millrace.apps.vcd.program import init_weights
from millrace.card import Card, with_card
from millrace.checkpoint.best import BestMetric
from millrace.checkpoint.store import restore_part
from millrace.config import ConfigurationError, replace_options
from millrace.program.step import Weights
from millrace.run.options import Which
from millrace.run.saved import announce, find_run

ELBO = "validation_elbo"
BEST_BY = BestMetric(ELBO, "max")
"""The metric that selects the best checkpoint."""


@with_card
class Generator(NamedTuple):
    """A trained model; images are arrays (images, height, width) from 0 to 1."""

    config: VcdConfig
    """The configuration of its training."""
    params: Any
    images: BinaryImages
    """A split of its dataset."""
    dataset: str
    """Name and size of the split."""
    checkpoint: Path
    update: int
    """The number of updates it was trained for."""
    step_size: float
    """HMC step size, as last reported in training."""

    def card(self) -> Card:
        """Return what a terminal or a notebook shows."""
        rows = {
            "objective": self.config.model.resolved_objective,
            "z_dim": self.config.model.z_dim,
            "images": "x".join(map(str, self.image_shape)),
            "parameters": f"{sum(leaf.size for leaf in jax.tree.leaves(self.params)):,}",
            "update": self.update,
            "checkpoint": self.checkpoint,
        }
        return Card("Generator", rows)

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of an image."""
        return self.images.shape

    def sample(self, count: int = 16, *, seed: int = 0) -> np.ndarray:
        """Return the pixel probabilities of images drawn from the prior."""
        z_dim = self.config.model.z_dim
        return self._pixels(jax.random.normal(jax.random.key(seed), (count, z_dim)))

    def reconstruct(self, images: Any) -> np.ndarray:
        """Return reconstructions of images, decoded from the mean of q(z|x)."""
        flat = jnp.asarray(images, jnp.float32).reshape(len(images), -1)
        return self._pixels(encode(self.params["encoder"], flat).mean)

    def _pixels(self, z: jax.Array) -> np.ndarray:
        pixels = jax.nn.sigmoid(decode(self.params["decoder"], z))
        return np.asarray(pixels).reshape(-1, *self.image_shape)


def load_generator(
    path: Path | str,
    which: Which = "best",
    *,
    split: Literal["test", "validation", "training"] = "test",
    dataset_path: Path | None = None,
    announce: Callable[[str], Any] = announce,
) -> Generator:
    """Load a checkpoint of a ``vcd train`` run.

    Args:
        path: A run directory, its folder of checkpoints, or one checkpoint.
        which: The best checkpoint, the last, or that after this number of updates.
        split: The images to load with it.
        dataset_path: Where the dataset is now; by default, where it was in training.
        announce: Called with a line about the checkpoint.
    """
    saved = find_run(path, command="vcd train")
    saved.check_command("vcd-train")
    config = saved.build_config(VcdConfig, without=("results_dir",))
    if dataset_path is not None:
        config = replace_options(config, dataset_path=dataset_path)
    splits = load_images(
        config.data, num_validation=config.workflow.num_held_out, needs_images=False
    )
    images: BinaryImages | None = getattr(splits, split)
    if images is None:
        raise ConfigurationError(
            "There is no validation split: the model was trained without --validation."
        )
    like = jax.eval_shape(lambda: init_weights(config, images.num_pixels))
    chosen = saved.choose(which, best_by=BEST_BY)
    announce(chosen.describe())
    restored = restore_part(chosen.path, Weights(like))
    metrics = restored.manifest["metrics"]
    return Generator(
        config,
        jax.device_put(restored.state.params),
        images,
        f"{splits.name}, {len(images):,} {split} images",
        chosen.path,
        chosen.update,
        float(metrics.get("train_step_size", config.model.step_size)),
    )
