"""Pools that decode images: in worker processes with shared memory, or in threads.

Threads share the interpreter lock: decoders release it, but what Python does for every
image does not. Processes scale with the cores; a slot of shared memory holds a batch, and
workers write its rows where they belong, so that no pixel goes through a pipe.
"""

import contextlib
import itertools
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from millrace.data.decode_worker import DecodeJob, Job, Task, TaskResult

_IN_FLIGHT = 2  # tasks per worker: the next one is there when it finishes the first
_LAST_CHANCE_SECONDS = 2.0
_MAIN = "from millrace.data.decode_worker import main; main()"


class DataWorkerError(RuntimeError):
    """A worker process ended unexpectedly, or could not be started."""


class DecodePool:
    """Decodes images into slots, each of which holds a batch.

    Args:
        job: What the tasks have in common.
        workers: Worker processes, or threads of this process, which pools may share.
    """

    def __init__(self, job: DecodeJob, workers: "WorkerPool | ThreadPoolExecutor") -> None:
        self.job = job
        self._workers = workers
        is_shared = isinstance(workers, WorkerPool)
        memory = workers.memory if is_shared else bytearray(job.memory_bytes)
        self.slots = job.slots(memory)
        self._run = job.open(memory)
        self.free = deque(range(job.num_slots))
        """Slots that nobody uses."""
        self.leftovers: list[Future[TaskResult]] = []
        """Tasks that were under way when their consumer went away."""

    @property
    def failure(self) -> BaseException | None:
        """Why tasks can no longer be run, if a worker process is gone."""
        return self._workers.failure if isinstance(self._workers, WorkerPool) else None

    def submit(self, task: Task) -> "Future[TaskResult]":
        """Decode images into rows of a slot."""
        if isinstance(self._workers, WorkerPool):
            return self._workers.submit(task)
        return self._workers.submit(self._run, task)

    def close(self) -> None:
        """Stop the worker processes; tasks that have not been run are canceled."""
        if isinstance(self._workers, WorkerPool):
            self._workers.close()


class WorkerPool:
    """Processes that run the tasks of a job.

    Their shared memory has no name (memfd), so it needs no room in /dev/shm and disappears
    with the last process that uses it, however that ends.

    Args:
        job: What the tasks have in common; it is pickled and sent to every worker.
        num_workers: Number of processes.
    """

    def __init__(self, job: Job, num_workers: int) -> None:
        self.num_workers = num_workers
        pickled = pickle.dumps(job)
        size = max(1, job.memory_bytes)
        descriptor = _reserve_memory(size)
        self.memory = mmap.mmap(descriptor, size)
        self._workers: list[_Worker] = []
        self._tasks: deque[tuple[int, Any, Future[Any]]] = deque()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        """Why tasks can no longer be run, if a worker is gone."""
        # Wakes the thread when there are new tasks.
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        try:
            for _ in range(num_workers):
                self._workers.append(_Worker(descriptor, size, pickled))
        except BaseException:
            for worker in self._workers:
                worker.stop()
            self._wake_receiver.close()
            self._wake_sender.close()
            raise
        finally:
            os.close(descriptor)
        self._thread = threading.Thread(
            target=self._run, name="millrace-data-workers", daemon=True
        )
        self._thread.start()
        # Also called when the interpreter exits.
        self._stop = weakref.finalize(self, _stop_workers, self._workers, self._wake_sender)

    def submit(self, task: Any) -> "Future[Any]":
        """Run a task in one of the processes."""
        future: Future[Any] = Future()
        with self._lock:
            if self.failure is not None:
                future.set_exception(self.failure)
                return future
            self._tasks.append((next(self._numbers), task, future))
        with contextlib.suppress(OSError):  # full: the thread will wake up anyway
            self._wake_sender.send(b"\0")
        return future

    def close(self) -> None:
        """Stop all work; tasks that have not been run fail."""
        self._stop()
        self._fail(DataWorkerError("The data workers were closed."))

    def _run(self) -> None:
        """Hand out tasks and take in results, until the pool is closed."""
        by_connection: dict[Any, _Worker] = {w.connection: w for w in self._workers}
        try:
            while True:
                for worker in self._workers:
                    self._hand_out(worker)
                for ready in wait([*by_connection, self._wake_receiver]):
                    if ready is self._wake_receiver:
                        if not self._wake_receiver.recv(4096):
                            return
                    else:
                        by_connection[ready].take_result()
        except DataWorkerError as error:
            self._fail(error)
        except (OSError, ValueError) as error:  # closed meanwhile
            self._fail(DataWorkerError(f"The connection to a data worker broke: {error}"))
        finally:
            self._wake_receiver.close()

    def _hand_out(self, worker: "_Worker") -> None:
        while len(worker.pending) < _IN_FLIGHT:
            with self._lock:
                if not self._tasks:
                    return
                number, task, future = self._tasks.popleft()
            if future.set_running_or_notify_cancel():
                worker.send(number, task, future)

    def _fail(self, error: BaseException) -> None:
        """Let every task that is not done fail, and those to come."""
        with self._lock:
            self.failure = self.failure or error
            waiting = [future for *_, future in self._tasks]
            self._tasks.clear()
        for worker in self._workers:
            waiting += worker.pending.values()
            worker.pending.clear()
        for future in waiting:
            with contextlib.suppress(Exception):  # done or canceled meanwhile
                future.set_exception(error)


