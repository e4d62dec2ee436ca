"""A trained model put to use: validation, recommendations, titles."""

import csv
import gzip
import json
import shutil

import numpy as np
import pytest
from autoencoder_runs import (
    FIRST_ITEM,
    ITEMS,
    SMALL,
    USERS,
    command,
    events_of,
    summary_of,
    write_ratings,
)

from millrace.apps.autoencoder.model import reconstruct
from millrace.apps.autoencoder.titles import load_titles
from millrace.apps.autoencoder.trained import RATINGS, find_trained
from millrace.config import ConfigurationError
from millrace.data.ratings.reading import load_ratings


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run, beside its files."""
    folder = tmp_path_factory.mktemp("trained")
    files = write_ratings(folder)
    words = f"train {SMALL} {files}--epochs 2 --untied-decoder --no-dense-refeeding"
    ended = command(None, f"{words} --run-dir {folder}/run")
    assert ended.status == 0
    return folder / "run"


def expected_rankings(run):
    """Every user's items not rated before, best first, by NumPy."""
    found = find_trained(run)
    params, _ = found.weights()
    ratings = load_ratings(run.parent / "train.txt")
    rows = np.zeros((ratings.num_users, ITEMS), np.float32)
    for user in range(ratings.num_users):
        items, values = ratings.get_user(user)
        rows[user, items] = values
    output = np.where(rows == 0, reconstruct(found.model, params, rows), -np.inf)
    return ratings, np.argsort(-output, axis=1), output


def test_the_best_items_of_every_user_are_written(trained, tmp_path, capsys):
    out = tmp_path / "deep" / "best.csv"
    words = f"recommend --checkpoint {trained} --all --top 4 --batch-size 7 --out {out}"
    ended = command(capsys, words)
    assert ended.status == 0, ended.err
    assert f"{4 * USERS} recommendations to {USERS} users" in ended.out
    ratings, order, output = expected_rankings(trained)
    with out.open() as file:
        found = list(csv.DictReader(file))
    assert [row["rank"] for row in found[:4]] == ["1", "2", "3", "4"]
    for place, row in enumerate(found):
        user, rank = divmod(place, 4)
        assert row["user"] == str(ratings.user_ids[user])
        best = order[user, rank]
        assert float(row["rating"]) == pytest.approx(output[user, best], abs=1e-3)
        assert row["item"] == str(ratings.item_ids[best])
    assert [path.name for path in out.parent.iterdir()] == ["best.csv"]


def test_some_users_are_recommended_items_by_title(trained, tmp_path, capsys):
    titles = tmp_path / "titles.txt"
    titles.write_text("".join(f"{FIRST_ITEM + n},2005,Film {n}\n" for n in range(ITEMS)))
    words = f"recommend --checkpoint {trained} --user 1007 1003 --top 2 --titles {titles}"
    ended = command(capsys, words)
    assert ended.status == 0, ended.err
    assert "has a title for none" not in ended.err
    ratings, order, _ = expected_rankings(trained)
    lines = ended.out.splitlines()
    assert [lines[0], lines[4]] == ["user 1007", "user 1003"]
    best = ratings.item_ids[order[3, 0]]
    assert lines[5].split() == [
        "1", lines[5].split()[1], str(best), "Film", str(best - FIRST_ITEM), "(2005)"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--user 1", "There is no user 1 in the ratings."),
        ("", "Give the users to recommend to"),
        ("--all --user 1000", "Give the users to recommend to"),
        ("--all --out x.doc", "out must end in .tsv, .txt, .csv"),
        ("--user 1000 --titles nowhere", "Cannot read the titles in nowhere"),
        ("--user 1000 --checkpoint /nowhere", "There are no checkpoints in /nowhere"),
    ],
)
def test_a_mistake_is_one_line(trained, capsys, words, said):
    checkpoint = "" if "--checkpoint" in words else f"--checkpoint {trained}"
    ended = command(capsys, f"recommend {checkpoint} {words}")
    assert ended.status == 2
    assert said in ended.err and len(ended.err.splitlines()) == 1


def test_new_users_of_known_items_are_recommended_to(trained, tmp_path, capsys):
    new = tmp_path / "new.txt"
    new.write_text(f"ann,{FIRST_ITEM},5\nann,77777,1\nann,{FIRST_ITEM + 1},1\n")
    words = f"recommend --checkpoint {trained} --training-data-file {new} --user ann"
    ended = command(capsys, f"{words} --top {ITEMS}")
    assert ended.status == 0, ended.err
    assert len(ended.out.splitlines()) == 1 + ITEMS - 2  # what she has rated is left out


@pytest.fixture
def with_unknown(trained, tmp_path):
    """Files with ratings of items that the model does not know; user 2000 has no others."""
    known = [(trained.parent / f"{name}.txt").read_text() for name in ("train", "valid")]
    train, valid = tmp_path / "more.txt", tmp_path / "later.txt"
    train.write_text(known[0] + "1000\t9000\t3\n1001\t9000\t2\n2000\t9001\t5\n")
    valid.write_text(known[1] + "1001\t9001\t3\n3000\t500\t4\n1000\t8000\t2\n")
    return train, valid


