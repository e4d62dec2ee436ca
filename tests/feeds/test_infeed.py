import itertools
import subprocess
import sys
import threading
import time
import traceback

import jax
import numpy as np
import pytest

import millrace as mr
from millrace.feeds.stager import SampleSlice


def add(carry, x):
    return carry + x.sum(), carry


def numbers(count):
    return [np.full(3, i, np.float32) for i in range(count)]


def test_elements_arrive_in_order_and_none_is_lost():
    outfeed = mr.Outfeed()
    mr.repeat(
        600, lambda c, x: (c, x[0]), 0.0, infeed=mr.Infeed(numbers(600)), outfeed=outfeed
    )
    np.testing.assert_array_equal(outfeed.dequeue(), np.arange(600))


def test_a_second_loop_continues_where_the_first_stopped():
    with mr.Infeed(iter(numbers(20))) as infeed:  # an iterator cannot restart
        outfeed = mr.Outfeed()
        for count in (3, 7):
            mr.repeat(count, lambda c, x: (c, x[0]), 0.0, infeed=infeed, outfeed=outfeed)
        np.testing.assert_array_equal(outfeed.dequeue(), np.arange(10))
        assert infeed.position == 10


@pytest.mark.parametrize("steps", [None, 4])
def test_an_exception_in_the_dataset_is_raised_with_its_own_traceback(steps):
    class Corrupt(RuntimeError):
        pass

    def reading_a_corrupt_record():
        yield from numbers(5)
        raise Corrupt("record 5")

    with pytest.raises(Corrupt, match="record 5") as caught:
        mr.repeat(
            10,
            add,
            0.0,
            infeed=mr.Infeed(reading_a_corrupt_record()),
            steps_per_execution=steps,
        )
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "reading_a_corrupt_record" in frames


def test_good_elements_before_an_exception_are_used_first():
    def failing():
        yield from numbers(5)
        raise KeyError("gone")

    infeed, outfeed = mr.Infeed(failing()), mr.Outfeed()
    with pytest.raises(KeyError):
        mr.repeat(10, add, 0.0, infeed=infeed, outfeed=outfeed)
    assert len(outfeed.dequeue()) == 5


def test_the_error_for_a_short_dataset_says_how_many_elements_it_had():
    with pytest.raises(mr.DatasetEnded, match=r"ended after 7 .*7 of 10 steps"):
        mr.repeat(10, add, 0.0, infeed=mr.Infeed(numbers(7)))


def test_on_end_stop_ends_the_loop_with_the_dataset():
    outfeed = mr.Outfeed()
    infeed = mr.Infeed(numbers(7), on_end="stop")
    total = mr.repeat(10, add, 0.0, infeed=infeed, outfeed=outfeed)
    assert (float(total), len(outfeed.dequeue())) == (63.0, 7)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (np.zeros(4, np.float32), r"Element 5 .* float32\[4\]; .* float32\[3\]"),
        (np.zeros(3, np.float64), r"Element 5 .* float64\[3\]; .* float32\[3\]"),
        ({"x": np.zeros(3, np.float32)}, "Element 5 .* structure"),
    ],
)
def test_an_error_names_the_element_that_differs_from_the_first(odd, message):
    with pytest.raises(mr.ElementError, match=message):
        mr.repeat(10, add, 0.0, infeed=mr.Infeed([*numbers(5), odd]))


def test_a_value_that_needs_64_bits_is_an_error_and_not_truncated():
    def elements(last):
        return mr.Infeed([np.array([1, 2]), np.array([-(2**31), last])])

    assert int(mr.repeat(2, add, 0, infeed=elements(2**31 - 1))) == 2
    with pytest.raises(mr.ElementError, match=r"Element 1 .* 2147483648, which int32"):
        mr.repeat(2, add, 0, infeed=elements(2**31))


def test_the_position_can_be_saved_and_restored():
    data = numbers(50)
    first, second = mr.Infeed(data), mr.Infeed(data)
    mr.repeat(17, add, 0.0, infeed=first)
    second.seek(first.position)
    outfeed = mr.Outfeed()
    mr.repeat(3, lambda c, x: (c, x[0]), 0.0, infeed=second, outfeed=outfeed)
    np.testing.assert_array_equal(outfeed.dequeue(), [17, 18, 19])


