"""Convert published formats to three files, whose lines are compared one by one."""

import gzip
import itertools
import os

import numpy as np
import pytest
from image_files import real_data

from millrace.apps.autoencoder import convert as module
from millrace.apps.autoencoder.config.commands import ConvertConfig
from millrace.apps.autoencoder.convert import convert
from millrace.cli import main
from millrace.config import ConfigurationError
from millrace.data.ratings import chunks
from millrace.data.ratings.reading import load_aligned, load_ratings
from millrace.data.ratings.split import PERIODS
from millrace.data.source import DatasetError

NETFLIX = {
    # item: (user, rating, date); the 3-month period trains from September to November
    1: [
        (6, 3, "2005-08-31"),  # too early
        (6, 4, "2005-09-01"),  # the first day of training
        (7, 5, "2005-11-30"),  # the last
        (8, 2, "2005-12-01"),  # a user not in training
        (6, 1, "2005-12-31"),  # the last day of test
    ],
    2: [(6, 2, "2005-10-10"), (7, 3, "2005-12-05"), (6, 3, "2006-01-01")],
    17770: [(7, 5, "2005-12-24")],  # an item not in training
}
TRAINED = {(6, 1, 4.0), (7, 1, 5.0), (6, 2, 2.0)}
LATER = {(6, 1, 1.0), (7, 2, 3.0)}


def section(item):
    lines = [f"{user},{rating},{day}\n" for user, rating, day in NETFLIX[item]]
    return f"{item}:\n" + "".join(lines)


def write_netflix(folder, kind):
    if kind == "combined":
        (folder / "combined_data_1.txt").write_text(section(1) + section(2))
        (folder / "combined_data_2.txt").write_text(section(17770))
        return folder
    place = folder / "training_set" if kind == "training_set" else folder
    place.mkdir(exist_ok=True)
    for item in NETFLIX:
        text, path = section(item), place / f"mv_{item:07}.txt"
        if kind == "zipped":
            path.with_suffix(".txt.gz").write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
    return folder


def lines(path):
    found = [line.split("\t") for line in path.read_text().splitlines()]
    return [(int(user), int(item), float(rating)) for user, item, rating in found]


@pytest.mark.parametrize("kind", ["training_set", "folder", "combined", "zipped"])
@pytest.mark.parametrize("chunk_bytes", [20, 1 << 23])
def test_the_netflix_prize_is_split_at_a_published_period(
    tmp_path, monkeypatch, capsys, kind, chunk_bytes
):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", chunk_bytes)
    out = tmp_path / "out" / "deeper"
    # The default seed puts one later rating into each of the two files.
    config = ConvertConfig(input=write_netflix(tmp_path, kind), period="3m", output_dir=out)
    convert(config)
    names = {"3m_train.txt", "3m_valid.txt", "3m_test.txt"}
    assert {path.name for path in out.iterdir()} == names
    assert set(lines(out / "3m_train.txt")) == TRAINED
    valid, test = lines(out / "3m_valid.txt"), lines(out / "3m_test.txt")
    assert len(valid) == len(test) == 1 and set(valid + test) == LATER
    printed = capsys.readouterr().out
    assert "2 ratings, because 1 users and 1 items are not in training" in printed
    assert "Published: 13,675,402 ratings by 311,315 users" in printed
    assert "The name 3m_train.txt chooses the recipe of Graphcore's" in printed


