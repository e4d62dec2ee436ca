"""A trained network, found again from what its run has left."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.mistakes import class_names
from millrace.apps.cnn.preprocessing import preparation
from millrace.apps.cnn.program import model_of
from millrace.checkpoint.store import restore_part
from millrace.data.augment import prepare_image
from millrace.data.image_source import open_image
from millrace.nn.layers import Layer, apply_layers, init_shapes
from millrace.program.step import Weights
from millrace.run.saved import find_run


class TrainedCnn(NamedTuple):
    """A network that has been trained."""

    config: CnnConfig
    layers: list[Layer]
    params: Any
    model_state: Any
    classes: list[str]
    """What its outputs stand for."""
    image_shape: tuple[int, int, int]
    checkpoint: Path

    def logits(self, images: Any) -> np.ndarray:
        """Return the outputs for pictures, (number, height, width, channels).

        Args:
            images: Pixels as they are stored, from 0 to 255 (of digits, to 16), not scaled.
        """
        shape = np.shape(images)
        if shape[1:] != self.image_shape:
            wanted = ", ".join(map(str, ("number", *self.image_shape)))
            raise ValueError(f"images must have the shape ({wanted}), got {shape}.")
        _warn_of_scaled(np.asarray(images))
        steps = preparation(
            self.config.resolved_dataset, normalize=self.config.normalize_input
        )
        scaled = jnp.asarray(steps.scale_on_host(np.asarray(images)))
        outputs, _ = jax.jit(self._apply)(self.params, self.model_state, scaled)
        return np.asarray(outputs)

    def predict(self, images: Any) -> tuple[list[str], np.ndarray]:
        """Return the most likely class of each picture, and how sure the network is.

        Args:
            images: Pixels as they are stored, from 0 to 255 (of digits, to 16), not scaled.
        """
        shares = np.asarray(jax.nn.softmax(self.logits(images)))
        return [self.classes[n] for n in shares.argmax(1)], shares.max(1)

    def predict_files(self, paths: Iterable[Path | str]) -> tuple[list[str], np.ndarray]:
        """Do the same for files of pictures, cropped and scaled as in validation."""
        side = self.image_shape[0]
        if self.image_shape[2] != 3:
            raise ValueError(f"Files are pictures in color, not {self.image_shape}.")
        pictures = []
        for path in paths:
            with open_image(path, formats=None) as image:
                pictures.append(prepare_image(image, None, size=side, flip=False))
        return self.predict(np.stack(pictures))

    def _apply(self, params: Any, model_state: Any, images: Any) -> Any:
        return apply_layers(self.layers, params, model_state, images, training=False)


def _warn_of_scaled(images: np.ndarray) -> None:
    if np.issubdtype(images.dtype, np.floating) and not (images > 1).any():
        warnings.warn(
            "No pixel is above 1. Give pictures as they are stored, from 0 to 255: the "
            "network scales them itself.",
            stacklevel=3,
        )


def load_trained(path: Path | str) -> TrainedCnn:
    """Load the newest checkpoint of a ``cnn train`` run, or the one that is named."""
    saved = find_run(Path(path), command="cnn train")
    saved.check_command("cnn-train")
    config = saved.build_config(CnnConfig)
    images = data.load(config)
    model = model_of(config, images)
    params, model_state = init_shapes(model, np.zeros((1, *images.image_shape), np.float32))
    dtype = jnp.dtype(config.types.weights)
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), params)
    weights, _ = restore_part(saved.newest(), Weights(params, model_state))
    names = class_names(images, config.resolved_dataset)
    return TrainedCnn(
        config,
        model,
        weights.params,
        weights.model_state,
        names,
        images.image_shape,
        saved.newest(),
    )
