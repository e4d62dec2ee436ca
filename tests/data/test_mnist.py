"""MNIST, Fashion-MNIST, binarized MNIST and digits: read exactly, or rejected by name."""

import gzip
import hashlib
import struct

import numpy as np
import pytest
from image_files import real_data

from millrace.config import ConfigurationError
from millrace.data.catalog import CATALOG, DatasetNotFound
from millrace.data.fetch import digest, expected_digest
from millrace.data.mnist import (
    load_binarized_mnist,
    load_digits,
    load_fashion_mnist,
    load_mnist,
    read_amat,
    read_digits,
)
from millrace.data.source import DatasetError
from millrace.data.verify import verify


def test_the_digits_are_split_completely_without_overlap():
    training, validation = load_digits()
    assert (len(training), len(validation)) == (1437, 360)
    image = np.concatenate([training.arrays["image"], validation.arrays["image"]])
    assert image.shape[1:] == (8, 8, 1)
    assert image.dtype == np.uint8 and (image.min(), image.max()) == (0, 16)
    labels = np.concatenate([training.arrays["label"], validation.arrays["label"]])
    assert sorted(np.bincount(labels)) == [174, 177, 178, 179, 180, 181, 181, 182, 182, 183]


def test_the_digits_are_those_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.datasets")
    theirs, (images, labels) = sklearn.load_digits(), read_digits()
    assert images.dtype == np.uint8 and labels.dtype == theirs.target.dtype
    np.testing.assert_array_equal(images, theirs.images)
    np.testing.assert_array_equal(labels, theirs.target)


def test_the_digits_agree_with_the_catalog():
    known = CATALOG["digits"]
    training, validation = load_digits()
    assert verify((training, validation), known) == []
    pixels = training.arrays["image"] / 16
    np.testing.assert_allclose(
        [pixels.mean(), pixels.std()], [*known.mean, *known.std], 1e-6
    )


IMAGES = np.arange(5 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(5, 28, 28)


LABELS = np.array([3, 0, 9, 1, 9], np.uint8)


def idx(array, magic=None):
    magic = 0x800 | array.ndim if magic is None else magic
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


def write(folder, *, gzipped=False, **changed):
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "train-images-idx3-ubyte": idx(IMAGES),
        "train-labels-idx1-ubyte": idx(LABELS),
        "t10k-images-idx3-ubyte": idx(IMAGES[:2]),
        "t10k-labels-idx1-ubyte": idx(LABELS[:2]),
    }
    for name, content in contents.items():
        content = changed.get(name.split("-idx")[0].replace("-", "_"), content)
        if gzipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize("subfolder", ["", "raw", "MNIST/raw"])
def test_idx_files_are_read_plain_or_gzipped_from_the_usual_folders(
    tmp_path, gzipped, subfolder
):
    write(tmp_path / subfolder, gzipped=gzipped)
    training, validation = load_mnist(tmp_path)
    assert (len(training), len(validation)) == (5, 2)
    batch = training[np.array([4, 2])]
    assert batch["image"].dtype == np.uint8 and batch["label"].dtype == np.int32
    np.testing.assert_array_equal(batch["image"], IMAGES[[4, 2], :, :, None])
    np.testing.assert_array_equal(batch["label"], [9, 9])


def test_fashion_mnist_is_read_from_its_own_folders(tmp_path):
    write(tmp_path / "FashionMNIST" / "raw", gzipped=True)
    assert len(load_fashion_mnist(tmp_path)[0]) == 5
    with pytest.raises(ConfigurationError, match="no mnist in"):
        load_mnist(tmp_path)


def test_a_plain_file_wins_over_a_gzipped_one(tmp_path):
    write(tmp_path, gzipped=True, train_labels=b"not read")
    write(tmp_path)
    np.testing.assert_array_equal(load_mnist(tmp_path)[0].arrays["label"], LABELS)


def test_a_missing_dataset_error_names_the_files_and_how_to_get_them(tmp_path):
    write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigurationError) as caught:
            load_mnist(path)
        message = str(caught.value)
        assert str(path) in message and "--dataset-path" in message
        assert "t10k-labels-idx1-ubyte[.gz]" in message


