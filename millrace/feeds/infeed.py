"""The infeed: a dataset staged on the devices, chunk by chunk, for a compiled loop."""

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

import jax
import numpy as np

from millrace.card import Card, with_card
from millrace.feeds.device import DeviceDataset
from millrace.feeds.iterator_state import (
    decode_state,
    encode_state,
    find_state_getter,
    open_at,
)
from millrace.feeds.reader import Pass, Reader, Request, Staged
from millrace.feeds.stager import Chunk, SampleSlice


class DatasetEnded(RuntimeError):
    """The dataset had fewer elements than the loop asked for."""

    state: Any = None
    """The state after the last update that ``train`` made."""


@runtime_checkable
class Seekable(Protocol):
    """A dataset that can jump to its n-th element."""

    def seek(self, position: int) -> None:
        """Make the next iteration start with element `position`."""


@with_card
class Infeed:
    """Feeds a compiled loop from any iterable of pytrees of NumPy arrays.

    A thread reads the dataset and copies the next chunk of elements to the devices while
    the loop works on the current one. If the dataset raises an exception, the loop uses
    the elements before it and then raises it, with its own traceback. A dataset with an
    attribute `failure` that is not None, such as one whose worker process was killed, ends
    the loop at once.

    All loops that use an infeed share one pass over its dataset: each continues where the
    last one stopped, whatever their chunk sizes.

    Args:
        dataset: An iterable whose elements have the same structure, shapes and types, or a
            ``DeviceDataset``.
        prefetch_depth: Chunks staged ahead of the current one. Each is also kept on the
            host until it is used: a loop with another chunk size may need its elements.
        on_end: What a loop does if the dataset has too few elements: raise an "error", or
            "stop" there.
    """

    def __init__(
        self,
        dataset: Iterable[Any] | DeviceDataset,
        *,
        prefetch_depth: int = 2,
        on_end: Literal["error", "stop"] = "error",
    ) -> None:
        if prefetch_depth < 1:
            raise ValueError(f"prefetch_depth must be at least 1, got {prefetch_depth}.")
        if on_end not in ("error", "stop"):
            raise ValueError(f"on_end must be 'error' or 'stop', got {on_end!r}.")
        if not isinstance(dataset, Iterable | DeviceDataset):
            raise TypeError(
                "Infeed takes an iterable of pytrees of NumPy arrays, got "
                f"{type(dataset).__name__}."
            )
        self.dataset = dataset
        self.on_end = on_end
        self._depth = prefetch_depth
        self._position = 0
        self._request: Request | None = None
        self._sizes: Iterator[int] | None = None
        """Sizes of the next chunks of a ``DeviceDataset``."""
        self._staged: Staged | None = None
        """The chunk in use; None when all of it has been used."""
        self._example: Any = None
        self._pass: Pass | None = None
        self._failed = False
        """Whether the dataset raised an error; the next request opens a new pass."""
        self._reading = threading.Lock()
        self._reader: Reader | None = None
        self._stopped: list[Reader] = []
        """Readers that were stopped while they waited for the dataset."""

    def card(self) -> Card:
        """Return what a terminal or a notebook shows."""
        dataset = self.dataset
        shown = dataset if hasattr(dataset, "card") else type(dataset).__name__
        return Card("Infeed", {"dataset": shown, "position": self._position})

    @property
    def position(self) -> int:
        """The number of elements that loops have used; checkpoints save it."""
        return self._position

    @property
    def elements_read(self) -> int:
        """The number of elements read from the dataset, used or not."""
        return self._position if self._pass is None else self._pass.index

    @property
    def failure(self) -> BaseException | None:
        """The error that ends a loop at once, although more elements may be staged."""
        failure = getattr(self.dataset, "failure", None)
        return failure if isinstance(failure, BaseException) else None

    def peek(self) -> Any:
        """Return an element like those to come, without using it."""
        if isinstance(self.dataset, DeviceDataset):
            return self.dataset.peek()
        if self._example is None:
            try:
                self._example = self._current_pass().peek()
            except BaseException:
                self._failed = True
                raise
            if self._example is None:
                raise DatasetEnded("The dataset has no elements.")
        return self._example

    def state(self) -> Any:
        """Return the state of the dataset's iterator at `position`, as JSON values.

        None if the dataset has none, or can seek. Checkpoints save it.
        """
        if self._pass is None or isinstance(self.dataset, Seekable):
            return None
        state = self._pass.state_at(self._position)
        return None if state is None else encode_state(state)

    def seek(self, position: int, state: Any = None) -> None:
        """Continue at element `position`; call it before or between loops.

        A dataset without a ``seek`` of its own is read up to there, from its start when
        going back. A dataset that can be read only once cannot go back.

        Args:
            position: Number of elements to skip, from the start of the dataset.
            state: What ``state`` returned there. An iterator that can be set to it
                continues without reading anything again.
        """
        if position < 0:
            raise ValueError(f"position must not be negative, got {position}.")
        self.close()
        if state is not None and self._open_at_state(position, decode_state(state)):
            return
        if self._pass is not None and position < self._pass.oldest:
            self._pass = self._open_pass(position, None)
        elif self._pass is not None:
            self._pass.start = position
        self._position = position

    def _open_at_state(self, position: int, state: Any) -> bool:
        """Open a pass that continues from a state; return whether the dataset can."""
        if isinstance(self.dataset, Seekable | DeviceDataset):
            return False
        iterator = open_at(self.dataset, state)
        if iterator is None:
            return False
        self._pass = Pass(
            lambda: iterator,
            position,
            start=position,
            samples=None,
            reading=self._reading,
            get_state=functools.partial(find_state_getter, self.dataset),
        )
        self._position = position
        return True

    def chunk(
        self,
        capacity: int | tuple[int, ...] | None = None,
        sharding: Any = None,
        *,
        only_full: bool = False,
        partial: int | None = None,
        give_up: Callable[[], bool] | None = None,
    ) -> Chunk | None:
        """Return the current chunk, waiting for it if necessary; None at the end.

        Args:
            capacity: Elements per chunk, or the sizes of successive chunks, repeated
                forever. If not given, it is chosen by the size of the elements, and a
                partial chunk may come when the loop would otherwise wait.
            sharding: Where the chunk goes; the default device if not given.
            only_full: Drop the last chunk of the dataset if it is not full.
            partial: Accept a chunk that is not full, but padded, instead of waiting long
                for a full one; its size is a multiple of this.
            give_up: Returns whether to stop waiting; ``GaveUp`` is raised then, and the
                infeed stays as it is.
        """
        capacities = (capacity,) if isinstance(capacity, int) else capacity
        request = Request(capacities, sharding, only_full, partial)
        if request != self._request:
            self._stop_reading()
            self._request = request
        if self._reader is not None and (failure := self.failure) is not None:
            self._fail(failure)
        if self._staged is None:
            self._staged = self._next_chunk(request, give_up)
        return None if self._staged is None else self._staged.chunk

    def took(self, count: int) -> None:
        """Record that a loop has used `count` more elements of the current chunk."""
        assert self._staged is not None
        chunk = self._staged.chunk._replace(start=self._staged.chunk.start + count)
        assert chunk.start <= chunk.stop
        self._position += count
        if self._pass is not None:
            self._pass.state_at(self._position)  # earlier ones are no longer needed
        # A used chunk is dropped at once: its copy on the host may take gigabytes.
        is_used = chunk.start == chunk.stop
        self._staged = None if is_used else self._staged._replace(chunk=chunk)

    def close(self) -> None:
        """Stop reading ahead; the infeed can be used again.

        Elements that were read but not used are kept, or read again if the dataset can
        seek.
        """
        self._stop_reading()
        for reader in self._stopped:
            reader.join()
        self._stopped.clear()
        if isinstance(self.dataset, DeviceDataset):
            self.dataset.close()
        elif isinstance(self.dataset, Seekable):
            self._pass = None

    def _next_chunk(
        self, request: Request, give_up: Callable[[], bool] | None
    ) -> Staged | None:
        if isinstance(self.dataset, DeviceDataset):
            if self._sizes is None:
                self._sizes = itertools.cycle(request.capacities or (1,))
            size = next(self._sizes)
            data = self.dataset.make(self._position, size, request.sharding)
            return Staged(Chunk(data, 0, size), None)
        if self._reader is None:
            samples = _own_samples(request.sharding, self)
            elements = self._current_pass(samples)
            self._reader = Reader(elements, request, samples, self._depth)
        result = self._reader.get(give_up)
        if isinstance(result, BaseException):
            self._fail(result)
        return result

    def _fail(self, error: BaseException) -> NoReturn:
        self._stop_reading()
        self._failed = True
        raise error

    def _stop_reading(self) -> None:
        """Stop the reader without waiting for it; the pass takes back unused elements."""
        staged, self._staged = self._staged, None
        reader, self._reader = self._reader, None
        self._sizes = None
        if reader is None:
            return
        elements = reader.retire()
        if staged is not None and staged.on_host is not None:
            elements = reader.unused(staged.on_host, staged.chunk.start) + elements
        assert self._pass is not None
        self._pass.give_back(elements)
        self._stopped = [old for old in [*self._stopped, reader] if old.is_alive]

    def _current_pass(self, samples: SampleSlice | None = None) -> Pass:
        elements = self._pass
        reusable = elements is not None and not self._failed and elements.contains(samples)
        # A pass over whole elements is given up for one over this process's samples.
        shares = samples is not None and hasattr(self.dataset, "share")
        if elements is None or not reusable or (shares and elements.samples is None):
            elements = self._pass = self._open_pass(self._position, samples)
            self._failed = False
        return elements

    def _open_pass(self, position: int, samples: SampleSlice | None) -> Pass:
        """Open a pass over the dataset, or continue one that cannot be opened again."""
        assert isinstance(self.dataset, Iterable)
        dataset, before, own = self.dataset, self._pass, None
        # share(slice) returns the dataset with only these samples of every element.
        if samples is not None and (share := getattr(dataset, "share", None)) is not None:
            dataset, own = share(samples.own), samples
        new_pass = functools.partial(
            Pass,
            start=position,
            samples=own,
            reading=self._reading,
            get_state=functools.partial(find_state_getter, dataset),
        )
        if isinstance(dataset, Seekable):
            return new_pass(functools.partial(_iterate_from, dataset, position), position)
        if before is not None and isinstance(dataset, Iterator):
            return self._continue_pass(before, position, samples)
        iterator = iter(dataset)
        if before is not None and iterator is before.iterator:
            return self._continue_pass(before, position, samples)
        return new_pass(lambda: iterator, 0)

    def _continue_pass(
        self, elements: Pass, position: int, samples: SampleSlice | None
    ) -> Pass:
        if position < elements.oldest or not elements.contains(samples):
            raise ValueError(
                f"The dataset of this infeed can be read only once and is past element "
                f"{position}. Use an iterable that can restart, or one with a seek method."
            )
        elements.start = position
        elements.forget_error()
        return elements

    def __enter__(self) -> "Infeed":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        # Only sets a flag: the garbage collector must not wait for a lock.
        reader = getattr(self, "_reader", None)
        if reader is not None:
            reader.stop.set()


def _iterate_from(dataset: Any, position: int) -> Iterator[Any]:
    dataset.seek(position)
    return iter(dataset)


def _own_samples(sharding: Any, infeed: Infeed) -> SampleSlice | None:
    """Return the samples of an element for the devices of this process; None for all."""
    if sharding is None or sharding.is_fully_addressable or sharding.is_fully_replicated:
        return None
    total = np.shape(jax.tree.leaves(infeed.peek())[0])[0]
    indices = sharding.addressable_devices_indices_map((1, total)).values()
    bounds = [index[1].indices(total) for index in indices]
    start, stop = min(b[0] for b in bounds), max(b[1] for b in bounds)
    return None if (start, stop) == (0, total) else SampleSlice(slice(start, stop), total)
