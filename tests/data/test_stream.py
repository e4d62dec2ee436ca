"""Batches for training and evaluation: their order, their parts, exact resumption."""

import itertools

import numpy as np
import pytest

from millrace.data import augment
from millrace.data.source import ArraySource
from millrace.data.stream import EvaluationBatches, Stream


def source(count=23):
    return ArraySource({"id": np.arange(count), "x": np.arange(count * 2).reshape(-1, 2)})


def take(stream, count):
    return [batch["id"].tolist() for batch in itertools.islice(stream, count)]


def joined(batches):
    return list(itertools.chain.from_iterable(batches))


def test_an_epoch_has_no_sample_twice_and_epochs_differ_in_order():
    batches = take(Stream(source(), 4, seed=1), 15)
    epochs = [joined(batches[i : i + 5]) for i in (0, 5, 10)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 20
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_only_on_the_seed():
    assert take(Stream(source(), 4, seed=1), 9) == take(Stream(source(), 4, seed=1), 9)
    assert take(Stream(source(), 4, seed=1), 9) != take(Stream(source(), 4, seed=2), 9)


@pytest.mark.parametrize("position", [0, 3, 5, 7, 1000])
def test_a_stream_resumes_at_any_position(position):
    whole = Stream(source(), 4, seed=3)
    expected = [whole.batch(position + i)["id"].tolist() for i in range(4)]
    stream = Stream(source(), 4, seed=3)
    stream.seek(position)
    assert take(stream, 4) == expected


def test_each_batch_has_its_own_generator_for_the_transform():
    def jitter(batch, generator):
        return batch | {"noise": generator.random(2)}

    stream = Stream(source(), 4, seed=3, transform=jitter)
    first = [batch["noise"] for batch in itertools.islice(stream, 4)]
    stream.seek(2)
    again = next(iter(stream))["noise"]
    np.testing.assert_array_equal(again, first[2])
    assert not np.array_equal(first[0], first[1])


def test_without_shuffling_the_order_is_that_of_the_source():
    batches = take(Stream(source(), 5, shuffle=False), 5)
    assert batches == [list(range(i, i + 5)) for i in (0, 5, 10, 15)] + [[0, 1, 2, 3, 4]]


def test_an_epoch_may_be_shorter_than_the_dataset():
    batches = take(Stream(source(), 4, batches_per_epoch=2, seed=0), 4)
    assert len(set(joined(batches[:2]))) == 8
    assert set(joined(batches[:2])) != set(joined(batches[2:]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 24}, "23 samples make 0 batches of 24"),
        ({"batch_size": 4, "batches_per_epoch": 6}, "23 samples make 5 batches of 4"),
    ],
)
def test_impossible_sizes_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        Stream(source(), **arguments)


@pytest.mark.parametrize("data", [(np.ones(8),), {"x": np.ones(8)}, np.ones(8)])
def test_plain_arrays_are_no_source(data):
    with pytest.raises(TypeError, match=r"needs a source, such as mr\.ArraySource"):
        Stream(data, 2)


@pytest.mark.parametrize(("count", "size"), [(23, 4), (24, 4), (3, 8), (1, 1)])
def test_evaluation_sees_every_sample_once_and_marks_padding(count, size):
    seen = []
    for item in EvaluationBatches(source(count), size):
        assert item["batch"]["id"].shape == item["valid"].shape == (size,)
        seen += item["batch"]["id"][item["valid"]].tolist()
    assert seen == list(range(count))


def test_evaluating_an_empty_source_is_an_error():
    with pytest.raises(ValueError, match="no samples to evaluate"):
        EvaluationBatches(source(0), 4)


def assert_parts_equal_the_whole(stream) -> None:
    for position in (0, 3):
        whole = stream.batch(position)
        parts = [stream.share(slice(a, b)).batch(position) for a, b in ((0, 2), (2, 6))]
        for name, array in whole.items():
            joined = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(joined, array)


def image_source(count: int = 20) -> ArraySource:
    rng = np.random.default_rng(0)
    return ArraySource({"image": rng.random((count, 8, 8, 3)), "label": np.arange(count)})


def test_parts_of_a_batch_are_augmented_like_the_whole_batch():
    transform = augment.map_images(augment.random_flip, augment.pad_and_crop)
    assert transform.by_sample
    assert_parts_equal_the_whole(Stream(image_source(), 6, transform=transform))


def test_a_part_reads_only_its_own_samples():
    requested = []

    class Recorded(ArraySource):
        def __getitem__(self, indices):
            requested.append(len(indices))
            return super().__getitem__(indices)

    Stream(Recorded(image_source().arrays), 6).share(slice(2, 4)).batch(1)
    assert requested == [2]


def test_a_transform_that_mixes_samples_is_given_the_whole_batch():
    def roll(batch, generator):
        return {name: np.roll(array, 1, 0) for name, array in batch.items()}

    assert_parts_equal_the_whole(Stream(image_source(), 6, transform=roll))


def test_evaluation_batches_are_divided_without_loss():
    batches = EvaluationBatches(ArraySource({"x": np.arange(11)}), 4)
    seen = []
    for part in (batches.share(slice(0, 1)), batches.share(slice(1, 4))):
        seen += [x for b in part for x in b["batch"]["x"][b["valid"]]]
    assert sorted(seen) == list(range(11))
    strided = [batches.every(2, first=number) for number in range(2)]
    assert [len(part) for part in strided] == [2, 1]
    seen = [x for part in strided for b in part for x in b["batch"]["x"][b["valid"]]]
    assert sorted(seen) == list(range(11))
