"""Text files of ratings: every promised layout is read, every error named, all cached."""

import gzip
import json
import logging
import math
import os
import re
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.config import ConfigurationError
from millrace.data.ratings import chunks, reading
from millrace.data.ratings.identifiers import CodedIds
from millrace.data.ratings.reading import load_aligned, load_ratings, read_events
from millrace.data.ratings.split import write_ratings
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
@pytest.mark.parametrize("gzipped", [False, True])
def test_every_layout_is_read(tmp_path, content, gzipped):
    encoded = content.encode()
    events = read(tmp_path, gzip.compress(encoded) if gzipped else encoded)
    assert rows(events) == [(7, 3, 4.0), (2, 5, 3.5)]
    assert events.users.ids.dtype == np.int64 and events.times is None


def test_users_and_items_may_be_text(tmp_path):
    events = read(tmp_path, "anna,B07,4\nbjörn,A1,3\nanna,A1,5\n")
    assert rows(events) == [("anna", "B07", 4), ("björn", "A1", 3), ("anna", "A1", 5)]
    assert events.users.ids.dtype.kind == "U"


def test_a_leading_zero_makes_an_identifier_text(tmp_path):
    events = read(tmp_path, "1,007,4\n1,7,3\n")
    assert rows(events) == [(1, "007", 4), (1, "7", 3)]


def test_a_late_text_among_numbers_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 16)
    lines = [f"{n},1,4" for n in range(50)]
    with caplog.at_level(logging.WARNING, "millrace"):
        events = read(tmp_path, "\n".join([*lines, "x1,1,3", *lines]))
    assert len(rows(events)) == 101 and ("x1", 1, 3.0) in rows(events)
    assert "line 51: its user is not a number: 'x1,1,3'" in caplog.text


def test_times_are_read_if_requested(tmp_path):
    seconds = "1,1,4,1133308800\n1,2,4,1133395199\n"
    for content in (
        seconds,
        "1,1,4,2005-11-30\n1,2,4,2005-11-30T23:59:59\n",
        "1,1,4,1133308800000\n1,2,4,1133395199999\n",  # milliseconds
        "1,1,4,1133308800.0\n1,2,4,1133395199.9\n",
    ):
        events = read(tmp_path, content, window=ALWAYS)
        np.testing.assert_array_equal(events.times, [1133308800, 1133395199])
    cache = read(tmp_path, seconds, window=(0, 1133308801))
    assert rows(cache) == [(1, 1, 4)]


def test_dates_agree_with_numpy(tmp_path):
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
        ConfigurationError, match="no column whom; choose from date, who, what, how"
    ):
        read(tmp_path, content, columns={"user": "whom"})
    with pytest.raises(ConfigurationError, match="no column 5; choose from 1 to 3"):
        read(tmp_path, "1,2,3\n", columns={"user": "5"})
    with pytest.raises(DatasetError, match="one column is used twice"):
        read(tmp_path, "1,2,3\n", columns={"user": "2"})


def test_columns_of_any_name_can_be_chosen(tmp_path):
    columns = {"user": "who", "item": "what", "rating": "how"}
    assert rows(read(tmp_path, "who,what,how\n7,3,4\n", columns=columns)) == [(7, 3, 4)]


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ("7,3\n2,5\n", {}),
        ("7\t3\r\n2\t5\r\n", {}),
        ("customer_id,Product ID\n7,3\n2,5\n", {}),
        ("date,asin,user\n2005-01-01,3,7\n2005-01-02,5,2\n", {}),
        ("7::3::881250949\n2::5::881250949\n", {"no_ratings": True}),
        ("7,3\n 2 ,5\n", {"no_ratings": True}),
        ("user,item,rating\n7,3,99\n2,5,nothing\n", {"no_ratings": True}),
    ],
)
def test_a_file_without_ratings_is_implicit(tmp_path, content, options):
    events = read(tmp_path, content, **options)
    assert events.implicit and rows(events) == [(7, 3, 1.0), (2, 5, 1.0)]
    ratings = load_ratings(tmp_path / "ratings", limits=(2.0, 10.0), **options)
    again = load_ratings(tmp_path / "ratings", limits=(2.0, 10.0), **options)
    for found in (ratings, again):
        assert found.implicit and found.values.tolist() == [1.0, 1.0]


def test_the_third_column_is_the_time_of_a_file_without_ratings(tmp_path):
    content = "anna,B1,1133308800\nanna,B2,2005-11-30\n"
    events = read(tmp_path, content, no_ratings=True, window=ALWAYS)
    assert events.times.tolist() == [1133308800] * 2
    with pytest.raises(DatasetError, match="line 1: the rating 1133308800 is not between"):
        read(tmp_path, content)


