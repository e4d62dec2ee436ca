"""Facts about each image dataset: sizes, shapes, statistics, files, checksums, folder.

Imported by ``millrace data fetch --help``, so it must not import NumPy.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from millrace.config import ConfigurationError
from millrace.trust import find_writers


@dataclass(frozen=True)
class DataFile:
    """A file as published."""

    name: str
    num_bytes: int
    md5: str
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A dataset as published."""

    name: str
    num_training: int
    num_validation: int
    image_shape: tuple[int, int, int]
    """Height, width, channels; for ImageNet, whose images differ, after cropping."""
    num_classes: int
    mean: tuple[float, ...]
    """Mean of the training pixels per channel, scaled to [0, 1]."""
    std: tuple[float, ...]
    """Standard deviation of the training pixels per channel, scaled to [0, 1]."""
    files: tuple[DataFile, ...]
    url: str | None = None
    """The folder with the files; None where a registration is required."""
    website: str | None = None
    """Where to register."""


class DatasetNotFound(ConfigurationError):
    """A folder does not contain the dataset."""


def data_folder() -> Path:
    """Return the folder for downloads: MILLRACE_DATA, or millrace in the user cache."""
    if chosen := os.environ.get("MILLRACE_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "millrace"


def check_trusted(folder: Path, *, variable: str = "MILLRACE_DATA") -> None:
    """Raise if any user of this machine could change what is in a folder of downloads."""
    if (reason := find_writers(folder, trust_owner=True)) is not None:
        raise ConfigurationError(
            f"What is in {folder} is not used, because {reason}. Take that right away "
            f"(chmod o-w), or choose another folder with {variable}."
        )


def download_folder(name: str) -> Path:
    """Return the folder that a dataset is downloaded to."""
    return data_folder() / name


def tfds_folder() -> Path:
    """Return the folder of TensorFlow Datasets: TFDS_DATA_DIR, or that in the home."""
    chosen = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return Path(chosen).expanduser()


def find_downloaded(name: str) -> Path:
    """Return the folder of a downloaded dataset; raise if any user could change it."""
    folder = download_folder(name)
    if folder.exists():
        check_trusted(folder)
    return folder


def find_tfds_folder() -> Path:
    """Return the folder of TensorFlow Datasets; raise if any user could change it."""
    folder = tfds_folder()
    if folder.exists():
        check_trusted(folder, variable="TFDS_DATA_DIR")
    return folder


def dataset_not_found(
    name: str, folder: Path, looked_for: Iterable[str]
) -> DatasetNotFound:
    """Return an error that names what is missing, where, and how to get it."""
    return DatasetNotFound(
        f"There is no {name} in {folder.resolve()}; looked for {', '.join(looked_for)}. "
        f"{_how_to_get(name)}"
    )


def _how_to_get(name: str) -> str:
    option = "its folder with --dataset-path."
    known = CATALOG.get(name)
    if known is None or not known.files:
        return f"Give {option}"
    if known.url is None:
        return f"Download it from {known.website}, and give {option}"
    files = ", ".join(file.name for file in known.files)
    return (
        f"`millrace data fetch {name}` downloads {files} from {known.url} to "
        f"{download_folder(name)}; or give {option}"
    )


_DATASETS = (
    Dataset(
        name="digits",
        num_training=1437,
        num_validation=360,
        image_shape=(8, 8, 1),
        num_classes=10,
        mean=(0.30488390,),
        std=(0.37587267,),
        files=(),
    ),
    Dataset(
        name="mnist",
        num_training=60_000,
        num_validation=10_000,
        image_shape=(28, 28, 1),
        num_classes=10,
        mean=(0.1307,),
        std=(0.3081,),
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        files=(
            DataFile(
                "train-images-idx3-ubyte.gz",
                9_912_422,
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            DataFile(
                "train-labels-idx1-ubyte.gz",
                28_881,
                "d53e105ee54ea40749a09fcbcd1e9432",
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            DataFile(
                "t10k-images-idx3-ubyte.gz",
                1_648_877,
                "9fb629c4189551a2d022fa330f9573f3",
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            DataFile(
                "t10k-labels-idx1-ubyte.gz",
                4_542,
                "ec29112dd5afa0611ce80d1b7f02629c",
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
    ),
    Dataset(
        name="fashion-mnist",
        num_training=60_000,
        num_validation=10_000,
        image_shape=(28, 28, 1),
        num_classes=10,
        mean=(0.2860,),
        std=(0.3530,),
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        files=(
            DataFile(
                "train-images-idx3-ubyte.gz",
                26_421_880,
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            DataFile(
                "train-labels-idx1-ubyte.gz",
                29_515,
                "25c81989df183df01b3e8a0aad5dffbe",
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            DataFile(
                "t10k-images-idx3-ubyte.gz",
                4_422_102,
                "bef4ecab320f06d8554ea6380940ec79",
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            DataFile(
                "t10k-labels-idx1-ubyte.gz",
                5_148,
                "bb300cfdad3c16e7a12a480ee83cd310",
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
    ),
    Dataset(
        name="binarized-mnist",
        num_training=50_000,
        num_validation=10_000,
        image_shape=(28, 28, 1),
        num_classes=0,
        mean=(0.1306,),
        std=(0.3369,),
        url="https://www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist/",
        files=(
            DataFile(
                "binarized_mnist_train.amat",
                78_400_000,
                "db28b1a6ae0fe70cbd3da91acf46e477",
                "ad693b29f94c14277b095f5238ddefbbdaaae0939789dd2f4f0205278cee3e4d",
            ),
            DataFile(
                "binarized_mnist_test.amat",
                15_680_000,
                "14e41ae11040adba6ab8cb291eda0dd8",
                "e6687bfea3f820c174f33b7865140b2a2dd2930ef786f35d45795fc193b5ab2c",
            ),
        ),
    ),
    Dataset(
        name="cifar10",
        num_training=50_000,
        num_validation=10_000,
        image_shape=(32, 32, 3),
        num_classes=10,
        mean=(0.49139968, 0.48215841, 0.44653091),
        std=(0.24703223, 0.24348513, 0.26158784),
        url="https://www.cs.toronto.edu/~kriz/",
        files=(
            DataFile(
                "cifar-10-binary.tar.gz",
                170_052_171,
                "c32a1d4ab5d03f1284b67883e8d87530",
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
    ),
    Dataset(
        name="cifar100",
        num_training=50_000,
        num_validation=10_000,
        image_shape=(32, 32, 3),
        num_classes=100,
        mean=(0.50707516, 0.48654887, 0.44091784),
        std=(0.26733429, 0.25643846, 0.27615047),
        url="https://www.cs.toronto.edu/~kriz/",
        files=(
            DataFile(
                "cifar-100-binary.tar.gz",
                168_513_733,
                "03b5dce01913d631647c71ecec9e9cb8",
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
    ),
    Dataset(
        name="imagenet",
        num_training=1_281_167,
        num_validation=50_000,
        image_shape=(224, 224, 3),
        num_classes=1000,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        website="https://image-net.org/download",
        files=(
            DataFile(
                "ILSVRC2012_img_train.tar",
                147_897_477_120,
                "1d675b47d978889d74fa0da5fadfb00e",
            ),
            DataFile(
                "ILSVRC2012_img_val.tar", 6_744_924_160, "29b22e2961454d5413ddabcf34fc5622"
            ),
        ),
    ),
)

CATALOG: Mapping[str, Dataset] = MappingProxyType(
    {dataset.name: dataset for dataset in _DATASETS}
)
"""All datasets by name."""
