"""How batches of users reach the device: sparse, one shape, users along dim 0."""

from typing import Any

import numpy as np

from millrace.apps.autoencoder.config import TrainingOptions
from millrace.apps.autoencoder.reference_steps import Steps
from millrace.apps.autoencoder.resident import ResidentRatings, fits, table_bytes
from millrace.data.parallel import ParallelStream
from millrace.data.ratings.matrix import Ratings
from millrace.data.ratings.source import RatingsSource, evaluation_source, training_source
from millrace.data.stream import Stream
from millrace.feeds.infeed import Infeed

_SHARE_OF_MEMORY = 0.1
"""Of the device's, that all ratings may take without being asked to."""


class ByUser:
    """A source of ratings whose every array has the batch's users along dim 0.

    What the runtime splits and counts are samples. A batch's flat list of ratings is cut
    into as many equal pieces as it has users; which rating is whose, its row says.

    Args:
        source: Gives the ratings of some users as a flat list.
        micro_batch_size: Users that one replica has; a batch is such lists, one after
            the other. By default all users are one replica's.
    """

    def __init__(self, source: RatingsSource, micro_batch_size: int | None = None) -> None:
        self._source = source
        self._users = micro_batch_size

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        size = self._users or len(indices)
        if size < len(indices):
            firsts = range(0, len(indices), size)
            parts = [self[indices[first : first + size]] for first in firsts]
            return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
        batch = self._source[indices]
        users = len(indices)
        return {
            name: array if name == "user" else _cut(array, users, name)
            for name, array in batch.items()
        }


class ForEvaluation(ByUser):
    """The same, and whether a batch is whole: a short last one is filled up."""

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        batch = super().__getitem__(indices)
        is_whole = len(np.unique(indices)) == len(indices)
        return batch | {"is_whole": np.full(len(indices), is_whole)}


def _cut(array: np.ndarray, users: int, name: str) -> np.ndarray:
    if missing := -len(array) % users:
        filling = users if name.endswith("row") else 0
        array = np.append(array, np.full(missing, filling, array.dtype))
    return array.reshape(users, -1)


class Refed:
    """A stream in which every batch is followed by one without ratings.

    That one says that the reconstruction of the batch before is to be learned.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        first = stream.batch(0)
        self._users = len(first["user"])
        self._empty = first | {"row": np.full_like(first["row"], self._users)}

    def batch(self, position: int) -> dict[str, np.ndarray]:
        """Return batch number `position`, those without ratings counted."""
        number, is_refed = divmod(position, 2)
        batch = self._empty if is_refed else self._stream.batch(number)
        return batch | {"refed": np.full(self._users, bool(is_refed))}


def open_infeed(
    ratings: Ratings, config: TrainingOptions, steps: Steps, device: Any
) -> Infeed:
    """Return the run's batches, on their way to the device or gathered there."""
    plan, batch_size = config.plan, config.resolved_batch_size
    source = training_source(
        ratings,
        plan.micro_batch_size,
        num_batches=steps.num_batches * plan.num_replicas,
        seed=config.seed,
        batches_per_epoch=steps.batches_per_epoch * plan.num_replicas,
    )
    stream = Stream(ByUser(source, plan.micro_batch_size), batch_size, seed=config.seed)
    refed = config.refeeding == "detached"
    if plan.num_replicas == 1 and _on_device(ratings, config.data_on_device, device):
        return Infeed(ResidentRatings(ratings, source.users, stream, refed=refed))
    batches = Refed(stream) if refed else stream
    return Infeed(ParallelStream(batches, config.pipeline_num_parallel))


def _on_device(ratings: Ratings, asked: bool | None, device: Any) -> bool:
    """Decide whether all ratings should lie on the device."""
    if asked is not None:
        return asked
    statistics = device.memory_stats() if device.platform != "cpu" else None
    memory = (statistics or {}).get("bytes_limit", 0)
    return fits(ratings) and table_bytes(ratings) <= memory * _SHARE_OF_MEMORY


def validation_users(
    ratings: Ratings, targets: Ratings | None, batch_size: int
) -> ForEvaluation:
    """Return users with what they have rated, and what of them is to be foretold."""
    return ForEvaluation(evaluation_source(ratings, targets, batch_size))