def test_ignored_ratings_do_not_share_a_cache_with_the_others(tmp_path):
    (tmp_path / "ratings").write_text("1,1,4\n1,2,5\n")
    for _ in range(2):
        assert load_ratings(tmp_path / "ratings").values.tolist() == [4, 5]
        implicit = load_ratings(tmp_path / "ratings", no_ratings=True)
        assert implicit.implicit and implicit.values.tolist() == [1, 1]


def test_files_with_and_without_ratings_do_not_mix(tmp_path):
    write(tmp_path / "valid", "1,1\n1,2\n")
    write(tmp_path / "train", "1,1,4\n1,2,5\n")
    with pytest.raises(DatasetError, match=r"valid has no ratings, but .*train has"):
        load_aligned(tmp_path / "train", tmp_path / "valid")
    with pytest.raises(DatasetError, match=r"valid has no ratings, but .*train has"):
        load_aligned(tmp_path / "valid", tmp_path / "train")


@pytest.mark.parametrize(
    ("header", "missing"),
    [
        ("user_id,review_id,book_ref,rating,timestamp", "the item"),
        ("book_id,user_nick,rating", "the user"),
        ("one,two,rating", "the user or the item"),
        ("user_id,artist_id,track_id,rating", "the item"),
    ],
)
def test_a_header_must_identify_every_column(tmp_path, header, missing):
    with pytest.raises(DatasetError) as caught:
        read(tmp_path, header + "\n1,2,3,4,5\n")
    assert f"does not identify the column of {missing}." in str(caught.value)
    assert header.replace(",", ", ") in str(caught.value)
    assert "--user-column NAME --item-column NAME --rating-column" in str(caught.value)


def test_a_chosen_column_needs_no_well_known_name(tmp_path):
    content = "user_id,artist_id,track_id,rating\n7,1,3,4\n"
    assert rows(read(tmp_path, content, columns={"item": "track_id"})) == [(7, 3, 4)]


@pytest.mark.parametrize("columns", [None, {"rating": "3"}])
def test_a_malformed_first_line_is_not_mistaken_for_a_header(tmp_path, columns):
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
        ("\t2\t3", "it has no user"),
        ("1\t\t3", "it has no item"),
        ("1\t" + 300 * "x" + "\t3", "its item is longer than 255 bytes"),
        ('"1\t2\t3', "its quotes do not match"),
        ("1\t2\0\t3", "it contains a zero byte"),
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


def test_line_numbers_count_the_header_and_blank_lines(tmp_path):
    with pytest.raises(DatasetError, match=r"line 5: the rating 'x' is not a number"):
        read(tmp_path, "\nuser,item,rating\n\n1,2,3\n1,2,x\n")


def test_bytes_that_are_not_text_are_shown_escaped(tmp_path):
    with pytest.raises(DatasetError, match=re.escape(r"not UTF-8 text: 'n\\xe9e,2,3'")):
        read(tmp_path, b"1,2,3\nn\xe9e,2,3\n")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "has no ratings: it is empty"),
        ("\n \r\n", "has no ratings: it is empty"),
        ("userId,movieId,rating\n", "has no ratings, only a header"),
        ("userId,movieId,rating\n\n\n", "has no ratings, only a header"),
        ("1 2 3\n", r"line 1 has no delimiter \(tab, '::', comma, semicolon\): '1 2 3'"),
        ("1:\n2,3,2005-01-01\n", "need millrace autoencoder convert first"),
        ("1,\n", "line 1: it has no item: '1,'"),
        ("1,2,3,4,5\n", "the first line has 5 fields: '1, 2, 3, 4, 5'"),
        ("user,item,user,rating\n1,2,3,4\n", "more than one column named user"),
        ("1,2,3\n".encode("utf-16"), "it is UTF-16 text; save it as UTF-8"),
        (b"1,2,3\n" + 3 * (1 << 20) * b"x", "not a text file of ratings"),
        (gzip.compress(GOOD.encode())[:-20], "ratings is a damaged gzip file"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "bytes",
)
def test_a_file_without_ratings_is_an_error(tmp_path, content, reason):
    with pytest.raises(DatasetError, match=reason) as caught:
        read(tmp_path, content)
    assert str(tmp_path) in str(caught.value)


def test_a_file_that_cannot_be_opened_is_a_usage_error(tmp_path):
    with pytest.raises(ConfigurationError, match=r"Cannot read .*: Is a directory"):
        read_events(tmp_path, STARS)


