"""A trained VAE in the hand: pictures from the prior, and reconstructions."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.config.commands import SampleConfig
from millrace.apps.vcd.model import decode, encode
from millrace.apps.vcd.trained import load_trained


class Generator(NamedTuple):
    """A trained model; pictures are arrays (number, height, width) from 0 to 1."""

    config: VcdConfig
    params: Any
    picture_shape: tuple[int, int]
    checkpoint: Path

    def sample(self, count: int = 16, *, seed: int = 0) -> np.ndarray:
        """Return the probability of each pixel in pictures drawn from the prior."""
        z = jax.random.normal(jax.random.key(seed), (count, self.config.z_dim))
        return self._pixels(z)

    def reconstruct(self, pictures: Any) -> np.ndarray:
        """Return what the model makes of pictures, by the mean of q(z|x)."""
        flat = jnp.asarray(pictures, jnp.float32).reshape(len(pictures), -1)
        return self._pixels(encode(self.params["encoder"], flat).mean)

    def _pixels(self, z: jax.Array) -> np.ndarray:
        pixels = jax.nn.sigmoid(decode(self.params["decoder"], z))
        return np.asarray(pixels).reshape(-1, *self.picture_shape)


def load_generator(path: Path | str) -> Generator:
    """Read the newest checkpoint of a ``vcd train`` run, or the one that is named."""
    trained = load_trained(SampleConfig(checkpoint_dir=Path(path)))
    shape = trained.pictures.shape
    return Generator(trained.config, trained.params, (shape[0], shape[1]), trained.path)
