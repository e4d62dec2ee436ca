"""Images and labels that are passed as arrays from Python."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace.config import ConfigurationError
from millrace.data.memory import HeldArrays, as_images, as_numpy, require_held
from millrace.data.source import ArraySource


def hold_images(data: Any, validation_data: Any = None) -> HeldArrays:
    """Check arrays for training and keep them in memory; their record is for the run.

    Args:
        data: ``(images, labels)`` or an ``ArraySource`` with ``image`` and ``label``.
        validation_data: The same, to validate on.
    """
    if data is None:
        raise ConfigurationError("validation_data needs data: the images to train on.")
    images, labels = _split("data", data)
    arrays = {"image": images, "label": labels}
    if validation_data is not None:
        images, labels = _split("validation_data", validation_data)
        if images.shape[1:] != arrays["image"].shape[1:]:
            raise ConfigurationError(
                f"Images of validation_data have the shape {images.shape[1:]}, those of "
                f"data {arrays['image'].shape[1:]}."
            )
        arrays |= {"validation_image": images, "validation_label": labels}
    names = [name for name in ("label", "validation_label") if name in arrays]
    classes = None
    if arrays["label"].dtype.kind in "US":
        classes = np.unique(arrays["label"]).tolist()
        for name in names:
            arrays[name] = _number_classes(name, arrays[name], classes)
    num_classes = 1 + max(int(arrays[name].max()) for name in names)
    mean, std = _channel_statistics(arrays["image"])
    return HeldArrays(arrays, num_classes=num_classes, classes=classes, mean=mean, std=std)


def _split(name: str, data: Any) -> tuple[np.ndarray, np.ndarray]:
    data = data.arrays if isinstance(data, ArraySource) else data
    if isinstance(data, Mapping):
        if not {"image", "label"} <= set(data):
            raise ConfigurationError(
                f"{name} needs the arrays image and label, got {', '.join(data)}."
            )
        data = data["image"], data["label"]
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise ConfigurationError(
            f"{name} must be (images, labels) or an ArraySource, got {type(data).__name__}."
        )
    images = as_images(f"The images of {name}", data[0])
    labels = _as_labels(f"The labels of {name}", data[1])
    if len(images) != len(labels):
        raise ConfigurationError(
            f"{name} has {len(images):,} images but {len(labels):,} labels."
        )
    return images, labels


def _as_labels(name: str, value: Any) -> np.ndarray:
    labels = as_numpy(name, value)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 2:
        raise ConfigurationError(
            f"{name} must be class numbers, got the shape {labels.shape}. For one-hot "
            "labels, pass labels.argmax(1)."
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iuUS":
        hint = " Pass labels.astype(int)." if labels.dtype.kind in "bf" else ""
        raise ConfigurationError(
            f"{name} must be class numbers or names, one per image; got {labels.dtype} of "
            f"shape {labels.shape}.{hint}"
        )
    if labels.dtype.kind == "S":
        return labels.astype(str)
    if labels.dtype.kind == "U":
        return labels
    if labels.min() < 0:
        raise ConfigurationError(f"{name} start at 0, but one is {labels.min()}.")
    return labels.astype(np.int32)


def _number_classes(name: str, labels: np.ndarray, classes: list[str]) -> np.ndarray:
    if unknown := sorted({str(label) for label in labels.tolist()} - {*classes}):
        raise ConfigurationError(f"{unknown[0]} of {name} is not a class of data.")
    return np.searchsorted(np.array(classes), labels).astype(np.int32)


def _channel_statistics(images: np.ndarray) -> tuple[list[float], list[float]]:
    """Return the mean and the standard deviation of each channel."""
    axes = (0, 1, 2)
    mean = images.mean(axes, dtype=np.float64)
    std = images.std(axes, dtype=np.float64)
    return [float(x) for x in mean], [float(x) or 1.0 for x in std]


class ImageArrays(ArraySource):
    """A split of the arrays, with the names of its classes."""

    def __init__(self, arrays: Mapping[str, Any], classes: list[str] | None) -> None:
        super().__init__(arrays)
        self.classes = classes


class MissingArrays:
    """Stands for arrays that are no longer in memory, when only the model is needed."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.classes = record.get("classes")
        self._record = record

    def __len__(self) -> int:
        require_held(self._record, "mr.cnn.train")
        raise AssertionError("unreachable: the arrays are not in memory")

    def __getitem__(self, indices: np.ndarray) -> Any:
        return len(self)