def _is_plain(text):
    """Whether a text can be written between tabs without quotes."""
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
def test_written_ratings_are_read_back(tmp_path, users, items, seed, chunk_bytes):
    generator = np.random.default_rng(seed)
    coded = []
    for names in (users, items):
        ids = np.unique(np.array(names))
        coded.append(CodedIds(ids, generator.integers(0, len(ids), 50).astype(np.int32)))
    values = (generator.integers(1, 500, 50) / 100).astype(np.float32)
    path = tmp_path / "written"
    write_ratings(path, *coded, values, np.arange(50))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_CHUNK_BYTES", chunk_bytes)
        events = read_events(path, (0.0, 5.0))
    for written, found in zip(coded, (events.users, events.items), strict=True):
        np.testing.assert_array_equal(
            written.ids[written.codes].astype(str), found.ids[found.codes].astype(str)
        )
    np.testing.assert_array_equal(events.values, values)


def test_a_failed_read_leaves_no_thread_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 64)
    with pytest.raises(DatasetError):
        read(tmp_path, "x\t1\tbad\n" + GOOD)
    assert not [t for t in threading.enumerate() if t.name.startswith("millrace-ratings")]


def test_ratings_keep_seven_digits(tmp_path):
    events = read(tmp_path, "1,2,3.141593\n", limits=(0, 5))
    assert events.values[0] == np.float32(3.141593)


# Cache


CONTENT = "1\t10\t4\n2\t10\t3.5\n1\t20\t5\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return the folder of the cache."""
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path / "data"))
    return tmp_path / "data" / "ratings"


@pytest.fixture
def text_reads(monkeypatch):
    """Return the list of paths that were parsed as text."""
    read, seen = reading.read_events, []

    def counted(path, *args, **options):
        seen.append(path)
        return read(path, *args, **options)

    monkeypatch.setattr(reading, "read_events", counted)
    return seen


def write(path, content=CONTENT):
    path.write_text(content)
    return path


def assert_read(ratings):
    np.testing.assert_array_equal(ratings.user_ids, [1, 2])
    np.testing.assert_array_equal(ratings.item_ids, [10, 20])
    np.testing.assert_array_equal(ratings.starts, [0, 2, 3])
    np.testing.assert_array_equal(ratings.items, [0, 1, 0])
    np.testing.assert_array_equal(ratings.values, [4, 5, 3.5])


def test_a_file_is_read_once_and_then_mapped(tmp_path, cache, text_reads):
    path = write(tmp_path / "a.txt")
    for _ in range(3):
        ratings = load_ratings(path)
        assert_read(ratings)
        assert isinstance(ratings.items, np.memmap) and not ratings.items.flags.writeable
    assert len(text_reads) == 1 and len(list(cache.iterdir())) == 1


def test_others_may_read_a_cache_in_a_shared_folder(tmp_path, cache):
    before = os.umask(0o022)
    try:
        load_ratings(write(tmp_path / "a.txt"))
    finally:
        os.umask(before)
    (folder,) = cache.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o755
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())


def test_the_cache_is_found_by_content_not_by_name_or_age(tmp_path, text_reads):
    path = write(tmp_path / "a.txt")
    stat = path.stat()
    load_ratings(path)
    load_ratings(write(tmp_path / "copy.txt"))
    assert len(text_reads) == 1
    write(path, CONTENT.replace("3.5", "2.5"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert 2.5 in load_ratings(path).values
    assert len(text_reads) == 2


def damage_array(folder):
    with (folder / "values.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")


def shorten_array(folder):
    (folder / "items.npy").write_bytes((folder / "items.npy").read_bytes()[:50])


def lose_a_fact(folder):
    facts = json.loads((folder / "facts.json").read_text())
    del facts["smallest"]
    (folder / "facts.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    "damage",
    [
        damage_array,
        shorten_array,
        lose_a_fact,
        lambda folder: (folder / "facts.json").write_text("{"),
        lambda folder: (folder / "facts.json").write_text("[]"),
        lambda folder: (folder / "facts.json").unlink(),
        lambda folder: (folder / "starts.npy").unlink(),
    ],
)
def test_a_damaged_cache_is_rebuilt_with_a_warning(
    tmp_path, cache, text_reads, caplog, damage
):
    path = write(tmp_path / "a.txt")
    load_ratings(path)
    (folder,) = cache.iterdir()
    damage(folder)
    with caplog.at_level(logging.WARNING, "millrace"):
        assert_read(load_ratings(path))
    assert f"{folder} is damaged" in caplog.text and "rebuilding it" in caplog.text
    caplog.clear()
    assert_read(load_ratings(path))
    assert len(text_reads) == 2 and not caplog.records


def test_a_cache_that_cannot_be_read_is_left_alone(
    tmp_path, cache, text_reads, caplog, monkeypatch
):
    path = write(tmp_path / "a.txt")
    load_ratings(path)
    real = Path.read_text

    def refuse(self, *args, **options):
        if self.name == "facts.json":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **options)

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "millrace"):
        patched.setattr(Path, "read_text", refuse)
        assert_read(load_ratings(path))
    assert "cannot be read: [Errno 13] Permission denied" in caplog.text
    assert "damaged" not in caplog.text
    assert_read(load_ratings(path))
    assert len(text_reads) == 2  # the cache is still there


