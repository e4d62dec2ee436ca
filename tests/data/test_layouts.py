"""Layouts of image datasets: recognized, and read as the same batches."""

import gzip
import itertools
import sys
import tarfile
import warnings

import numpy as np
import pytest
from image_files import (
    SMALL,
    encode,
    example,
    make_image,
    read_folders,
    sample_members,
    write_folders,
    write_records,
    write_tar,
)

from millrace.config import ConfigurationError
from millrace.data.imagenet import load_imagenet, load_images
from millrace.data.layouts import find_layout, find_shards
from millrace.data.packed import Encoding, pack
from millrace.data.source import DatasetError

JPEG = encode(make_image(0))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp("layouts") / "folders")


def split_shards(samples):
    """Divide samples over two shards, in their order."""
    return samples[:7], samples[7:]


def write_tfrecords(folders, target):
    target.mkdir()
    for split, samples in read_folders(folders).items():
        name = "validation" if split == "val" else split
        for number, some in enumerate(split_shards(samples)):
            records = [example(content, label + 1) for content, label in some]
            write_records(target / f"{name}-{number:05}-of-00002", records)
    return target


def write_webdataset(folders, target):
    target.mkdir()
    for split, samples in read_folders(folders).items():
        numbered = [(f"images/{n:04}", *sample) for n, sample in enumerate(samples)]
        for number, some in enumerate(split_shards(numbered)):
            members = [member for sample in some for member in sample_members(*sample)]
            write_tar(target / f"{split}-{number}.tar", members)
    return target


def write_packed(folders, target):
    splits = load_images(folders, SMALL)
    pack(
        {"train": splits.training, "validation": splits.validation},
        target,
        Encoding(),
        num_classes=3,
        source=str(folders),
        num_workers=1,
        progress=lambda *_: None,
    )
    return target


WRITERS = {
    "folders": lambda folders, target: folders,
    "tfrecord": write_tfrecords,
    "webdataset": write_webdataset,
    "packed": write_packed,
}


