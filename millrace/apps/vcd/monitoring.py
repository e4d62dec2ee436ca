"""Validation during training: the ELBO of held-out images, and grids of images."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.data import ImageSplits, unpack
from millrace.apps.vcd.images import FOLDER, compute_grids, save_grids, shown_chains
from millrace.apps.vcd.model import bernoulli_vae
from millrace.data.source import ArraySource
from millrace.loop.activity import run_stoppable
from millrace.loop.evaluate import evaluate
from millrace.plan import Plan
from millrace.program.evaluate import EvaluationProgram, MetricFn
from millrace.program.step import Weights

_MAX_IMAGES = 1000  # per step and replica
_NUM_ROWS, _NUM_COLUMNS = 8, 10
_NUM_SHOWN_STEPS = 8


class Monitor:
    """Validates a training state; called at every checkpoint.

    Args:
        config: The configuration of the run.
        images: The ELBO is that of the validation images or, without any, the test images.
        devices: The devices that train.
        folder: The run directory.
    """

    def __init__(
        self, config: VcdConfig, images: ImageSplits, devices: list[Any], folder: Path
    ) -> None:
        self._config = config
        self._images = images.validation or images.test
        self._source = ArraySource(
            {
                "packed": self._images.packed,
                "index": np.arange(len(self._images), dtype=np.int32),
            }
        )
        count = len(devices)
        metric_fn = build_elbo(self._images.num_pixels, config.model.z_dim, config.run.seed)
        self._program = EvaluationProgram(metric_fn, Plan(num_replicas=count), devices)
        self._batch_size = min(_MAX_IMAGES, -(-len(self._images) // count)) * count
        self._folder = folder / FOLDER

    def __call__(self, state: Any) -> dict[str, float]:
        """Return the mean ELBO, and save image grids if ``pictures`` is set."""
        weights = self._program.place_state(Weights(state.params))
        metrics = evaluate(self._program, weights, self._source, self._batch_size)
        if self._config.workflow.pictures:
            self._save_images(state)
        return metrics

    def _save_images(self, state: Any) -> None:
        params, step_size = jax.device_get((state.params, state.model_state["step_size"]))
        compute = functools.partial(
            compute_grids,
            params,
            self._images,
            num_rows=_NUM_ROWS,
            num_columns=_NUM_COLUMNS,
            hmc=shown_chains(self._config, _NUM_SHOWN_STEPS),
            step_size=float(step_size),
        )
        grids = run_stoppable(compute)
        save_grids(grids, self._folder, int(state.update))


def build_elbo(num_pixels: int, z_dim: int, seed: int) -> MetricFn:
    """Return a metric function: the ELBO of each image, with noise that never changes."""
    model = bernoulli_vae()

    def metric_fn(params: Any, model_state: Any, batch: Any) -> dict[str, jax.Array]:
        del model_state
        x = unpack(batch["packed"], num_pixels)
        key = jax.random.key(seed)
        # One key per image, so that the batch size does not change the result.
        noise = jax.vmap(
            lambda index: jax.random.normal(jax.random.fold_in(key, index), (z_dim,))
        )(batch["index"])
        q = model.encode(params["encoder"], x)
        log_joint, _ = model.log_joint(params["decoder"], x)(q.at(noise))
        return {"elbo": log_joint + q.entropy()}

    return metric_fn
