"""Recommendations for many users at once: computed on the device in batches, and written.

A batch is written while the device computes the next ones, so memory does not grow with the
number of users.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from millrace.apps.autoencoder.data import RowSource
from millrace.apps.autoencoder.loss import to_dense_rows
from millrace.apps.autoencoder.metrics import select_top_items
from millrace.apps.autoencoder.run_ratings import Popularity
from millrace.config import writing
from millrace.data.ratings.matrix import Ratings, find_ids
from millrace.data.ratings.source import evaluation_source
from millrace.data.ratings.split import as_bytes, join_fields, quote
from millrace.data.ratings.tables import import_pyarrow
from millrace.data.stream import EvaluationBatches
from millrace.durable import PARTIAL, clear_leftovers, replacing
from millrace.feeds.infeed import Infeed
from millrace.feeds.outfeed import Outfeed
from millrace.loop.repeat import repeat

_ROWS_PER_GROUP = 1 << 18
"""Rows of a row group of Parquet."""


class TopItems(NamedTuple):
    """The best items of some users: a row for each item, the best of a user first."""

    user: np.ndarray
    """IDs of the users."""
    rank: np.ndarray
    """int32, 1 for the best item."""
    item: np.ndarray
    """IDs of the items."""
    rating: np.ndarray
    """float32, the predicted ratings, within the scale of the training ratings, or the
    scores of a model that ranks items."""


class Columns(NamedTuple):
    """What a file says about each item besides the rating."""

    titles: Mapping[str, str] | None = None
    """Titles by item ID."""
    item_ids: np.ndarray | None = None
    popularity: Popularity | None = None
    """The popularity of the items in `item_ids`; None if the run has not kept it."""
    rating: str = "rating"
    """The name of the column of ratings."""

    def build(self, batch: TopItems) -> dict[str, Any]:
        """Return the columns of a file, by name."""
        columns = {
            self.rating if n == "rating" else n: x for n, x in batch._asdict().items()
        }
        if self.titles is not None:
            columns["title"] = [self.titles.get(str(i), "") for i in batch.item.tolist()]
        if self.popularity is not None:
            assert self.item_ids is not None
            places = find_ids(self.item_ids, batch.item)
            columns["popularity"] = self.popularity.counts[places].astype(np.int64)
            columns["novelty"] = self.popularity.novelty[places].astype(np.float32)
        return columns


def stream_top_items(
    predict: Callable[[Any, jax.Array, jax.Array], jax.Array],
    weights: Any,
    ratings: Ratings,
    users: np.ndarray,
    top: int,
    batch_size: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of users with their best items, as soon as the device has them."""

    def body(weights: Any, element: Any) -> tuple[Any, dict[str, jax.Array]]:
        batch = element["batch"]
        rows = to_dense_rows(batch, ratings.num_items)
        rows = rows.astype(jax.tree.leaves(weights)[0].dtype)
        output = predict(weights, rows, batch["user"])
        rating, item = select_top_items(output, rows, top)
        valid = element["valid"]
        return weights, {
            "user": batch["user"], "item": item, "rating": rating, "valid": valid
        }  # fmt: skip

    batch_size = min(batch_size, len(users))
    source = RowSource(evaluation_source(ratings, None, batch_size, users))
    batches = EvaluationBatches(source, batch_size)
    outfeed = Outfeed()
    with Infeed(batches) as infeed, ThreadPoolExecutor(1) as pool:
        loop = pool.submit(
            repeat, len(batches), body, weights, infeed=infeed, outfeed=outfeed
        )
        yield from outfeed
        loop.result()  # raises the error of the thread, if there was one


def name_top_items(
    batches: Iterable[Mapping[str, np.ndarray]],
    ratings: Ratings,
    limits: tuple[float, float] | None,
) -> Iterator[TopItems]:
    """Yield batches with IDs instead of numbers, and ratings within the limits, if any."""
    low, high = limits or (-np.inf, np.inf)
    for batch in batches:
        # A user who has rated nearly everything has fewer items than asked for.
        rows, columns = np.nonzero(batch["valid"][:, None] & np.isfinite(batch["rating"]))
        yield TopItems(
            ratings.user_ids[batch["user"][rows]],
            columns.astype(np.int32) + np.int32(1),
            ratings.item_ids[batch["item"][rows, columns]],
            np.clip(batch["rating"][rows, columns], low, high).astype(np.float32),
        )


