"""What was read once is kept, found again, never out of date, and repaired if damaged."""

import gzip
import json
import logging
import os
import time
import zipfile

import numpy as np
import pytest

from millrace.config import ConfigurationError
from millrace.data.ratings import file as ratings_file
from millrace.data.ratings.file import load_ratings, paired
from millrace.data.source import DatasetError

CONTENT = "1\t10\t4\n2\t10\t3.5\n1\t20\t5\n"


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """The folder that arrays are kept in."""
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path / "data"))
    return tmp_path / "data" / "ratings"


@pytest.fixture
def reads(monkeypatch):
    """The paths that were read as text."""
    read, seen = ratings_file.read_events, []

    def counted(path, *args):
        seen.append(path)
        return read(path, *args)

    monkeypatch.setattr(ratings_file, "read_events", counted)
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


def test_a_file_is_read_once_and_then_mapped(tmp_path, kept, reads):
    path = write(tmp_path / "a.txt")
    for _ in range(3):
        ratings = load_ratings(path)
        assert_read(ratings)
        assert isinstance(ratings.items, np.memmap) and not ratings.items.flags.writeable
    assert len(reads) == 1 and len(list(kept.iterdir())) == 1


def test_what_was_kept_is_found_by_content_not_by_name_or_age(tmp_path, reads):
    path = write(tmp_path / "a.txt")
    stat = path.stat()
    load_ratings(path)
    load_ratings(write(tmp_path / "copy.txt"))
    assert len(reads) == 1
    write(path, CONTENT.replace("3.5", "2.5"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert 2.5 in load_ratings(path).values
    assert len(reads) == 2


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
def test_a_damaged_copy_is_made_again_and_said(tmp_path, kept, reads, caplog, damage):
    path = write(tmp_path / "a.txt")
    load_ratings(path)
    (folder,) = kept.iterdir()
    damage(folder)
    with caplog.at_level(logging.WARNING, "millrace"):
        assert_read(load_ratings(path))
    assert f"{folder} is damaged" in caplog.text and "made again" in caplog.text
    caplog.clear()
    assert_read(load_ratings(path))
    assert len(reads) == 2 and not caplog.records


def test_nothing_is_left_of_a_file_that_cannot_be_read(tmp_path, kept):
    with pytest.raises(DatasetError, match=r"a\.txt, line 4: .*'1\\t2\\tx'"):
        load_ratings(write(tmp_path / "a.txt", CONTENT + "1\t2\tx\n"))
    assert not kept.exists()


def test_nothing_half_made_is_left_when_writing_fails(tmp_path, kept, monkeypatch, caplog):
    def full(file, array):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with caplog.at_level(logging.WARNING, "millrace"):
        assert_read(load_ratings(write(tmp_path / "a.txt")))
    assert "cannot be kept for the next time: [Errno 28] No space left" in caplog.text
    assert not list(kept.iterdir())


def test_what_a_killed_run_left_is_removed_after_a_day(tmp_path, kept):
    old, new = kept / ".being-made-old", kept / ".being-made-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, time.time() - 25 * 3600))
    load_ratings(write(tmp_path / "a.txt"))
    assert not old.exists() and new.exists()


def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path, kept, monkeypatch):
    path = write(tmp_path / "a.txt")
    read = ratings_file.read_events

    def change(*args):
        write(path, CONTENT + "3\t10\t1\n")
        return read(*args)

    monkeypatch.setattr(ratings_file, "read_events", change)
    with pytest.raises(DatasetError, match="changed while it was being read"):
        load_ratings(path)
    assert not kept.exists()


def test_limits_hold_also_for_what_was_kept_under_wider_ones(tmp_path):
    path = write(tmp_path / "a.txt", "1,1,0.7\n1,2,9\n")
    assert load_ratings(path, limits=(0.7, 9)).largest == 9
    with pytest.raises(DatasetError, match=r"line 2: the rating 9 is not between 0\.5"):
        load_ratings(path)


def test_duplicates_are_counted_each_time(tmp_path, caplog):
    path = write(tmp_path / "a.txt", CONTENT + "1\t10\t1\n")
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "millrace"):
            ratings = load_ratings(path)
        assert ratings.num_duplicates == 1 and ratings.of_user(0)[1][0] == 1
        assert "rates 1 times what the same user had rated before" in caplog.text


def test_a_zipped_file_is_kept_too(tmp_path, reads):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(CONTENT.encode()))
    assert_read(load_ratings(path))
    assert_read(load_ratings(str(path)))
    assert len(reads) == 1


def test_a_file_that_is_not_there_is_a_mistake_in_the_command(tmp_path):
    with pytest.raises(ConfigurationError, match=r"There is no file .*nowhere\.txt"):
        load_ratings(tmp_path / "nowhere.txt")


def test_what_is_not_a_plain_file_is_called_by_its_name(tmp_path):
    with pytest.raises(ConfigurationError, match="is a directory, not a file of ratings"):
        load_ratings(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match=r"not a plain file but a pipe .* Save"):
        load_ratings(tmp_path / "pipe")


def test_a_zip_archive_is_to_be_unpacked_first(tmp_path):
    path = tmp_path / "ratings.txt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ratings.csv", CONTENT)
    with pytest.raises(ConfigurationError, match=r"is a zip archive.* Unpack it first\."):
        load_ratings(path)


def test_validation_is_numbered_as_training_and_the_unseen_is_counted(tmp_path):
    training = write(tmp_path / "train.txt")
    validation = write(tmp_path / "valid.txt", "2\t20\t1\n3\t10\t2\n1\t30\t3\n")
    first, second, unseen = paired(training, validation)
    assert_read(first)
    np.testing.assert_array_equal(second.starts, [0, 0, 1])
    np.testing.assert_array_equal(second.items, [1])
    assert unseen == (1, 1, 2)


def test_validation_of_strangers_only_is_an_error(tmp_path):
    training = write(tmp_path / "train.txt")
    validation = write(tmp_path / "valid.txt", "7\t70\t1\n")
    with pytest.raises(DatasetError, match=r"valid\.txt is by a user .*train\.txt"):
        paired(training, validation)
