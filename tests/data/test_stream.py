import itertools

import numpy as np
import pytest

from millrace.data import augment
from millrace.data.digits import load_digits
from millrace.data.source import ArraySource
from millrace.data.stream import EvaluationBatches, Stream


def source(count=23):
    return ArraySource({"id": np.arange(count), "x": np.arange(count * 2).reshape(-1, 2)})


def take(stream, count):
    return [batch["id"].tolist() for batch in itertools.islice(stream, count)]


def joined(batches):
    return list(itertools.chain.from_iterable(batches))


def test_an_epoch_has_no_sample_twice_and_epochs_differ():
    batches = take(Stream(source(), 4, seed=1), 15)
    epochs = [joined(batches[i : i + 5]) for i in (0, 5, 10)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 20
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_only_on_the_seed():
    assert take(Stream(source(), 4, seed=1), 9) == take(Stream(source(), 4, seed=1), 9)
    assert take(Stream(source(), 4, seed=1), 9) != take(Stream(source(), 4, seed=2), 9)


@pytest.mark.parametrize("position", [0, 3, 5, 7, 1000])
def test_a_stream_continues_from_any_position(position):
    whole = Stream(source(), 4, seed=3)
    expected = [whole.batch(position + i)["id"].tolist() for i in range(4)]
    stream = Stream(source(), 4, seed=3)
    stream.seek(position)
    assert take(stream, 4) == expected


def test_the_transform_draws_from_the_batchs_own_generator():
    def jitter(batch, generator):
        return batch | {"noise": generator.random(2)}

    stream = Stream(source(), 4, seed=3, transform=jitter)
    first = [batch["noise"] for batch in itertools.islice(stream, 4)]
    stream.seek(2)
    again = next(iter(stream))["noise"]
    np.testing.assert_array_equal(again, first[2])
    assert not np.array_equal(first[0], first[1])


def test_without_shuffling_samples_come_as_they_lie():
    batches = take(Stream(source(), 5, shuffle=False), 5)
    assert batches == [list(range(i, i + 5)) for i in (0, 5, 10, 15)] + [[0, 1, 2, 3, 4]]


def test_an_epoch_may_be_shorter_than_the_data():
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
def test_impossible_sizes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Stream(source(), **arguments)


@pytest.mark.parametrize(("count", "size"), [(23, 4), (24, 4), (3, 8), (1, 1)])
def test_evaluation_sees_every_sample_once_and_marks_padding(count, size):
    seen = []
    for item in EvaluationBatches(source(count), size):
        assert item["batch"]["id"].shape == item["valid"].shape == (size,)
        seen += item["batch"]["id"][item["valid"]].tolist()
    assert seen == list(range(count))


def test_evaluating_nothing_is_an_error():
    with pytest.raises(ValueError, match="no samples to evaluate"):
        EvaluationBatches(source(0), 4)


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="different numbers of samples"):
        ArraySource({"a": np.zeros(3), "b": np.zeros(4)})
    with pytest.raises(ValueError, match="at least one array"):
        ArraySource({})
    with pytest.raises(ValueError, match=r"needs a dict of arrays.* got ndarray"):
        ArraySource(np.ones((5, 2)))


def test_the_embedded_digits_are_whole_and_do_not_overlap():
    training, validation = load_digits()
    assert (len(training), len(validation)) == (1437, 360)
    image = np.concatenate([training.arrays["image"], validation.arrays["image"]])
    assert image.shape[1:] == (8, 8, 1)
    assert image.dtype == np.uint8 and (image.min(), image.max()) == (0, 16)
    labels = np.concatenate([training.arrays["label"], validation.arrays["label"]])
    assert sorted(np.bincount(labels)) == [174, 177, 178, 179, 180, 181, 181, 182, 182, 183]


def assert_shares_make_up_the_whole(stream) -> None:
    for position in (0, 3):
        whole = stream.batch(position)
        parts = [stream.share(slice(a, b)).batch(position) for a, b in ((0, 2), (2, 6))]
        for name, array in whole.items():
            joined = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(joined, array)


def test_lists_become_arrays_and_anything_else_is_refused_at_once():
    source = ArraySource({"x": [1, 2, 3], "y": ((1.0, 2.0),) * 3})
    assert source[np.array([2, 0])]["x"].tolist() == [3, 1]
    assert source[np.array([1])]["y"].tolist() == [[1.0, 2.0]]
    for wrong in (3, 2.5, None, np.float32(1), [[1], [1, 2]], [None, {}], object()):
        with pytest.raises(ValueError, match=r"x (must be|cannot be made) an array"):
            ArraySource({"x": wrong})


def pictures(count: int = 20) -> ArraySource:
    rng = np.random.default_rng(0)
    return ArraySource({"image": rng.random((count, 8, 8, 3)), "label": np.arange(count)})


def test_shares_of_a_batch_are_augmented_as_in_the_whole():
    transform = augment.on_images(augment.random_flip, augment.pad_and_crop)
    assert transform.by_sample
    assert_shares_make_up_the_whole(Stream(pictures(), 6, transform=transform))


def test_a_share_reads_only_its_own_samples():
    asked = []

    class Watched(ArraySource):
        def __getitem__(self, indices):
            asked.append(len(indices))
            return super().__getitem__(indices)

    Stream(Watched(pictures().arrays), 6).share(slice(2, 4)).batch(1)
    assert asked == [2]


def test_a_transform_of_the_whole_batch_is_given_the_whole_batch_and_then_shared():
    def roll(batch, generator):
        return {name: np.roll(array, 1, 0) for name, array in batch.items()}

    assert_shares_make_up_the_whole(Stream(pictures(), 6, transform=roll))


def test_evaluation_batches_are_shared_or_dealt_out_without_loss():
    batches = EvaluationBatches(ArraySource({"x": np.arange(11)}), 4)
    seen = []
    for part in (batches.share(slice(0, 1)), batches.share(slice(1, 4))):
        seen += [x for b in part for x in b["batch"]["x"][b["valid"]]]
    assert sorted(seen) == list(range(11))
    dealt = [batches.deal(number, 2) for number in range(2)]
    assert [len(part) for part in dealt] == [2, 1]
    seen = [x for part in dealt for b in part for x in b["batch"]["x"][b["valid"]]]
    assert sorted(seen) == list(range(11))