def test_the_periods_are_the_published_ones():
    days = {
        name: [str(day) for day in (*period.training, *period.test)]
        for name, period in PERIODS.items()
    }
    december = ["2005-12-01", "2005-12-31"]
    assert days == {
        "3m": ["2005-09-01", "2005-11-30", *december],
        "6m": ["2005-06-01", "2005-11-30", *december],
        "1y": ["2004-06-01", "2005-05-31", "2005-06-01", "2005-06-30"],
        "full": ["1999-12-01", "2005-11-30", *december],
    }


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("1:\n6,3,2005-10-01\n6,3\n", "line 3: it has 2 fields instead of 3: '6,3'"),
        ("1:\n\n2:\n6,3,2005-13-01\n", "line 4: the time '2005-13-01' is neither"),
        ("1:\n6,3,2005-02-30\n", "line 2: the time '2005-02-30' is neither"),
        ("1:\n6,9,2005-10-01\n", "line 2: the rating 9 is not between 0.5 and 5"),
        ("1:\nx,3,2005-10-01\n", "line 2: its user is not a number: 'x,3,2005-10-01'"),
        ("1:\n6,3,2005-10-01\nx:\n", "line 3: it is neither an item with a colon nor"),
    ],
)
def test_a_malformed_netflix_line_is_reported_with_its_number(tmp_path, content, reason):
    path = tmp_path / "mv_0000001.txt"
    path.write_text(content)
    with pytest.raises(DatasetError) as caught:
        convert(ConvertConfig(input=path, period="3m", output_dir=tmp_path))
    assert str(caught.value).startswith(f"{path}, {reason}")
    assert list(tmp_path.iterdir()) == [path]


def test_ratings_without_an_item_header_are_an_error(tmp_path):
    write_netflix(tmp_path, "folder")
    (tmp_path / "mv_0000002.txt").write_text("\n6,3,2005-10-01\n")
    with pytest.raises(DatasetError, match=r"mv_0000002\.txt, line 2: no item precedes"):
        convert(ConvertConfig(input=tmp_path, period="3m"))
    (tmp_path / "mv_0000002.txt").write_text("")
    with pytest.raises(DatasetError, match=r"mv_0000002\.txt is empty"):
        convert(ConvertConfig(input=tmp_path, period="3m"))


TIMED = [
    (user, item, (user + item) % 5 + 1, 10**9 + 86400 * ((7 * user + 3 * item) % 23))
    for user, item in itertools.product(range(1, 6), range(1, 11))
]
"""User, item, rating and time; every user and item has early and late ratings."""
TIMES = {(user, item): time for user, item, _, time in TIMED}
PARTS = ("train", "valid", "test")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("u.data", "".join("{}\t{}\t{}\t{}\n".format(*row) for row in TIMED)),
        ("ratings.dat", "".join("{}::{}::{}::{}\n".format(*row) for row in TIMED)),
        (
            "ratings.csv",
            "userId,movieId,rating,timestamp\n"
            + "".join("{},{},{}.0,{}\n".format(*row) for row in TIMED),
        ),
    ],
)
@pytest.mark.parametrize("by", ["file", "folder"])
def test_movielens_is_split_by_time(tmp_path, name, text, by):
    (tmp_path / name).write_text(text)
    config = ConvertConfig(
        input=tmp_path / name if by == "file" else tmp_path,
        fractions=[0.6, 0.2, 0.2],
        output_dir=tmp_path / "out",
        quiet=True,
    )
    convert(config)
    parts = [lines(tmp_path / "out" / f"{part}.txt") for part in PARTS]
    spans = [sorted(TIMES[user, item] for user, item, _ in part) for part in parts]
    assert [len(part) for part in parts] == [30, 10, 10]
    assert spans[0][-1] <= spans[1][0] and spans[1][-1] <= spans[2][0]
    ratings = {(user, item): rating for user, item, rating, _ in TIMED}
    assert all(
        ratings[user, item] == rating for user, item, rating in itertools.chain(*parts)
    )


def test_fractions_apply_to_each_user(tmp_path):
    path = tmp_path / "u.data"
    path.write_text("".join("{}\t{}\t{}\t{}\n".format(*row) for row in reversed(TIMED)))
    convert(
        ConvertConfig(
            input=path, fractions=[0.7, 0.1, 0.2], per_user=True, output_dir=tmp_path
        )
    )
    parts = [lines(tmp_path / f"{part}.txt") for part in PARTS]
    for user in range(1, 6):
        in_order = sorted(range(1, 11), key=lambda item: TIMES[user, item])
        items = [[item for u, item, _ in part if u == user] for part in parts]
        assert [set(found) for found in items] == [
            set(in_order[:7]),
            set(in_order[7:8]),
            set(in_order[8:]),
        ]


