"""Ratings in Parquet files and DataFrames are those of the same text file."""

import datetime
import math
import sys

import numpy as np
import pytest

from millrace.config import ConfigurationError
from millrace.data.ratings import tables
from millrace.data.ratings.identifiers import CodedIds
from millrace.data.ratings.reading import load_ratings, read_events
from millrace.data.ratings.tables import read_table
from millrace.data.source import DatasetError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

STARS = (0.5, 5.0)
ALWAYS = (-math.inf, math.inf)
USERS = ["björn", "anna", "björn", "a b"]
ITEMS = [30, 10, 20, 10]
VALUES = [4.0, 3.5, 1.0, 5.0]
TIMES = [1133308800, 1133308801, 1133308802, 1133308803]
TABLE = {"userId": USERS, "movie_id": ITEMS, "rating": VALUES, "timestamp": TIMES}


def write(path, columns, **options):
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def rows(events):
    ids = [coded.ids[coded.codes].tolist() for coded in (events.users, events.items)]
    return list(zip(*ids, events.values.tolist(), strict=True))


def test_a_parquet_file_is_read_like_text(tmp_path):
    path = write(tmp_path / "ratings.parquet", TABLE, row_group_size=2)
    text = tmp_path / "ratings.csv"
    lines = zip(*TABLE.values(), strict=True)
    text.write_text(
        ",".join(TABLE) + "\n" + "".join(",".join(map(str, line)) + "\n" for line in lines)
    )
    found, expected = (read_events(p, STARS, window=ALWAYS) for p in (path, text))
    assert rows(found) == rows(expected)
    assert found.times.tolist() == expected.times.tolist() == TIMES
    for a, b in ((found.users, expected.users), (found.items, expected.items)):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.codes, b.codes)
    loaded = load_ratings(path)
    for name in ("starts", "items", "values", "user_ids", "item_ids"):
        array = getattr(load_ratings(text), name)
        np.testing.assert_array_equal(getattr(loaded, name), array)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("user", pyarrow.array(USERS).dictionary_encode()),
        ("user", pyarrow.array(USERS, pyarrow.large_string())),
        ("user", pyarrow.array(USERS, pyarrow.string_view())),
        ("user", pyarrow.chunked_array([USERS[:1], USERS[1:]]).dictionary_encode()),
        ("item", pyarrow.array(ITEMS, pyarrow.uint8())),
        ("rating", pyarrow.array(VALUES, pyarrow.float32())),
        ("rating", pyarrow.array(VALUES).cast(pyarrow.decimal128(9, 4))),
        ("time", pyarrow.array(TIMES).cast(pyarrow.timestamp("s"))),
        ("time", pyarrow.array([t * 1000 for t in TIMES]).cast(pyarrow.timestamp("ms"))),
        ("time", pyarrow.array([t * 1000 for t in TIMES])),
        ("time", pyarrow.array([str(t) for t in TIMES])),
    ],
    ids=lambda value: str(getattr(value, "type", value)),
)
def test_every_type_of_column_is_read(tmp_path, column, values):
    plain = {"user": USERS, "item": ITEMS, "rating": VALUES, "time": TIMES}
    path = write(tmp_path / "r", plain | {column: values})
    events = read_events(path, STARS, window=ALWAYS)
    assert rows(events) == list(zip(USERS, ITEMS, VALUES, strict=True))
    assert events.times.tolist() == TIMES


def test_dates_are_the_first_second_of_their_day(tmp_path):
    table = {"user": [1], "item": [2], "date": [datetime.date(2005, 11, 30)]}
    events = read_events(write(tmp_path / "r", table), STARS, window=ALWAYS)
    assert events.times.tolist() == [1133308800] and events.implicit


def test_columns_of_a_parquet_file_can_be_chosen(tmp_path):
    path = write(tmp_path / "r", {"who": [7], "what": [3], "how": [4.5]})
    columns = {"user": "who", "item": "2", "rating": "how"}
    assert rows(read_events(path, STARS, columns)) == [(7, 3, 4.5)]
    with pytest.raises(ConfigurationError, match="no column whom; choose from who, what"):
        read_events(path, STARS, {"user": "whom"})
    with pytest.raises(DatasetError, match="does not identify the column of the user or"):
        read_events(path, STARS)


