import functools
import itertools
import struct

import numpy as np
import pytest
from image_files import encode, example, example_type, picture, write_records

from millrace.config import ConfigurationError
from millrace.data.augment import imagenet_image
from millrace.data.crc32c import crc32c, masked_crc32c
from millrace.data.image_source import TooManyCorrupt
from millrace.data.imagenet import load_imagenet
from millrace.data.tfrecord import TFRecords, load_tfrecords, parse_example, record_spans

SMALL = functools.partial(imagenet_image, size=16)


def records(count, first=0):
    """Serialised examples with the labels 1, 2, 3, 1, 2, 3, …"""
    numbers = range(first, first + count)
    return [example(encode(picture(number)), number % 3 + 1) for number in numbers]


def write_shards(folder, split="train", per_shard=4, num_shards=3):
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_records(
            folder / f"{split}-{shard:05}-of-{num_shards:05}",
            records(per_shard, shard * per_shard),
        )
        for shard in range(num_shards)
    ]


def spoil(path, record):
    """Turn one bit of a record's data over; return the name it is known by."""
    offset, length = record_spans(path)[record]
    content = bytearray(path.read_bytes())
    content[offset + length // 2] ^= 1
    path.write_bytes(content)
    return f"{path}, byte {offset}"


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
def test_the_checksum_is_the_published_one(message, checksum):
    assert crc32c(message) == checksum
    # A message that ends in its own checksum always has the same one.
    for length in (0, 300, 5000, 70_000):
        long = np.random.default_rng(length).bytes(length) + message
        assert crc32c(long + struct.pack("<I", crc32c(long))) == 0x48674BC7


@pytest.mark.parametrize("length", [255, 256, 257, 1023, 1024, 1025, 16_384, 16_385])
def test_the_checksum_agrees_with_tensorboards_at_any_length(length):
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as theirs

    message = np.random.default_rng(length).bytes(length)
    assert masked_crc32c(message) == theirs(message)
    assert masked_crc32c(memoryview(message)[3:]) == theirs(message[3:])


def test_records_are_read_at_random_and_labels_count_from_0(tmp_path):
    source = TFRecords(write_shards(tmp_path), SMALL)
    assert len(source) == 12
    batch = source[np.array([11, 0, 5])]
    assert batch["image"].dtype == np.uint8 and batch["label"].dtype == np.int32
    assert batch["label"].tolist() == [2, 0, 2]
    expected = SMALL(picture(5), None).astype(int)
    assert np.abs(batch["image"][2] - expected).mean() < 8  # but for JPEG's loss


def test_both_splits_are_found_side_by_side_or_in_folders_of_their_own(tmp_path):
    write_shards(tmp_path / "flat")
    write_shards(tmp_path / "flat", "validation", num_shards=1)
    write_shards(tmp_path / "deep" / "train")
    write_shards(tmp_path / "deep" / "validation", "validation", num_shards=1)
    for folder in ("flat", "deep"):
        training, validation = load_tfrecords(tmp_path / folder, SMALL, num_classes=3)
        assert (len(training), len(validation)) == (12, 4)


def test_pictures_to_validate_with_may_be_missing_where_nothing_is_validated(tmp_path):
    write_shards(tmp_path)
    with pytest.raises(ConfigurationError, match="validation"):
        load_tfrecords(tmp_path, SMALL, num_classes=3)
    training, none = load_tfrecords(tmp_path, SMALL, num_classes=3, needs_validation=False)
    assert len(training) == 12 and none is None
    found = load_imagenet(tmp_path, SMALL, needs_validation=False)
    assert len(found.training) == 12 and found.validation is None
    assert found.warning is None


def test_a_stream_resumes_with_the_same_pictures(tmp_path):
    write_shards(tmp_path)

    def batches(start, num_threads):
        source = TFRecords(sorted(tmp_path.iterdir()), SMALL, num_threads=num_threads)
        stream = source.stream(5, seed=2)
        stream.seek(start)
        return list(itertools.islice(stream, 6 - start))

    for expected, batch in zip(batches(0, 1)[3:], batches(3, 3), strict=True):
        np.testing.assert_array_equal(batch["image"], expected["image"])
        np.testing.assert_array_equal(batch["label"], expected["label"])


def test_a_record_with_a_wrong_checksum_is_replaced_and_named(tmp_path):
    first, second, _ = write_shards(tmp_path)
    source = TFRecords(sorted(tmp_path.iterdir()), SMALL, max_corrupt=1)
    before = source[np.arange(4)]
    name = spoil(first, 1)
    batch = source[np.arange(4)]
    np.testing.assert_array_equal(batch["image"], before["image"][[0, 2, 2, 3]])
    np.testing.assert_array_equal(batch["label"], before["label"][[0, 2, 2, 3]])
    assert source.corrupt == {name: "its checksum does not match"}
    other = spoil(second, 0)
    with pytest.raises(TooManyCorrupt, match="2 of 12 samples") as caught:
        source[np.arange(3, 7)]
    assert set(caught.value.names) == {name, other}


def mistyped(name: str) -> bytes:
    """A record whose picture is a whole number, or whose label is text."""
    made = example_type()()
    made.ParseFromString(records(1)[0])
    del made.features.feature[name]
    if name == "image/encoded":
        made.features.feature[name].int64_list.value.append(1)
    else:
        made.features.feature[name].bytes_list.value.append(b"1")
    return made.SerializeToString()


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xff" * 40,
        b"\x0a",  # a field whose length is missing
        b"\x0a\x80",  # and one whose length ends in its middle
        records(1)[0] + b"\x08\x80",  # a number that does
        example(b"no picture", 1),
        records(1)[0][:-9],
        example_type()().SerializeToString(),
        mistyped("image/encoded"),
        mistyped("image/class/label"),
    ],
    ids=lambda record: f"{len(record)} bytes",  # which differ between processes
)
def test_a_record_that_is_no_picture_counts_as_corrupt(tmp_path, record):
    path = write_records(tmp_path / "train", [*records(2), record])
    source = TFRecords([path], SMALL)
    assert source[np.arange(3)]["label"].tolist() == [0, 1, 0]
    assert len(source.corrupt) == 1


