"""Grids of pictures as PNG files: samples, reconstructions, and chains at work."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.vcd import objective
from millrace.apps.vcd.data import BinaryPictures
from millrace.apps.vcd.model import bernoulli_vae, decode
from millrace.apps.vcd.sampler import HmcSettings
from millrace.program.compiling import jit

FOLDER = "pictures"
"""In the run directory; the report shows what is there."""

_SMALLEST_SIDE = 56  # pixels that a picture of 28 x 28, or a smaller one, is drawn with
_FRAME = 0.35  # the gray between pictures

Grid = np.ndarray
"""(rows, columns, height, width), from 0 to 1."""


@functools.partial(jit, static_argnames=("hmc",))
def _decoded(
    params: Any, x: jax.Array, z: jax.Array, step_size: Any, key: jax.Array, hmc: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Decode latents, pictures' means, and the pictures' chains."""
    draws = objective.draw(key, "vcd", hmc, (x.shape[0], z.shape[-1]))
    q, path = objective.reconstruction_path(
        bernoulli_vae(), params, x, draws, step_size, hmc
    )
    decoder = params["decoder"]

    def pixels(z: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(decode(decoder, z))

    return pixels(z), pixels(q.mean), pixels(path)


def grids(
    params: Any,
    pictures: BinaryPictures,
    *,
    num_rows: int,
    num_columns: int,
    hmc: HmcSettings,
    step_size: float,
    seed: int = 0,
) -> dict[str, Grid]:
    """Draw pixels' probabilities, always for the same latents and pictures.

    - prior: decoded draws from the prior.
    - reconstructions: rows of originals, each above what q(z|x)'s mean decodes to.
    - chain: in each row an original, then its chain from q(z|x) on, step by step.
    """
    num_pairs = -(-num_rows // 2)
    some = max(num_pairs * num_columns, num_rows)
    where = np.linspace(0, len(pictures) - 1, some).round().astype(int)
    x = pictures.at(where)
    z_dim = params["decoder"]["hidden1"]["kernel"].shape[0]
    z_key, key = jax.random.split(jax.random.key(seed))
    z = jax.random.normal(z_key, (num_rows * num_columns, z_dim))
    prior, means, path = _decoded(params, x, z, jnp.float32(step_size), key, hmc)
    spread = np.linspace(0, some - 1, num_rows).round().astype(int)
    chain = jnp.concatenate([x[None], path])[:, spread].swapaxes(0, 1)
    pairs = jnp.stack([x, means])[:, : num_pairs * num_columns]
    pairs = pairs.reshape(2, num_pairs, num_columns, -1).swapaxes(0, 1)
    made = {
        "prior": prior.reshape(num_rows, num_columns, -1),
        "reconstructions": pairs.reshape(2 * num_pairs, num_columns, -1),
        "chain": chain,
    }
    return {
        name: np.asarray(grid).reshape(*grid.shape[:2], *pictures.shape)
        for name, grid in made.items()
    }


def save_grid(grid: Grid, path: Path) -> None:
    """Write a grid as a PNG; 1 is white."""
    from PIL import Image

    rows, columns, height, width = grid.shape
    factor = max(1, -(-_SMALLEST_SIDE // max(height, width)))
    large = grid.repeat(factor, 2).repeat(factor, 3)
    framed = np.pad(large, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=_FRAME)
    whole = framed.transpose(0, 2, 1, 3).reshape(
        rows * (height * factor + 1), columns * (width * factor + 1)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((whole * 255).round().astype(np.uint8)).save(path, optimize=True)


def save_grids(made: dict[str, Grid], folder: Path, update: int) -> list[Path]:
    """Write ``<kind>-<update>.png`` for each grid."""
    paths = []
    for name, grid in made.items():
        paths.append(folder / f"{name}-{update:09d}.png")
        save_grid(grid, paths[-1])
    return paths
