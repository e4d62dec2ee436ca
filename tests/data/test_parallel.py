"""Batches prepared by background threads: in order, bounded, and without leaks."""

import gc
import itertools
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from millrace.data.source import ArraySource
from millrace.data.stream import ParallelStream, Stream
from millrace.feeds.infeed import Infeed


def plain_stream(**options):
    return Stream(ArraySource({"id": np.arange(23)}), 4, seed=3, **options)


def ids(stream, count):
    return [batch["id"].tolist() for batch in itertools.islice(stream, count)]


def workers():
    return [t for t in threading.enumerate() if t.name.startswith("millrace-batch")]


def wait_until(condition):
    for _ in range(200):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("the condition did not become true within 4 s")


class Recorded:
    """Returns positions as batches and records those requested."""

    def __init__(self, fail_at=None, first_takes=0.0):
        self.fail_at = fail_at
        self.first_takes = first_takes
        self.requested = []

    def batch(self, position):
        self.requested.append(position)
        time.sleep(self.first_takes if position % 4 == 0 else 0)
        if position == self.fail_at:
            raise RuntimeError(f"batch {position} is bad")
        return position


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("ahead", [None, 1, 9])
def test_the_batches_equal_those_of_the_plain_stream(num_workers, ahead):
    def jitter(batch, generator):
        return batch | {"id": batch["id"] + generator.integers(100)}

    expected = ids(plain_stream(transform=jitter), 40)  # eight epochs of five
    parallel = ParallelStream(plain_stream(transform=jitter), num_workers, ahead)
    assert ids(parallel, 40) == expected
    parallel.seek(17)
    assert ids(parallel, 23) == expected[17:]
    assert parallel.batch(2)["id"].tolist() == expected[2]


def test_batches_arrive_in_order_even_if_some_take_longer():
    stream = Recorded(first_takes=0.02)
    assert list(itertools.islice(ParallelStream(stream, 4), 30)) == list(range(30))


def test_the_number_of_batches_prepared_ahead_is_bounded():
    stream = Recorded()
    batches = iter(ParallelStream(stream, 3, ahead=4))
    next(batches)
    wait_until(lambda: len(stream.requested) == 5)  # the one in use and four more
    time.sleep(0.05)
    assert sorted(stream.requested) == list(range(5))
    next(batches)
    wait_until(lambda: len(stream.requested) == 6)
    batches.close()


def test_an_exception_is_raised_at_its_batch_with_its_traceback():
    batches = iter(ParallelStream(Recorded(fail_at=5), 3))
    assert list(itertools.islice(batches, 5)) == list(range(5))
    with pytest.raises(RuntimeError, match="batch 5 is bad") as caught:
        next(batches)
    assert caught.traceback[-1].name == "batch"
    wait_until(lambda: not workers())


def test_closing_or_dropping_the_iterator_stops_the_workers():
    batches = iter(ParallelStream(Recorded(), 3))
    next(batches)
    assert len(workers()) == 3
    batches.close()
    wait_until(lambda: not workers())
    batches = iter(ParallelStream(Recorded(), 2))
    next(batches)
    assert len(workers()) == 2
    del batches
    gc.collect()
    wait_until(lambda: not workers())


def test_two_iterations_are_independent():
    parallel = ParallelStream(plain_stream(), 2)
    expected = ids(plain_stream(), 12)
    first, second = iter(parallel), iter(parallel)
    pairs = [(next(first), next(second)) for _ in range(12)]
    assert [a["id"].tolist() for a, _ in pairs] == expected
    assert [b["id"].tolist() for _, b in pairs] == expected


def test_an_infeed_leaves_no_workers_behind():
    expected = ids(plain_stream(), 8)
    with Infeed(ParallelStream(plain_stream(), 2)) as infeed:
        assert infeed.peek()["id"].tolist() == expected[0]
        infeed.seek(3)
        chunk = infeed.chunk(5)
        assert chunk is not None
        assert np.asarray(chunk.data["id"]).tolist() == expected[3:]
    wait_until(lambda: not workers())


@pytest.mark.parametrize("last_line", ["", "raise SystemExit(0)"])
def test_exiting_python_does_not_wait_for_the_workers(last_line):
    program = f"""
import time
from millrace.data.stream import ParallelStream
class Slow:
    def batch(self, position):
        time.sleep(60 if position else 0)
batches = iter(ParallelStream(Slow(), 3))
next(batches)
{last_line}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=20, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("option", [{"num_workers": 0}, {"ahead": 0}])
def test_impossible_options_are_rejected(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be at least 1, got 0"):
        ParallelStream(plain_stream(), **option)