def false_header(*shape: int) -> bytes:
    """Return an IDX file whose header claims this shape, with hardly any data."""
    return struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape) + b"\0" * 9


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_images": idx(IMAGES, 0x801)}, "magic number 0x801; expected 0x803"),
        ({"train_images": idx(IMAGES)[:-1]}, "should have 3920 bytes .* has 3919"),
        ({"train_images": idx(IMAGES) + b"!"}, "should have 3920 bytes .* has more"),
        ({"train_images": idx(IMAGES[:, :14])}, "images of 14 x 28; mnist has 28 x 28"),
        ({"train_images": idx(IMAGES[:0])}, "claims to have 0 samples"),
        ({"train_labels": idx(LABELS[:0])}, "claims to have 0 samples"),
        (
            {"train_images": false_header(2**32 - 1, 28, 28)},
            "to have 4,294,967,295 samples; mnist",
        ),
        ({"train_images": false_header(5, 2**32 - 1, 2**32 - 1)}, "mnist has 28 x 28"),
        (
            {"t10k_labels": false_header(2**31)},
            "2,147,483,648 samples; mnist has at most 60",
        ),
        ({"train_images": b"\0\0\x08"}, "too short to be an IDX file"),
        ({"train_labels": idx(LABELS[:4])}, "has 5 images, but .* has 4 labels"),
        (
            {"t10k_labels": idx(np.array([9, 10], np.uint8))},
            "the label 10; the largest .* is 9",
        ),
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
    write(tmp_path, gzipped=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is a damaged gzip"):
        load_mnist(tmp_path)
    path.write_bytes(b"not gzip at all")
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is a damaged gzip"):
        load_mnist(tmp_path)


def test_the_real_mnist_agrees_with_the_catalog():
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
    # Every second image would not do: two sources alternate, one brighter.
    parts = np.array_split(training.arrays["image"], 20)
    histogram = sum(np.bincount(part.ravel(), minlength=256) for part in parts)
    gray = np.arange(256) / 255
    mean = np.average(gray, weights=histogram)
    std = np.average((gray - mean) ** 2, weights=histogram) ** 0.5
    np.testing.assert_allclose([mean, std], [known.mean[0], known.std[0]], atol=5e-5)


ROWS = np.random.default_rng(0).integers(0, 2, (6, 784)).astype(np.uint8)


def as_text(rows, separator=" ", ending="\n"):
    return "".join(separator.join(map(str, row)) + ending for row in rows)


@pytest.fixture
def amat_file(tmp_path):
    path = tmp_path / "binarized_mnist_train.amat"

    def write(text):
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    "text",
    [
        as_text(ROWS),
        as_text(ROWS)[:-1],  # no newline at the end
        as_text(ROWS, ending=" \n"),
        as_text(ROWS, ending="\r\n"),
        as_text(ROWS, separator="\t"),
        as_text(ROWS.astype(float)),
    ],
)
def test_binarized_images_are_read_with_any_spacing(amat_file, text):
    found = read_amat(amat_file(text), 784)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, ROWS)


def test_a_pixel_that_is_not_binary_is_rejected_with_its_position(amat_file):
    rows = ROWS.copy()
    rows[3, 17] = 2
    with pytest.raises(DatasetError, match=r"'2' in line 4, column 18; .* are 0 or 1"):
        read_amat(amat_file(as_text(rows)), 784)
    with pytest.raises(DatasetError, match=r"'0\.5' in line 1, column 1;"):
        read_amat(amat_file("0.5" + as_text(ROWS)[1:]), 784)


@pytest.mark.parametrize("cut", [1, 2, 783, 1000])
def test_a_truncated_text_file_is_rejected(amat_file, cut):
    text = as_text(ROWS)[: -1 - cut]
    with pytest.raises(DatasetError, match=r"numbers in line 6, expected 784.*truncated"):
        read_amat(amat_file(text), 784)


def test_an_empty_text_file_is_rejected(amat_file):
    with pytest.raises(DatasetError, match="is empty"):
        read_amat(amat_file(""), 784)


def test_missing_rows_are_detected(amat_file, tmp_path):
    amat_file(as_text(ROWS))
    (tmp_path / "binarized_mnist_test.amat").write_text(as_text(ROWS))
    with pytest.raises(DatasetError, match=r"has 6 images, expected 50,000"):
        load_binarized_mnist(tmp_path)


def test_a_folder_without_binarized_mnist_says_how_to_get_it(tmp_path):
    with pytest.raises(DatasetNotFound, match="millrace data fetch binarized-mnist"):
        load_binarized_mnist(tmp_path)


@pytest.mark.slow
def test_the_published_files_have_the_checksums_of_the_catalog(tmp_path):
    packed = np.load(real_data("binarized_mnist") / "binarized_mnist_packed.npz")
    known = CATALOG["binarized-mnist"]
    for file, split in zip(known.files, ("train", "test"), strict=True):
        bits = np.unpackbits(packed[split], axis=1, count=784)
        text = np.full((len(bits), 1568), ord(" "), np.uint8)
        text[:, ::2] = bits + ord("0")
        text[:, -1] = ord("\n")
        path = tmp_path / file.name
        path.write_bytes(text.tobytes())
        assert path.stat().st_size == file.num_bytes
        assert digest(path, file) == expected_digest(file)
    training, test = load_binarized_mnist(tmp_path)
    assert (len(training), len(test)) == (known.num_training, known.num_validation)
    pixels = training.arrays["image"]
    assert pixels.mean() == pytest.approx(known.mean[0], abs=1e-4)
    assert pixels.std() == pytest.approx(known.std[0], abs=1e-4)