def test_all_that_validation_leaves_out_is_counted(trained, with_unknown, tmp_path, capsys):
    words = f"validate --checkpoint {trained} --run-dir {tmp_path}/v --quiet "
    files = "--training-data-file {} --validation-data-file {}".format(*with_unknown)
    ended = command(capsys, words + files)
    assert ended.status == 0, ended.err
    assert (
        "3 of the ratings to validate with are left out: 1 users and 2 items do not occur"
    ) in ended.err
    assert (
        "3 of the ratings to foretell from are left out: the model does not know 2 items, "
        "and 1 users have rated nothing else."
    ) in ended.err
    found, before = summary_of(tmp_path / "v")["metrics"], summary_of(trained)["best"]
    assert found["validation_rmse"] == pytest.approx(before["validation_rmse"], rel=1e-6)


def test_validation_of_unknown_items_only_is_refused(
    trained, with_unknown, tmp_path, capsys
):
    train, valid = with_unknown
    valid.write_text("1001\t9001\t3\n")
    words = f"validate --checkpoint {trained} --run-dir {tmp_path}/v "
    words += f"--training-data-file {train} --validation-data-file {valid}"
    ended = command(capsys, words)
    assert ended.status == 2
    assert "None of the ratings to validate with is one that the model can" in ended.err


def test_users_of_unknown_items_only_are_named_or_counted(
    trained, with_unknown, tmp_path, capsys
):
    words = f"recommend --checkpoint {trained} --training-data-file {with_unknown[0]} "
    ended = command(capsys, words + "--user 2000")
    assert ended.status == 2
    assert "User 2000 has rated only items that the model does not know" in ended.err
    ended = command(capsys, words + f"--all --out {tmp_path}/all.txt")
    assert ended.status == 0 and f"to {USERS} users" in ended.out
    said = "1 users have rated nothing else. Nothing is recommended to these users."
    assert said in ended.err
    # Who asks for some users only is not told about the others.
    ended = command(capsys, words + "--user 1000")
    assert ended.status == 0 and "1 users have rated nothing else." in ended.err
    assert "Nothing is recommended" not in ended.err


@pytest.mark.parametrize(
    ("words", "name", "role"),
    [
        ("recommend --user 1000", "training", "trained on"),
        ("validate", "training", "trained on"),
        ("validate", "validation", "validated with"),
    ],
)
def test_a_file_of_the_run_that_is_gone_is_asked_for(
    trained, tmp_path, monkeypatch, capsys, words, name, role
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run" / RATINGS
    kept = json.loads(path.read_text())
    kept[name]["file"] = "/ml/some.txt"
    path.write_text(json.dumps(kept))
    ended = command(capsys, f"{words} --checkpoint {tmp_path}/run")
    assert ended.status == 2
    assert f"There is no file /ml/some.txt, which the run was {role}." in ended.err
    assert f"Say where it is with --{name}-data-file." in ended.err


def test_validation_repeats_what_training_found(trained, tmp_path, capsys):
    words = f"validate --checkpoint {trained} --run-dir {tmp_path}/v --top 3 --quiet"
    ended = command(capsys, words)
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
    assert f"{last['validation_mean_batch_rmse']:.4f} as the mean of batches" in tested.err


def test_another_file_is_validated_with_and_must_fit(trained, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("nobody\tnothing\t3\n")
    words = f"validate --checkpoint {trained} --run-dir {tmp_path}/v "
    ended = command(capsys, words + f"--validation-data-file {other}")
    assert ended.status == 1
    assert "Are the identifiers the same?" in ended.err
    ended = command(capsys, words + f"--training-data-file {other} --quiet")
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
def test_title_files_of_netflix_and_movielens_are_read(tmp_path, text, titles):
    path = tmp_path / "titles.txt"
    path.write_text(text, encoding="latin-1")
    assert load_titles(path) == titles
    packed = tmp_path / "titles.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert load_titles(packed) == titles


def test_a_byte_order_mark_is_no_part_of_an_item(tmp_path):
    (tmp_path / "titles.txt").write_text("1,Toy Story (1995),Comedy\n", "utf-8-sig")
    assert load_titles(tmp_path / "titles.txt") == {"1": "Toy Story (1995)"}


def test_titles_of_other_items_are_said_to_be_of_no_use(trained, tmp_path, capsys):
    titles = tmp_path / "titles.txt"
    titles.write_text("tt0050825,Paths of Glory\n")
    words = f"recommend --checkpoint {trained} --user 1007 --titles {titles}"
    ended = command(capsys, words)
    assert ended.status == 0
    assert f"warning: {titles} has a title for none of these items." in ended.err


def test_an_empty_file_of_titles_is_refused(tmp_path):
    (tmp_path / "titles.txt").write_text("\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        load_titles(tmp_path / "titles.txt")
