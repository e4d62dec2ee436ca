"""Encoded images by index, decoded by a pool of workers; corrupt ones are replaced.

A batch goes through these steps, each in one place: a source `locate`s its samples, a pool
reads, decodes, crops and flips them into the rows of a slot (`decode_worker.run_task`), and
`finish` replaces those that are corrupt. The batch is then handed over without a copy.
"""

import copy
import itertools
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from millrace.data.decode_pool import DecodePool, WorkerPool
from millrace.data.decode_worker import DecodeJob, ReadSample, Task, TaskResult
from millrace.data.decoded_cache import DecodedCache
from millrace.data.decoding import NUM_DRAWS, Crop, Times, decoder_name
from millrace.data.source import ArraySource
from millrace.data.stream import Stream

_MIN_MAX_CORRUPT = 10
_MAX_NAMES_SHOWN = 3
_TASK_IMAGES = 16  # long enough that messages cost nothing, short enough to share evenly
_WORKER_IMAGES = 4 * _TASK_IMAGES
"""Images ahead for every worker. Batches are finished in order, so with fewer, workers have
nothing to do while the last task of a batch is under way: with half of them, up to a fifth
of the time."""
_LEFTOVER_SECONDS = 30.0
_MANY_CORES = 4
"""Cores from which one is left free."""
_FEW_SAMPLES = 5_000
"""Starting processes for this many samples would take longer than an epoch in threads."""
_DRAWS_PER_BLOCK = 8
"""Numbers in single precision that Philox computes at once."""
_BLOCKS_PER_SAMPLE = -(-NUM_DRAWS // _DRAWS_PER_BLOCK)
AHEAD = 4
"""Batches that are decoded ahead of the one in use, unless workers need more."""

Contents = tuple[np.ndarray, np.ndarray | None]
"""Indices of the samples in a batch, and the random numbers of each, (samples, NUM_DRAWS);
None crops the center."""


class TooManyCorrupt(RuntimeError):
    """More samples are corrupt than `max_corrupt` allows."""

    def __init__(self, reasons: Mapping[str, str], num_samples: int, limit: int) -> None:
        lines = [f"  {name}: {reason}" for name, reason in reasons.items()]
        if len(lines) > _MAX_NAMES_SHOWN:
            hidden = len(lines) - _MAX_NAMES_SHOWN
            lines = [*lines[:_MAX_NAMES_SHOWN], f"  and {hidden} more"]
        super().__init__(
            f"{len(reasons)} of {num_samples} samples cannot be read; at most {limit} "
            "may be replaced by others (max_corrupt):\n" + "\n".join(lines)
        )
        self.names = tuple(reasons)


class _Pending(NamedTuple):
    """A batch that a pool is decoding."""

    slot: int
    indices: np.ndarray
    draws: np.ndarray | None
    tasks: "list[Future[TaskResult]]"


class ImageSource(ABC):
    """Images and labels by index, read and decoded each time they are requested.

    A sample that cannot be decoded is recorded and replaced by the next good one of the
    dataset. The replacement does not depend on the batch, so a batch is the same however
    often, and in however many parts, it is read. A read error of the disk is raised.

    Args:
        num_samples: Number of samples.
        crop: How images are cropped.
        num_workers: Worker processes that decode; 0 decodes in threads of this process. By
            default as many as ``usual_num_workers``, or 0 for a small dataset.
        max_corrupt: Corrupt samples allowed before an error is raised; by default 0.1 %
            of the samples, and at least 10.
    """

    is_packed = False
    """Whether the images were prepared for training by ``millrace data pack``."""

    def __init__(
        self,
        num_samples: int,
        crop: Crop,
        *,
        num_workers: int | None = None,
        max_corrupt: int | None = None,
    ) -> None:
        if num_workers is not None and num_workers < 0:
            raise ValueError(f"num_workers must be 0 or more, got {num_workers}.")
        if max_corrupt is not None and max_corrupt < 0:
            raise ValueError(f"max_corrupt must be 0 or more, got {max_corrupt}.")
        self._num_samples = num_samples
        self.crop = crop
        if num_workers is None:
            num_workers = 0 if num_samples <= _FEW_SAMPLES else usual_num_workers()
        self.num_workers = num_workers
        if max_corrupt is None:
            max_corrupt = max(_MIN_MAX_CORRUPT, num_samples // 1000)
        self.max_corrupt = max_corrupt
        self.times = Times()
        """Seconds that workers have spent on this source so far, over all of them."""
        self.num_decoded = 0
        """Images that they have decoded."""
        self._cache: DecodedCache | None = None
        self._corrupt: dict[int, str] = {}
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._idle: list[DecodePool] = []
        self._in_use: set[DecodePool] = set()
        weakref.finalize(self, _close_all, self._idle)

    @property
    @abstractmethod
    def reader(self) -> ReadSample:
        """Reads a sample at a location: picklable, since workers get a copy."""

    @abstractmethod
    def locate(self, index: int) -> Any:
        """Return where a sample is, for `reader`: a few picklable values."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of a sample for messages: its file, and the offset in it."""

    def __len__(self) -> int:
        return self._num_samples

    def keep_decoded(self, max_bytes: int) -> bool:
        """Keep center crops in memory once they are decoded, if all of them fit.

        Random crops are not kept: they are cut from the whole image, of which the
        operating system keeps the file.

        Args:
            max_bytes: Memory for the crops.

        Returns:
            Whether they fit.
        """
        size = self.crop.size
        if DecodedCache.num_bytes(len(self), size) > max_bytes:
            return False
        self._cache = DecodedCache(len(self), size)
        return True

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return ``image`` and ``label`` at `indices`, cropped at the center."""
        return self.read(indices, None)

    def read(self, indices: np.ndarray, draws: np.ndarray | None) -> dict[str, np.ndarray]:
        """Decode one batch in threads of this process; see `Contents`."""
        if (kept := self._read_kept((indices, draws))) is not None:
            return kept
        job = DecodeJob(self.reader, self.crop, len(indices), 1)
        pool = DecodePool(job, self._decoding_threads())
        self._finish(pool, self._submit(pool, 0, (indices, draws)))
        images, labels = job.views(pool.slots[0])
        batch = {"image": images, "label": labels}
        self._keep((indices, draws), batch)
        return batch

    def _read_kept(self, contents: Contents) -> dict[str, np.ndarray] | None:
        indices, draws = contents
        if self._cache is None or draws is not None:
            return None
        return self._cache.read(indices)

    def _keep(self, contents: Contents, batch: dict[str, np.ndarray]) -> None:
        indices, draws = contents
        if self._cache is not None and draws is None:
            self._cache.store(indices, batch)

    def batches(
        self, contents: Iterable[Contents], batch_size: int, ahead: int = AHEAD
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield batches, decoded ahead of time.

        The memory of a batch is used again once nothing refers to it.

        Args:
            contents: What is in each batch.
            batch_size: Samples in each of them.
            ahead: Batches decoded ahead of the one in use. Each takes the memory of a
                batch of bytes, and so do two more.
        """
        self._close_broken()
        upcoming = iter(contents)
        for content in upcoming:
            if (kept := self._read_kept(content)) is None:
                upcoming = itertools.chain([content], upcoming)
                break
            yield kept
        else:
            return  # all of them were in memory: no workers are needed
        pending: deque[_Pending] = deque()
        pool = self._take_pool(batch_size, ahead)
        self._in_use.add(pool)
        try:
            while True:
                while pool.free and len(pending) < ahead:
                    if (content := next(upcoming, None)) is None:
                        break
                    pending.append(self._submit(pool, pool.free.popleft(), content))
                if not pending:
                    return
                # In `pending` until it is done: if the caller gives up, or a worker fails,
                # its slot must not be lost.
                self._finish(pool, pending[0])
                done = pending.popleft()
                batch = _hand_over(pool, done.slot)
                self._keep((done.indices, done.draws), batch)
                yield batch
        finally:
            # Without waiting: the garbage collector may close an iterator on any thread,
            # one of the pool included.
            for batch in pending:
                pool.leftovers += [task for task in batch.tasks if not task.cancel()]
                pool.free.append(batch.slot)
            if not pool.failure:
                self._in_use.discard(pool)
            self._idle.append(pool)

    @property
    def failure(self) -> BaseException | None:
        """The error of a worker process that is gone while its batches are being read.

        It is raised at the batch that the worker did not finish. A loop for which many
        batches were read ahead learns of it here, before it uses them.
        """
        return next((pool.failure for pool in list(self._in_use) if pool.failure), None)

    def stream(self, batch_size: int, **options: Any) -> "ImageStream":
        """Return an endless stream of training batches; see `ImageStream` for options."""
        return ImageStream(self, batch_size, **options)

    def close(self) -> None:
        """Stop the workers that are idle; new ones are started when they are needed."""
        _close_all(self._idle)

    # Decoding

    def _decoding_threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(num_cores(), "millrace-decode")
            return self._threads

    def _close_broken(self) -> None:
        """Close the pools that have lost a worker, and forget why."""
        for pool in [each for each in self._idle if each.failure]:
            self._idle.remove(pool)
            self._in_use.discard(pool)
            pool.close()

    def _close_idle(self) -> None:
        """Close the pools for batches of other sizes, such as the one of a first look."""
        for pool in [each for each in self._idle if not each.failure]:
            self._idle.remove(pool)
            pool.close()

    def _take_pool(self, batch_size: int, ahead: int) -> DecodePool:
        """Return a pool that nobody else uses."""
        # One slot for the batch in use, one that its consumer may still hold.
        job = DecodeJob(self.reader, self.crop, batch_size, ahead + 2)
        for pool in list(self._idle):
            if not pool.failure and pool.job[2:] == job[2:]:
                self._idle.remove(pool)
                # Tasks of the last iteration must not write into a slot of this one.
                wait(pool.leftovers, timeout=_LEFTOVER_SECONDS)
                pool.leftovers.clear()
                return pool
        self._close_idle()
        if self.num_workers:
            return DecodePool(job, WorkerPool(job, self.num_workers))
        return DecodePool(job, self._decoding_threads())

    def _submit(self, pool: DecodePool, slot: int, contents: Contents) -> _Pending:
        indices, draws = contents
        tasks = []
        for first in range(0, len(indices), _TASK_IMAGES):
            some = slice(first, first + _TASK_IMAGES)
            locations = [self.locate(int(index)) for index in indices[some]]
            numbers = None if draws is None else draws[some].tolist()
            tasks.append(pool.submit(Task(slot, first, locations, numbers)))
        return _Pending(slot, indices, draws, tasks)

    def _finish(self, pool: DecodePool, pending: _Pending) -> None:
        """Wait until a batch is decoded, and replace its corrupt images."""
        for task in pending.tasks:
            result = task.result()
            self.times = self.times.plus(result.times)
            for row, reason in result.failures:
                self._replace(pool, pending, row, reason)
        self.num_decoded += len(pending.indices)

    def _replace(self, pool: DecodePool, pending: _Pending, row: int, reason: str) -> None:
        """Decode the next good image of the dataset in place of a corrupt one."""
        index = int(pending.indices[row])
        self._record_corrupt(index, reason)
        numbers = None if pending.draws is None else [pending.draws[row].tolist()]
        for candidate in self._candidates(index):
            task = Task(pending.slot, row, [self.locate(candidate)], numbers)
            failures = pool.submit(task).result().failures
            if not failures:
                return
            self._record_corrupt(candidate, failures[0][1])

    # Corrupt samples

    @property
    def corrupt(self) -> dict[str, str]:
        """The corrupt samples found so far: name and reason."""
        with self._lock:
            return {self.name(index): reason for index, reason in self._corrupt.items()}

    def is_corrupt(self, indices: np.ndarray) -> np.ndarray:
        """Return which of these samples have been found corrupt and replaced."""
        with self._lock:
            return np.array([int(index) in self._corrupt for index in indices], bool)

    def _record_corrupt(self, index: int, reason: str) -> None:
        """Remember a corrupt sample; raise TooManyCorrupt if there are too many."""
        with self._lock:
            self._corrupt[index] = reason
        if len(self._corrupt) > self.max_corrupt:
            raise TooManyCorrupt(self.corrupt, len(self), self.max_corrupt)

    def _candidates(self, index: int) -> Iterator[int]:
        """Yield the samples that may replace a corrupt one, in order.

        They depend on nothing else, so processes that each read a part of a batch agree
        with one that reads all of it.
        """
        for step in range(1, len(self)):
            candidate = (index + step) % len(self)
            if candidate not in self._corrupt:
                yield candidate
        raise TooManyCorrupt(self.corrupt, len(self), self.max_corrupt)


class ImageStream:
    """Endless training batches ``{"image": uint8, "label": int32}`` of an `ImageSource`.

    What is in a batch depends on the seed and its number alone: not on the number of
    workers, nor on how a batch is divided over processes. So a position is one integer. The
    samples of two batches are those of one batch of twice the size, with the same crops.

    Args:
        source: Where the encoded images are.
        batch_size: Samples per batch: a micro-batch for every replica.
        ahead: Batches decoded ahead of the one in use. By default `min_ahead`, or more if
            that is not enough work for all worker processes.
        min_ahead: Batches decoded ahead at least.
        options: ``seed``, ``shuffle`` and ``batches_per_epoch`` of `Stream`.
    """

    def __init__(
        self,
        source: ImageSource,
        batch_size: int,
        *,
        ahead: int | None = None,
        min_ahead: int = AHEAD,
        **options: Any,
    ) -> None:
        for name, value in (("ahead", ahead), ("min_ahead", min_ahead)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        self.source = source
        self._ahead = ahead
        self._min_ahead = min_ahead
        numbers = ArraySource({"index": np.arange(len(source))})
        self._order = Stream(numbers, batch_size, **options)
        self._seed = options.get("seed", 0)
        self._rows = slice(0, batch_size)
        self._position = 0

    @property
    def batch_size(self) -> int:
        """Samples in the whole batch, of which this process may read a part."""
        return self._order.batch_size

    @property
    def batches_per_epoch(self) -> int:
        """Batches before the samples are shuffled again."""
        return self._order.batches_per_epoch

    @property
    def advice(self) -> str:
        """What to do if this is slower than the devices."""
        source, usual = self.source, usual_num_workers()
        ideas = []
        if source.num_workers < usual:
            ideas.append(f"use more workers (--num-workers {usual})")
        if decoder_name() == "Pillow":
            ideas.append(
                "install faster decoders: millrace[images], with pip install '.[images]'"
            )
        if not source.is_packed:
            ideas.append("resize the images once (millrace data pack --short-side 256)")
        if not ideas:
            ideas.append("use a machine with more cores, or store pixels (data pack --raw)")
        text = "; or ".join(ideas)
        return f"{text[0].upper()}{text[1:]}."

    @property
    def failure(self) -> BaseException | None:
        """The error of a worker process that is gone."""
        return self.source.failure

    def seek(self, position: int) -> None:
        """Make the next iteration start with batch number `position`."""
        self._position = position

    def share(self, rows: slice) -> "ImageStream":
        """Return the same stream with only these rows of every batch."""
        part = copy.copy(self)
        part._rows = rows
        return part

    def batch(self, position: int) -> dict[str, np.ndarray]:
        """Return batch number `position`, decoded in this process."""
        return self.source.read(*self._contents(position))

    @property
    def ahead(self) -> int:
        """Batches decoded ahead, given the rows that this process reads."""
        if self._ahead is not None:
            return self._ahead
        rows = self._rows.stop - self._rows.start
        return max(self._min_ahead, -(-self.source.num_workers * _WORKER_IMAGES // rows))

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        rows = self._rows.stop - self._rows.start
        return self.source.batches(self._all_contents(), rows, self.ahead)

    def _all_contents(self) -> Iterator[Contents]:
        position = self._position
        while True:
            yield self._contents(position)
            position += 1

    def _contents(self, position: int) -> Contents:
        """Return the samples of a batch, and the random numbers of their crops."""
        indices = self._order.indices(position)
        own = indices[self._rows]
        first = position * self.batch_size + self._rows.start
        return own, _draw(self._seed, first, len(own))


def _draw(seed: int, first: int, count: int) -> np.ndarray:
    """Return the random numbers of some samples, (samples, NUM_DRAWS), from number `first`.

    They depend on the number of a sample alone, not on how samples are divided into
    batches and over processes. Philox computes any block of its sequence directly.
    """
    key = np.random.SeedSequence([seed, 1]).generate_state(2, np.uint64)
    bits = np.random.Philox(key=key, counter=first * _BLOCKS_PER_SAMPLE)
    size = (count, _BLOCKS_PER_SAMPLE * _DRAWS_PER_BLOCK)
    return np.random.Generator(bits).random(size, np.float32)[:, :NUM_DRAWS]


def _hand_over(pool: DecodePool, slot: int) -> dict[str, np.ndarray]:
    """Return a batch without copying it, unless the consumer holds too many."""
    # An array that is not a view of another: the views of it refer to it, and not past it
    # to the memory, so that it is alive as long as one of them is.
    base = np.frombuffer(pool.slots[slot].data, np.uint8)
    images, labels = pool.job.views(base)
    if not pool.free:
        images, labels = images.copy(), labels.copy()
        pool.free.append(slot)
    else:
        weakref.finalize(base, pool.free.append, slot).atexit = False
    return {"image": images, "label": labels}


def _close_all(pools: list[DecodePool]) -> None:
    while pools:
        pools.pop().close()


def usual_num_workers() -> int:
    """Return one worker per core, less one core for the process that feeds the devices.

    With a worker on all of 16 cores, an H200 trained ResNet-50 from files at 93 % of its
    speed, although the data was ready: the process that launches its work had to wait for a
    core. With 15 workers it was 100 %.
    """
    cores = num_cores()
    return cores - 1 if cores >= _MANY_CORES else cores


def num_cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
