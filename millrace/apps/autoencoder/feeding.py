"""How batches of users reach the device: sparse, one shape, users along dim 0."""

from typing import Any

import numpy as np

from millrace.apps.autoencoder.config import TrainingOptions
from millrace.apps.autoencoder.resident import ResidentRatings, fits, table_bytes
from millrace.apps.autoencoder.steps import Steps
from millrace.data.parallel import ParallelStream
from millrace.data.ratings import Ratings
from millrace.data.ratings_source import RatingsSource, evaluation_source, training_source
from millrace.data.stream import Stream
from millrace.feeds.infeed import Infeed

_SHARE_OF_MEMORY = 0.1
"""Of the device's, that all ratings may take without being asked to."""


class ByUser:
    """A source of ratings whose every array has the batch's users along dim 0.

    What the runtime splits and counts are samples. A batch's flat list of ratings is cut
    into as many equal pieces as it has users; which rating is whose, its row says.
    """

    def __init__(self, source: RatingsSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
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

    That one says that the reconstruction of the batch before is to be learnt.
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
    batch_size = config.resolved_batch_size
    source = training_source(
        ratings, batch_size, num_batches=steps.num_batches, seed=config.seed
    )
    stream = Stream(ByUser(source), batch_size, seed=config.seed)
    refed = config.refeeding == "detached"
    if _on_device(ratings, config.data_on_device, device):
        return ResidentRatings(ratings, source.users, stream, refed=refed)
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
