"""Packed datasets: what is stored, resuming, checksums, and what is refused."""

import io
import json
import os

import numpy as np
import pytest
from image_files import SMALL, encode, make_image, write_folders
from PIL import Image
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from worker_jobs import MadeImages, PartlyCorruptReader

from millrace.config import ConfigurationError
from millrace.data import packed as module
from millrace.data.image_source import TooManyCorrupt
from millrace.data.imagenet import load_images
from millrace.data.packed import Encoding, PackedImages, pack, read_manifest
from millrace.data.source import DatasetError
from millrace.data.tfrecord import find_records, index_path, locate_records, parse_example


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp("to_pack"))


def pack_folders(folders, target, encoding=None, *, source="here", progress=None):
    splits = load_images(folders, SMALL)
    named = {"train": splits.training, "validation": splits.validation}
    return pack(
        named,
        target,
        encoding or Encoding(),
        num_classes=splits.num_classes,
        source=source,
        num_workers=1,
        progress=progress or (lambda *_: None),
    )


def pack_contents(contents, target, encoding):
    """Pack images of one class; return them as they are stored."""
    folder = target.with_name(f"{target.name}-source") / "train" / "a"
    folder.mkdir(parents=True)
    for number, (content, ending) in enumerate(contents):
        (folder / f"{number:02}.{ending}").write_bytes(content)
    training = load_images(folder.parents[1], SMALL, needs_validation=False).training
    pack(
        {"train": training},
        target,
        encoding,
        num_classes=1,
        source="here",
        num_workers=1,
        progress=lambda *_: None,
    )
    reader = load_images(target, SMALL, needs_validation=False).training
    return [reader.reader(reader.locate(n))[0] for n in range(len(reader))]


def as_image(content):
    return Image.open(io.BytesIO(content))


@pytest.fixture(scope="module")
def example(folders, tmp_path_factory):
    """A packed dataset; copy what is changed."""
    target = tmp_path_factory.mktemp("packed") / "p"
    pack_folders(folders, target)
    return target


@pytest.fixture
def copied(example, tmp_path):
    target = tmp_path / "copy"
    target.mkdir()
    for path in example.iterdir():
        if path.is_file():
            (target / path.name).write_bytes(path.read_bytes())
    return target


# What is stored


def test_images_are_stored_byte_for_byte_with_their_labels(folders, example):
    names = sorted(path.name for path in example.iterdir() if path.name[0] != ".")
    shards = ["train-00000-of-00001", "validation-00000-of-00001"]
    assert names == ["dataset.json", *(x for s in shards for x in (s, f"{s}.idx"))]
    for split, source in zip(
        ("train", "val"), load_images(example, SMALL)[:2], strict=True
    ):
        files = sorted((folders / split).rglob("*.*"))
        for number, path in enumerate(files):
            content, label = source.reader(source.locate(number))
            assert content == path.read_bytes()
            assert label == number // 5
        assert not source.is_packed
        assert source.classes == ("class_0", "class_1", "class_2")


def test_records_are_readable_by_other_parsers(folders, example):
    path = example / "train-00000-of-00001"
    records = list(RawEventFileLoader(str(path)).Load())
    assert len(records) == 15
    wanted = ("image/encoded", "image/class/label")
    features = parse_example(memoryview(records[6]), wanted)
    assert features["image/class/label"] == [2]
    (content,) = features["image/encoded"]
    assert content == (folders / "train" / "class_1" / "1.png").read_bytes()


def test_the_index_has_offset_and_size_of_every_record(example):
    path = example / "train-00000-of-00001"
    lines = [line.split() for line in index_path(path).read_text().splitlines()]
    spans = find_records(path)
    assert [[int(a) + 12, int(b) - 16] for a, b in lines] == spans.tolist()
    np.testing.assert_array_equal(locate_records(path), spans)


@pytest.mark.parametrize(
    "text",
    [b"", b"0 100\n", b"not numbers\n", b"0 1\n2\n", b"5 10\n15 20\n", b"\xff", None],
    ids=["empty", "short", "text", "odd", "not from 0", "bytes", "missing"],
)
def test_a_wrong_index_is_ignored(copied, text):
    path = copied / "train-00000-of-00001"
    index_path(path).unlink()
    if text is not None:
        index_path(path).write_bytes(text)
    np.testing.assert_array_equal(locate_records(path), find_records(path))
    assert len(load_images(copied, SMALL).training) == 15


