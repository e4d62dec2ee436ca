"""Protocols of ``autoencoder convert``, compared with plain Python, and its formats."""

import collections
import itertools
import random

import pytest

from millrace.apps.autoencoder.config.commands import ConvertConfig
from millrace.apps.autoencoder.convert import convert
from millrace.cli import main
from millrace.config import ConfigurationError
from millrace.data.ratings.reading import load_ratings
from millrace.data.source import DatasetError

LINES = [
    (f"u{user}", item, (user + item) % 5 + 1, 10**9 + (7 * user + 3 * item) % 11)
    for user, item in itertools.product(range(12), range(10))
]
"""Every user has rated every item, and many of a user's ratings have the same time."""


def write(path, lines=LINES):
    path.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    return path


def split(tmp_path, *, lines=LINES, **options):
    """Return the three files as lists of (user, item)."""
    path = write(tmp_path / "all.csv", lines)
    convert(ConvertConfig(input=path, output_dir=tmp_path, overwrite=True, **options))
    found = []
    for name in ("train", "valid", "test"):
        text = (tmp_path / f"{name}.txt").read_text()
        found.append([tuple(line.split("\t")[:2]) for line in text.splitlines()])
    return found


def by_user(lines):
    grouped = collections.defaultdict(list)
    for line in lines:
        grouped[line[0]].append(line)
    return grouped


def pairs(lines):
    return {(user, str(item)) for user, item, *_ in lines}


def test_the_last_rating_of_each_user_is_left_for_test(tmp_path):
    train, valid, test = split(tmp_path, split="leave-one-out")
    expected = {
        user: sorted(lines, key=lambda x: x[3]) for user, lines in by_user(LINES).items()
    }
    assert set(test) == pairs(lines[-1] for lines in expected.values())
    assert set(valid) == pairs(lines[-2] for lines in expected.values())
    assert set(train) == pairs(LINES) - set(test) - set(valid)
    assert len(train) + len(valid) + len(test) == len(LINES)


def test_users_with_few_ratings_keep_one_in_training(tmp_path):
    few = [("one", 1, 3, 5), ("two", 1, 3, 5), ("two", 2, 3, 6)]
    train, valid, test = split(tmp_path, lines=[*LINES, *few], split="leave-one-out")
    assert {("one", "1"), ("two", "1")} <= set(train)
    assert ("two", "2") in test and not {"one", "two"} & {user for user, _ in valid}


@pytest.mark.parametrize("protocol", ["random", "random-leave-one-out"])
def test_random_splits_follow_the_seed_and_not_the_order_of_lines(tmp_path, protocol):
    shuffled = [line[:3] for line in LINES]  # no times are needed
    random.Random(0).shuffle(shuffled)
    first = split(tmp_path, split=protocol, seed=3)
    again = split(tmp_path, split=protocol, seed=3, lines=shuffled)
    other = split(tmp_path, split=protocol, seed=4)
    assert [set(part) for part in first] == [set(part) for part in again]
    assert set(first[2]) != set(other[2])
    assert set(first[0]) | set(first[1]) | set(first[2]) == pairs(LINES)


def test_a_random_split_has_the_fractions_it_is_given(tmp_path):
    train, valid, test = split(tmp_path, split="random", fractions=[0.5, 0.25, 0.25])
    assert [len(train), len(valid), len(test)] == [60, 30, 30]
    counts = {len(lines) for lines in by_user(test).values()}
    assert len(counts) > 1  # of all ratings together
    parts = split(tmp_path, split="random", per_user=True)
    for part, expected in zip(parts, (8, 1, 1), strict=True):
        assert {len(lines) for lines in by_user(part).values()} == {expected}


def test_a_random_leave_one_out_takes_one_rating_of_each_user(tmp_path):
    train, valid, test = split(tmp_path, split="random-leave-one-out")
    for part in (valid, test):
        assert {len(lines) for lines in by_user(part).values()} == {1} and len(part) == 12
    assert len({item for _, item in test}) > 2 and len(train) == 96


