"""``millrace vcd sample``: grids of samples, reconstructions and chains."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.vcd.config import SampleConfig, VcdConfig
from millrace.apps.vcd.data import BinaryImages
from millrace.apps.vcd.evaluate import chosen_devices
from millrace.apps.vcd.model import bernoulli_vae, decode
from millrace.apps.vcd.objective import draw, reconstruction_path
from millrace.apps.vcd.predictor import load_generator
from millrace.apps.vcd.program import hmc_settings
from millrace.apps.vcd.sampler import HmcSettings
from millrace.plan import Plan
from millrace.program.compiling import jit
from millrace.run.run import Run

FOLDER = "pictures"
"""Folder in the run directory; the report shows its content."""

_MIN_SIDE = 56  # smaller images are enlarged to at least this many pixels
_FRAME = 0.35  # gray between images
_GAP, _PAIR_GAP = 6, 1  # pixels between images, and between an original and what it became

Grid = np.ndarray
"""(rows, columns, height, width), from 0 to 1."""


def sample(config: SampleConfig, run: Run) -> None:
    """Save grids of samples, reconstructions and chains in the run directory."""
    with chosen_devices(config.devices) as devices:
        model = load_generator(
            config.checkpoint_dir,
            config.which,
            split=config.split,
            dataset_path=config.dataset_path,
            announce=run.console.line,
        )
        run.describe(
            devices[:1],
            Plan(),
            None,
            model=f"{model.checkpoint}, {model.update} updates",
            dataset=model.dataset,
        )
        grids = compute_grids(
            model.params,
            model.images,
            num_rows=config.num_rows,
            num_columns=config.num_columns,
            hmc=shown_chains(model.config, config.num_steps),
            step_size=model.step_size,
            seed=config.run.seed,
        )
    for path in save_grids(grids, run.directory.path / FOLDER, model.update):
        run.closing_notes[path.stem] = str(path)
    run.summary["updates"] = model.update
    run.summary["status"] = "completed"


def shown_chains(config: VcdConfig, num_steps: int) -> HmcSettings:
    """Return the settings of chains to look at: a constant step size from the start."""
    return hmc_settings(config)._replace(num_burn_in_steps=0, num_steps=num_steps)


def compute_grids(
    params: Any,
    images: BinaryImages,
    *,
    num_rows: int,
    num_columns: int,
    hmc: HmcSettings,
    step_size: float,
    seed: int = 0,
) -> dict[str, Grid]:
    """Compute grids of pixel probabilities, for the same latents and images every time.

    - prior: decoded samples from the prior.
    - reconstructions: rows of originals, each above the decoded means of q(z|x).
    - chain: in each row an original, then its chain from q(z|x) on, step by step.
    """
    num_pairs = -(-num_rows // 2)
    count = max(num_pairs * num_columns, num_rows)
    x = images.gather(_evenly_spaced(len(images), count))
    z_dim = params["decoder"]["hidden1"]["kernel"].shape[0]
    z_key, key = jax.random.split(jax.random.key(seed))
    z = jax.random.normal(z_key, (num_rows * num_columns, z_dim))
    prior, means, path = _decode_all(params, x, z, jnp.float32(step_size), key, hmc)
    shown = _evenly_spaced(count, num_rows)
    chain = jnp.concatenate([x[None], path])[:, shown].swapaxes(0, 1)
    pairs = jnp.stack([x, means])[:, : num_pairs * num_columns]
    pairs = pairs.reshape(2, num_pairs, num_columns, -1).swapaxes(0, 1)
    grids = {
        "prior": prior.reshape(num_rows, num_columns, -1),
        "reconstructions": pairs.reshape(2 * num_pairs, num_columns, -1),
        "chain": chain,
    }
    return {
        name: np.asarray(grid).reshape(*grid.shape[:2], *images.shape)
        for name, grid in grids.items()
    }


def _evenly_spaced(length: int, count: int) -> np.ndarray:
    return np.linspace(0, length - 1, count).round().astype(int)


@functools.partial(jit, static_argnames=("hmc",))
def _decode_all(
    params: Any,
    x: jax.Array,  # (images, pixels)
    z: jax.Array,  # (samples, z_dim)
    step_size: jax.Array,  # ()
    key: jax.Array,
    hmc: HmcSettings,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Decode latents, the means of q(z|x), and the chains of the images."""
    draws = draw(key, "vcd", hmc, (x.shape[0], z.shape[-1]))
    q, path = reconstruction_path(bernoulli_vae(), params, x, draws, step_size, hmc)

    def pixels(z: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(decode(params["decoder"], z))

    return pixels(z), pixels(q.mean), pixels(path)


def save_grids(grids: dict[str, Grid], folder: Path, update: int) -> list[Path]:
    """Save each grid as ``<name>-<update>.png``."""
    paths = []
    for name, grid in grids.items():
        paths.append(folder / f"{name}-{update:09d}.png")
        _save_grid(grid, paths[-1], in_pairs=name == "reconstructions")
    return paths


def _save_grid(grid: Grid, path: Path, *, in_pairs: bool) -> None:
    """Save a grid with gaps between its images; pairs of rows are close to each other."""
    from PIL import Image

    rows, columns, height, width = grid.shape
    factor = max(1, -(-_MIN_SIDE // max(height, width)))
    enlarged = grid.repeat(factor, 2).repeat(factor, 3)
    height, width = enlarged.shape[2:]
    gaps = [_PAIR_GAP if in_pairs and row % 2 else _GAP for row in range(rows)]
    tops = np.cumsum([gap + (height if row else 0) for row, gap in enumerate(gaps)])
    whole = np.full((tops[-1] + height + _GAP, columns * (width + _GAP) + _GAP), _FRAME)
    for row, top in enumerate(tops):
        for column in range(columns):
            left = _GAP + column * (width + _GAP)
            whole[top : top + height, left : left + width] = enlarged[row, column]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((whole * 255).round().astype(np.uint8)).save(path, optimize=True)
