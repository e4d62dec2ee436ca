"""Parquet files, DataFrames and files without ratings, from the command line and Python."""

import json
import shutil

import numpy as np
import pytest
from autoencoder_runs import PLAIN, command, write_ratings

import millrace as mr
from millrace.apps.autoencoder import data as ratings_data
from millrace.apps.autoencoder.arrays import build_ratings, hold_ratings
from millrace.apps.autoencoder.config.data import DataOptions
from millrace.config import ConfigurationError

QUICK = f"{PLAIN} --epochs 1 --no-dense-refeeding "


def read_lines(path):
    return [line.split("\t") for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    """Training and validation ratings as columns, with users and items as text."""
    folder = tmp_path_factory.mktemp("frames")
    write_ratings(folder)
    return [
        {
            "customer": [f"user {line[0]}" for line in lines],
            "asin": [f"B{line[1]}" for line in lines],
            "stars": [float(line[2]) for line in lines],
        }
        for lines in (read_lines(folder / f"{part}.txt") for part in ("train", "valid"))
    ]


def test_parquet_files_train_validate_and_recommend(frames, tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    files = ""
    for part, columns in zip(("training", "validation"), frames, strict=True):
        path = tmp_path / f"{part}.parquet"
        parquet.write_table(pyarrow.table(columns), path)
        files += f"--{part}-data-file {path} "
    ended = command(capsys, f"train {QUICK} {files} --run-dir {tmp_path}/run")
    assert ended.status == 0, ended.err
    (item, _), *_ = mr.autoencoder.load(tmp_path / "run").recommend_to(
        frames[0]["customer"][0], top=1
    )
    assert item in frames[0]["asin"]
    path = tmp_path / "validation.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    ended = command(capsys, f"validate {tmp_path}/run --run-dir {tmp_path}/v")
    assert ended.status == 1 and "is a damaged Parquet file" in ended.err


def test_a_model_trained_on_a_frame_works_with_its_identifiers(frames, tmp_path):
    polars = pytest.importorskip("polars")
    pandas = pytest.importorskip("pandas")
    options = {
        **{"epochs": 1, "batch_size": 10, "precision": "32.32", "loss_scaling": 1},
        **{"size": 128, "recipe": "graphcore", "no_dense_refeeding": True, "quiet": True},
    }
    data, validation = polars.DataFrame(frames[0]), pandas.DataFrame(frames[1])
    run = tmp_path / "run"
    done = mr.autoencoder.train(
        data=data, validation_data=validation, run_dir=run, **options
    )
    user = frames[0]["customer"][0]
    best = done.model.recommend_to(user, top=2)
    assert {item for item, _ in best} <= set(frames[0]["asin"])
    options["epochs"] = 2
    again = mr.autoencoder.train(
        data=pandas.DataFrame(frames[0]),
        validation_data=validation,
        run_dir=run,
        resume=True,
        **options,
    )
    assert again.summary["status"] == "completed"
    del done, again
    moved = tmp_path / "moved"  # nothing is in memory any more
    shutil.copytree(run, moved)
    with pytest.raises(ConfigurationError, match="Pass the same arrays again"):
        mr.autoencoder.load(moved).recommend_to(user)
    loaded = mr.autoencoder.load(moved, data=data, validation_data=validation)
    assert len(loaded.recommend_to(user, top=3)) == 3
    with pytest.raises(ConfigurationError, match="not the data that the run was trained"):
        mr.autoencoder.load(moved, data=validation)


def test_arrays_and_frames_without_ratings_are_implicit():
    users, items = np.array(["a", "b", "a"]), np.array([5, 5, 7])
    one, other = hold_ratings((users, items)), hold_ratings({"user": users, "item": items})
    assert one.record == other.record and "rating" not in one.arrays
    ratings = build_ratings(one.arrays, "", (2.0, 5.0))
    assert ratings.implicit and ratings.values.tolist() == [1, 1, 1]
    with pytest.raises(ConfigurationError, match="needs --objective ranking"):
        ratings_data.load(DataOptions(arrays=one.record), seed=0)
    with pytest.raises(ConfigurationError, match="the other has none"):
        hold_ratings((users, items), (users, items, [1.0, 2.0, 3.0]))


def test_a_file_without_ratings_is_ranked(tmp_path, capsys):
    path = tmp_path / "choices.csv"
    path.write_text("".join(f"u{n % 7},{n % 11}\n" for n in range(77)))
    train = f"train --training-data-file {path} --run-dir {tmp_path}/run --quiet"
    ended = command(capsys, f"{train} --objective rating")
    assert ended.status == 2 and "Traceback" not in ended.err
    assert f"{path} has no ratings to predict" in ended.err
    assert "--objective ranking" in ended.err
    record = tmp_path / "run" / "summary.json"
    assert not record.exists() or json.loads(record.read_text())["status"] == "failed"
    assert command(capsys, f"{train} --run-dir {tmp_path}/ranked --epochs 2").status == 0
    recommender = mr.autoencoder.load(tmp_path / "ranked")
    assert recommender.config.training.objective == "ranking"
    assert recommender.config.data.positive_from == 1
    assert len(recommender.recommend([3, 5], top=2)) == 2