class _Worker:
    """One worker process and its tasks."""

    def __init__(self, memory_fd: int, memory_size: int, job: bytes) -> None:
        own, other = socket.socketpair()
        self.pending: dict[int, Future[Any]] = {}
        # The package may be anywhere on the path of this process.
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        arguments = [str(other.fileno()), str(memory_fd), str(memory_size)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, *arguments],
                pass_fds=(other.fileno(), memory_fd),
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            own.close()
            raise DataWorkerError(f"Cannot start a data worker: {error}.") from error
        finally:
            other.close()
        self.connection = Connection(own.detach())
        try:
            self.connection.send_bytes(pickle.dumps(sys.path))
            self.connection.send_bytes(job)
        except OSError as error:
            raise self._lost() from error

    def send(self, number: int, task: Any, future: "Future[Any]") -> None:
        """Give the process a task."""
        self.pending[number] = future
        try:
            # Connection.send would leave a buffer to the garbage collector if it fails,
            # about which Python 3.13 complains.
            self.connection.send_bytes(pickle.dumps((number, task)))
        except OSError as error:
            raise self._lost() from error

    def take_result(self) -> None:
        """Receive a result, which is there, or notice that the process is gone."""
        try:
            number, result = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        future = self.pending.pop(number)
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _lost(self) -> DataWorkerError:
        try:
            code = self.process.wait(_LAST_CHANCE_SECONDS)
        except subprocess.TimeoutExpired:
            return DataWorkerError(f"Data worker {self.process.pid} closed its connection.")
        if code >= 0:
            ended = f"ended with status {code}; its error is above"
        else:
            ended = f"was killed by {signal.Signals(-code).name}"
            if -code in (signal.SIGKILL, signal.SIGBUS):
                ended += ", perhaps because memory ran out"
        return DataWorkerError(
            f"Data worker {self.process.pid} {ended}. Fewer workers need less memory "
            "(--num-workers)."
        )

    def stop(self) -> None:
        """End the process, which stops when its connection is closed."""
        with contextlib.suppress(OSError):
            self.connection.close()
        try:
            self.process.wait(_LAST_CHANCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _stop_workers(workers: list[_Worker], wake_sender: socket.socket) -> None:
    wake_sender.close()  # ends the thread
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.connection.close()  # all at once, then wait for each
    for worker in workers:
        worker.stop()


def _reserve_memory(size: int) -> int:
    """Return a descriptor of nameless shared memory; fail now, not when it is used."""
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("millrace-batches")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
    except OSError as error:
        raise DataWorkerError(
            f"Cannot reserve {size / 2**20:,.0f} MiB of memory for batches: "
            f"{error.strerror}. Use a smaller batch, or fewer workers (--num-workers)."
        ) from error
    os.set_inheritable(descriptor, True)
    return descriptor