def test_a_window_keeps_only_its_ratings(tmp_path):
    path = write(tmp_path / "r", TABLE)
    events = read_events(path, STARS, window=(TIMES[1], TIMES[3]))
    assert rows(events) == list(zip(USERS, ITEMS, VALUES, strict=True))[1:3]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rating": [4, math.nan, 1, 1]}, "ratings has the value nan in row 2"),
        ({"rating": [4, None, 1, 1]}, "ratings has no value in row 2"),
        ({"rating": [4, 1, 9, 1]}, "row 3: the rating 9 is not between 0.5 and 5"),
        ({"rating": ["4", "1", "9", "1"]}, "ratings must be numbers"),
        ({"userId": [1.5, 2, 3, 4]}, "users must be integers or text, but has values of"),
        ({"userId": ["a", None, "b", "c"]}, "users has no value in row 2"),
        ({"userId": ["a", "", "b", "c"]}, "users has an empty text"),
        ({"userId": ["a", "b\0", "b", "c"]}, "users has a text with a zero byte"),
        ({"userId": [2**62, 1, 2, 3]}, "users has integers of more than 18 digits"),
        ({"timestamp": ["now", "1", "2", "3"]}, "the time 'now' is neither seconds"),
    ],
)
def test_a_bad_column_is_named(tmp_path, changed, message):
    path = write(tmp_path / "ratings.parquet", TABLE | changed)
    with pytest.raises(DatasetError) as caught:
        read_events(path, STARS, window=ALWAYS)
    assert message in str(caught.value) and str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_table_without_rows_has_no_ratings(tmp_path):
    empty = {name: pyarrow.array([], pyarrow.int64()) for name in TABLE}
    with pytest.raises(DatasetError, match="has no ratings: it has no rows"):
        read_events(write(tmp_path / "r", empty), STARS)


@pytest.mark.parametrize("kept", [4, 100, -1])
def test_a_truncated_parquet_file_is_damaged(tmp_path, kept):
    path = write(tmp_path / "ratings.parquet", TABLE)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DatasetError, match=r"ratings.parquet is a damaged Parquet file: "):
        load_ratings(path)


def test_another_file_with_the_name_of_parquet_is_an_error(tmp_path):
    path = tmp_path / "ratings.parquet"
    path.write_text("1,2,3\n")
    with pytest.raises(DatasetError, match="not a Parquet file: it starts with b'1,2,'"):
        load_ratings(path)
    path.write_text("")
    with pytest.raises(DatasetError, match="not a Parquet file"):
        load_ratings(path)


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "ratings.parquet", TABLE)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigurationError, match="pip install pyarrow"):
        load_ratings(path)


# DataFrames


class Frame:
    """A table with columns, like a DataFrame, that knows nothing of Arrow."""

    def __init__(self, columns):
        self._columns = columns
        self.columns = list(columns)

    def __getitem__(self, name):
        return np.array(self._columns[name], object)


def polars_frame(columns):
    return pytest.importorskip("polars").DataFrame(columns)


def pandas_frame(columns):
    return pytest.importorskip("pandas").DataFrame(columns)


FRAMES = [Frame, dict, pyarrow.table, polars_frame, pandas_frame]


def decoded(ids):
    return ids.ids[ids.codes].tolist() if isinstance(ids, CodedIds) else ids.tolist()


@pytest.mark.parametrize("build", FRAMES)
@pytest.mark.parametrize("with_pyarrow", [True, False])
def test_every_kind_of_frame_is_read(build, with_pyarrow, monkeypatch):
    table = build(TABLE)
    if not with_pyarrow and build is not pyarrow.table:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    found = read_table("data", table)
    assert decoded(found.users) == USERS and decoded(found.items) == ITEMS
    assert found.values.tolist() == VALUES and found.times.tolist() == TIMES
    choices = read_table("data", build({n: TABLE[n] for n in ("userId", "movie_id")}))
    assert choices.values is None and choices.times is None


@pytest.mark.parametrize("build", [pandas_frame, polars_frame])
def test_times_of_a_frame_may_be_dates(build):
    days = [datetime.datetime(2005, 11, 30), datetime.datetime(2005, 12, 1)]
    found = read_table("data", build({"user": [1, 2], "item": [1, 2], "date": days}))
    assert found.times.tolist() == [1133308800, 1133395200]


def test_a_category_of_pandas_is_text():
    pandas = pytest.importorskip("pandas")
    frame = pandas_frame(TABLE)
    frame["userId"] = frame["userId"].astype("category")
    assert decoded(read_table("data", frame[frame["rating"] > 2]).users) == [
        user for user, value in zip(USERS, VALUES, strict=True) if value > 2
    ]
    assert pandas.Series(USERS).nunique() == 3


@pytest.mark.parametrize("build", [Frame, pandas_frame])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"userId": ["a", 1, "b", "c"]}, "column of the users (mixes values|has values)"),
        ({"userId": ["a", None, "b", "c"]}, "column of the users has no value in row 2"),
        ({"rating": [1.0, math.nan, 1.0, 1.0]}, "column of the ratings has .* row 2"),
    ],
)
def test_a_bad_frame_is_one_sentence(build, changed, message):
    with pytest.raises(DatasetError, match=f"^data: the {message}") as caught:
        read_table("data", build(TABLE | changed))
    assert "\n" not in str(caught.value)


def test_a_missing_text_of_pandas_is_found_without_pyarrow(monkeypatch):
    pandas = pytest.importorskip("pandas")
    monkeypatch.setattr(tables, "_find_pyarrow", lambda: None)
    frame = pandas_frame(TABLE)
    frame["userId"] = pandas.array(["a", pandas.NA, "b", "c"], dtype="string")
    with pytest.raises(DatasetError, match="column of the users has no value in row 2"):
        read_table("data", frame)


def test_two_columns_of_one_name_are_an_error():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([[1, 2, 3, 4]], columns=["user", "user", "item", "rating"])
    with pytest.raises(DatasetError, match="more than one column named user"):
        read_table("data", frame)
