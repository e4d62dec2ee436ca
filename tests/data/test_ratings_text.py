"""Text in, ratings out: every layout that is promised, and every fault that is named."""

import gzip
import logging
import math
import re
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.config import ConfigurationError
from millrace.data.ratings import chunks
from millrace.data.ratings.fast_parser import parse_quickly
from millrace.data.ratings.parser import BadLine, Layout, parse_lines
from millrace.data.ratings.text import Coded, read_events
from millrace.data.ratings.writing import write_text
from millrace.data.source import DatasetError

STARS = (0.5, 5.0)
ALWAYS = (-math.inf, math.inf)


def rows(events):
    return [
        (u, i, float(v))
        for u, i, v in zip(
            events.users.ids[events.users.codes].tolist(),
            events.items.ids[events.items.codes].tolist(),
            events.values,
            strict=True,
        )
    ]


def read(tmp_path, content, **options):
    path = tmp_path / "ratings"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_events(path, options.pop("limits", STARS), **options)


@pytest.mark.parametrize(
    "content",
    [
        "7\t3\t4\n2\t5\t3.5\n",
        "7\t3\t4\t881250949\n2\t5\t3.5\t881250949\n",  # MovieLens 100K
        "7::3::4::978300760\n2::5::3.5::978302109\n",  # 1M, 10M
        "userId,movieId,rating,timestamp\n7,3,4.0,1256677221\n2,5,3.5,1256677456\n",  # 20M…
        "7,3,4\n2,5,3.5",  # no newline at the end
        "7,3,4\r\n2,5,3.5\r\n",
        "\ufeffuserId,movieId,rating\r\n7,3,4\r\n2,5,3.5\r\n",
        "\n\n7,3,4\n  \n2,5,3.5\n\n",
        '"7";"3";"4"\n"2";"5";"3.5"\n',
        " 7 , 3 , 4 \n2,5,3.50\n",
        "7,3,+4\n2,5,35e-1\n",
        "rating,movieId,userId,note\n4,3,7,fine\n3.5,5,2,\n",
        "User-ID;ISBN;Book-Rating\n7;3;4\n2;5;3.5\n",
        "book_id,user_name,rating\n3,7,4\n5,2,3.5\n",
        "rating,Book ID,username,user_id\n4,3,x,7\n3.5,5,y,2\n",  # an id before a name
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_every_layout_is_read(tmp_path, content, zipped):
    encoded = content.encode()
    events = read(tmp_path, gzip.compress(encoded) if zipped else encoded)
    assert rows(events) == [(7, 3, 4.0), (2, 5, 3.5)]
    assert events.users.ids.dtype == np.int64 and events.times is None


def test_texts_name_users_and_items_too(tmp_path):
    events = read(tmp_path, "anna,B07,4\nbjörn,A1,3\nanna,A1,5\n")
    assert rows(events) == [("anna", "B07", 4), ("björn", "A1", 3), ("anna", "A1", 5)]
    assert events.users.ids.dtype.kind == "U"


def test_a_leading_zero_makes_an_identifier_a_text(tmp_path):
    events = read(tmp_path, "1,007,4\n1,7,3\n")
    assert rows(events) == [(1, "007", 4), (1, "7", 3)]


def test_a_late_text_among_numbers_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 16)
    lines = [f"{n},1,4" for n in range(50)]
    with caplog.at_level(logging.WARNING, "millrace"):
        events = read(tmp_path, "\n".join([*lines, "x1,1,3", *lines]))
    assert len(rows(events)) == 101 and ("x1", 1, 3.0) in rows(events)
    assert "line 51: its user is not a number: 'x1,1,3'" in caplog.text


def test_times_are_read_where_they_are_wanted(tmp_path):
    seconds = "1,1,4,1133308800\n1,2,4,1133395199\n"
    for content in (
        seconds,
        "1,1,4,2005-11-30\n1,2,4,2005-11-30T23:59:59\n",
        "1,1,4,1133308800000\n1,2,4,1133395199999\n",  # milliseconds
        "1,1,4,1133308800.0\n1,2,4,1133395199.9\n",
    ):
        events = read(tmp_path, content, window=ALWAYS)
        np.testing.assert_array_equal(events.times, [1133308800, 1133395199])
    kept = read(tmp_path, seconds, window=(0, 1133308801))
    assert rows(kept) == [(1, 1, 4)]


def test_dates_are_what_python_says_they_are(tmp_path):
    days = np.arange(np.datetime64("1999-11-11"), np.datetime64("2006-01-01"))
    events = read(tmp_path, "".join(f"1,1,4,{day}\n" for day in days), window=ALWAYS)
    np.testing.assert_array_equal(
        events.times, days.astype("datetime64[s]").astype(np.int64)
    )


def test_columns_are_chosen_by_name_or_number(tmp_path):
    content = "date,who,what,how\n2005-01-01,7,3,4\n"
    by_name = {"user": "who", "item": "what", "rating": "how", "time": "date"}
    by_number = {"user": "2", "item": "3", "rating": "4", "time": "1"}
    for columns in (by_name, by_number):
        events = read(tmp_path, content, columns=columns, window=ALWAYS)
        assert rows(events) == [(7, 3, 4)] and events.times == [1104537600]
    with pytest.raises(
        ConfigurationError, match="no column whom; there is date, who, what, how"
    ):
        read(tmp_path, content, columns={"user": "whom"})
    with pytest.raises(ConfigurationError, match="no column 5; there is 1 to 3"):
        read(tmp_path, "1,2,3\n", columns={"user": "5"})
    with pytest.raises(DatasetError, match="cannot be told apart"):
        read(tmp_path, "1,2,3\n", columns={"user": "2"})


def test_columns_of_any_names_are_found_by_them(tmp_path):
    columns = {"user": "who", "item": "what", "rating": "how"}
    assert rows(read(tmp_path, "who,what,how\n7,3,4\n", columns=columns)) == [(7, 3, 4)]


@pytest.mark.parametrize(
    ("header", "missing"),
    [
        ("user_id,review_id,book_ref,rating,timestamp", "the item"),
        ("book_id,user_nick,rating", "the user"),
        ("one,two,rating", "the user or the item"),
        ("user_id,artist_id,track_id,rating", "the item"),
    ],
)
def test_a_header_must_say_what_every_column_is(tmp_path, header, missing):
    with pytest.raises(DatasetError) as caught:
        read(tmp_path, header + "\n1,2,3,4,5\n")
    assert f"does not say plainly which column is {missing}; there is" in str(caught.value)
    assert header.replace(",", ", ") in str(caught.value)
    assert "--user-column NAME --item-column NAME --rating-column" in str(caught.value)


def test_columns_that_are_given_need_no_well_known_name(tmp_path):
    content = "user_id,artist_id,track_id,rating\n7,1,3,4\n"
    assert rows(read(tmp_path, content, columns={"item": "track_id"})) == [(7, 3, 4)]


@pytest.mark.parametrize("columns", [None, {"rating": "3"}])
def test_a_malformed_first_line_is_not_taken_for_a_header(tmp_path, columns):
    with pytest.raises(DatasetError, match=r"line 1: the rating 'n/a' is not a number \("):
        read(tmp_path, "u1,i1,n/a\nu1,i2,4\n", columns=columns)


GOOD = "1\t2\t3\n" * 1000


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1\t2", "it has 2 fields instead of 3"),
        ("1\t2\t3\t4", "it has 4 fields instead of 3"),
        ("1\t2\tfive", "the rating 'five' is not a number"),
        ("1\t2\t", "the rating '' is not a number"),
        ("1\t2\tnan", "the rating 'nan' is not a number"),
        ("1\t2\t1.2.3", "the rating '1.2.3' is not a number"),
        ("1\t2\t.", "the rating '.' is not a number"),
        ("1\t2\t0", "the rating 0 is not between 0.5 and 5"),
        ("1\t2\t-1", "the rating -1 is not between 0.5 and 5"),
        ("1\t2\t5.5", "the rating 5.5 is not between 0.5 and 5"),
        ("1\t2\t1e999", "the rating 1e999 is not between 0.5 and 5"),
        ("\t2\t3", "it names no user"),
        ("1\t\t3", "it names no item"),
        ("1\t" + 300 * "x" + "\t3", "its item is longer than 255 bytes"),
        ('"1\t2\t3', "its quotes do not match"),
        ("1\t2\0\t3", "it holds a zero byte"),
        ("nonsense", "it has 1 fields instead of 3"),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [64, 1 << 23])
