"""CNNs with random weights, and run directories of them that took no training."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.program import build_model, weight_shapes
from millrace.checkpoint.store import write_checkpoint
from millrace.config import as_plain, build

METRICS = {"train_loss": 0.5, "validation_accuracy": 0.75}


def random_weights(shapes: Any, seed: int = 0) -> Any:
    """Return weights and statistics of these shapes, none at its default."""
    random = np.random.default_rng(seed)

    def sample(path: Any, spec: Any) -> np.ndarray:
        if (name := path[-1].key) == "kernel":
            std = (2 / np.prod(spec.shape[:-1])) ** 0.5
            return (std * random.standard_normal(spec.shape)).astype(spec.dtype)
        # Small scales, so that the sums of residual blocks do not grow.
        limits = {"scale": (0.2, 0.4), "var": (0.5, 1.5)}.get(name, (-0.1, 0.1))
        return random.uniform(*limits, spec.shape).astype(spec.dtype)

    return jax.tree_util.tree_map_with_path(sample, shapes)


def write_cnn_run(path: Path, **options: Any) -> Path:
    """Write a run directory of ``cnn train`` with a checkpoint of random weights."""
    config = build(CnnConfig, options)
    images = data.load(config)
    shapes = weight_shapes(config, images, build_model(config, images))
    earlier = {**METRICS, "validation_accuracy": 0.5, "learning_rate": 0.1}
    metadata = {"epoch": 1.0, "time": 1.0, "metrics": earlier, "scores": METRICS}
    checkpoint = path / "checkpoints" / "update-000000003"
    checkpoint.parent.mkdir(parents=True)
    write_checkpoint(checkpoint, random_weights(shapes), 3, metadata)
    plain = {"command": "cnn-train"} | as_plain(config)
    (path / "config.yml").write_text(yaml.safe_dump(plain))
    return path