def test_an_index_saves_the_scan_of_the_file(example, monkeypatch):
    monkeypatch.setattr("millrace.data.tfrecord.find_records", None)
    assert len(load_images(example, SMALL).training) == 15


def test_only_larger_images_are_resized_and_small_jpegs_stay_as_they_are(tmp_path):
    large, wide = make_image(1, size=(120, 90)), make_image(2, size=(400, 64))
    small, png = encode(make_image(3, size=(60, 40))), encode(make_image(4), "PNG")
    exact = encode(make_image(5, size=(64, 64)), progressive=True)
    contents = [(encode(large), "jpg"), (encode(wide), "jpg"), (small, "jpg")]
    contents += [(png, "png"), (exact, "jpg"), (encode(make_image(6, "L")), "jpg")]
    stored = pack_contents(contents, tmp_path / "p", Encoding(short_side=64))
    assert [as_image(x).size for x in stored] == [
        *((85, 64), (400, 64), (60, 40)),
        *((48, 40), (64, 64), (48, 40)),
    ]
    assert stored[1] == contents[1][0]
    assert stored[2] == small and stored[4] == exact
    assert all(as_image(x).format == "JPEG" and as_image(x).mode == "RGB" for x in stored)
    expected = np.asarray(large.resize((85, 64), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(np.asarray(as_image(stored[0])) - expected).mean() < 5
    assert load_images(tmp_path / "p", SMALL, needs_validation=False).training.is_packed


def test_the_quality_of_resized_images_can_be_chosen(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3), np.uint8)
    contents = [(encode(Image.fromarray(noise)), "jpg")]
    sizes = []
    for quality in (50, 90):
        encoding = Encoding(short_side=64, quality=quality)
        (stored,) = pack_contents(contents, tmp_path / f"{quality}", encoding)
        sizes.append(len(stored))
    assert sizes[1] > 1.5 * sizes[0]


def test_pixels_can_be_stored_instead(tmp_path):
    large, small = make_image(1, size=(120, 90)), make_image(2, size=(48, 40))
    contents = [(encode(large), "jpg"), (encode(small, "PNG"), "png")]
    stored = pack_contents(contents, tmp_path / "p", Encoding(short_side=64, raw=True))
    assert [pixels.shape for pixels in stored] == [(64, 85, 3), (40, 48, 3)]
    np.testing.assert_array_equal(stored[1], np.asarray(small))
    assert all(pixels.dtype == np.uint8 for pixels in stored)
    source = load_images(tmp_path / "p", SMALL, needs_validation=False).training
    assert source.is_packed
    expected = load_images(tmp_path / "p-source", SMALL, needs_validation=False).training
    # Both are resized once, from pixels and from a PNG, by different libraries.
    a, b = (x[np.array([1])]["image"].astype(int) for x in (source, expected))
    assert np.abs(a - b).mean() < 3
    stream = source.stream(2, seed=1)
    np.testing.assert_array_equal(next(iter(stream))["image"], stream.batch(0)["image"])


def test_a_packed_dataset_can_be_packed_again(example, tmp_path):
    packed = pack_folders(example, tmp_path / "again", Encoding(short_side=20, raw=True))
    assert packed.manifest.num_samples("train") == 15
    pixels = load_images(tmp_path / "again", SMALL).training
    assert pixels.reader(pixels.locate(0))[0].shape == (20, 24, 3)
    assert pixels.classes == ("class_0", "class_1", "class_2")


def test_unreadable_images_are_left_out_and_named(folders, tmp_path):
    source = write_folders(tmp_path / "source")
    victim = source / "train" / "class_1" / "0.JPEG"
    victim.write_bytes(victim.read_bytes()[:200])
    (source / "train" / "class_0" / "3.JPEG").write_bytes(b"nothing")
    packed = pack_folders(source, tmp_path / "p", Encoding(short_side=32))
    (shard,) = packed.manifest.shards["train"]
    assert shard.num_samples == packed.manifest.num_samples("train") == 13
    assert list(shard.skipped)[1] == str(victim)
    reasons = list(shard.skipped.values())
    assert reasons[0] == "not a JPEG, PNG or WebP image" and "runcated" in reasons[1]
    assert read_manifest(tmp_path / "p") == packed.manifest
    assert packed.num_written == 28
    training = load_images(tmp_path / "p", SMALL).training
    assert training[np.arange(13)]["label"].tolist() == [0] * 4 + [1] * 4 + [2] * 5


def test_a_file_without_any_readable_image_is_skipped(tmp_path, few_per_shard):
    folder = write_folders(tmp_path / "source", 3, 3)
    for name in ("train/class_2/2.JPEG", "val/class_2/2.JPEG"):
        (folder / name).write_bytes(b"")
    pack_folders(folder, tmp_path / "p", Encoding(short_side=32))
    splits = load_images(tmp_path / "p", SMALL)
    assert [len(splits.training), len(splits.validation)] == [8, 8]
    assert splits.training[np.arange(8)]["label"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_a_split_without_any_readable_image_is_as_if_missing(tmp_path):
    folder = write_folders(tmp_path / "source", 1, 1)
    for path in (folder / "val").glob("*/*"):
        path.write_bytes(b"")
    pack_folders(folder, tmp_path / "p", Encoding(short_side=32))
    with pytest.raises(ConfigurationError, match="has training images, but none for valid"):
        load_images(tmp_path / "p", SMALL)


def test_names_of_files_need_not_be_text(tmp_path):
    folder = write_folders(tmp_path / "source", 2, 1)
    strange = os.fsdecode(b"class_\xff \n")
    for split in ("train", "val"):
        (folder / split / "class_1").rename(folder / split / strange)
    (folder / "train" / strange / "0.JPEG").write_bytes(b"")
    packed = pack_folders(folder, tmp_path / "p", Encoding(short_side=32))
    assert packed.manifest == read_manifest(tmp_path / "p")
    assert load_images(tmp_path / "p", SMALL).training.classes == ("class_0", strange)


def test_too_many_unreadable_images_in_all_files_are_an_error(tmp_path, few_per_shard):
    images = MadeImages(30, read=PartlyCorruptReader({0, 1, 10, 11, 29}), max_corrupt=3)
    with pytest.raises(TooManyCorrupt, match="4 of 30 samples") as caught:
        pack(
            {"train": images},
            tmp_path / "p",
            Encoding(short_side=8),
            num_classes=30,
            source="here",
            num_workers=1,
            progress=lambda *_: None,
        )
    assert caught.value.names == ("number 0", "number 1", "number 10", "number 11")


def test_progress_reaches_the_number_of_samples(folders, tmp_path):
    calls = []
    pack_folders(folders, tmp_path / "p", progress=lambda *call: calls.append(call))
    assert ("train", 15, 15) in calls and calls[-1] == ("validation", 15, 15)


# Resuming


class Stopped(Exception):
    pass


@pytest.fixture
def few_per_shard(monkeypatch):
    monkeypatch.setattr(module, "_SHARD_SAMPLES", 4)


def stop_after(count):
    def progress(split, done, total):
        if split == "train" and done >= count:
            raise Stopped

    return progress


def test_an_interrupted_pack_continues_where_it_stopped(folders, tmp_path, few_per_shard):
    whole = pack_folders(folders, tmp_path / "whole")
    assert [shard.num_samples for shard in whole.manifest.shards["train"]] == [4, 4, 4, 3]
    target = tmp_path / "parts"
    with pytest.raises(Stopped):
        pack_folders(folders, target, progress=stop_after(8))
    first = target / "train-00000-of-00004"
    before = first.stat()
    assert not (target / "dataset.json").exists()
    (target / ".train-00002-of-00004.abc.partial").write_bytes(b"left by a crash")
    packed = pack_folders(folders, target)
    assert packed.num_written == 30 - 8
    after = first.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert packed.manifest == whole.manifest
    for path in (tmp_path / "whole").iterdir():
        assert (target / path.name).read_bytes() == path.read_bytes()
    assert not (target / "packing.json").exists()
    assert not list(target.glob(".*.partial"))


def test_a_shard_that_is_gone_or_cut_off_is_written_again(folders, tmp_path, few_per_shard):
    with pytest.raises(Stopped):
        pack_folders(folders, tmp_path / "p", progress=stop_after(12))
    (tmp_path / "p" / "train-00000-of-00004").unlink()
    path = tmp_path / "p" / "train-00001-of-00004"
    path.write_bytes(path.read_bytes()[:-1])
    assert pack_folders(folders, tmp_path / "p").num_written == 30 - 4
    assert list(load_images(tmp_path / "p", SMALL).training.damaged_files()) == []


def test_a_complete_dataset_is_left_alone(folders, copied):
    before = {path: path.stat().st_mtime_ns for path in copied.iterdir()}
    packed = pack_folders(folders, copied)
    assert (packed.num_written, packed.manifest.num_samples("train")) == (0, 15)
    assert {p: p.stat().st_mtime_ns for p in copied.iterdir() if p in before} == before


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("change", ["source", "encoding", "files"])
def test_another_dataset_or_encoding_is_refused(
    folders, copied, tmp_path, complete, change
):
    if not complete:  # as it is before the last step
        manifest = read_manifest(copied)
        shards = [shard for some in manifest.shards.values() for shard in some]
        progress = {"plan": manifest.plan, "shards": shards}
        (copied / "packing.json").write_text(json.dumps(progress))
        (copied / "dataset.json").unlink()
    options = {"source": "elsewhere"} if change == "source" else {}
    encoding = Encoding(short_side=32) if change == "encoding" else None
    if change == "files":
        folders = write_folders(tmp_path / "others")
    message = "already holds another packed" if complete else "holds an unfinished dataset"
    with pytest.raises(ConfigurationError, match=message):
        pack_folders(folders, copied, encoding, **options)


def test_a_folder_with_other_files_is_refused(folders, tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigurationError, match="is not empty"):
        pack_folders(folders, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name[0] != "."] == [
        "thesis.tex"
    ]


def test_two_processes_cannot_pack_into_the_same_folder(folders, tmp_path):
    from millrace.durable import locked

    (tmp_path / "p").mkdir()
    with locked(tmp_path / "p"), pytest.raises(ConfigurationError, match="Another process"):
        pack_folders(folders, tmp_path / "p")


# Damage


def test_a_flipped_byte_is_noticed_when_read_and_by_its_checksum(copied):
    path = copied / "train-00000-of-00001"
    offset, length = find_records(path)[3]
    content = bytearray(path.read_bytes())
    content[offset + length // 2] ^= 8
    path.write_bytes(content)
    splits = load_images(copied, SMALL)
    assert list(splits.training.damaged_files()) == [str(path)]
    assert list(splits.validation.damaged_files()) == []
    before = splits.validation[np.array([4])]
    found = splits.training[np.array([3])]
    np.testing.assert_array_equal(found["image"], before["image"])  # the next one
    assert splits.training.corrupt == {
        f"{path}, byte {offset}": "its checksum does not match"
    }


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_an_incomplete_copy_is_an_error(copied, damage):
    path = copied / "validation-00000-of-00001"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DatasetError, match=r"validation-00000-of-00001 is missing or inc"):
        load_images(copied, SMALL)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"format": "other"}', '{"format": "millrace packed images 1"}'],
)
def test_a_damaged_manifest_is_an_error(copied, text):
    (copied / "dataset.json").write_text(text)
    with pytest.raises(DatasetError, match=r"dataset\.json is damaged or was not written"):
        load_images(copied, SMALL)


def test_a_dataset_without_validation_says_so(copied):
    fields = json.loads((copied / "dataset.json").read_text())
    del fields["shards"]["validation"]
    (copied / "dataset.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigurationError, match="but none for validation"):
        load_images(copied, SMALL)
    splits = load_images(copied, SMALL, needs_validation=False)
    assert isinstance(splits.training, PackedImages) and splits.validation is None
