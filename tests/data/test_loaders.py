"""Loaders of other libraries feed a run, and a resumed run continues exactly."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from small_runner import make_runner

import millrace as mr

SAMPLES, BATCH, UPDATES, STOP_AFTER = 26, 2, 20, 5


class Squares:
    """Numbers by index."""

    def __repr__(self):
        return "Squares"  # grain compares it

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return np.float32(index)


def torch_loader(source):
    torch = pytest.importorskip("torch")
    return mr.from_torch_loader(
        torch.utils.data.DataLoader(source, BATCH, shuffle=True, drop_last=True), seed=3
    )


def grain_dataset(source):
    grain = pytest.importorskip("grain")
    data = grain.MapDataset.source(source).seed(3).shuffle().repeat()
    return data.to_iter_dataset().batch(BATCH, drop_remainder=True)


def grain_loader(source):
    grain = pytest.importorskip("grain")
    return grain.DataLoader(
        data_source=source,
        sampler=grain.samplers.IndexSampler(SAMPLES, shuffle=True, seed=3),
        operations=[grain.transforms.Batch(BATCH, drop_remainder=True)],
        read_options=grain.ReadOptions(num_threads=0),
    )


def tf_dataset(source):
    tf = pytest.importorskip("tensorflow")
    values = tf.data.Dataset.from_tensor_slices(np.arange(SAMPLES, dtype=np.float32))
    shuffled = values.shuffle(SAMPLES, seed=3, reshuffle_each_iteration=True)
    return mr.from_tf_data(shuffled.batch(BATCH, drop_remainder=True))


def hugging_face_stream(source):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": np.arange(SAMPLES, dtype=np.float32)})
    stream = rows.to_iterable_dataset().repeat(None).batch(BATCH, drop_last_batch=True)
    return stream.with_format("numpy").map(lambda rows: rows)


def hugging_face_dataset(source):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": np.arange(SAMPLES, dtype=np.float32)})
    return mr.Stream(rows.with_format("numpy"), BATCH, seed=3)


LOADERS = [
    torch_loader,
    grain_dataset,
    grain_loader,
    tf_dataset,
    hugging_face_stream,
    hugging_face_dataset,
]


class Recorded:
    """A dataset whose batches are recorded; it has the methods that the dataset has."""

    def __init__(self, dataset, seen):
        self._dataset, self._seen = dataset, seen
        for name in ("seek", "state_dict", "load_state_dict"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))

    def __iter__(self):
        return _RecordedIterator(iter(self._dataset), self._seen)


class _RecordedIterator:
    def __init__(self, iterator, seen):
        self._iterator, self._seen = iterator, seen
        for name in ("get_state", "set_state"):
            if hasattr(iterator, name):
                setattr(self, name, getattr(iterator, name))

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self._iterator)
        batch = batch["x"] if isinstance(batch, dict) else batch
        self._seen.append(tuple(np.asarray(batch).tolist()))
        return np.asarray(batch, np.float32)


class StopAfter(mr.Callback):
    def __init__(self, update):
        self.update = update

    def on_validation(self, event):
        return event["update"] == self.update


def run(path, dataset, seen, *, stop_after=None, resume=False):
    """Train; return the mean of the batch of every update, as the program saw it."""
    runner, state, directory, checkpoints = make_runner(
        path,
        Recorded(dataset, seen),
        updates=UPDATES,
        logs=UPDATES,
        checkpoint=1,
        validate=lambda state: {"loss": 0.0},
        validations=4,
        callbacks=[StopAfter(stop_after)],
    )
    result = runner.run(state, resume=resume)
    checkpoints.close()
    events = [e for e in directory.read_metrics() if "train_seen" in e]
    return [event["train_seen"] for event in events], result


@pytest.mark.parametrize("loader", LOADERS, ids=lambda f: f.__name__)
def test_a_resumed_run_continues_with_the_next_batch(loader, tmp_path):
    whole, _ = run(tmp_path / "whole", loader(Squares()), [])
    assert len(whole) == UPDATES
    epoch = SAMPLES // BATCH
    assert sum(whole[:epoch]) == pytest.approx(sum(range(SAMPLES)) / BATCH)

    _, result = run(tmp_path / "r", loader(Squares()), [], stop_after=STOP_AFTER)
    assert result.interrupted and result.updates == STOP_AFTER
    seen = []
    resumed, _ = run(tmp_path / "r", loader(Squares()), seen, resume=True)
    assert resumed == whole
    # Nothing before the checkpoint is read again.
    assert np.mean(seen[0]) == pytest.approx(whole[STOP_AFTER])


def test_a_checkpoint_has_the_state_of_an_iterator_at_the_last_used_element(tmp_path):
    pytest.importorskip("grain")
    run(tmp_path / "r", grain_dataset(Squares()), [])
    newest = sorted((tmp_path / "r" / "checkpoints").glob("update-*"))[-1]
    saved = json.loads((newest / "manifest.json").read_text())["data_state"]
    dataset = grain_dataset(Squares())
    iterator = iter(dataset)
    for _ in range(UPDATES):
        next(iterator)
    assert saved == json.loads(json.dumps(iterator.get_state()))


class Counter:
    """An iterator with a state that JSON has no value for, if wanted."""

    def __init__(self, state_type=tuple):
        self.next, self._type = 0, state_type

    def __iter__(self):
        return self

    def __next__(self):
        self.next += 1
        return np.full(2, self.next, np.float32)

    def get_state(self):
        return self._type([self.next, 0])

    def set_state(self, state):
        assert isinstance(state, self._type)
        self.next = next(iter(state))


@pytest.mark.parametrize("state_type", [list, tuple, bytes])
def test_an_infeed_returns_to_a_state(state_type):
    def take(infeed, count):
        chunk = infeed.chunk(count)
        infeed.took(count)
        return np.asarray(chunk.data)[:, 0].tolist()

    with mr.Infeed(Counter(state_type)) as infeed:
        take(infeed, 3)
        saved = json.loads(json.dumps(infeed.state()))
        position = infeed.position
        assert take(infeed, 3) == [4, 5, 6]
    dataset = Counter(state_type)
    with mr.Infeed(dataset, prefetch_depth=1) as infeed:
        infeed.seek(position, saved)
        assert take(infeed, 3) == [4, 5, 6]
        assert infeed.position == 6
        assert take(infeed, 3) == [7, 8, 9]


def test_a_state_that_cannot_be_saved_is_a_warning(caplog):
    with mr.Infeed(Counter(set)) as infeed:
        infeed.peek()
        assert infeed.state() is None
    assert "its state has a set" in caplog.text


def test_what_is_no_loader_is_an_error():
    with pytest.raises(TypeError, match="DataLoader that makes batches"):
        mr.from_torch_loader([jnp.zeros(3)])
    with pytest.raises(TypeError, match=r"takes a tf.data.Dataset, got list"):
        mr.from_tf_data([1])