def test_a_split_by_time_is_the_default_and_ties_keep_the_order_of_lines(tmp_path):
    named = split(tmp_path, split="time", per_user=True)
    assert named == split(tmp_path, fractions=[0.8, 0.1, 0.1], per_user=True)
    for user, lines in by_user(LINES).items():
        last = sorted(lines, key=lambda line: line[3])[-1]  # stable
        assert (user, str(last[1])) in named[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "leave-one-out", "fractions": [0.8, 0.1, 0.1]}, "has no --fractions"),
        ({"split": "random-leave-one-out", "per_user": True}, "--per-user is implied"),
        ({"split": "random", "period": "3m"}, "got --period and --fractions or --split"),
        ({"per_user": True, "period": "3m"}, "--per-user needs --fractions or --split"),
    ],
)
def test_options_of_protocols_must_fit(tmp_path, options, message):
    with pytest.raises(ConfigurationError, match=message):
        ConvertConfig(input=tmp_path, **options)


def test_a_split_by_time_needs_times(tmp_path, capsys):
    path = write(tmp_path / "untimed.csv", [line[:3] for line in LINES])
    with pytest.raises(SystemExit, match="2"):
        main(["autoencoder", "convert", str(path), "--split", "leave-one-out"])
    assert "has no column of times to split by" in capsys.readouterr().err


HARD_IDS = ['a"b', '"quoted"', "a,b", "tab\tbed", "björn", "two words"]


@pytest.mark.parametrize("form", ["txt", "csv", "parquet"])
@pytest.mark.parametrize("implicit", [False, True])
def test_every_format_is_read_back(tmp_path, form, implicit):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    users, items = zip(*itertools.product(HARD_IDS, range(20)), strict=True)
    times = [
        (item + 3 * HARD_IDS.index(u)) % 20 for u, item in zip(users, items, strict=True)
    ]
    table = {"user": users, "item": items, "time": times}
    if not implicit:
        table["rating"] = [item % 10 / 2 + 0.5 for item in items]
    parquet.write_table(pyarrow.table(table), tmp_path / "all.parquet")
    convert(
        ConvertConfig(
            input=tmp_path / "all.parquet",
            output_dir=tmp_path,
            split="leave-one-out",
            format=form,
        )
    )
    train = load_ratings(tmp_path / f"train.{form}")
    assert train.implicit == implicit and set(train.user_ids) == set(HARD_IDS)
    assert train.num_ratings == 18 * len(HARD_IDS)
    for user in range(train.num_users):
        found, values = train.get_user(user)
        stars = train.item_ids[found] % 10 / 2 + 0.5
        assert values.tolist() == ([1.0] * 18 if implicit else stars.tolist())
    if form != "txt":  # the others keep times, so they can be split again
        again = ConvertConfig(
            input=tmp_path / f"train.{form}", output_dir=tmp_path / "2", split="time"
        )
        convert(again)


def test_identifiers_that_text_cannot_hold_are_an_error(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = {
        "user": [f"u{n % 3}\n" for n in range(30)],
        "item": [n // 3 for n in range(30)],
    }
    parquet.write_table(pyarrow.table(table), tmp_path / "all.parquet")
    with pytest.raises(DatasetError, match=r"has line breaks.* Write Parquet instead"):
        convert(
            ConvertConfig(
                input=tmp_path / "all.parquet", output_dir=tmp_path, split="random"
            )
        )
    assert [path.name for path in tmp_path.iterdir()] == ["all.parquet"]


def test_repeated_choices_count_once(tmp_path, capsys):
    lines = [(user, item, time) for user, item, _, time in LINES]
    parts = split(tmp_path, lines=lines + lines[:5], split="leave-one-out", no_ratings=True)
    assert "5 repeated choices of an item count once" in capsys.readouterr().out
    assert sum(map(len, parts)) == len(LINES)
