"""Pools of data workers: equal batches, slots used once at a time, failures, and ends."""

import contextlib
import errno
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from worker_jobs import (
    MadeImages,
    Unloadable,
    find_workers,
    is_running,
    make_content,
    read_made,
    read_or_fail,
    read_or_fail_oddly,
    read_slowly,
)

from millrace.data.decode_pool import DataWorkerError
from millrace.data.image_source import usual_num_workers
from millrace.data.stream import EvaluationBatches

TESTS = Path(__file__).resolve().parents[1]
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="processes are looked up in /proc"
)


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def assert_equal(batches, others):
    for batch, other in zip(batches, others, strict=True):
        np.testing.assert_array_equal(batch["image"], other["image"])
        np.testing.assert_array_equal(batch["label"], other["label"])


@contextlib.contextmanager
def made_images(count=40, **options):
    source = MadeImages(count, **options)
    try:
        yield source
    finally:
        source.close()


def address(batch):
    return batch["image"].__array_interface__["data"][0]


# Batches


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_batches_do_not_depend_on_workers_parts_or_the_start(num_workers):
    expected = [MadeImages().stream(8, seed=3).batch(number) for number in range(12)]
    with made_images(num_workers=num_workers) as source:
        stream = source.stream(8, seed=3, ahead=3)
        assert_equal(itertools.islice(stream, 12), expected)
        stream.seek(7)
        assert_equal(itertools.islice(stream, 5), expected[7:])
        for rows in (slice(0, 5), slice(5, 8)):
            part = source.stream(8, seed=3).share(rows)
            some = [{name: x[rows] for name, x in batch.items()} for batch in expected]
            assert_equal(itertools.islice(part, 12), some)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_iterations_at_a_time_are_independent(num_workers):
    with made_images(num_workers=num_workers) as source:
        stream = source.stream(5, seed=1)
        expected = [stream.batch(number) for number in range(9)]
        pairs = list(itertools.islice(zip(stream, stream, strict=True), 9))
        assert_equal([first for first, _ in pairs], expected)
        assert_equal([second for _, second in pairs], expected)


def test_evaluation_is_the_same_with_workers_and_with_threads():
    passes = []
    for num_workers in (0, 2):
        with made_images(21, num_workers=num_workers) as source:
            batches = EvaluationBatches(source, 4)
            elements = list(batches)
            passes.append(([x["batch"] for x in elements], [x["valid"] for x in elements]))
            assert batches.num_valid == 21 and len(elements) == 6
            part = EvaluationBatches(source, 4).share(slice(1, 3)).every(2, first=1)
            labels = [element["batch"]["label"].tolist() for element in part]
            assert labels == [[5, 6], [13, 14], [20, 20]]
    assert_equal(passes[0][0], passes[1][0])
    np.testing.assert_array_equal(passes[0][1], passes[1][1])
    labels = np.concatenate([batch["label"] for batch in passes[1][0]])
    assert labels.tolist() == [*range(21), 20, 20, 20]


def test_small_datasets_are_decoded_in_threads_and_large_ones_in_processes():
    assert MadeImages(5000).num_workers == 0
    assert MadeImages(5001).num_workers == usual_num_workers()
    assert MadeImages(10, num_workers=3).num_workers == 3


def test_seconds_of_reading_decoding_and_resizing_are_summed():
    with made_images(read=read_slowly, num_workers=2) as source:
        list(itertools.islice(source.stream(10), 4))
        assert source.times.reading > 0.35  # 40 samples of 0.01 s
        assert source.times.decoding > 0 and source.times.resizing > 0


# Slots


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_slot_is_used_again_only_when_no_view_of_its_batch_is_left(num_workers):
    with made_images(num_workers=num_workers) as source:
        stream = source.stream(8, seed=3, ahead=1)
        batches = iter(stream)
        first = next(batches)
        place, kept = address(first), first["image"][3, 2:5][:, ::2]
        expected = kept.copy()
        del first
        for _ in range(12):
            assert address(next(batches)) != place
        np.testing.assert_array_equal(kept, expected)
        del kept
        assert any(address(next(batches)) == place for _ in range(6))


@pytest.mark.parametrize("name", ["image", "label"])
def test_images_and_labels_each_keep_their_slot(name):
    with made_images() as source:
        batches = iter(source.stream(8, seed=3, ahead=1))
        kept = next(batches)[name]
        expected = kept.copy()
        list(itertools.islice(batches, 12))
        np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_consumer_that_keeps_many_batches_gets_copies(num_workers):
    with made_images(num_workers=num_workers) as source:
        stream = source.stream(8, seed=3, ahead=2)
        kept = list(itertools.islice(stream, 20))
        assert_equal(kept, [stream.batch(number) for number in range(20)])
        (pool,) = source._idle
        shared = [
            batch
            for batch in kept
            if any(np.shares_memory(batch["image"], slot) for slot in pool.slots)
        ]
        assert 1 <= len(shared) < len(pool.slots) == 4
        # The next iteration has fewer slots, and still works.
        assert_equal(itertools.islice(stream, 20), kept)


