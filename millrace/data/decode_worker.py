"""What a data worker does: decode images into shared memory, task by task.

A worker process imports neither JAX nor anything of the program that started it, so it
starts in a fraction of a second and cannot disturb a device. It ends when its connection
does, and the kernel closes that however the main process ends.
"""

import contextlib
import ctypes
import mmap
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np

from millrace.data.decoding import CorruptSample, Crop, Encoded, Times, decode_into

_NICENESS = 10
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # from malloc.h
_FREED_BYTES = 1 << 30

ReadSample = Callable[[Any], tuple[Encoded | np.ndarray, int]]
"""Returns the encoded image (or its pixels) and the label at a location; raises
CorruptSample. It is sent to worker processes, so it must be picklable, and small."""


class Job(Protocol):
    """What all tasks of a pool have in common: picklable, and small."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of shared memory."""
        ...

    def open(self, memory: Any) -> Callable[[Any], Any]:
        """Return a function that runs a task, given the shared memory."""
        ...


class DecodeJob(NamedTuple):
    """Decodes images into the slots of a shared memory; a slot holds a batch."""

    read: ReadSample
    crop: Crop
    batch_size: int
    num_slots: int

    @property
    def image_bytes(self) -> int:
        """Bytes of one decoded image."""
        return self.crop.size**2 * 3

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the labels of a batch, then its images."""
        return self.batch_size * (self.image_bytes + np.dtype(np.int32).itemsize)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slot_bytes * self.num_slots

    def open(self, memory: Any) -> "Callable[[Task], TaskResult]":
        """Return a function that runs a task, given the shared memory."""
        slots = self.slots(memory)
        return lambda task: run_task(self, task, slots[task.slot])

    def slots(self, memory: Any) -> list[np.ndarray]:
        """Return the bytes of every slot in the shared memory."""
        size = self.slot_bytes
        return [
            np.frombuffer(memory, np.uint8, size, number * size)
            for number in range(self.num_slots)
        ]

    def views(self, slot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the images (batch, size, size, 3) and labels (batch,) in a slot."""
        size, start = self.crop.size, self.batch_size * np.dtype(np.int32).itemsize
        images = slot[start:].reshape(self.batch_size, size, size, 3)
        return images, slot[:start].view(np.int32)


class Task(NamedTuple):
    """Images to decode into some rows of a slot."""

    slot: int
    first_row: int
    locations: list[Any]
    draws: list[list[float]] | None
    """Random numbers of each image; None for the center crop."""


class TaskResult(NamedTuple):
    """What happened in a task."""

    failures: list[tuple[int, str]]
    """Rows whose image is corrupt, and why."""
    times: Times


def run_task(job: DecodeJob, task: Task, slot: np.ndarray) -> TaskResult:
    """Read and decode the images of a task into its slot."""
    images, labels = job.views(slot)
    failures = []
    reading = decoding = resizing = 0.0
    for place, location in enumerate(task.locations):
        row = task.first_row + place
        started = time.perf_counter()
        try:
            content, labels[row] = job.read(location)
            reading += time.perf_counter() - started
            draws = None if task.draws is None else task.draws[place]
            seconds = decode_into(images[row], content, job.crop, draws)
        except CorruptSample as error:
            failures.append((row, str(error)))
            continue
        decoding += seconds[0]
        resizing += seconds[1]
    return TaskResult(failures, Times(reading, decoding, resizing))


def serve(connection: Connection, memory: mmap.mmap) -> None:
    """Run tasks from a connection until it is closed."""
    sys.path[:] = connection.recv()
    # Two steps: what is pickled may be found only with that path.
    job: Job = pickle.loads(connection.recv_bytes())
    run = job.open(memory)
    while True:
        try:
            number, task = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer: Any = run(task)
        except Exception as error:  # a read error of the disk, for example
            answer = _make_portable(error)
        try:
            connection.send((number, answer))
        except (BrokenPipeError, ConnectionError):
            return


def _make_portable(error: Exception) -> Exception:
    """Return an exception that can be sent, with the traceback of this process."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"In a data worker:\n{text}")
    return error


def _keep_freed_memory() -> None:
    """Use freed memory again: returning it after every image costs 3 % of the time."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(parameter, _FREED_BYTES)


def main() -> None:
    """Serve with the connection and the shared memory that were inherited."""
    # Ctrl-C reaches every process of a terminal; the main process decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The threads that keep a device busy need little time, but need it at once: without
    # this, training from files on an H200 with 16 cores and workers was 6 % slower.
    os.nice(_NICENESS)
    _keep_freed_memory()
    connection_fd, memory_fd, size = (int(argument) for argument in sys.argv[1:])
    memory = mmap.mmap(memory_fd, size)
    with Connection(connection_fd) as connection:
        serve(connection, memory)