def test_a_seekable_dataset_is_not_read_from_its_start():
    class Seekable:
        def __init__(self):
            self.start, self.read = 0, []

        def seek(self, position):
            self.start = position

        def __iter__(self):
            for i in range(self.start, 10_000):
                self.read.append(i)
                yield np.full(3, i, np.float32)

    data = Seekable()
    with mr.Infeed(data) as infeed:
        infeed.seek(9000)
        mr.repeat(2, add, 0.0, infeed=infeed)
    assert min(data.read) == 9000


def test_an_iterator_can_seek_forward_but_not_back():
    with mr.Infeed(iter(numbers(20))) as infeed:
        infeed.seek(5)
        outfeed = mr.Outfeed()
        mr.repeat(3, lambda c, x: (c, x[0]), 0.0, infeed=infeed, outfeed=outfeed)
        np.testing.assert_array_equal(outfeed.dequeue(), [5, 6, 7])
        infeed.close()
        with pytest.raises(ValueError, match="read only once and is past element 0"):
            infeed.seek(0)


def test_prefetched_elements_survive_a_change_of_chunk_size():
    def endless():
        yield from numbers(10_000)

    outfeed = mr.Outfeed()
    with mr.Infeed(endless()) as infeed:
        for count, steps in ((3, 3), (2, 2), (4, None), (1, 1)):
            mr.repeat(
                count,
                lambda c, x: (c, x[0]),
                0.0,
                infeed=infeed,
                outfeed=outfeed,
                steps_per_execution=steps,
            )
    np.testing.assert_array_equal(outfeed.dequeue(), np.arange(10))


def test_a_dataset_may_reuse_one_array_for_all_elements():
    def reusing():
        buffer = np.zeros(1, np.float32)
        for number in range(1000):
            buffer[:] = number
            yield buffer

    outfeed = mr.Outfeed()
    with mr.Infeed(reusing()) as infeed:
        for steps, length in ((4, 4), (6, 3), (5, None)):
            mr.repeat(
                steps,
                lambda carry, x: (carry, x[0]),
                0,
                infeed=infeed,
                outfeed=outfeed,
                steps_per_execution=length,
            )
    np.testing.assert_array_equal(outfeed.dequeue(), np.arange(15))


class Shuffling:
    """A loader with a new order in every pass; it records what is read."""

    def __init__(self, count):
        self.rng, self.count = np.random.default_rng(0), count
        self.passes, self.read = 0, []

    def __iter__(self):
        self.passes += 1
        for number in self.rng.permutation(self.count):
            self.read.append(number)
            yield np.full(3, number, np.float32)


def taken(infeed, *sizes):
    """Return the elements of chunks with these capacities, requested one at a time."""
    found = []
    for size in sizes:
        chunk = infeed.chunk(size, only_full=True)
        found += np.asarray(chunk.data)[: chunk.stop, 0].tolist()
        infeed.took(chunk.stop)
    return found


@pytest.mark.parametrize("closing", [False, True])
def test_chunks_of_all_sizes_come_from_one_pass(closing):
    loader = Shuffling(400)
    with mr.Infeed(loader, prefetch_depth=1 + closing) as infeed:
        assert infeed.peek().shape == (3,)
        found = []
        for sizes in ((7, 7, 2), (5,), (1, 1, 9), (30, 2)):
            found += taken(infeed, *sizes)
            if closing:
                infeed.close()
        assert infeed.position == len(found) == 64
    assert loader.passes == 1 and len(set(found)) == 64
    np.testing.assert_array_equal(found, loader.read[:64])


def test_memory_is_bounded_by_the_prefetch_depth():
    loader = Shuffling(100_000)
    with mr.Infeed(loader, prefetch_depth=2) as infeed:
        for size in (50, 3, 50, 7) * 20:
            taken(infeed, size)
    # Three chunks of 50: two staged, one being gathered. Small chunks add nothing.
    assert infeed.position == 110 * 20
    assert len(loader.read) <= infeed.position + 3 * 50 + 1