def join_top_items(batches: Iterable[TopItems]) -> TopItems:
    """Return all batches as one."""
    return TopItems(*map(np.concatenate, zip(*batches, strict=True)))


# -------------------------------------------------------------------------------- files


def write_top_items(
    path: Path, batches: Iterable[TopItems], columns: Columns | None = None
) -> int:
    """Write a file atomically, in the format of its name; return the number of rows.

    The suffix is .csv, .tsv, .txt, .jsonl or .parquet. A process that is killed leaves the
    old file, if there was one; its unfinished file is deleted by the next one.

    Args:
        path: The file.
        batches: The recommendations.
        columns: What to write about each item.
    """
    if path.suffix == ".parquet":
        import_pyarrow("Writing Parquet")
    columns = columns or Columns()
    count = 0
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(path.parent, f".{path.name}.*{PARTIAL}")
        with replacing(path, binary=True) as file:
            writer = _WRITERS.get(path.suffix, _TextWriter)(file, path.suffix)
            for batch in batches:
                writer.write(columns.build(batch))
                count += len(batch.rank)
            writer.close()
    return count


class _TextWriter:
    """Writes text with a header: comma-separated for .csv, else tab-separated."""

    def __init__(self, file: IO[bytes], suffix: str) -> None:
        self._file, self._delimiter = file, "," if suffix == ".csv" else "\t"
        self._has_header = False

    def write(self, columns: dict[str, Any]) -> None:
        """Write rows, after the header if they are the first."""
        if not self._has_header:
            self._file.write((self._delimiter.join(columns) + "\n").encode())
            self._has_header = True
        if len(columns["rank"]):
            fields = [self._as_fields(np.asarray(column)) for column in columns.values()]
            self._file.write(join_fields(fields, self._delimiter))

    def _as_fields(self, values: np.ndarray) -> np.ndarray:
        if values.dtype.kind == "f":
            return as_bytes(np.char.mod("%.4f", values.astype(np.float64)))
        if values.dtype.kind != "U":
            return as_bytes(values)
        distinct, codes = np.unique(values, return_inverse=True)
        quoted = [quote(text, self._delimiter) for text in distinct.tolist()]
        return as_bytes(np.array(quoted, np.str_))[codes]

    def close(self) -> None:
        """Do nothing: every row is written."""


class _JsonWriter:
    """Writes a JSON object per line."""

    def __init__(self, file: IO[bytes], suffix: str) -> None:
        self._file = file

    def write(self, columns: dict[str, Any]) -> None:
        """Write rows."""
        lists = [np.asarray(column).tolist() for column in columns.values()]
        for row in zip(*lists, strict=True):
            cells = [round(x, 4) if isinstance(x, float) else x for x in row]
            line = json.dumps(dict(zip(columns, cells, strict=True)))
            self._file.write(f"{line}\n".encode())

    def close(self) -> None:
        """Do nothing: every row is written."""


class _ParquetWriter:
    """Writes Parquet in large row groups."""

    def __init__(self, file: IO[bytes], suffix: str) -> None:
        self._file, self._pyarrow = file, import_pyarrow("Writing Parquet")
        self._writer: Any = None
        self._waiting: list[Any] = []

    def write(self, columns: dict[str, Any]) -> None:
        """Write rows, or keep them for the next row group."""
        columns = {name: self._as_column(x) for name, x in columns.items()}
        self._waiting.append(self._pyarrow.table(columns))
        if sum(len(table) for table in self._waiting) >= _ROWS_PER_GROUP:
            self._flush()

    def _as_column(self, values: Any) -> Any:
        if isinstance(values, np.ndarray) and values.dtype.kind != "U":
            return values
        # The type of no texts could not be inferred.
        return self._pyarrow.array(list(values), self._pyarrow.string())

    def _flush(self) -> None:
        table = self._pyarrow.concat_tables(self._waiting).combine_chunks()
        self._waiting = []
        if self._writer is None:
            writer = self._pyarrow.parquet.ParquetWriter
            self._writer = writer(self._file, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        """Write what is left, and the footer."""
        if self._waiting:
            self._flush()
        if self._writer is not None:
            self._writer.close()


_WRITERS: dict[str, Any] = {".jsonl": _JsonWriter, ".parquet": _ParquetWriter}