@pytest.mark.parametrize("days", [["2001-09-18"], ["2001-09-18", "2001-09-25"]])
def test_ratings_are_split_at_dates(tmp_path, days):
    path = tmp_path / "u.data"
    path.write_text("".join("{}\t{}\t{}\t{}\n".format(*row) for row in TIMED))
    convert(ConvertConfig(input=path, split_at=days, output_dir=tmp_path))
    dates = {pair: str(np.datetime64(time, "s"))[:10] for pair, time in TIMES.items()}
    found = {
        part: {dates[user, item] for user, item, _ in lines(tmp_path / f"{part}.txt")}
        for part in PARTS
    }
    assert max(found["train"]) < days[0] <= min(found["valid"] | found["test"])
    if len(days) == 2:
        assert max(found["valid"]) < days[1] <= min(found["test"])


def test_the_random_split_does_not_depend_on_the_order_of_lines(tmp_path):
    found = []
    for number, rows in enumerate((TIMED, TIMED[::-1])):
        path = tmp_path / f"{number}.data"
        path.write_text("".join("{}\t{}\t{}\t{}\n".format(*row) for row in rows))
        out = tmp_path / str(number)
        convert(ConvertConfig(input=path, split_at=["2001-09-18"], output_dir=out))
        found.append([set(lines(out / f"{part}.txt")) for part in PARTS])
    assert found[0] == found[1]


def test_any_csv_can_be_read_by_its_columns(tmp_path):
    path = tmp_path / "reviews.csv"
    rows = [f"{n % 4 + 1},x,{10**12 + n},Book {n % 3},reader {n % 5}" for n in range(60)]
    path.write_text("\n".join(["score,text,when,title,who", *rows]))
    config = ConvertConfig(
        input=path,
        fractions=[0.5, 0.25, 0.25],
        user_column="who",
        item_column="4",
        rating_column="score",
        time_column="when",
        output_dir=tmp_path,
        prefix="books-",
    )
    convert(config)
    first = (tmp_path / "books-train.txt").read_text().splitlines()[0]
    assert first == "reader 0\tBook 0\t1"


def run(*args):
    with pytest.raises(SystemExit) as exited:
        main(["autoencoder", "convert", *map(str, args)])
    return exited.value.code


def test_the_command_prints_counts_and_replaces_files_only_if_asked(tmp_path, capsys):
    folder = write_netflix(tmp_path, "combined")
    args = (folder, "--period", "3m", "--output-dir", tmp_path / "out")
    assert run(*args) == 0
    printed = capsys.readouterr().out
    assert "3m_train.txt  3 ratings by 2 users of 2 items" in printed
    assert f"--training-data-file {tmp_path}/out/3m_train.txt" in printed
    assert run(*args) == 2
    assert "would be replaced. Give --overwrite" in capsys.readouterr().err
    assert run(*args, "--overwrite", "--quiet") == 0
    assert not capsys.readouterr().out
    assert run(tmp_path / "out" / "3m_train.txt", *args[1:], "--overwrite") == 2
    assert "has no column of times to split by" in capsys.readouterr().err


def test_a_folder_without_ratings_lists_the_supported_files(tmp_path, capsys):
    assert run(tmp_path, "--period", "3m") == 2
    printed = capsys.readouterr().err
    assert "training_set/mv_*.txt" in printed and "ratings.csv" in printed
    assert run(tmp_path / "nowhere", "--period", "3m") == 2
    assert "There is no file or folder" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    assert run(tmp_path / "pipe", "--period", "3m") == 2
    assert "is a pipe or a device, but" in capsys.readouterr().err


def test_a_part_without_ratings_is_an_error_and_nothing_is_written(tmp_path, capsys):
    path = tmp_path / "u.data"
    path.write_text("".join("{}\t{}\t{}\t{}\n".format(*row) for row in TIMED))
    out = tmp_path / "out"
    assert run(path, "--split-at", "2020-01-01", "--output-dir", out) == 1
    printed = capsys.readouterr().err
    assert "No ratings are left for validation" in printed
    assert "from 2001-09-09 to 2001-10-01" in printed and not out.exists()
    assert run(path, "--period", "3m", "--output-dir", out) == 1
    assert "has no ratings in the requested period" in capsys.readouterr().err