@pytest.mark.parametrize("layout", [name for name in WRITERS if name != "folders"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_layout_gives_the_same_batches(folders, tmp_path, layout, num_workers):
    expected = load_images(folders, SMALL)
    path = WRITERS[layout](folders, tmp_path / "other")
    assert find_layout(path) == layout
    found = load_images(path, SMALL, num_workers=num_workers)
    assert found.num_classes == (1000 if layout == "tfrecord" else 3)
    for images, others in zip(expected[:2], found[:2], strict=True):
        stream, other = images.stream(4, seed=3), others.stream(4, seed=3)
        for a, b in itertools.islice(zip(stream, other, strict=True), 8):
            np.testing.assert_array_equal(a["image"], b["image"])
            np.testing.assert_array_equal(a["label"], b["label"])
        np.testing.assert_array_equal(
            images[np.arange(15)]["image"], others[np.arange(15)]["image"]
        )
        assert others.corrupt == {}
        others.close()


@pytest.mark.parametrize("layout", WRITERS)
def test_imagenet_may_be_in_any_layout(folders, tmp_path, layout):
    splits = load_imagenet(WRITERS[layout](folders, tmp_path / "other"), SMALL)
    assert (len(splits.training), len(splits.validation)) == (15, 15)


def make_files(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "layout"),
    [
        (["train/a/1.jpg"], "folders"),
        (["train-00000-of-01024", "validation-0"], "tfrecord"),
        (["train/train-0"], "tfrecord"),
        (["train-0.tar"], "webdataset"),
        (["train/0001.tar"], "webdataset"),
        (["data/train-00000.parquet"], "huggingface"),
        (["train.parquet", "README.md"], "huggingface"),
        (["dataset_dict.json", "train/data.arrow"], "huggingface"),
        (["dataset.json", "train-0", "train-0.idx"], "packed"),
        (["data_batch_1.bin", "test_batch.bin"], None),
        (["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte"], None),
        (["train.bin", "test.bin"], None),
        (["train.tfrecords"], "tfrecord"),
        (["train/1.jpg"], None),
        (["val/a/1.jpg"], None),
        (["train-0.idx", "training.txt", "train.json"], None),
        ([], None),
    ],
)
def test_layouts_are_recognized_by_the_names_of_files(tmp_path, names, layout):
    assert find_layout(make_files(tmp_path, *names)) == layout
    assert find_layout(tmp_path / "nowhere") is None


def test_shards_are_sorted_and_the_first_name_with_files_counts(tmp_path):
    make_files(tmp_path, "val-1.tar", "val-0.tar", "test-0.tar", "val-0.tar.idx")
    names = [path.name for path in find_shards(tmp_path, ("val", "test"), ".tar")]
    assert names == ["val-0.tar", "val-1.tar"]
    assert [p.name for p in find_shards(tmp_path, ("new", "test"), ".tar")] == [
        "test-0.tar"
    ]


@pytest.mark.parametrize("name", ["test", "val"])
def test_the_name_of_the_folder_does_not_make_its_files_a_split(tmp_path, name):
    folder = make_files(tmp_path / name, "train-0.tar")
    assert find_shards(folder, (name,), ".tar") == []


def test_an_unknown_layout_is_an_error_with_all_that_are_known(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        load_images(tmp_path, SMALL)
    for part in ("train/<class>/*.jpg", "train*.tar", "dataset.json", "parquet", "train-*"):
        assert part in str(caught.value)


# WebDataset


def load_tar(folder, members, **options):
    write_tar(folder / "train-0.tar", members)
    return load_images(folder, SMALL, needs_validation=False, **options)


def test_members_of_a_sample_may_be_in_any_order_and_have_company(tmp_path):
    splits = load_tar(
        tmp_path,
        [
            *(("readme.txt", b"hello"), ("a/1.jpeg", JPEG), ("a/1.txt", b"a dog")),
            *(("a/1.cls", b"2\n"), ("b/1.cls", b"0"), ("b/1.JPG", JPEG)),
            *(("c.seg.png", b"no image"), ("c.webp", encode(make_image(3), "WEBP"))),
            ("c.cls", b"1"),
        ],
    )
    assert splits.num_classes == 3 and splits.validation is None
    assert splits.training[np.arange(3)]["label"].tolist() == [2, 0, 1]
    assert splits.training.name(1) == f"{tmp_path}/train-0.tar, b/1"
    assert splits.training.corrupt == {}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.jpg", JPEG)], r"train-0\.tar: a has no class \(a\.cls\)\."),
        ([("a.jpg", JPEG), ("a.cls", b"dog")], r"a\.cls must hold the number .* 'dog'"),
        ([("a.jpg", JPEG), ("a.cls", b"-1")], r"a\.cls must hold the number .* '-1'"),
        ([("a.jpg", JPEG), ("a.cls", b"9" * 10)], r"a\.cls must hold the number .* '999"),
        ([("a.jpg", JPEG), ("a.cls", b"")], r"a\.cls must hold the number .* ''"),
        ([("a.txt", b"x"), ("a.cls", b"1")], r"train-0\.tar has no images"),
        ([], r"train-0\.tar has no images"),
    ],
)
def test_a_tar_file_without_images_or_classes_is_an_error(tmp_path, members, message):
    with pytest.raises(DatasetError, match=message):
        load_tar(tmp_path, members)


@pytest.mark.parametrize("damage", ["compressed", "truncated", "another file"])
def test_a_compressed_or_damaged_tar_file_is_an_error(tmp_path, damage):
    path = write_tar(tmp_path / "train-0.tar", sample_members("a", JPEG, 0))
    content = path.read_bytes()
    path.write_bytes(
        {
            "compressed": gzip.compress(content),
            "truncated": content[:1800],
            "another file": JPEG * 2,
        }[damage]
    )
    with pytest.raises(DatasetError, match=r"train-0\.tar is not an uncompressed tar file"):
        load_images(tmp_path, SMALL, needs_validation=False)


@pytest.mark.parametrize("left", [0, 100])
def test_a_tar_file_cut_off_between_two_members_is_an_error(tmp_path, left):
    members = [*sample_members("a", JPEG, 0), *sample_members("b", JPEG, 1)]
    path = write_tar(tmp_path / "train-0.tar", members)
    with tarfile.open(path) as archive:
        start = archive.getmember("b.jpg").offset
    path.write_bytes(path.read_bytes()[: start + left])  # bytes of the next header
    with pytest.raises(DatasetError, match=r"train-0\.tar is incomplete"):
        load_images(tmp_path, SMALL, needs_validation=False)


def test_a_class_that_only_validation_has_is_an_error(tmp_path):
    write_tar(tmp_path / "train-0.tar", sample_members("a", JPEG, 1))
    write_tar(tmp_path / "val-0.tar", sample_members("a", JPEG, 2))
    with pytest.raises(DatasetError, match=r"has the class 2 in validation.* 0 to 1"):
        load_images(tmp_path, SMALL)