def test_batches_outlive_the_pool_and_the_source():
    source = MadeImages(num_workers=1)
    stream = source.stream(8, seed=3)
    expected = [stream.batch(number) for number in range(3)]
    kept = list(itertools.islice(stream, 3))
    source.close()
    del source, stream
    gc.collect()
    assert_equal(kept, expected)


def test_an_iteration_that_is_dropped_does_not_write_into_the_next_one():
    release = threading.Event()
    blocked = threading.Event()

    def read(index):
        if index == 9 and not release.is_set():
            blocked.set()
            release.wait(10)
        return make_content(index), index

    source = MadeImages(40, read=read, num_workers=0)
    contents = [(np.arange(8) + 8 * number, None) for number in range(4)]
    batches = source.batches(contents, 8, ahead=2)
    next(batches)
    assert blocked.wait(10)  # a task of the second batch is under way
    batches.close()
    threading.Timer(0.3, release.set).start()
    others = [(np.arange(16, 24) + 4 * number, None) for number in range(4)]
    for (indices, _), batch in zip(others, source.batches(others, 8, ahead=2), strict=True):
        expected, last = MadeImages().read(indices, None), batch
    (pool,) = source._idle
    assert np.shares_memory(last["image"], pool.slots[1])  # that of the blocked task
    time.sleep(0.5)
    np.testing.assert_array_equal(last["label"], expected["label"])
    np.testing.assert_array_equal(last["image"], expected["image"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterations_may_be_dropped_at_any_time(num_workers):
    with made_images(read=read_slowly, num_workers=num_workers) as source:
        stream = source.stream(8, seed=3, ahead=3)
        expected = [stream.batch(number) for number in range(3)]
        for count in (1, 2, 3, 1, 3):
            assert_equal(itertools.islice(stream, count), expected[:count])
        assert len(source._idle) == 1  # always the same pool


@needs_proc
def test_workers_for_batches_of_another_size_do_not_stay():
    with made_images(num_workers=2) as source:
        next(iter(source.stream(8, seed=3)))  # a first look
        first = find_workers()
        next(iter(source.stream(4, seed=3)))
        wait_until(lambda: not first & find_workers())
        assert len(find_workers()) == 2


# Failures


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_read_error_is_raised_at_its_batch_with_the_traceback_of_the_worker(num_workers):
    with made_images(read=read_or_fail, num_workers=num_workers) as source:
        stream = source.stream(4, shuffle=False)
        batches = iter(stream)
        assert next(batches)["label"].tolist() == [0, 1, 2, 3]
        with pytest.raises(OSError, match="Input/output error: 'disk/7'") as caught:
            next(batches)
        assert caught.value.errno == errno.EIO
        text = "".join(getattr(caught.value, "__notes__", ["read_or_fail"]))
        assert "read_or_fail" in text
        assert ("In a data worker:\nTraceback" in text) == bool(num_workers)
        stream.seek(2)  # the workers are as good as new
        assert next(iter(stream))["label"].tolist() == [8, 9, 10, 11]


def test_an_error_that_cannot_be_sent_is_described():
    with made_images(read=read_or_fail_oddly, num_workers=1) as source:
        with pytest.raises(RuntimeError, match="TwoArguments: one and two") as caught:
            next(iter(source.stream(4)))
        assert "in read_or_fail_oddly" in caught.value.__notes__[0]


def test_a_worker_that_cannot_start_is_an_error(capfd):
    with made_images(read=Unloadable(), num_workers=1) as source:
        with pytest.raises(DataWorkerError, match=r"ended with status 1; its error is"):
            next(iter(source.stream(4)))
    assert "cannot be loaded here" in capfd.readouterr().err


@needs_proc
def test_a_killed_worker_is_an_error_and_the_next_iteration_has_new_ones():
    with made_images(num_workers=2) as source:
        stream = source.stream(8, seed=3)
        batches = iter(stream)
        next(batches)
        first = find_workers()
        assert len(first) == 2
        os.kill(min(first), signal.SIGKILL)
        started = time.monotonic()
        message = rf"Data worker {min(first)} was killed by SIGKILL, perhaps because memory"
        with pytest.raises(DataWorkerError, match=message):
            for _ in range(100):
                next(batches)
        assert time.monotonic() - started < 10
        expected = [stream.batch(number) for number in range(3)]
        assert_equal(itertools.islice(stream, 3), expected)
        assert len(find_workers()) == 2 and not find_workers() & first


@needs_proc
def test_a_killed_worker_is_known_before_its_batch_is_requested():
    with made_images(num_workers=2) as source:
        stream = source.stream(8, seed=3)
        batches = iter(stream)
        next(batches)
        assert stream.failure is None
        os.kill(min(find_workers()), signal.SIGKILL)
        wait_until(lambda: stream.share(slice(0, 4)).failure is not None)
        assert isinstance(stream.failure, DataWorkerError)
        with pytest.raises(DataWorkerError):
            list(batches)
        assert stream.failure is not None  # the consumer may not know yet
        next(iter(stream))
        assert stream.failure is None


@needs_proc
def test_an_idle_worker_that_is_killed_is_replaced_silently():
    with made_images(21, num_workers=2) as source:
        batches = EvaluationBatches(source, 4)
        expected = [element["batch"] for element in batches]
        first = find_workers()
        os.kill(min(first), signal.SIGKILL)
        (pool,) = source._idle
        wait_until(lambda: pool.failure is not None)
        assert batches.failure is None
        assert_equal([element["batch"] for element in batches], expected)
        assert not find_workers() & first


@needs_proc
def test_a_killed_worker_of_an_evaluation_is_known_at_once():
    with made_images(4000, num_workers=2) as source:
        batches = EvaluationBatches(source, 4)
        iterator = iter(batches)
        next(iterator)
        os.kill(min(find_workers()), signal.SIGKILL)
        wait_until(lambda: isinstance(batches.failure, DataWorkerError))


def test_memory_that_cannot_be_reserved_is_a_plain_error(monkeypatch):
    def fail(descriptor, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail, raising=False)
    with made_images(num_workers=1, size=512) as source:
        message = r"Cannot reserve 36 MiB .*: No space left on device\. Use a smaller batch"
        with pytest.raises(DataWorkerError, match=message):
            next(iter(source.stream(8, ahead=4)))


def test_a_python_that_cannot_be_started_is_a_plain_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with made_images(num_workers=1) as source:
        with pytest.raises(DataWorkerError, match="Cannot start a data worker"):
            next(iter(source.stream(8)))


# Ends


@needs_proc
def test_batches_are_in_memory_without_a_name():
    with made_images(num_workers=1) as source:
        batches = iter(source.stream(8))
        next(batches)
        (worker,) = find_workers()
        for process in ("self", worker):
            maps = Path(f"/proc/{process}/maps").read_text()
            assert "memfd:millrace-batches" in maps
            assert "/dev/shm/" not in maps


@needs_proc
def test_a_closed_or_dropped_source_leaves_no_worker():
    with made_images(num_workers=2) as source:
        list(itertools.islice(source.stream(8), 2))
        assert len(find_workers()) == 2
    assert not find_workers()
    source = MadeImages(num_workers=2)
    batches = iter(source.stream(8))
    next(batches)
    assert len(find_workers()) == 2
    del source, batches
    gc.collect()
    wait_until(lambda: not find_workers())


@needs_proc
def test_workers_import_no_jax():
    with made_images(num_workers=1) as source:
        next(iter(source.stream(8)))
        (worker,) = find_workers()
        assert "jaxlib" not in Path(f"/proc/{worker}/maps").read_text()


def start_script(text, **options):
    program = (
        "import itertools, os, signal, sys, time\n"
        # A shell ignores Ctrl-C in what it starts in the background, such as these tests.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from worker_jobs import MadeImages, find_workers, read_slowly\n"
        "source = MadeImages(2000, read=read_slowly, num_workers=2)\n"
        "batches = iter(source.stream(16, ahead=4))\n"
        "next(batches)\n"
        "print(*find_workers(), flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program + text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
        **options,
    )
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2, process.stderr.read()
    return process, workers


@needs_proc
@pytest.mark.parametrize("then", ["for _ in batches: pass", "time.sleep(60)"])
def test_workers_end_when_the_main_process_is_killed(then):
    process, workers = start_script(then)
    time.sleep(0.3)  # with nothing left to do, workers wait for tasks
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_running(worker) for worker in workers))
    _, errors = process.communicate()  # not before: workers have the same streams
    assert errors == ""


@needs_proc
def test_ctrl_c_reaches_only_the_main_process_and_ends_in_order():
    process, workers = start_script(
        "try:\n"
        "    print('ready', flush=True)\n"
        "    for _ in batches: pass\n"
        "except KeyboardInterrupt:\n"
        "    print(len(next(iter(source.stream(16)))['label']), flush=True)\n"
        "    print(len(find_workers()), flush=True)\n",
        start_new_session=True,
    )
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert output.split()[0] == "16"  # its workers still work
    wait_until(lambda: not any(is_running(worker) for worker in workers))


@needs_proc
@pytest.mark.parametrize("last_line", ["", "raise SystemExit(0)"])
def test_exiting_python_ends_the_workers_without_errors(last_line):
    process, workers = start_script(last_line)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    wait_until(lambda: not any(is_running(worker) for worker in workers))


def test_ahead_must_be_at_least_1():
    with pytest.raises(ValueError, match="ahead must be at least 1, got 0"):
        MadeImages(read=read_made).stream(4, ahead=0)