def test_a_malformed_file_is_not_cached(tmp_path, cache):
    with pytest.raises(DatasetError, match=r"a\.txt, line 4: .*'1\\t2\\tx'"):
        load_ratings(write(tmp_path / "a.txt", CONTENT + "1\t2\tx\n"))
    assert not cache.exists()


def test_nothing_incomplete_remains_if_writing_fails(tmp_path, cache, monkeypatch, caplog):
    def full(file, array):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with caplog.at_level(logging.WARNING, "millrace"):
        assert_read(load_ratings(write(tmp_path / "a.txt")))
    assert "Cannot cache the ratings: [Errno 28] No space left" in caplog.text
    assert not list(cache.iterdir())


def test_incomplete_folders_of_killed_runs_are_removed_after_a_day(tmp_path, cache):
    old, new = cache / ".being-made-old", cache / ".being-made-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, time.time() - 25 * 3600))
    load_ratings(write(tmp_path / "a.txt"))
    assert not old.exists() and new.exists()


def test_a_file_that_changes_while_it_is_read_is_not_cached(tmp_path, cache, monkeypatch):
    path = write(tmp_path / "a.txt")
    read = reading.read_events

    def change(*args, **options):
        write(path, CONTENT + "3\t10\t1\n")
        return read(*args, **options)

    monkeypatch.setattr(reading, "read_events", change)
    with pytest.raises(DatasetError, match="changed while it was being read"):
        load_ratings(path)
    assert not cache.exists()


def test_limits_also_apply_to_a_cache_written_with_wider_ones(tmp_path):
    path = write(tmp_path / "a.txt", "1,1,0.7\n1,2,9\n")
    assert load_ratings(path, limits=(0.7, 9)).largest == 9
    with pytest.raises(DatasetError, match=r"line 2: the rating 9 is not between 0\.5"):
        load_ratings(path)


def test_duplicates_are_reported_each_time(tmp_path, caplog):
    path = write(tmp_path / "a.txt", CONTENT + "1\t10\t1\n")
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "millrace"):
            ratings = load_ratings(path)
        assert ratings.num_duplicates == 1 and ratings.get_user(0)[1][0] == 1
        assert "has 1 ratings of items that the same user had rated before" in caplog.text


def test_a_gzipped_file_is_cached_too(tmp_path, text_reads):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(CONTENT.encode()))
    assert_read(load_ratings(path))
    assert_read(load_ratings(str(path)))
    assert len(text_reads) == 1


def test_a_missing_file_is_a_usage_error(tmp_path):
    with pytest.raises(ConfigurationError, match=r"There is no file .*nowhere\.txt"):
        load_ratings(tmp_path / "nowhere.txt")


def test_folders_and_pipes_are_usage_errors(tmp_path):
    with pytest.raises(ConfigurationError, match="is a directory, not a file of ratings"):
        load_ratings(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match=r"is a pipe or a device.* Save"):
        load_ratings(tmp_path / "pipe")


def test_a_zip_archive_must_be_unpacked_first(tmp_path):
    path = tmp_path / "ratings.txt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ratings.csv", CONTENT)
    with pytest.raises(ConfigurationError, match=r"is a zip archive.* Unpack it first\."):
        load_ratings(path)


def test_validation_is_numbered_like_training_and_the_unseen_is_counted(tmp_path):
    training = write(tmp_path / "train.txt")
    validation = write(tmp_path / "valid.txt", "2\t20\t1\n3\t10\t2\n1\t30\t3\n")
    first, second, unseen = load_aligned(training, validation)
    assert_read(first)
    np.testing.assert_array_equal(second.starts, [0, 0, 1])
    np.testing.assert_array_equal(second.items, [1])
    assert unseen == (1, 1, 2)


def test_validation_without_known_users_is_an_error(tmp_path):
    training = write(tmp_path / "train.txt")
    validation = write(tmp_path / "valid.txt", "7\t70\t1\n")
    with pytest.raises(DatasetError, match=r"valid\.txt has both its user .*train\.txt"):
        load_aligned(training, validation)