def test_nothing_is_left_behind_when_writing_fails(tmp_path, monkeypatch):
    path = write_netflix(tmp_path, "combined")
    written = []

    def fail_at_the_second(place, *rest):
        place.write_text("half")
        written.append(place)
        if len(written) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_ratings", fail_at_the_second)
    printed = rf"Cannot write {tmp_path}/out/3m_valid\.txt: No space left on device\."
    with pytest.raises(ConfigurationError, match=printed):
        convert(ConvertConfig(input=path, period="3m", output_dir=tmp_path / "out"))
    assert len(written) == 2 and not list((tmp_path / "out").iterdir())


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    path = write_netflix(tmp_path, "combined")
    in_file = path / "combined_data_1.txt" / "out"
    with pytest.raises(ConfigurationError, match=r"Cannot write .*: Not a directory\."):
        convert(ConvertConfig(input=path, period="3m", output_dir=in_file))


def test_the_next_command_needs_no_options_but_the_files(tmp_path, capsys):
    path = tmp_path / "u.data"
    path.write_text("".join("{}\t{}\t{}\t{}\n".format(*row) for row in TIMED))
    assert run(path, "--fractions", 0.6, 0.2, 0.2, "--output-dir", tmp_path) == 0
    printed = capsys.readouterr().out
    assert f"train --training-data-file {tmp_path}/train.txt --validation" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {},
            "Give one of --period, --split-at, --fractions or --split to split by; got",
        ),
        ({"period": "3m", "fractions": [0.8, 0.1, 0.1]}, "got --period and --fractions"),
        ({"split_at": ["yesterday"]}, "--split-at takes dates such as 2005-12-01"),
        ({"split_at": ["2005-01-02", "2005-01-01"]}, "the earlier first"),
        ({"split_at": ["2005-01-01"] * 3}, "one or two dates"),
        ({"fractions": [0.8, 0.2]}, "three numbers above 0 that sum to 1"),
        ({"fractions": [0.8, 0.1, 0.2]}, "three numbers above 0 that sum to 1"),
        ({"fractions": [1.0, 0.1, -0.1]}, "three numbers above 0 that sum to 1"),
        ({"period": "3m", "per_user": True}, "--per-user needs --fractions"),
        ({"period": "3m", "rating_range": [0, 5]}, "two numbers above 0"),
        ({"period": "3m", "rating_range": [5]}, "two numbers above 0"),
    ],
)
def test_options_that_do_not_fit_together_are_rejected(tmp_path, options, message):
    with pytest.raises(ConfigurationError, match=message):
        ConvertConfig(input=tmp_path, **options)


def test_columns_of_netflix_cannot_be_chosen(tmp_path):
    folder = write_netflix(tmp_path, "combined")
    with pytest.raises(ConfigurationError, match="they cannot be chosen"):
        convert(ConvertConfig(input=folder, period="3m", user_column="2"))


@pytest.mark.slow
def test_movielens_1m_has_the_published_counts(tmp_path, monkeypatch):
    path = real_data("movielens") / "ml-1m_ratings.npz"
    with np.load(path) as arrays:
        columns = [arrays[name].tolist() for name in ("user", "movie", "rating", "ts")]
    rows = zip(*columns, strict=True)
    text = "".join("{}::{}::{}::{}\n".format(*row) for row in rows)
    (tmp_path / "ratings.dat").write_text(text)
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path / "data"))
    ratings = load_ratings(tmp_path / "ratings.dat")
    assert (ratings.num_users, ratings.num_items, ratings.num_ratings) == (
        *(6040, 3706),
        1_000_209,
    )
    stars = np.bincount(ratings.values.astype(int))
    assert stars.tolist() == [0, 56174, 107557, 261197, 348971, 226310]
    convert(ConvertConfig(input=tmp_path, fractions=[0.8, 0.1, 0.1], output_dir=tmp_path))
    training, validation, unseen = load_aligned(
        tmp_path / "train.txt", tmp_path / "valid.txt"
    )
    assert training.num_ratings == 800_167
    assert validation.num_ratings > 20_000 and unseen.num_ratings == 0