def test_a_malformed_line_is_named_with_its_file_number_and_text(
    tmp_path, monkeypatch, line, reason, chunk_bytes
):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", chunk_bytes)
    with pytest.raises(DatasetError) as caught:
        read(tmp_path, GOOD + line + "\n" + GOOD)
    shown = line if len(line) <= 100 else f"{line[:100]}…"
    assert str(caught.value) == f"{tmp_path}/ratings, line 1001: {reason}: {shown!r}."


def test_a_line_number_counts_header_and_blank_lines(tmp_path):
    with pytest.raises(DatasetError, match=r"line 5: the rating 'x' is not a number"):
        read(tmp_path, "\nuser,item,rating\n\n1,2,3\n1,2,x\n")


def test_bytes_that_are_not_text_are_shown_as_they_are(tmp_path):
    with pytest.raises(DatasetError, match=re.escape(r"not UTF-8 text: 'n\\xe9e,2,3'")):
        read(tmp_path, b"1,2,3\nn\xe9e,2,3\n")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "has no ratings in it: it is empty"),
        ("\n \r\n", "has no ratings in it: it is empty"),
        ("userId,movieId,rating\n", "has no ratings in it, only a header"),
        ("userId,movieId,rating\n\n\n", "has no ratings in it, only a header"),
        ("1 2 3\n", "line 1 has no tab, '::', comma, semicolon between fields: '1 2 3'"),
        ("1:\n2,3,2005-01-01\n", "need millrace autoencoder convert first"),
        ("1,2\n", "the first has 2 fields: '1,2'"),
        ("1,2,3,4,5\n", "the first has 5 fields: '1,2,3,4,5'"),
        ("1,2,3\n".encode("utf-16"), "it is UTF-16 text; save it as UTF-8"),
        (b"1,2,3\n" + 3 * (1 << 20) * b"x", "not a text file of ratings"),
        (gzip.compress(GOOD.encode())[:-20], "ratings is a damaged gzip file"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "bytes",
)
def test_a_file_that_holds_no_ratings_is_an_error(tmp_path, content, reason):
    with pytest.raises(DatasetError, match=reason) as caught:
        read(tmp_path, content)
    assert str(tmp_path) in str(caught.value)


