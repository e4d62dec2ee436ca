"""TFRecord files: random access, checksums, damaged records and files."""

import itertools

import numpy as np
import pytest
from image_files import (
    SMALL,
    decode,
    encode,
    example,
    example_type,
    make_image,
    write_records,
)

from millrace.config import ConfigurationError
from millrace.data.image_source import TooManyCorrupt
from millrace.data.imagenet import load_imagenet
from millrace.data.tfrecord import (
    TFRecords,
    find_records,
    masked_crc32c,
    parse_example,
)


def records(count, first=0):
    """Return serialized examples with the labels 1, 2, 3, 1, 2, 3, …"""
    numbers = range(first, first + count)
    return [example(encode(make_image(number)), number % 3 + 1) for number in numbers]


def write_shards(folder, split="train", per_shard=4, num_shards=3):
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_records(
            folder / f"{split}-{shard:05}-of-{num_shards:05}",
            records(per_shard, shard * per_shard),
        )
        for shard in range(num_shards)
    ]


def flip_bit(path, record):
    """Flip one bit in the data of a record; return the name of the record."""
    offset, length = find_records(path)[record]
    content = bytearray(path.read_bytes())
    content[offset + length // 2] ^= 1
    path.write_bytes(content)
    return f"{path}, byte {offset}"


def test_records_are_read_by_index_and_labels_start_at_0(tmp_path):
    source = TFRecords(write_shards(tmp_path), SMALL)
    assert len(source) == 12
    batch = source[np.array([11, 0, 5])]
    assert batch["image"].dtype == np.uint8 and batch["label"].dtype == np.int32
    assert batch["label"].tolist() == [2, 0, 2]
    expected = decode(make_image(5)).astype(int)
    assert np.abs(batch["image"][2] - expected).mean() < 8  # the loss of JPEG


def test_both_splits_are_found_in_one_folder_or_in_two(tmp_path):
    write_shards(tmp_path / "flat")
    write_shards(tmp_path / "flat", "validation", num_shards=1)
    write_shards(tmp_path / "deep" / "train")
    write_shards(tmp_path / "deep" / "validation", "validation", num_shards=1)
    for folder in ("flat", "deep"):
        training, validation, *_ = load_imagenet(tmp_path / folder, SMALL)
        assert (len(training), len(validation)) == (12, 4)


def test_validation_images_may_be_missing_if_not_needed(tmp_path):
    write_shards(tmp_path)
    with pytest.raises(ConfigurationError, match="validation"):
        load_imagenet(tmp_path, SMALL)
    splits = load_imagenet(tmp_path, SMALL, needs_validation=False)
    assert len(splits.training) == 12 and splits.validation is None
    assert splits.warning is None


def test_a_stream_resumes_with_the_same_images(tmp_path):
    write_shards(tmp_path)

    def batches(start, num_workers):
        source = TFRecords(sorted(tmp_path.iterdir()), SMALL, num_workers=num_workers)
        stream = source.stream(5, seed=2)
        stream.seek(start)
        return list(itertools.islice(stream, 6 - start))

    for expected, batch in zip(batches(0, 0)[3:], batches(3, 2), strict=True):
        np.testing.assert_array_equal(batch["image"], expected["image"])
        np.testing.assert_array_equal(batch["label"], expected["label"])


def test_a_record_with_a_wrong_checksum_is_replaced_and_named(tmp_path):
    first, second, _ = write_shards(tmp_path)
    source = TFRecords(sorted(tmp_path.iterdir()), SMALL, max_corrupt=1)
    before = source[np.arange(4)]
    name = flip_bit(first, 1)
    batch = source[np.arange(4)]
    np.testing.assert_array_equal(batch["image"], before["image"][[0, 2, 2, 3]])
    np.testing.assert_array_equal(batch["label"], before["label"][[0, 2, 2, 3]])
    assert source.corrupt == {name: "its checksum does not match"}
    other = flip_bit(second, 0)
    with pytest.raises(TooManyCorrupt, match="2 of 12 samples") as caught:
        source[np.arange(3, 7)]
    assert set(caught.value.names) == {name, other}


def mistyped(name: str) -> bytes:
    """Return a record whose image is an integer, or whose label is text."""
    message = example_type()()
    message.ParseFromString(records(1)[0])
    del message.features.feature[name]
    if name == "image/encoded":
        message.features.feature[name].int64_list.value.append(1)
    else:
        message.features.feature[name].bytes_list.value.append(b"1")
    return message.SerializeToString()


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xff" * 40,
        b"\x0a",  # a field without its length
        b"\x0a\x80",  # a field whose length is truncated
        records(1)[0] + b"\x08\x80",  # a truncated integer
        example(b"not an image", 1),
        records(1)[0][:-9],
        example_type()().SerializeToString(),
        mistyped("image/encoded"),
        mistyped("image/class/label"),
    ],
    ids=lambda record: f"{len(record)} bytes",  # the content differs between processes
)
def test_a_record_without_an_image_counts_as_corrupt(tmp_path, record):
    path = write_records(tmp_path / "train", [*records(2), record])
    source = TFRecords([path], SMALL)
    assert source[np.arange(3)]["label"].tolist() == [0, 1, 0]
    assert len(source.corrupt) == 1