def test_the_unused_part_of_a_chunk_is_not_lost():
    with mr.Infeed(iter(numbers(40))) as infeed:
        infeed.chunk(8)
        infeed.took(3)
        assert taken(infeed, 4) == [3, 4, 5, 6]
        infeed.chunk(6)
        infeed.close()
        assert taken(infeed, 2, 6) == list(range(7, 15))


class Resetting:
    """An iterator that starts over whenever ``iter`` is called on it."""

    def __iter__(self):
        self.next = 0
        return self

    def __next__(self):
        self.next += 1
        return np.full(3, self.next - 1, np.float32)


def test_iter_is_called_only_once_on_an_iterator_that_resets_itself():
    with mr.Infeed(Resetting()) as infeed:
        assert infeed.peek()[0] == 0
        assert taken(infeed, 3, 2, 4) == list(range(9))
        with pytest.raises(ValueError, match="read only once and is past element 2"):
            infeed.seek(2)
        assert taken(infeed, 2) == [9, 10]


def test_a_slow_generator_is_never_entered_by_two_readers():
    def slow():
        for number in range(100):
            time.sleep(0.05)
            yield np.full(3, number, np.float32)

    with mr.Infeed(slow()) as infeed:
        # At each change of size, the reader is inside next().
        started = time.perf_counter()
        assert taken(infeed, 2, 1, 3, 1, 2) == list(range(9))
        assert time.perf_counter() - started < 5


def test_elements_already_read_are_used_while_a_stopped_reader_is_blocked():
    released = threading.Event()

    def stalling():
        yield from numbers(5)
        released.wait(20)
        yield from numbers(9)[5:]

    infeed = mr.Infeed(stalling())
    assert taken(infeed, 2, 1, 2) == list(range(5))
    released.set()
    assert taken(infeed, 3, 1) == list(range(5, 9))
    infeed.close()


@pytest.mark.parametrize("kind", [list, iter], ids=["iterable", "iterator"])
def test_seeking_forward_works_from_any_position(kind):
    with mr.Infeed(kind(numbers(60))) as infeed:
        assert taken(infeed, 3) == [0, 1, 2]
        infeed.seek(7)
        assert infeed.position == 7
        assert taken(infeed, 2) == [7, 8]
        infeed.seek(9)
        infeed.seek(40)
        assert taken(infeed, 3) == [40, 41, 42]


def test_seeking_forward_stays_within_the_pass():
    loader = Shuffling(200)
    with mr.Infeed(loader) as infeed:
        found = taken(infeed, 3)
        infeed.seek(50)
        found += taken(infeed, 2)
    assert loader.passes == 1
    assert found == loader.read[:3] + loader.read[50:52]


def test_an_iterable_can_seek_back():
    with mr.Infeed(numbers(30)) as infeed:
        assert taken(infeed, 12) == list(range(12))
        infeed.seek(4)
        assert taken(infeed, 3) == [4, 5, 6]


def test_a_prefetched_error_is_raised_after_the_elements_before_it():
    def failing():
        yield from numbers(5)
        raise OSError("disk")

    with mr.Infeed(failing()) as infeed:
        assert taken(infeed, 2, 1, 2) == list(range(5))
        with pytest.raises(OSError, match="disk"):
            infeed.chunk(1)
        assert infeed.position == 5
        assert infeed.chunk(1) is None  # the generator has ended


def test_the_error_for_an_odd_element_is_raised_again_on_retry():
    infeed = mr.Infeed(iter([*numbers(3), np.zeros(4, np.float32)]))
    for _ in range(2):
        with pytest.raises(mr.ElementError, match="Element 3 of the dataset"):
            infeed.chunk(4, only_full=True)
    assert taken(infeed, 3) == [0, 1, 2]
    infeed.close()


def test_elements_left_at_the_end_fit_smaller_chunks():
    with mr.Infeed(Shuffling(11)) as infeed:
        assert len(taken(infeed, 4, 4)) == 8
        assert infeed.chunk(4, only_full=True) is None
        assert infeed.elements_read == 11
        assert len(taken(infeed, 2, 1)) == 3
        assert infeed.chunk(1, only_full=True) is None