def test_a_file_that_cannot_be_opened_is_a_mistake_in_the_command(tmp_path):
    with pytest.raises(ConfigurationError, match=r"Cannot read .*: Is a directory"):
        read_events(tmp_path, STARS)


def _is_plain(text):
    """Whether a text survives between tabs, unquoted."""
    return bool(text) and not re.search(r'[\t\n\0"]', text) and text == text.strip()


columns = st.one_of(
    st.lists(st.integers(0, 10**18 - 1), min_size=1, max_size=30),
    st.lists(
        st.text("abcÄ 019-_.", min_size=1, max_size=8).filter(_is_plain),
        min_size=1,
        max_size=30,
    ),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(columns, columns, st.integers(0, 2**32), st.integers(7, 200))
def test_what_is_written_is_read_again(tmp_path, users, items, seed, chunk_bytes):
    generator = np.random.default_rng(seed)
    coded = []
    for names in (users, items):
        ids = np.unique(np.array(names))
        coded.append(Coded(ids, generator.integers(0, len(ids), 50).astype(np.int32)))
    values = (generator.integers(1, 500, 50) / 100).astype(np.float32)
    path = tmp_path / "written"
    write_text(path, *coded, values, np.arange(50))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_CHUNK_BYTES", chunk_bytes)
        events = read_events(path, (0.0, 5.0))
    for written, found in zip(coded, (events.users, events.items), strict=True):
        np.testing.assert_array_equal(
            written.ids[written.codes].astype(str), found.ids[found.codes].astype(str)
        )
    np.testing.assert_array_equal(events.values, values)


fields = st.sampled_from(
    [
        "1",
        "23",
        "456",
        "0",
        "4.5",
        "3.",
        ".5",
        "5.25",
        "007",
        "-1",
        "x",
        "",
        " 2",
        '"3"',
        ".",
    ]
)


@given(st.lists(st.tuples(fields, fields, fields), min_size=1, max_size=6), st.booleans())
def test_the_quick_way_says_what_the_plain_way_says_or_nothing(lines, texts):
    chunk = "".join("\t".join(line) + "\n" for line in lines).encode()
    kinds = frozenset({"user", "item"} if texts else ())
    layout = Layout(b"\t", 3, 0, 1, 2, None, (0.5, 500), kinds)
    quick = parse_quickly(chunk, layout)
    try:
        plain = parse_lines(chunk, layout)
    except BadLine:
        assert quick is None
        return
    if quick is not None:
        for a, b in zip(quick[:3], plain[:3], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("texts", [False, True])
def test_ordinary_lines_are_read_the_quick_way(texts):
    prefix = "u" if texts else ""
    chunk = "".join(f"{prefix}{n}::{n % 7}::{n % 10 / 2 + 0.5}::{n}\n" for n in range(99))
    kinds = frozenset({"user"} if texts else ())
    layout = Layout(b"::", 4, 0, 1, 2, 3, (0.5, 5), kinds)
    assert parse_quickly(chunk.encode(), layout) is not None


def test_a_reader_that_fails_leaves_no_thread_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 64)
    with pytest.raises(DatasetError):
        read(tmp_path, "x\t1\tbad\n" + GOOD)
    assert not [t for t in threading.enumerate() if t.name.startswith("millrace-ratings")]


def test_ratings_keep_seven_digits(tmp_path):
    events = read(tmp_path, "1,2,3.141593\n", limits=(0, 5))
    assert events.values[0] == np.float32(3.141593)
