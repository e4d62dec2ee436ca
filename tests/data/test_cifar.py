"""CIFAR in both published forms: read exactly; malicious or damaged files rejected."""

import hashlib
import importlib.util
import io
import os
import pickle
import struct
import tarfile

import numpy as np
import pytest
from image_files import real_data

from millrace.config import ConfigurationError
from millrace.data import cifar
from millrace.data.catalog import CATALOG
from millrace.data.cifar import load_cifar10, load_cifar100

PER_FILE = 4


@pytest.fixture(autouse=True)
def small_files(monkeypatch, request):
    """Accept files of a few images as complete."""
    if "published" not in request.node.name and "real" not in request.node.name:
        monkeypatch.setattr(cifar, "_num_images", lambda name, release, file: PER_FILE)


def planes(seed):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8)


def labels(seed, num_classes=10):
    return [(7 * seed + number) % num_classes for number in range(PER_FILE)]


def python2_pickle(entries):
    """Pickle a dict like cPickle of Python 2: protocol 2, byte strings, NumPy 1 names."""

    def text(value):
        return b"T" + struct.pack("<i", len(value)) + value

    def value(item):
        if isinstance(item, bytes):
            return text(item)
        if isinstance(item, list):
            return b"](" + b"".join(map(value, item)) + b"e"
        if isinstance(item, int):
            return b"J" + struct.pack("<i", item)
        rows, columns = item.shape
        dtype = (
            b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
            b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        )
        return (
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
            + text(b"b")
            + b"\x87R(K\x01"
            + (value(rows) + value(columns) + b"\x86")
            + dtype
            + b"\x89"
            + text(item.tobytes())
            + b"tb"
        )

    items = b"".join(text(key) + value(item) for key, item in entries.items())
    return b"\x80\x02}(" + items + b"u."


def cifar10_pickle(seed):
    entries = {b"batch_label": b"batch", b"labels": labels(seed), b"data": planes(seed)}
    return python2_pickle(entries | {b"filenames": [b"a.png"] * PER_FILE})


def cifar10_files(release):
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    if release == "pickle":
        return {name: cifar10_pickle(seed) for seed, name in enumerate(names)}
    return {
        f"{name}.bin": np.c_[np.array(labels(seed), np.uint8), planes(seed)].tobytes()
        for seed, name in enumerate(names)
    }


FOLDERS = {"binary": "cifar-10-batches-bin", "pickle": "cifar-10-batches-py"}


ARCHIVES = {"binary": "cifar-10-binary.tar.gz", "pickle": "cifar-10-python.tar.gz"}


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def archive(path, folder, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def check_cifar10(training, validation):
    assert (len(training), len(validation)) == (5 * PER_FILE, PER_FILE)
    batch = training[np.arange(2 * PER_FILE)]
    assert batch["image"].dtype == np.uint8 and batch["label"].dtype == np.int32
    pixels = np.concatenate([planes(0), planes(1)]).reshape(-1, 3, 32, 32)
    np.testing.assert_array_equal(batch["image"], pixels.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(batch["label"], labels(0) + labels(1))
    np.testing.assert_array_equal(validation.arrays["label"], labels(5))


@pytest.mark.parametrize("release", ["binary", "pickle"])
@pytest.mark.parametrize("location", ["folder", "parent", "archive", "archive's folder"])
def test_cifar10_is_read_in_either_form_from_any_usual_location(
    tmp_path, release, location
):
    files, folder = cifar10_files(release), FOLDERS[release]
    path = tmp_path
    if location == "folder":
        write(tmp_path, files)
    elif location == "parent":
        write(tmp_path / folder, files)
    else:
        archive(tmp_path / ARCHIVES[release], folder, files)
        path = tmp_path / ARCHIVES[release] if location == "archive" else tmp_path
    check_cifar10(*load_cifar10(path))
    assert not (location.startswith("archive") and (tmp_path / folder).exists())


@pytest.mark.parametrize("release", ["binary", "pickle"])
def test_cifar100_has_the_fine_labels(tmp_path, release):
    files = {}
    for seed, name in enumerate(["train", "test"]):
        fine, coarse = labels(seed + 13, 100), [seed] * PER_FILE
        if release == "pickle":
            entries = {
                b"data": planes(seed),
                b"coarse_labels": coarse,
                b"fine_labels": fine,
            }
            files[name] = python2_pickle(entries)
        else:
            both = np.array([coarse, fine], np.uint8).T
            files[f"{name}.bin"] = np.c_[both, planes(seed)].tobytes()
    write(tmp_path, files)
    training, validation = load_cifar100(tmp_path)
    np.testing.assert_array_equal(training.arrays["label"], labels(13, 100))
    np.testing.assert_array_equal(validation.arrays["label"], labels(14, 100))
    image = planes(1).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(validation.arrays["image"], image)


@pytest.mark.parametrize("protocol", [3, 4])
def test_a_pickle_written_by_python_3_is_also_read(tmp_path, protocol):
    for seed, name in enumerate(cifar10_files("pickle")):
        entries = {"labels": labels(seed), "data": planes(seed)}
        (tmp_path / name).write_bytes(pickle.dumps(entries, protocol))
    check_cifar10(*load_cifar10(tmp_path))


class Malicious:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("function", "argument"),
    [(os.system, "touch {}"), (eval, "open('{}', 'w')"), (os.mkdir, "{}")],
)
def test_a_malicious_pickle_is_rejected_and_executes_nothing(tmp_path, function, argument):
    trap = tmp_path / "trap"
    write(tmp_path, cifar10_files("pickle"))
    entries = {"labels": Malicious(function, argument.format(trap)), "data": planes(0)}
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps(entries, 4))
    with pytest.raises(
        ValueError, match=r"data_batch_3 is not a file of cifar10.*asks for"
    ):
        load_cifar10(tmp_path)
    assert not trap.exists()