class FailsOnce:
    """A dataset that raises in the first pass and works in the second."""

    def __init__(self):
        self.has_failed = False

    def __iter__(self):
        for number in range(20):
            if number == 5 and not self.has_failed:
                self.has_failed = True
                raise OSError("the disk is gone")
            yield np.float32(number)


@pytest.mark.parametrize("on_end", ["error", "stop"])
def test_a_retry_after_an_error_continues_where_the_loop_stopped(on_end):
    with mr.Infeed(FailsOnce(), on_end=on_end) as infeed:
        with pytest.raises(OSError, match="the disk is gone"):
            mr.repeat(10, add, 0.0, infeed=infeed)
        position = infeed.position
        total = mr.repeat(10, add, 0.0, infeed=infeed)
    assert total == sum(range(position, position + 10))


def test_a_dataset_that_failed_at_its_first_element_can_be_retried():
    class Waking:
        has_failed = False

        def __iter__(self):
            if not self.has_failed:
                self.has_failed = True
                raise OSError("not there yet")
            yield from numbers(4)

    infeed = mr.Infeed(Waking())
    with pytest.raises(OSError, match="not there yet"):
        infeed.peek()
    assert infeed.peek()[0] == 0
    assert taken(infeed, 4) == [0, 1, 2, 3]


def test_an_iterable_that_always_returns_the_same_generator_works():
    class Shared:
        def __init__(self):
            self.generator = iter(numbers(9))

        def __iter__(self):
            return self.generator

    infeed = mr.Infeed(Shared())
    assert infeed.peek()[0] == 0
    assert float(mr.repeat(3, add, 0.0, infeed=infeed)) == 9.0


def test_a_partial_chunk_is_used_when_the_dataset_stalls(caplog):
    released = threading.Event()

    def stalling():
        yield from numbers(3)
        released.wait(20)

    with mr.Infeed(stalling()) as infeed:
        assert float(mr.repeat(3, add, 0.0, infeed=infeed)) == 9.0
    assert "does not answer" in caplog.text
    released.set()


def test_peeking_uses_no_element_even_of_an_iterator():
    infeed = mr.Infeed(iter(numbers(3)))
    assert infeed.peek()[0] == 0
    assert float(mr.repeat(3, add, 0.0, infeed=infeed)) == 9.0


def test_an_empty_dataset_is_an_error():
    with pytest.raises(mr.DatasetEnded, match="no elements"):
        mr.Infeed([]).peek()
    with pytest.raises(mr.DatasetEnded, match="ended after 0 elements"):
        mr.repeat(1, add, 0.0, infeed=mr.Infeed([]))


def test_closing_does_not_hang_on_an_endless_dataset():
    def endless():
        while True:
            yield np.zeros(1000, np.float32)

    before = threading.active_count()
    infeed = mr.Infeed(endless())
    infeed.chunk()
    started = time.perf_counter()
    infeed.close()
    assert time.perf_counter() - started < 2
    assert threading.active_count() == before


def test_reading_overlaps_with_the_loop():
    """10 ms on the host and 10 ms on the device take 10 ms per step, not 20.

    The machine may be busy with something else: one success in a few attempts is enough.
    """
    assert any(overlaps() for _ in range(5))


def overlaps() -> bool:
    def slow():
        while True:
            time.sleep(0.01)
            yield np.ones((40, 40), np.float32)

    fed = seconds_of_40_steps(slow())
    device = seconds_of_40_steps([np.ones((40, 40), np.float32)] * 43)
    # Serial execution takes device + 40 x 10 ms; the margin is half of the smaller part.
    return fed < device + 0.4 - 0.5 * min(device, 0.4)


def seconds_of_40_steps(dataset) -> float:
    def busy(carry, x):
        def grind(_, y):
            return y @ x * 1e-3 + y

        return jax.lax.fori_loop(0, 600, grind, carry), None

    start = np.ones((40, 40), np.float32)
    with mr.Infeed(dataset) as infeed:
        mr.repeat(3, busy, start, infeed=infeed)
        began = time.perf_counter()
        mr.repeat(40, busy, start, infeed=infeed)
        return time.perf_counter() - began