@pytest.mark.parametrize("label", [0, 4, -1])
def test_a_label_out_of_range_is_an_immediate_error(tmp_path, label):
    path = write_records(tmp_path / "train", [example(encode(make_image(0)), label)])
    source = TFRecords([path], SMALL, num_classes=3)
    with pytest.raises(
        ValueError, match=rf"train, byte 12 has the label {label}; .* 1 and 3"
    ):
        source[np.array([0])]


def test_a_truncated_empty_or_unrelated_file_is_named(tmp_path):
    path = write_records(tmp_path / "train", records(2))
    content = path.read_bytes()
    for keep, message in (
        (len(content) - 1, "train ends in the middle of record 2"),
        (len(content) // 2 + 5, "train ends in the middle of record"),
        (0, "train is empty"),
        (5, "train ends in the middle of record 0"),
    ):
        path.write_bytes(content[:keep])
        with pytest.raises(ValueError, match=message):
            TFRecords([path], SMALL)
    for bad in (b"PK" + bytes(50), content[:3] + b"\x01" + content[4:]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"train is not a TFRecord file .* at byte 0"):
            TFRecords([path], SMALL)


def test_a_missing_dataset_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        load_imagenet(tmp_path, SMALL)
    for part in (str(tmp_path), "train-*", "validation-*", "--dataset-path"):
        assert part in str(caught.value)


def test_features_are_parsed_packed_or_not_and_others_are_skipped():
    message = example_type()()
    message.features.feature["n"].int64_list.value.extend([-1, 0, 300, 2**62])
    message.features.feature["b"].bytes_list.value.extend([b"x", b""])
    message.features.feature["other"].float_list.value.append(1.5)
    data = memoryview(message.SerializeToString())
    assert parse_example(data, ("n", "b", "absent")) == {
        "n": [-1, 0, 300, 2**62],
        "b": [b"x", b""],
    }
    # The unpacked form of proto2 writers: field 1, integer, twice.
    unpacked = b"\x1a\x05\x08\x07\x08\xac\x02"
    entry = b"\x0a\x01n\x12" + bytes([len(unpacked)]) + unpacked
    features = b"\x0a" + bytes([len(entry)]) + entry
    data = memoryview(b"\x0a" + bytes([len(features)]) + features)
    assert parse_example(data, ("n",)) == {"n": [7, 300]}


def mask(checksum):
    """Return a CRC-32C as TFRecord files store it: rotated, plus a constant."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) % 2**32


@pytest.mark.parametrize(
    ("message", "checksum"),  # from RFC 3720, B.4
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
)
def test_checksums_equal_published_values(message, checksum):
    assert masked_crc32c(message) == mask(checksum)
    assert masked_crc32c(memoryview(b"12" + message)[2:]) == mask(checksum)


def test_checksums_agree_with_tensorboard_at_any_length():
    theirs = pytest.importorskip("tensorboard.compat.tensorflow_stub.pywrap_tensorflow")
    for length in (0, 1, 63, 64, 255, 4097):
        message = np.random.default_rng(length).bytes(length)
        assert masked_crc32c(message) == theirs.masked_crc32c(message)
