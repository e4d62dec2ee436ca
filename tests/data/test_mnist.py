import gzip
import hashlib
import struct

import numpy as np
import pytest
from image_files import real_data

from millrace.config import ConfigurationError
from millrace.data.catalog import CATALOG
from millrace.data.mnist import load_fashion_mnist, load_mnist
from millrace.data.verify import verify

IMAGES = np.arange(5 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(5, 28, 28)
LABELS = np.array([3, 0, 9, 1, 9], np.uint8)


def idx(array, magic=None):
    magic = 0x800 | array.ndim if magic is None else magic
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


def write(folder, *, zipped=False, **changed):
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "train-images-idx3-ubyte": idx(IMAGES),
        "train-labels-idx1-ubyte": idx(LABELS),
        "t10k-images-idx3-ubyte": idx(IMAGES[:2]),
        "t10k-labels-idx1-ubyte": idx(LABELS[:2]),
    }
    for name, content in contents.items():
        content = changed.get(name.split("-idx")[0].replace("-", "_"), content)
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("subfolder", ["", "raw", "MNIST/raw"])
def test_idx_files_are_read_plain_or_zipped_from_the_usual_folders(
    tmp_path, zipped, subfolder
):
    write(tmp_path / subfolder, zipped=zipped)
    training, validation = load_mnist(tmp_path)
    assert (len(training), len(validation)) == (5, 2)
    batch = training[np.array([4, 2])]
    assert batch["image"].dtype == np.uint8 and batch["label"].dtype == np.int32
    np.testing.assert_array_equal(batch["image"], IMAGES[[4, 2], :, :, None])
    np.testing.assert_array_equal(batch["label"], [9, 9])


def test_fashion_mnist_is_read_from_its_own_folders(tmp_path):
    write(tmp_path / "FashionMNIST" / "raw", zipped=True)
    assert len(load_fashion_mnist(tmp_path)[0]) == 5
    with pytest.raises(ConfigurationError, match="no mnist in"):
        load_mnist(tmp_path)


def test_of_a_plain_and_a_zipped_file_the_plain_one_is_read(tmp_path):
    write(tmp_path, zipped=True, train_labels=b"not looked at")
    write(tmp_path)
    np.testing.assert_array_equal(load_mnist(tmp_path)[0].arrays["label"], LABELS)


def test_a_missing_data_set_says_what_was_looked_for_and_how_to_get_it(tmp_path):
    write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigurationError) as caught:
            load_mnist(path)
        message = str(caught.value)
        assert str(path) in message and "--dataset-path" in message
        assert "t10k-labels-idx1-ubyte[.gz]" in message


def lying(*shape: int) -> bytes:
    """An IDX file that says it has this shape, and has next to nothing."""
    return struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape) + b"\0" * 9


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_images": idx(IMAGES, 0x801)}, "magic number 0x801; expected 0x803"),
        ({"train_images": idx(IMAGES)[:-1]}, "should hold 3920 bytes .* holds 3919"),
        ({"train_images": idx(IMAGES) + b"!"}, "should hold 3920 bytes .* holds more"),
        ({"train_images": idx(IMAGES[:, :14])}, "pictures of 14 x 28; mnist has 28 x 28"),
        ({"train_images": idx(IMAGES[:0])}, "says that it holds 0 samples"),
        ({"train_labels": idx(LABELS[:0])}, "says that it holds 0 samples"),
        ({"train_images": lying(2**32 - 1, 28, 28)}, "holds 4,294,967,295 samples; mnist"),
        ({"train_images": lying(5, 2**32 - 1, 2**32 - 1)}, "mnist has 28 x 28"),
        ({"t10k_labels": lying(2**31)}, "holds 2,147,483,648 samples; mnist has up to 60"),
        ({"train_images": b"\0\0\x08"}, "too short to be an IDX file"),
        ({"train_labels": idx(LABELS[:4])}, "holds 5 pictures, but .* 4 labels"),
        ({"t10k_labels": idx(np.array([9, 10], np.uint8))}, "the label 10; .* end at 9"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, changed, message):
    write(tmp_path, **changed)
    with pytest.raises(ValueError, match=message) as caught:
        load_mnist(tmp_path)
    assert next(iter(changed)).replace("_", "-") in str(caught.value)
    assert not isinstance(caught.value, ConfigurationError)


@pytest.mark.parametrize("keep", [30, 200])
def test_a_damaged_gzip_file_is_named(tmp_path, keep):
    write(tmp_path, zipped=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is a damaged gzip"):
        load_mnist(tmp_path)
    path.write_bytes(b"not gzip at all")
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is a damaged gzip"):
        load_mnist(tmp_path)


def test_the_real_mnist_is_as_the_catalog_says():
    path = real_data("mnist")
    known = CATALOG["mnist"]
    for file in known.files:
        content = (path / file.name).read_bytes()
        assert len(content) == file.num_bytes
        assert hashlib.md5(content).hexdigest() == file.md5
        assert hashlib.sha256(content).hexdigest() == file.sha256
    training, validation = load_mnist(path)
    assert verify((training, validation), known) == []
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # published
    assert np.bincount(training.arrays["label"]).tolist() == counts
    # Every second picture would not do: two sources alternate, one brighter.
    parts = np.array_split(training.arrays["image"], 20)
    histogram = sum(np.bincount(part.ravel(), minlength=256) for part in parts)
    gray = np.arange(256) / 255
    mean = np.average(gray, weights=histogram)
    std = np.average((gray - mean) ** 2, weights=histogram) ** 0.5
    np.testing.assert_allclose([mean, std], [known.mean[0], known.std[0]], atol=5e-5)
