"""What is looked at while a model trains: held-out pictures' ELBO, and drawn pictures."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from millrace.apps.vcd import program as vcd_program
from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.data import PictureData, unpack
from millrace.apps.vcd.images import FOLDER, grids, save_grids
from millrace.apps.vcd.model import bernoulli_vae, encode
from millrace.data.source import ArraySource
from millrace.loop.evaluate import evaluate
from millrace.plan import Plan
from millrace.program.evaluate import EvaluationProgram, MetricFn
from millrace.program.step import Weights

ELBO = "validation_elbo"

_MOST_PICTURES = 1000  # per step and replica
_NUM_ROWS, _NUM_COLUMNS = 8, 10
_SHOWN_STEPS = 8


class Watch:
    """Called between two executions, at every checkpoint.

    Args:
        config: The run's.
        pictures: The ELBO is of those held out or, where there are none, of the test's.
        devices: Those that train.
        folder: The run directory.
    """

    def __init__(
        self, config: VcdConfig, pictures: PictureData, devices: list[Any], folder: Path
    ) -> None:
        self._config = config
        self._pictures = pictures.validation or pictures.test
        self._source = ArraySource(
            {
                "packed": self._pictures.packed,
                "index": np.arange(len(self._pictures), dtype=np.int32),
            }
        )
        count = len(devices)
        metric_fn = elbo_of(self._pictures.num_pixels, config.z_dim, config.seed)
        self._program = EvaluationProgram(metric_fn, Plan(num_replicas=count), devices)
        self._batch_size = min(_MOST_PICTURES, -(-len(self._pictures) // count)) * count
        self._folder = folder / FOLDER

    def __call__(self, state: Any) -> dict[str, float]:
        """Return the mean ELBO; draw if that is asked for."""
        weights = Weights(state.params)
        placed = self._program.place_state(weights)
        found = evaluate(self._program, placed, self._source, self._batch_size)
        if self._config.pictures:
            self._draw(state)
        return found

    def _draw(self, state: Any) -> None:
        hmc = vcd_program.hmc_of(self._config)._replace(
            num_burn_in_steps=0, num_steps=_SHOWN_STEPS
        )
        params, step_size = jax.device_get((state.params, state.model_state["step_size"]))
        made = grids(
            params,
            self._pictures,
            num_rows=_NUM_ROWS,
            num_columns=_NUM_COLUMNS,
            hmc=hmc,
            step_size=float(step_size),
        )
        save_grids(made, self._folder, int(state.update))


def elbo_of(num_pixels: int, z_dim: int, seed: int) -> MetricFn:
    """Return each picture's ELBO, from one draw that is always the same."""
    model = bernoulli_vae()

    def metric_fn(params: Any, model_state: Any, batch: Any) -> dict[str, jax.Array]:
        del model_state
        x = unpack(batch["packed"], num_pixels)
        key = jax.random.key(seed)
        # By picture, so that it does not matter how they are batched.
        noise = jax.vmap(
            lambda index: jax.random.normal(jax.random.fold_in(key, index), (z_dim,))
        )(batch["index"])
        q = encode(params["encoder"], x)
        log_joint, _ = model.log_joint(params["decoder"], x)(q.at(noise))
        return {"elbo": log_joint + q.entropy()}

    return metric_fn