def test_an_array_of_objects_is_rejected(tmp_path):
    write(tmp_path, cifar10_files("pickle"))
    data = np.array([[Malicious(print, "executed")]], object)
    content = pickle.dumps({"labels": labels(0), "data": data}, 4)
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(ValueError, match="data_batch_1 is not a file of cifar10"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([1, 2], "no 'data' and 'labels'"),
        ({"data": planes(0)}, "no 'data' and 'labels'"),
        ({"labels": [1, 2], "data": planes(0)}, "expected (2, 3072)"),
        (
            {"labels": [0.5] * PER_FILE, "data": planes(0)},
            "not a list of integers from 0 to 255",
        ),
        ({"labels": labels(0), "data": planes(0).astype("u2")}, "array of unsigned bytes"),
        ({"labels": labels(0), "data": [1]}, "array of unsigned bytes"),
        ({"labels": [10] * PER_FILE, "data": planes(0)}, "the label 10"),
    ],
)
def test_a_pickle_with_other_content_is_rejected(tmp_path, entries, message):
    write(tmp_path, cifar10_files("pickle"))
    (tmp_path / "test_batch").write_bytes(pickle.dumps(entries, 4))
    with pytest.raises(ValueError, match="test_batch is not a file of cifar10") as caught:
        load_cifar10(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize("keep", [0, 1, 100, 5000])
def test_a_truncated_pickle_is_named(tmp_path, keep):
    write(tmp_path, cifar10_files("pickle"))
    path = tmp_path / "data_batch_5"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"data_batch_5 .* cannot be read as a pickle"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are not whole records of 3073"),
        (bytes(3072), "3072 bytes are not whole records of 3073"),
        (b"\x0a" + bytes(3072), "the label 10"),
    ],
)
def test_a_wrong_binary_file_is_named(tmp_path, content, message):
    write(tmp_path, cifar10_files("binary"))
    (tmp_path / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(ValueError, match=f"data_batch_2.bin .*{message}"):
        load_cifar10(tmp_path)


def test_a_missing_dataset_error_names_the_files_and_how_to_get_them(tmp_path):
    write(tmp_path, cifar10_files("binary"))
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(ConfigurationError) as caught:
        load_cifar10(tmp_path)
    for part in ("test_batch.bin", "cifar-10-python.tar.gz", str(tmp_path)):
        assert part in str(caught.value)
    assert "cifar-10-binary.tar.gz" in str(caught.value)
    with pytest.raises(ConfigurationError, match="cifar-100"):
        load_cifar100(tmp_path / "nowhere")


def test_a_damaged_or_unrelated_archive_is_named(tmp_path):
    path = tmp_path / ARCHIVES["binary"]
    archive(path, FOLDERS["binary"], cifar10_files("binary"))
    content = path.read_bytes()
    for bad in (content[: len(content) // 2], b"no archive"):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"cifar-10-binary\.tar\.gz is a damaged"):
            load_cifar10(tmp_path)
    archive(path, "elsewhere", cifar10_files("binary"))
    with pytest.raises(ValueError, match="does not contain"):
        load_cifar10(path)


@pytest.mark.slow
@pytest.mark.parametrize("release", ["binary", "pickle"])
@pytest.mark.parametrize("count", [0, 1, PER_FILE - 1])
def test_a_file_truncated_between_two_images_is_rejected(
    release, count, tmp_path, monkeypatch
):
    files = cifar10_files(release)
    name = "data_batch_2.bin" if release == "binary" else "data_batch_2"
    files[name] = files[name][: 3073 * count]
    if release == "pickle":
        entries = {b"labels": labels(1)[:count], b"data": planes(1)[:count]}
        files[name] = python2_pickle(entries)
    write(tmp_path, files)
    with pytest.raises(ValueError, match=rf"{name} is not a file of cifar10: .*{count} "):
        load_cifar10(tmp_path)


def test_each_file_must_have_the_published_number_of_images(tmp_path):
    write(tmp_path, cifar10_files("binary"))
    with pytest.raises(ValueError, match=r"data_batch_1\.bin .*4 images, expected 10,000"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize(
    ("name", "training", "in_each"),
    [("cifar10", ("1", "2", "3", "4", "5"), 10_000), ("cifar100", ("1",), 50_000)],
)
def test_the_expected_number_of_images_is_the_published_one(name, training, in_each):
    release = cifar._Release("folder", "archive", training, "test", cifar._parse_binary)
    assert cifar._num_images(name, release, "1") == in_each
    assert cifar._num_images(name, release, "test") == 10_000


def test_the_real_test_images_have_the_published_statistics(tmp_path):
    folder = real_data("cifar10")
    spec = importlib.util.spec_from_file_location("shared", folder / "load_cifar10.py")
    assert spec is not None and spec.loader is not None
    shared = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shared)
    content = shared.to_bin(*shared.decode("test_batch"))  # all six would take 15 s
    assert hashlib.sha256(content).hexdigest() == shared.SHA256["test_batch"]
    (tmp_path / "test_batch.bin").write_bytes(content)
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}.bin").symlink_to(tmp_path / "test_batch.bin")
    training, validation = load_cifar10(tmp_path)
    assert (len(training), len(validation)) == (50_000, 10_000)
    assert np.bincount(validation.arrays["label"]).tolist() == [1000] * 10
    mean = validation.arrays["image"].mean((0, 1, 2), dtype=np.float64) / 255
    np.testing.assert_allclose(mean, [0.49421, 0.48513, 0.45041], atol=1e-5)
    assert validation.arrays["image"].shape[1:] == CATALOG["cifar10"].image_shape