@pytest.mark.parametrize("label", [0, 4, -1])
def test_a_label_out_of_range_is_an_error_at_once(tmp_path, label):
    path = write_records(tmp_path / "train", [example(encode(picture(0)), label)])
    source = TFRecords([path], SMALL, num_classes=3)
    with pytest.raises(
        ValueError, match=rf"train, byte 12 has the label {label}; .* 1 to 3"
    ):
        source[np.array([0])]


def test_a_truncated_empty_or_foreign_file_is_named(tmp_path):
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
        with pytest.raises(ValueError, match=r"train is no TFRecord file, .* at byte 0"):
            TFRecords([path], SMALL)


def test_a_missing_data_set_is_said_so(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        load_tfrecords(tmp_path, SMALL)
    for part in (str(tmp_path), "train*", "validation*", "--dataset-path"):
        assert part in str(caught.value)


def test_features_are_parsed_packed_or_not_and_others_passed_over():
    made = example_type()()
    made.features.feature["n"].int64_list.value.extend([-1, 0, 300, 2**62])
    made.features.feature["b"].bytes_list.value.extend([b"x", b""])
    made.features.feature["other"].float_list.value.append(1.5)
    data = memoryview(made.SerializeToString())
    assert parse_example(data, ("n", "b", "absent")) == {
        "n": [-1, 0, 300, 2**62],
        "b": [b"x", b""],
    }
    # The unpacked form, as proto2 writers have it: field 1, whole number, twice.
    unpacked = b"\x1a\x05\x08\x07\x08\xac\x02"
    entry = b"\x0a\x01n\x12" + bytes([len(unpacked)]) + unpacked
    features = b"\x0a" + bytes([len(entry)]) + entry
    data = memoryview(b"\x0a" + bytes([len(features)]) + features)
    assert parse_example(data, ("n",)) == {"n": [7, 300]}
