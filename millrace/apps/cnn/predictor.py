"""Predictions of a trained model, loaded from its run directory."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn import data
from millrace.apps.cnn.augment import get_preprocessing
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.mistakes import class_names
from millrace.apps.cnn.program import build_model, weight_shapes
from millrace.checkpoint.store import restore_part
from millrace.data.augment import prepare_image
from millrace.data.image_source import open_image
from millrace.nn.layers import Layer, apply_layers
from millrace.run.saved import find_run


class TrainedCnn(NamedTuple):
    """A trained model."""

    config: CnnConfig
    layers: list[Layer]
    params: Any
    model_state: Any
    classes: list[str]
    """The names of the outputs."""
    image_shape: tuple[int, int, int]
    checkpoint: Path

    def logits(
        self,
        images: Any,  # (number, height, width, channels)
    ) -> np.ndarray:
        """Return the outputs for images.

        Args:
            images: Unscaled pixels, from 0 to 255 (digits: from 0 to 16).
        """
        shape = np.shape(images)
        if shape[1:] != self.image_shape:
            expected = ", ".join(map(str, ("number", *self.image_shape)))
            raise ValueError(f"images must have the shape ({expected}), got {shape}.")
        _warn_if_scaled(np.asarray(images))
        steps = get_preprocessing(
            self.config.resolved_dataset, normalize=self.config.data.normalize_input
        )
        scaled = jnp.asarray(steps.scale_on_host(np.asarray(images)))
        outputs, _ = jax.jit(self._apply)(self.params, self.model_state, scaled)
        return np.asarray(outputs)

    def predict(
        self,
        images: Any,  # (number, height, width, channels)
    ) -> tuple[list[str], np.ndarray]:
        """Return the most likely class of each image, and its probability.

        Args:
            images: Unscaled pixels, from 0 to 255 (digits: from 0 to 16).
        """
        probabilities = np.asarray(jax.nn.softmax(self.logits(images)))
        return [self.classes[n] for n in probabilities.argmax(1)], probabilities.max(1)

    def predict_files(self, paths: Iterable[Path | str]) -> tuple[list[str], np.ndarray]:
        """Do the same for image files, cropped and scaled as in validation."""
        side = self.image_shape[0]
        if self.image_shape[2] != 3:
            raise ValueError(
                f"Image files are in color, but the model takes {self.image_shape}."
            )
        images = []
        for path in paths:
            with open_image(path, formats=None) as image:
                images.append(prepare_image(image, None, size=side, flip=False))
        return self.predict(np.stack(images))

    def _apply(self, params: Any, model_state: Any, images: Any) -> Any:
        return apply_layers(self.layers, params, model_state, images, training=False)


def _warn_if_scaled(images: np.ndarray) -> None:
    if np.issubdtype(images.dtype, np.floating) and not (images > 1).any():
        warnings.warn(
            "No pixel is above 1. Give unscaled images, from 0 to 255: they are scaled "
            "here.",
            stacklevel=3,
        )


def load_trained(path: Path | str) -> TrainedCnn:
    """Load the model of a ``cnn train`` run.

    Args:
        path: A run directory, for its newest checkpoint, or a checkpoint.
    """
    saved = find_run(Path(path), command="cnn train")
    saved.check_command("cnn-train")
    config = saved.build_config(CnnConfig)
    images = data.load(config)
    model = build_model(config, images)
    weights, _ = restore_part(saved.newest(), weight_shapes(config, images, model))
    return TrainedCnn(
        config,
        model,
        weights.params,
        weights.model_state,
        class_names(images, config.resolved_dataset),
        images.image_shape,
        saved.newest(),
    )
