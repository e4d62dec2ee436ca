"""Recommendations for all users: the same in every format, and never half a file."""

import csv
import itertools
import json

import jax
import numpy as np
import pytest
from autoencoder_runs import PLAIN, USERS, command, write_ratings

import millrace as mr
from millrace.apps.autoencoder.bulk import Columns, TopItems, write_top_items
from millrace.config import ConfigurationError

TOP = 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run, next to its rating files."""
    folder = tmp_path_factory.mktemp("trained")
    args = f"train {PLAIN} {write_ratings(folder)}--epochs 1 --no-dense-refeeding"
    assert command(None, f"{args} --run-dir {folder}/run").status == 0
    return folder / "run"


def read(path):
    """Return the rows of a file of recommendations."""
    if path.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open() as file:
        return list(csv.DictReader(file, delimiter="," if path.suffix == ".csv" else "\t"))


def test_every_format_has_the_items_of_recommend_to(trained, tmp_path, capsys):
    pytest.importorskip("pyarrow")
    recommender = mr.autoencoder.load(trained)
    found = recommender.recommend_all(top=TOP, batch_size=7)
    assert len(found.user) == TOP * USERS and found.rank[: TOP + 1].tolist() == [
        1,
        2,
        3,
        4,
        1,
    ]
    assert recommender.limits is not None
    low, high = recommender.limits
    assert low <= found.rating.min() <= found.rating.max() <= high
    best = recommender.recommend_to(int(found.user[-1]), top=TOP)
    assert found.item[-TOP:].tolist() == [item for item, _ in best]
    np.testing.assert_allclose(found.rating[-TOP:], [r for _, r in best], rtol=1e-5)
    for suffix in ("csv", "parquet"):
        path = tmp_path / f"recs.{suffix}"
        ended = command(capsys, f"recommend {trained} --all --top {TOP} --output {path}")
        assert ended.status == 0, ended.err
        assert f"{TOP * USERS} recommendations for {USERS} users: {path} (" in ended.out
        rows = read(path)
        for name in ("user", "item", "rank"):
            values = [int(row[name]) for row in rows]
            assert values == getattr(found, name).tolist()
        np.testing.assert_allclose(
            [float(row["rating"]) for row in rows], found.rating, atol=6e-5
        )
        if suffix == "parquet":
            assert isinstance(rows[0]["user"], int) and isinstance(rows[0]["rating"], float)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"recs.{suffix}" for suffix in ("csv", "parquet")
    }


def test_nothing_is_read_from_the_device_by_accident(trained):
    with jax.transfer_guard_device_to_host("disallow"):  # see strict_reads.py
        assert len(mr.autoencoder.load(trained).recommend_all(top=2).user) == 2 * USERS


def test_known_and_new_users_share_a_file(trained, tmp_path, capsys):
    pytest.importorskip("pyarrow")
    known = (trained.parent / "train.txt").read_text()
    new = "".join(f"ann\t{line.split()[1]}\t5\n" for line in known.splitlines()[:3])
    (tmp_path / "more.txt").write_text(known + new)
    path = tmp_path / "recs.parquet"
    args = f"recommend {trained} --all --top 2 --training-data-file {tmp_path}/more.txt"
    ended = command(capsys, f"{args} --out {path}")
    assert ended.status == 0, ended.err
    assert "ann" in {row["user"] for row in read(path)}


def test_recommend_all_writes_a_file(trained, tmp_path):
    recommender = mr.autoencoder.load(trained)
    assert recommender.recommend_all(top=1, output=tmp_path / "a.jsonl") is None
    assert len(read(tmp_path / "a.jsonl")) == USERS
    with pytest.raises(ValueError, match=r"must end in .*\.parquet, got 'a.doc'"):
        recommender.recommend_all(output=tmp_path / "a.doc")


BATCH = TopItems(
    np.array(["ann, a", '"bo"']), np.array([1, 1]), np.array([3, 5]), np.array([4.5, 3])
)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_texts_and_titles_are_read_back(tmp_path, suffix):
    pytest.importorskip("pyarrow")
    path = tmp_path / f"recs.{suffix}"
    assert write_top_items(path, [BATCH, BATCH], Columns({"3": "Up, Up\tand “Away”"})) == 4
    rows = read(path)
    assert [row["user"] for row in rows] == [*BATCH.user.tolist()] * 2
    assert [row["title"] for row in rows] == ["Up, Up\tand “Away”", ""] * 2


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_batch_of_users_who_have_rated_everything_has_no_rows(tmp_path, suffix):
    pytest.importorskip("pyarrow")
    path, columns = tmp_path / f"recs.{suffix}", Columns({"3": "Up"})
    nothing = TopItems(*(column[:0] for column in BATCH))
    assert write_top_items(path, [nothing, BATCH, nothing], columns) == 2
    assert [row["user"] for row in read(path)] == BATCH.user.tolist()
    assert write_top_items(path, [nothing], columns) == 0
    assert read(path) == []


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_an_error_leaves_the_old_file(tmp_path, suffix):
    pytest.importorskip("pyarrow")
    path = tmp_path / f"recs.{suffix}"
    path.write_text("old")
    (tmp_path / f".recs.{suffix}.0123.partial").write_text("of a process that was killed")

    def fail():
        raise RuntimeError("the device is gone")
        yield

    with pytest.raises(RuntimeError):
        write_top_items(path, itertools.chain([BATCH], fail()))
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_parquet_needs_pyarrow_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)

    def compute():
        raise AssertionError
        yield

    with pytest.raises(ConfigurationError, match="pip install pyarrow"):
        write_top_items(tmp_path / "a.parquet", compute())
    assert not list(tmp_path.iterdir())
