"""With rows of items, the network reads transposed ratings and users are columns."""

import csv
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from autoencoder_runs import (
    FIRST_USER,
    ITEMS,
    PLAIN,
    SMALL,
    USERS,
    clip,
    command,
    dense,
    events_of,
    summary_of,
    write_ratings,
)

import millrace as mr
from millrace.apps.autoencoder.item_rows import (
    EncodedItems,
    encode_items,
    fold_in,
    predict_for_users,
)
from millrace.apps.autoencoder.model import Model, OutputLayer, init_params, reconstruct
from millrace.apps.autoencoder.predictor import load_recommender
from millrace.data.ratings.generated import random_ratings
from millrace.data.ratings.matrix import align, transpose
from millrace.data.ratings.reading import load_ratings

RECIPE = f"{SMALL} --batches-per-step 2 --base-learning-rate -10 --untied-decoder "
RECIPE += "--no-dropout --no-dense-refeeding --epochs 6 --deterministic "
TOP = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ratings files, and the same ones with users and items swapped."""
    folder = tmp_path_factory.mktemp("rows")
    write_ratings(folder)
    (folder / "swapped").mkdir()
    for name in ("train.txt", "valid.txt"):
        fields = [line.split() for line in (folder / name).read_text().splitlines()]
        lines = [f"{item}\t{user}\t{rating}\n" for user, item, rating in fields]
        (folder / "swapped" / name).write_text("".join(lines))
    return folder


def files(folder):
    train, valid = folder / "train.txt", folder / "valid.txt"
    return f"--training-data-file {train} --validation-data-file {valid} "


@pytest.fixture(scope="module")
def trained(folder):
    args = f"train {RECIPE}{files(folder)}--rows items --run-dir {folder}/run"
    assert command(None, args).status == 0
    return folder / "run"


@pytest.fixture(scope="module")
def expected(trained):
    """Predictions by NumPy with the trained weights; all arrays are (users, items)."""
    found = load_recommender(trained)
    known = load_ratings(trained.parent / "train.txt")
    later, _ = align(load_ratings(trained.parent / "valid.txt"), known)
    rows, wanted = map(dense, (known, later))
    output = np.asarray(reconstruct(found.model, found.params, rows.T)).T
    scores = np.where(rows == 0, output, -np.inf)
    return SimpleNamespace(ratings=known, rows=rows, wanted=wanted, output=scores)


def load_params(run):
    return load_recommender(run, "last").params


def test_rows_of_items_train_like_users_of_the_swapped_file(folder, trained):
    args = f"train {RECIPE}{files(folder / 'swapped')}--data-on-device "
    ended = command(None, args + f"--run-dir {folder}/other --early-stopping 9")
    assert ended.status == 0
    jax.tree.map(
        np.testing.assert_array_equal, load_params(trained), load_params(folder / "other")
    )
    mine, other = (
        [e["validation_rmse"] for e in events_of(run) if "validation_rmse" in e]
        for run in (trained, folder / "other")
    )
    assert mine == other and mine[-1] < mine[0]


@pytest.mark.devices(2)
def test_replicas_split_the_items_of_a_batch(folder, trained, capsys):
    args = f"train {RECIPE}{files(folder)}--rows items --num-replicas 2 --no-validation "
    ended = command(capsys, args + f"--run-dir {folder}/two")
    assert ended.status == 0, ended.err
    two, one = (summary_of(run)["metrics"] for run in (folder / "two", trained))
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)


def test_a_run_resumes_only_with_the_rows_it_started_with(folder, capsys):
    run = f"--run-dir {folder}/parts --keep-checkpoints 9 "
    args = f"train {RECIPE}{files(folder)}{run}"
    assert command(capsys, args + "--rows items --build-init").status == 0
    ended = command(capsys, args + "--rows users --resume")
    assert ended.status == 2 and "rows" in ended.err
    ended = command(capsys, args + "--resume")
    assert ended.status == 0, ended.err
    jax.tree.map(
        np.testing.assert_array_equal,
        load_params(folder / "run"),
        load_params(folder / "parts"),
    )


def test_both_kinds_of_rows_share_the_cache_of_a_file(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path))
    for run, rows in (("first", "users"), ("second", "items"), ("third", "users")):
        args = f"train {RECIPE}{files(folder)}--rows {rows} --build-init "
        assert command(None, args + f"--run-dir {tmp_path}/{run}").status == 0
        columns = load_params(tmp_path / run)["encoder"]["fc_1"]["kernel"].shape[0]
        assert columns == (ITEMS if rows == "users" else USERS)
    assert len(list((tmp_path / "ratings").iterdir())) == 2  # one entry per file


def test_validation_pools_ratings_and_ranks_items_for_users(trained, expected, tmp_path):
    args = f"validate --checkpoint {trained} --run-dir {tmp_path}/v --top {TOP} --quiet"
    assert command(None, args + " --which newest").status == 0
    found = summary_of(tmp_path / "v")["metrics"]
    params = load_params(trained)
    model = load_recommender(trained).model
    output = np.asarray(reconstruct(model, params, expected.rows.T)).T
    error = (output - expected.wanted)[expected.wanted != 0]
    assert found["validation_rmse"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-5)
    assert found["validation_mae"] == pytest.approx(np.abs(error).mean(), rel=1e-5)
    recall, gain = compute_ranking(expected, np.where(expected.rows == 0, output, -np.inf))
    assert found[f"validation_recall_at_{TOP}"] == pytest.approx(recall, rel=1e-5)
    assert found[f"validation_ndcg_at_{TOP}"] == pytest.approx(gain, rel=1e-5)
    assert 0 < recall < 1


def compute_ranking(expected, output):
    """Return the mean recall and NDCG over users."""
    discounts = 1 / np.log2(np.arange(2, TOP + 2))
    recalls, gains = [], []
    for row, later, score in zip(expected.rows, expected.wanted, output, strict=True):
        relevant = (later >= 4) & (row == 0)
        if not relevant.any():
            continue
        hits = relevant[np.argsort(-score)[:TOP]]
        recalls.append(hits.sum() / relevant.sum())
        gains.append((hits * discounts).sum() / discounts[: relevant.sum()].sum())
    return np.mean(recalls), np.mean(gains)


def test_the_best_items_of_every_user_match_numpy(trained, expected, tmp_path):
    out = tmp_path / "best.csv"
    args = f"recommend --checkpoint {trained} --all --top {TOP} --batch-size 7 --out {out}"
    assert command(None, args).status == 0
    with out.open() as file:
        found = list(csv.DictReader(file))
    assert len(found) == TOP * USERS
    order = np.argsort(-expected.output, axis=1)
    for place, row in enumerate(found):
        user, rank = divmod(place, TOP)
        best = order[user, rank]
        assert row["user"] == str(expected.ratings.user_ids[user])
        assert row["item"] == str(expected.ratings.item_ids[best])
        assert float(row["rating"]) == pytest.approx(
            clip(expected.output[user, best]), abs=1e-3
        )


def test_known_users_get_all_unrated_items_and_new_users_are_rejected(
    trained, expected, tmp_path, capsys
):
    args = f"recommend --checkpoint {trained} --top {ITEMS} --user "
    ended = command(capsys, args + str(FIRST_USER + 5))
    assert ended.status == 0, ended.err
    lines = [line.split() for line in ended.out.splitlines()[1:]]
    assert len(lines) == np.isfinite(expected.output[5]).sum()
    (tmp_path / "new.txt").write_text(f"ann,500,5\n{FIRST_USER},501,1\n")
    args += f"ann --training-data-file {tmp_path}/new.txt"
    ended = command(capsys, args)
    assert ended.status == 2
    assert "trained without user ann" in ended.err and "--rows users" in ended.err
    (tmp_path / "new.txt").write_text("ann,500,5\n")
    ended = command(capsys, args)
    assert ended.status == 2 and "none of the users in these ratings" in ended.err


def test_users_that_the_model_does_not_know_are_counted(trained, tmp_path, capsys):
    new = tmp_path / "new.txt"
    new.write_text(f"ann,500,5\nbob,500,4\n{FIRST_USER},501,1\n")
    args = f"recommend --checkpoint {trained} --all --training-data-file {new}"
    ended = command(capsys, args)
    assert ended.status == 0, ended.err
    assert (
        "2 known ratings are left out: the model does not know 2 users, and 1 items were "
        "rated by nobody else. These users get no recommendations."
    ) in ended.err


def test_an_item_that_was_added_later_is_recommended(trained, expected, tmp_path, capsys):
    later = tmp_path / "later.txt"
    known = (trained.parent / "train.txt").read_text()
    later.write_text(known + "".join(f"{FIRST_USER + u}\t9999\t5\n" for u in range(4)))
    args = f"recommend --checkpoint {trained} --training-data-file {later} "
    ended = command(capsys, args + f"--top {ITEMS} --user {FIRST_USER + 5}")
    assert ended.status == 0, ended.err
    items = {line.split()[2] for line in ended.out.splitlines()[1:]}
    unrated = expected.ratings.item_ids[expected.rows[5] == 0]
    assert items == {"9999", *map(str, unrated)}


def test_recommend_to_works_for_known_users(trained, expected):
    model = mr.autoencoder.load(trained)
    user = expected.ratings.user_ids[3].item()
    found = model.recommend_to(user, top=2)
    order = np.argsort(-expected.output[3])
    items = expected.ratings.item_ids[order[:2]].tolist()
    assert [item for item, _ in found] == items
    assert found[0][1] == pytest.approx(expected.output[3, order[0]], rel=1e-5)
    assert model.item_ids.tolist() == expected.ratings.item_ids.tolist()
    with pytest.raises(ValueError, match=r"call recommend_to\(user\)"):
        model.recommend({items[0]: 5.0})


@pytest.mark.parametrize("tied", [True, False])
def test_predictions_for_users_are_the_transposed_reconstruction(tied):
    by_user = random_ratings(37, 23, 150, seed=1)  # some items have no ratings
    model = Model(37, 128, 0.5, tied=tied)
    params = init_params(model, jax.random.key(2))
    encoded = encode_items(model, params, transpose(by_user), 8, "float32")
    users = np.array([3, 36, 0])
    found = predict_for_users(model, encoded, users)
    rows = dense(by_user).T
    expected = np.asarray(reconstruct(model, params, rows)).T[users]
    # A value near 0 is a difference of larger ones and has their rounding error.
    largest = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_user_is_folded_in_without_weight_decay_as_with_little(count):
    random = np.random.default_rng(0)
    hidden, items = random.standard_normal((20, 8)), np.arange(count)
    encoded = EncodedItems(jnp.asarray(hidden), OutputLayer(jnp.zeros(0), jnp.zeros(0)))
    residuals = random.standard_normal(count)
    found = fold_in(encoded, items, residuals, 0.0)
    np.testing.assert_allclose(found[:count], residuals, atol=1e-6)
    little = fold_in(encoded, items, residuals, 1e-7)
    np.testing.assert_allclose(found, little, atol=1e-5)


@pytest.mark.slow
def test_a_sweep_over_rows_of_items_reports_items(folder, capsys):
    args = f"sweep {SMALL} {files(folder)}--rows items --no-dense-refeeding "
    args += "--base-learning-rates 1,10,12 --epochs 2 --batches-per-step 2 "
    ended = command(capsys, args.replace("--quiet", "") + f"--run-dir {folder}/sweep")
    assert ended.status == 0, ended.err
    output = " ".join(ended.err.split())
    assert "8 items, re-feeding none" in output and "items/s over 3 models" in output
    assert "users/s" not in output
    assert f"by {USERS} users of {ITEMS} items" in output
    best = yaml.safe_load((folder / "sweep" / "best.yml").read_text())["best"]
    assert best["rows"] == "items"
    trials = summary_of(folder / "sweep")["trials"]
    assert [trial["learning_rate"] for trial in trials] == [4, 2.0**-7, 2.0**-9]
    (diverged,) = [line for line in ended.err.splitlines() if line.endswith("diverged")]
    assert diverged.split()[0] == "-1"


def test_too_few_items_for_a_batch_are_rejected(folder, capsys):
    args = f"train {PLAIN} {files(folder)}--rows items --batch-size 64"
    ended = command(capsys, args + f" --run-dir {folder}/few")
    assert ended.status == 2
    assert "There are 30 items with ratings, fewer than one batch of 64" in ended.err
