"""Validation, recommendations and titles with a trained model."""

import csv
import gzip
import json
import shutil

import numpy as np
import pytest
from autoencoder_runs import (
    FIRST_ITEM,
    ITEMS,
    PLAIN,
    USERS,
    clip,
    command,
    events_of,
    summary_of,
    write_ratings,
)

from millrace.apps.autoencoder.model import reconstruct
from millrace.apps.autoencoder.predictor import load_recommender
from millrace.apps.autoencoder.recommend import load_titles
from millrace.apps.autoencoder.run_ratings import RATINGS
from millrace.config import ConfigurationError
from millrace.data.ratings.reading import load_ratings


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run, next to its rating files."""
    folder = tmp_path_factory.mktemp("trained")
    files = write_ratings(folder)
    args = f"train {PLAIN} {files}--epochs 2 --untied-decoder --no-dense-refeeding"
    ended = command(None, f"{args} --run-dir {folder}/run")
    assert ended.status == 0
    return folder / "run"


def expected_rankings(run):
    """Return the unrated items of every user by NumPy, best first."""
    found = load_recommender(run)
    ratings = load_ratings(run.parent / "train.txt")
    rows = np.zeros((ratings.num_users, ITEMS), np.float32)
    for user in range(ratings.num_users):
        items, values = ratings.get_user(user)
        rows[user, items] = values
    output = np.where(rows == 0, reconstruct(found.model, found.params, rows), -np.inf)
    return ratings, np.argsort(-output, axis=1), output


def test_the_best_items_of_every_user_are_written(trained, tmp_path, capsys):
    out = tmp_path / "deep" / "best.csv"
    args = f"recommend --checkpoint {trained} --all --top 4 --batch-size 7 --out {out}"
    ended = command(capsys, args)
    assert ended.status == 0, ended.err
    assert f"{4 * USERS} recommendations for {USERS} users" in ended.out
    ratings, order, output = expected_rankings(trained)
    with out.open() as file:
        found = list(csv.DictReader(file))
    assert [row["rank"] for row in found[:4]] == ["1", "2", "3", "4"]
    for place, row in enumerate(found):
        user, rank = divmod(place, 4)
        assert row["user"] == str(ratings.user_ids[user])
        best = order[user, rank]
        assert float(row["rating"]) == pytest.approx(clip(output[user, best]), abs=1e-3)
        assert row["item"] == str(ratings.item_ids[best])
    assert [path.name for path in out.parent.iterdir()] == ["best.csv"]


def test_recommendations_show_titles(trained, tmp_path, capsys):
    titles = tmp_path / "titles.txt"
    titles.write_text("".join(f"{FIRST_ITEM + n},2005,Film {n}\n" for n in range(ITEMS)))
    args = f"recommend --checkpoint {trained} --user 1007 1003 --top 2 --titles {titles}"
    ended = command(capsys, args)
    assert ended.status == 0, ended.err
    assert "has no titles" not in ended.err
    ratings, order, _ = expected_rankings(trained)
    lines = ended.out.splitlines()
    assert [line.split("  ")[0] for line in (lines[0], lines[4])] == [
        "user 1007",
        "user 1003",
    ]
    best = ratings.item_ids[order[3, 0]]
    assert lines[5].split()[:6] == [
        "1", lines[5].split()[1], str(best), "Film", str(best - FIRST_ITEM), "(2005)"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--user 1", "There is no user 1 in the ratings."),
        ("", "Give the users to recommend to"),
        ("--all --user 1000", "Give the users to recommend to"),
        ("--all --out x.doc", "out must end in .tsv, .txt, .csv"),
        ("--user 1000 --titles nowhere", "Cannot read the titles in nowhere"),
        ("--user 1000 --checkpoint /nowhere", "There is no /nowhere. Give the directory"),
    ],
)
def test_a_mistake_is_reported_in_one_line(trained, capsys, args, message):
    checkpoint = "" if "--checkpoint" in args else f"--checkpoint {trained}"
    ended = command(capsys, f"recommend {checkpoint} {args}")
    assert ended.status == 2
    assert message in ended.err and len(ended.err.splitlines()) == 1


def test_new_users_get_recommendations_of_known_items(trained, tmp_path, capsys):
    new = tmp_path / "new.txt"
    new.write_text(f"ann,{FIRST_ITEM},5\nann,77777,1\nann,{FIRST_ITEM + 1},1\n")
    args = f"recommend --checkpoint {trained} --training-data-file {new} --user ann"
    ended = command(capsys, f"{args} --top {ITEMS}")
    assert ended.status == 0, ended.err
    assert len(ended.out.splitlines()) == 1 + ITEMS - 2  # rated items are left out


@pytest.fixture
def with_unknown(trained, tmp_path):
    """Files with ratings of unknown items; user 2000 has no other ratings."""
    known = [(trained.parent / f"{name}.txt").read_text() for name in ("train", "valid")]
    train, valid = tmp_path / "more.txt", tmp_path / "later.txt"
    train.write_text(known[0] + "1000\t9000\t3\n1001\t9000\t2\n2000\t9001\t5\n")
    valid.write_text(known[1] + "1001\t9001\t3\n3000\t500\t4\n1000\t8000\t2\n")
    return train, valid


def test_validation_counts_everything_it_leaves_out(
    trained, with_unknown, tmp_path, capsys
):
    args = f"validate --checkpoint {trained} --run-dir {tmp_path}/v --quiet "
    files = "--training-data-file {} --validation-data-file {}".format(*with_unknown)
    ended = command(capsys, args + files)
    assert ended.status == 0, ended.err
    assert (
        "3 validation ratings are left out: 1 users and 2 items do not occur"
    ) in ended.err
    assert (
        "3 known ratings are left out: the model does not know 2 items, and 1 users have "
        "rated nothing else."
    ) in ended.err
    found, before = summary_of(tmp_path / "v")["metrics"], summary_of(trained)["best"]
    assert found["validation_rmse"] == pytest.approx(before["validation_rmse"], rel=1e-6)


def test_validation_on_unknown_items_only_is_rejected(
    trained, with_unknown, tmp_path, capsys
):
    train, valid = with_unknown
    valid.write_text("1001\t9001\t3\n")
    args = f"validate --checkpoint {trained} --run-dir {tmp_path}/v "
    args += f"--training-data-file {train} --validation-data-file {valid}"
    ended = command(capsys, args)
    assert ended.status == 2
    assert "The model can predict none of the validation ratings" in ended.err


def test_users_with_unknown_items_only_are_reported(
    trained, with_unknown, tmp_path, capsys
):
    args = f"recommend --checkpoint {trained} --training-data-file {with_unknown[0]} "
    ended = command(capsys, args + "--user 2000")
    assert ended.status == 2
    assert "User 2000 has rated only items that the model does not know" in ended.err
    ended = command(capsys, args + f"--all --out {tmp_path}/all.txt")
    assert ended.status == 0 and f"for {USERS} users" in ended.out
    warning = "1 users have rated nothing else. These users get no recommendations."
    assert warning in ended.err
    # With --user, only the users asked for matter.
    ended = command(capsys, args + "--user 1000")
    assert ended.status == 0 and "1 users have rated nothing else." in ended.err
    assert "no recommendations" not in ended.err


@pytest.mark.parametrize(
    ("args", "name", "role"),
    [
        ("recommend --user 1000", "training", "trained on"),
        ("validate", "training", "trained on"),
        ("validate", "validation", "validated on"),
    ],
)
def test_a_missing_file_of_the_run_is_asked_for(
    trained, tmp_path, monkeypatch, capsys, args, name, role
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run" / RATINGS
    recorded = json.loads(path.read_text())
    recorded[name]["file"] = "/ml/some.txt"
    path.write_text(json.dumps(recorded))
    ended = command(capsys, f"{args} --checkpoint {tmp_path}/run")
    assert ended.status == 2
    assert f"There is no file /ml/some.txt, which the run was {role}." in ended.err
    assert f"Give its new location with --{name}-data-file." in ended.err


def test_validation_matches_that_of_training(trained, tmp_path, capsys):
    args = f"validate --checkpoint {trained} --run-dir {tmp_path}/v --top 3 --quiet"
    ended = command(capsys, args)
    assert ended.status == 0, ended.err
    found, before = summary_of(tmp_path / "v")["metrics"], summary_of(trained)["best"]
    for name in ("validation_rmse", "validation_mae", "validation_mean_batch_rmse"):
        assert found[name] == pytest.approx(before[name], rel=1e-6)
    assert 0 <= found["validation_ndcg_at_3"] <= 1
    assert 0 <= found["validation_recall_at_3"] <= 1
    (event,) = events_of(tmp_path / "v")
    assert event["validation_rmse"] == found["validation_rmse"]
    tested = command(
        capsys, f"train --testing-on-checkpoint {trained} --run-dir {tmp_path}/t"
    )
    assert tested.status == 0, tested.err
    last = [e for e in events_of(trained) if "validation_rmse" in e][-1]
    assert f"Testing RMSE: {last['validation_rmse']:.4f} over all ratings, " in tested.err
    assert (
        f"{last['validation_mean_batch_rmse']:.4f} as the mean over batches" in tested.err
    )


def test_another_validation_file_must_have_the_same_ids(trained, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("nobody\tnothing\t3\n")
    args = f"validate --checkpoint {trained} --run-dir {tmp_path}/v "
    ended = command(capsys, args + f"--validation-data-file {other}")
    assert ended.status == 2
    assert "Are they from the same dataset?" in ended.err
    ended = command(capsys, args + f"--training-data-file {other} --quiet")
    assert ended.status in (1, 2) and "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("1,2003,Dinosaur Planet\n2,NULL,Crouch, Hide\n",
         {"1": "Dinosaur Planet (2003)", "2": "Crouch, Hide"}),
        ("1::Toy Story (1995)::Animation|Comedy\n", {"1": "Toy Story (1995)"}),
        ('movieId,title,genres\n11,"American President, The (1995)",Drama\n',
         {"movieId": "title", "11": "American President, The (1995)"}),
        ("1|Toy Story (1995)|01-Jan-1995\n", {"1": "Toy Story (1995)"}),
        ("7\tAmélie\n", {"7": "Amélie"}),
        ("1,Toy Story (1995),Adventure|Animation\n1178,Paths of Glory (1957),Drama\n",
         {"1": "Toy Story (1995)", "1178": "Paths of Glory (1957)"}),
        ("3|Up, Up | Away\n", {"3": "Up, Up"}),
    ],
)  # fmt: skip
def test_title_files_of_netflix_and_movielens_are_parsed(tmp_path, text, titles):
    path = tmp_path / "titles.txt"
    path.write_text(text, encoding="latin-1")
    assert load_titles(path) == titles
    packed = tmp_path / "titles.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert load_titles(packed) == titles


def test_a_byte_order_mark_is_not_part_of_an_item_id(tmp_path):
    (tmp_path / "titles.txt").write_text("1,Toy Story (1995),Comedy\n", "utf-8-sig")
    assert load_titles(tmp_path / "titles.txt") == {"1": "Toy Story (1995)"}


def test_titles_of_other_items_cause_a_warning(trained, tmp_path, capsys):
    titles = tmp_path / "titles.txt"
    titles.write_text("tt0050825,Paths of Glory\n")
    args = f"recommend --checkpoint {trained} --user 1007 --titles {titles}"
    ended = command(capsys, args)
    assert ended.status == 0
    assert f"warning: {titles} has no titles for these items." in ended.err


def test_an_empty_file_of_titles_is_rejected(tmp_path):
    (tmp_path / "titles.txt").write_text("\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        load_titles(tmp_path / "titles.txt")


def test_validation_without_a_relevant_item_has_errors_but_no_rankings(
    trained, tmp_path, capsys
):
    args = f"validate --checkpoint {trained} --run-dir {tmp_path}/v --relevant-rating 6 "
    ended = command(capsys, args)
    assert ended.status == 0, ended.err
    assert "No validation rating is 6 or more" in ended.err
    metrics = summary_of(tmp_path / "v")["metrics"]
    assert metrics["validation_rmse"] > 0
    assert not [name for name in metrics if "_at_" in name]
