"""Binarized MNIST's text files: read exactly, refused where they are not whole."""

import numpy as np
import pytest
from image_files import real_data

from millrace.data.binarized_mnist import load_binarized_mnist, read_amat
from millrace.data.catalog import CATALOG, DatasetNotFound
from millrace.data.fetch import digest, expected_digest
from millrace.data.source import DatasetError

ROWS = np.random.default_rng(0).integers(0, 2, (6, 784)).astype(np.uint8)


def text_of(rows, separator=" ", ending="\n"):
    return "".join(separator.join(map(str, row)) + ending for row in rows)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "binarized_mnist_train.amat"

    def write(text):
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    "text",
    [
        text_of(ROWS),
        text_of(ROWS)[:-1],  # no line's end at the end
        text_of(ROWS, ending=" \n"),
        text_of(ROWS, ending="\r\n"),
        text_of(ROWS, separator="\t"),
        text_of(ROWS.astype(float)),
    ],
)
def test_rows_are_read_whatever_the_spacing(file, text):
    found = read_amat(file(text), 784)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, ROWS)


def test_another_value_is_refused_with_its_place(file):
    rows = ROWS.copy()
    rows[3, 17] = 2
    with pytest.raises(DatasetError, match=r"'2' in line 4, column 18; .* are 0 or 1"):
        read_amat(file(text_of(rows)), 784)
    with pytest.raises(DatasetError, match=r"'0\.5' in line 1, column 1;"):
        read_amat(file("0.5" + text_of(ROWS)[1:]), 784)


@pytest.mark.parametrize("cut", [1, 2, 783, 1000])
def test_a_file_that_is_cut_off_is_refused(file, cut):
    text = text_of(ROWS)[: -1 - cut]
    with pytest.raises(DatasetError, match=r"numbers in line 6, expected 784.*cut off"):
        read_amat(file(text), 784)


def test_an_empty_file_is_refused(file):
    with pytest.raises(DatasetError, match="is empty"):
        read_amat(file(""), 784)


def test_missing_whole_rows_are_noticed(file, tmp_path):
    file(text_of(ROWS))
    (tmp_path / "binarized_mnist_test.amat").write_text(text_of(ROWS))
    with pytest.raises(DatasetError, match=r"holds 6 pictures, expected 50,000"):
        load_binarized_mnist(tmp_path)


def test_a_folder_without_it_says_how_to_get_it(tmp_path):
    with pytest.raises(DatasetNotFound, match="millrace data fetch binarized-mnist"):
        load_binarized_mnist(tmp_path)


@pytest.mark.slow
def test_the_published_files_have_the_catalogs_checksums(tmp_path):
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