def test_full_chunks_cycle_through_the_capacities():
    infeed = mr.Infeed(numbers(20))
    sizes = []
    while (chunk := infeed.chunk((3, 3, 2), only_full=True)) is not None:
        sizes.append(chunk.stop)
        infeed.took(chunk.stop)
    assert sizes == [3, 3, 2, 3, 3, 2, 3]  # the last element does not fill a chunk


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"prefetch_depth": 0}, "prefetch_depth must be at least 1, got 0"),
        ({"on_end": "loop"}, "on_end must be 'error' or 'stop'"),
    ],
)
def test_invalid_options_are_errors(arguments, error):
    with pytest.raises(ValueError, match=error):
        mr.Infeed(numbers(3), **arguments)
    with pytest.raises(TypeError, match="iterable of pytrees"):
        mr.Infeed(7)  # pyright: ignore[reportArgumentType]  (that is the test)


UNCLOSED = """
import atexit, itertools, threading

def left():
    return [thread.name for thread in threading.enumerate() if "infeed" in thread.name]

atexit.register(lambda: print("left", left()))  # registered first, called last
import jax, numpy as np
import millrace as mr

infeed = mr.Infeed({"x": np.zeros(200_000)} for _ in itertools.count())
infeed.chunk(2, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
print("open", left(), flush=True)
"""


def test_python_can_exit_with_an_open_infeed():
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "open ['millrace-infeed']\nleft []\n"


class Sharing:
    """A seekable dataset that can read a part of the samples."""

    def __init__(self, rows=slice(0, 4)):
        self.rows, self.start, self.samples_read = rows, 0, []

    def seek(self, position):
        self.start = position

    def share(self, rows):
        part = Sharing(rows)
        part.samples_read = self.samples_read
        return part

    def __iter__(self):
        for number in range(self.start, 100):
            element = (10 * number + np.arange(4, dtype=np.float32))[self.rows]
            self.samples_read += element.tolist()
            yield element


@pytest.mark.parametrize("kind", ["iterable", "iterator", "sharing"])
def test_a_process_stages_only_its_samples_of_every_element(kind, monkeypatch):
    """One device stands in for the devices of one process of several."""
    own = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    samples = SampleSlice(slice(1, 3), 4)
    monkeypatch.setattr(
        "millrace.feeds.infeed._own_samples",
        lambda sharding, infeed: (infeed.peek(), samples)[1] if sharding is own else None,
    )
    sharing = Sharing()
    dataset = {"iterable": list, "iterator": iter, "sharing": lambda x: x}[kind](sharing)

    def staged(infeed, count, sharding):
        data = np.asarray(infeed.chunk(count, sharding).data)
        infeed.took(count)
        return data.tolist()

    with mr.Infeed(dataset) as infeed:
        assert staged(infeed, 2, None) == [[0, 1, 2, 3], [10, 11, 12, 13]]
        assert staged(infeed, 2, own) == [[21, 22], [31, 32]]
        assert staged(infeed, 1, own) == [[41, 42]]
        assert infeed.peek().shape == (4,)
        if kind != "iterator":  # it cannot read the samples again that were cut off
            assert staged(infeed, 1, None) == [[50, 51, 52, 53]]


class Workers:
    """A dataset that may fail long before the loop comes to the element it cannot make."""

    def __init__(self, failure=None):
        self.failure = failure
        self._position = 0

    def seek(self, position):
        self._position = position

    def __iter__(self):
        return (np.float32(number) for number in itertools.count(self._position))


def test_a_failure_of_the_dataset_is_raised_before_what_is_staged():
    dataset = Workers()
    with mr.Infeed(dataset) as infeed:
        assert infeed.chunk(8).data[0] == 0
        infeed.took(3)
        dataset.failure = RuntimeError("worker 2 is gone")
        with pytest.raises(RuntimeError, match="worker 2 is gone"):
            infeed.chunk(8)
        assert infeed.failure is dataset.failure
        dataset.failure = None  # it has new workers
        chunk = infeed.chunk(8)
        assert (infeed.position, chunk.data[chunk.start]) == (3, 3)


def test_an_attribute_of_the_same_name_may_be_something_else():
    with mr.Infeed(Workers(failure=lambda: "a method")) as infeed:
        assert infeed.failure is None
        for _ in range(2):
            assert infeed.chunk(1).data[0] == infeed.position
            infeed.took(1)
