"""Image datasets of Hugging Face, read through their library (extra "huggingface")."""

from pathlib import Path
from typing import Any

from millrace.config import ConfigurationError
from millrace.data.decode_worker import ReadSample
from millrace.data.decoding import CorruptSample, Crop
from millrace.data.image_source import ImageSource
from millrace.data.layouts import VALIDATION_NAMES, find_shards
from millrace.data.source import DatasetError


def open_splits(folder: Path) -> tuple[Any, Any | None]:
    """Return the training and validation split: ``datasets.Dataset``, memory-mapped.

    Args:
        folder: Written by ``DatasetDict.save_to_disk``, or a copy of a repository with
            Parquet files.
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigurationError(
            f"{folder} is a Hugging Face dataset, which needs their library: "
            "pip install datasets."
        ) from error
    splits: Any
    if (folder / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(folder))
    else:
        files = {"train": ("train",), "validation": VALIDATION_NAMES}
        found = {name: find_shards(folder, x, ".parquet") for name, x in files.items()}
        paths = {name: [str(x) for x in some] for name, some in found.items() if some}
        splits = datasets.load_dataset("parquet", data_files=paths)
    if "train" not in splits:
        raise DatasetError(f"{folder} has the splits {', '.join(splits)}, but no train.")
    validation = next((name for name in VALIDATION_NAMES if name in splits), None)
    return splits["train"], None if validation is None else splits[validation]


class HuggingFaceImages(ImageSource):
    """The rows of a ``datasets.Dataset`` with an image and a class label.

    Args:
        dataset: One split.
        crop: How images are cropped.
        options: ``num_workers`` and ``max_corrupt`` of `ImageSource`.
    """

    def __init__(self, dataset: Any, crop: Crop, **options: Any) -> None:
        import datasets  # pyright: ignore[reportMissingImports]

        columns = dataset.features
        images = [n for n, kind in columns.items() if isinstance(kind, datasets.Image)]
        labels = [n for n, kind in columns.items() if isinstance(kind, datasets.ClassLabel)]
        if not images or not labels:
            raise DatasetError(
                "The Hugging Face dataset needs a column of type Image and one of type "
                f"ClassLabel; it has {columns}."
            )
        self.classes = tuple(columns[labels[0]].names)
        # Encoded: our workers decode only what a crop needs.
        encoded = dataset.cast_column(images[0], datasets.Image(decode=False))
        self._reader = _Reader(encoded, images[0], labels[0])
        super().__init__(len(dataset), crop, **options)

    @property
    def reader(self) -> ReadSample:
        return self._reader

    def locate(self, index: int) -> int:
        return index

    def name(self, index: int) -> str:
        return f"row {index}"


class _Reader:
    """Reads rows; a pickled dataset opens the same memory-mapped files again."""

    def __init__(self, dataset: Any, image: str, label: str) -> None:
        self._dataset = dataset
        self._image, self._label = image, label

    def __call__(self, location: int) -> tuple[bytes, int]:
        row = self._dataset[location]
        image, label = row[self._image], row[self._label]
        if image is None or label is None or label < 0:
            raise CorruptSample("it has no image or no label")
        if image["bytes"] is not None:
            return image["bytes"], label
        return Path(image["path"]).read_bytes(), label
