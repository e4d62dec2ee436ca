"""Predictions of a trained model, loaded from its run directory."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn import data
from millrace.apps.cnn.augment import Preprocessing, get_preprocessing
from millrace.apps.cnn.classify import ClassifiedFile, classify_files, read_image
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.evaluate import BEST_BY
from millrace.apps.cnn.mistakes import class_names
from millrace.apps.cnn.program import build_model, weight_shapes
from millrace.card import Card, with_card
from millrace.checkpoint.store import restore_part
from millrace.config import ConfigurationError
from millrace.nn.layers import Layer, apply_layers, num_parameters
from millrace.run.options import Which
from millrace.run.saved import announce, find_run


@with_card
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

    def card(self) -> Card:
        """Return what a terminal or a notebook shows."""
        rows = {
            "model": self.config.model_title,
            "parameters": f"{num_parameters(self.params):,}",
            "classes": len(self.classes),
            "images": "x".join(map(str, self.image_shape)),
            "checkpoint": self.checkpoint,
        }
        return Card("TrainedCnn", rows)

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
        if self.config.data.arrays is None:  # else they have the scale of those arrays
            _warn_if_scaled(np.asarray(images))
        scaled = jnp.asarray(self._preprocessing.scale_on_host(np.asarray(images)))
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
        if isinstance(paths, str | Path):
            raise ValueError(f"paths must be a list of files, got {str(paths)!r}.")
        found = []
        for file in self.classify_files(paths):
            if file.probabilities is None:
                raise ValueError(file.error)
            found.append(file.probabilities)
        probabilities = np.array(found).reshape(-1, len(self.classes))
        return [self.classes[n] for n in probabilities.argmax(1)], probabilities.max(1)

    def classify_files(
        self, paths: Iterable[Path | str], batch_size: int = 64
    ) -> Iterator[ClassifiedFile]:
        """Yield the probabilities of all classes for each image file, in order.

        A file that cannot be read has an error instead. Files are read in threads, cropped
        and scaled as in validation.

        Args:
            paths: Image files.
            batch_size: Images that are classified at a time.
        """
        if self.pixel_type != "uint8":
            raise ConfigurationError(
                f"The model was trained on arrays of {self.pixel_type}, and image files "
                "have bytes: call predict with arrays on the scale of those of training."
            )
        read = functools.partial(
            read_image, shape=self.image_shape, dataset=self.config.resolved_dataset
        )
        files = [Path(path) for path in paths]
        classify = self._build_classify()
        return classify_files(files, read, classify, self.image_shape, batch_size)

    def pixels_to_logits(
        self,
        images: jax.Array,  # (number, height, width, channels)
    ) -> jax.Array:  # (number, classes)
        """Return the outputs for unscaled pixels, in float32; a pure function."""
        scaled = self._preprocessing.scale_on_device(images)
        return self._apply(self.params, self.model_state, scaled)[0]

    @property
    def pixel_type(self) -> str:
        """The type of unscaled pixels: bytes, or float32 for arrays that are not bytes."""
        arrays = self.config.data.arrays
        return "uint8" if arrays is None else arrays["types"]["image"]

    @property
    def _preprocessing(self) -> Preprocessing:
        options = self.config.data
        return get_preprocessing(
            self.config.resolved_dataset, arrays=options.arrays, **options.scaling
        )

    def _build_classify(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return the compiled function from bytes to probabilities."""
        device = jax.local_devices()[0]
        weights = jax.device_put((self.params, self.model_state), device)

        @jax.jit
        def compute(weights: Any, images: jax.Array) -> jax.Array:
            params, model_state = weights
            model = self._replace(params=params, model_state=model_state)
            return jax.nn.softmax(model.pixels_to_logits(images))

        def classify(images: np.ndarray) -> np.ndarray:
            return jax.device_get(compute(weights, jax.device_put(images, device)))

        return classify

    def _apply(self, params: Any, model_state: Any, images: Any) -> Any:
        # A run in 16 bits stores 16-bit weights; predictions are computed in float32.
        params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return apply_layers(self.layers, params, model_state, images, training=False)


def _warn_if_scaled(images: np.ndarray) -> None:
    if np.issubdtype(images.dtype, np.floating) and not (images > 1).any():
        warnings.warn(
            "No pixel is above 1. Give unscaled images, from 0 to 255: they are scaled "
            "here.",
            stacklevel=3,
        )


def load_trained(
    path: Path | str, which: Which = "best", *, announce: Callable[[str], Any] = announce
) -> TrainedCnn:
    """Load the model of a ``cnn train`` run.

    Args:
        path: A run directory, its folder of checkpoints, or one checkpoint.
        which: The best checkpoint, the last, or that after this number of updates.
        announce: Called with a line about the checkpoint.
    """
    saved = find_run(path, command="cnn train")
    saved.check_command("cnn-train")
    config = saved.build_config(CnnConfig)
    chosen = saved.choose(which, best_by=BEST_BY)
    announce(chosen.describe())
    images = data.load(config)
    model = build_model(config, images)
    weights, _ = restore_part(chosen.path, weight_shapes(config, images, model))
    return TrainedCnn(
        config,
        model,
        weights.params,
        weights.model_state,
        class_names(images, config.resolved_dataset),
        images.image_shape,
        chosen.path,
    )