def test_files_with_several_names_are_stored_once(tmp_path):
    folder = tmp_path / "samples"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(JPEG)
    (folder / "a.cls").write_text("1")
    (folder / "b.jpg").hardlink_to(folder / "a.jpg")
    (folder / "b.cls").hardlink_to(folder / "a.cls")
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        for name in ("a.jpg", "a.cls", "b.jpg", "b.cls"):
            archive.add(folder / name, name)
    training = load_images(tmp_path, SMALL, needs_validation=False).training
    batch = training[np.arange(2)]
    assert batch["label"].tolist() == [1, 1] and not training.corrupt
    np.testing.assert_array_equal(*batch["image"])


def test_a_corrupt_image_in_a_tar_file_is_named(tmp_path):
    members = [*sample_members("a", JPEG, 0), *sample_members("b", b"nothing", 1)]
    training = load_tar(tmp_path, members, num_workers=1).training
    assert [x.tolist() for x in training[np.arange(2)].values()][1] == [0, 0]
    assert list(training.corrupt) == [f"{tmp_path}/train-0.tar, b"]


# Hugging Face


@pytest.fixture
def hugging_face(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


def write_parquet(datasets, path, samples):
    """Write samples as the library does: the schema has the types of the columns."""
    import pyarrow
    import pyarrow.parquet

    features = datasets.Features(
        {
            "image": datasets.Image(),
            "caption": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["class_0", "class_1", "class_2"]),
        }
    )
    columns = {
        "image": [x if x is None else {"bytes": x, "path": None} for x, _ in samples],
        "caption": ["x"] * len(samples),
        "label": [label for _, label in samples],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table(columns, schema=features.arrow_schema)
    pyarrow.parquet.write_table(table, str(path))
    return str(path)


def write_hugging_face(datasets, folders, target, kind):
    parent = target if kind == "parquet" else target.with_name("parquet")
    paths = {}
    for split, samples in read_folders(folders).items():
        name = "validation" if split == "val" else split
        path = parent / "data" / f"{name}-00000-of-00001.parquet"
        paths[name] = write_parquet(datasets, path, samples)
    if kind == "saved":
        datasets.load_dataset("parquet", data_files=paths).save_to_disk(str(target))
    return target


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_hugging_face_datasets_give_the_same_batches(hugging_face, folders, tmp_path, kind):
    path = write_hugging_face(hugging_face, folders, tmp_path / "other", kind)
    assert find_layout(path) == "huggingface"
    expected, found = (load_images(x, SMALL, num_workers=1) for x in (folders, path))
    assert found.num_classes == 3
    assert found.training.classes == expected.training.classes
    for images, others in zip(expected[:2], found[:2], strict=True):
        stream, other = images.stream(4, seed=3), others.stream(4, seed=3)
        for a, b in itertools.islice(zip(stream, other, strict=True), 5):
            np.testing.assert_array_equal(a["image"], b["image"])
            np.testing.assert_array_equal(a["label"], b["label"])
        images.close()
        others.close()


@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_dataset_needs_images_and_class_labels(hugging_face, tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"x": [1, 2]})
    pyarrow.parquet.write_table(table, str(tmp_path / "train.parquet"))
    with pytest.raises(DatasetError, match="a column of type Image and one of type"):
        load_images(tmp_path, SMALL, needs_validation=False)
    files = {"other": str(tmp_path / "train.parquet")}
    other = hugging_face.load_dataset("parquet", data_files=files)
    other.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DatasetError, match="has the splits other, but no train"):
        load_images(tmp_path / "saved", SMALL, needs_validation=False)


@pytest.mark.filterwarnings("ignore")
def test_a_row_without_an_image_or_a_label_is_replaced(hugging_face, tmp_path):
    rows = [(JPEG, 1), (None, 2), (JPEG, 0), (JPEG, None)]
    write_parquet(hugging_face, tmp_path / "train.parquet", rows)
    training = load_images(tmp_path, SMALL, needs_validation=False).training
    assert training[np.arange(4)]["label"].tolist() == [1, 0, 0, 1]
    reason = "it has no image or no label"
    assert training.corrupt == {"row 1": reason, "row 3": reason}


def test_without_the_library_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    make_files(tmp_path, "dataset_dict.json")
    with pytest.raises(ConfigurationError, match=r"pip install datasets\."):
        load_images(tmp_path, SMALL)
