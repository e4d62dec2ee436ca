"""With biases subtracted, errors, rankings and predictions are still of full ratings."""

import csv
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autoencoder_runs import (
    ITEMS,
    PLAIN,
    USERS,
    clip,
    command,
    dense,
    summary_of,
    write_ratings,
)

import millrace as mr
from millrace.apps.autoencoder.data import open_evaluation_source
from millrace.apps.autoencoder.loss import to_dense_rows
from millrace.apps.autoencoder.metrics import find_relevant
from millrace.apps.autoencoder.model import reconstruct
from millrace.apps.autoencoder.predictor import load_recommender
from millrace.apps.autoencoder.run_ratings import BIASES
from millrace.data.ratings.matrix import align, fit_biases, transpose
from millrace.data.ratings.reading import load_ratings
from millrace.program.mixed_precision import narrow
from millrace.report.sections import read_sections

RECIPE = f"{PLAIN} --batches-per-step 2 --learning-rate 0.02 --untied-decoder --no-dropout "
RECIPE += "--no-dense-refeeding --epochs 2 --subtract-biases "
TOP = 4


@pytest.fixture(scope="module", params=["users", "items"])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    args = f"train {RECIPE}{write_ratings(folder)}--rows {request.param} "
    assert command(None, args + f"--run-dir {folder}/run").status == 0
    return folder / "run"


@pytest.fixture(scope="module")
def expected(trained):
    """Return the ratings, the targets, and predictions by NumPy as (users, items)."""
    found = load_recommender(trained)
    known = load_ratings(trained.parent / "train.txt")
    later, _ = align(load_ratings(trained.parent / "valid.txt"), known)
    turn = transpose if found.config.data.rows == "items" else lambda ratings: ratings
    biases = fit_biases(turn(known))
    left = biases.subtract(turn(known), turn(known))
    output = np.asarray(reconstruct(found.model, found.params, dense(left)))
    output = output + biases.mean + biases.of_rows(turn(known))[:, None] + biases.of_column
    output = output.T if found.config.data.rows == "items" else output
    return known, later, output


def test_errors_are_those_of_full_ratings_and_the_rmse_of_biases_is_shown(
    trained, expected
):
    known, later, output = expected
    wanted = dense(later)
    error = (output - wanted)[wanted != 0]
    found = summary_of(trained)["best"]["validation_rmse"]
    assert found == pytest.approx(np.sqrt(np.square(error).mean()), rel=1e-4)
    biases = fit_biases(known)
    alone = np.sqrt(np.square(biases.subtract(later, known).values).mean())
    shown = summary_of(trained)["baselines"]["validation_rmse"]["biases"]
    assert shown == pytest.approx(alone, abs=0.01)


def test_validation_ranks_full_ratings(trained, expected, tmp_path):
    args = f"validate --checkpoint {trained} --run-dir {tmp_path}/v --top {TOP} --quiet"
    assert command(None, args).status == 0
    found = summary_of(tmp_path / "v")["metrics"]
    assert found["validation_rmse"] == pytest.approx(
        summary_of(trained)["best"]["validation_rmse"], rel=1e-5
    )
    known, later, output = expected
    rows, wanted = dense(known), dense(later)
    scores = np.where(rows == 0, output, -np.inf)
    recalls = []
    for row, target, score in zip(rows, wanted, scores, strict=True):
        relevant = (target >= 4) & (row == 0)
        if relevant.any():
            recalls.append(relevant[np.argsort(-score)[:TOP]].sum() / relevant.sum())
    assert found[f"validation_recall_at_{TOP}"] == pytest.approx(np.mean(recalls), rel=1e-5)
    residuals = read_sections(tmp_path / "v")["residuals"]
    stars = [star for star, _ in residuals.quantiles]
    assert stars == np.unique(later.values).tolist()


def test_recommendations_show_full_ratings(trained, expected, tmp_path):
    out = tmp_path / "best.csv"
    args = f"recommend --checkpoint {trained} --all --top {TOP} --batch-size 7 --out {out}"
    assert command(None, args).status == 0
    known, _, output = expected
    scores = np.where(dense(known) == 0, output, -np.inf)
    order = np.argsort(-scores, axis=1)
    with out.open() as file:
        found = list(csv.DictReader(file))
    assert len(found) == TOP * USERS
    for place, row in enumerate(found):
        user, rank = divmod(place, TOP)
        best = order[user, rank]
        assert row["item"] == str(known.item_ids[best])
        assert float(row["rating"]) == pytest.approx(clip(scores[user, best]), abs=2e-3)


@pytest.mark.parametrize("trained", ["items"], indirect=True)
def test_recommend_to_returns_full_ratings(trained, expected):
    known, _, output = expected
    user = known.user_ids[3].item()
    best = mr.autoencoder.load(trained).recommend_to(user, top=1)[0]
    scores = np.where(dense(known)[3] == 0, output[3], -np.inf)
    assert best[1] == pytest.approx(clip(scores.max()), abs=2e-3)
    assert type(best[0]) is int  # as from recommend, and JSON knows it


@pytest.mark.parametrize("trained", ["users"], indirect=True)
def test_predict_returns_full_ratings(trained, expected):
    known, _, output = expected
    model = mr.autoencoder.load(trained)
    items, values = known.get_user(3)
    names = known.item_ids[items].tolist()
    rated = dict(zip(names, map(float, values), strict=True))
    found = model.predict(rated)
    assert len(found) == ITEMS
    np.testing.assert_allclose(list(found.values()), clip(output[3]), atol=2e-3)
    of_nobody = np.array(list(model.predict({}).values()))
    assert abs(of_nobody.mean() - known.values.mean()) < 1


@pytest.mark.parametrize("trained", ["users"], indirect=True)
def test_the_same_items_are_relevant_in_sixteen_bits(trained):
    """Residuals are rounded, but four stars must stay four."""
    known = load_ratings(trained.parent / "train.txt")
    later, _ = align(load_ratings(trained.parent / "valid.txt"), known)
    biases = fit_biases(known)
    left, targets = (biases.subtract(part, known) for part in (known, later))
    batch = open_evaluation_source(left, targets, USERS)[np.arange(USERS)]
    counts = set()
    for dtype in ("float32", "float16", "bfloat16"):
        rounded = narrow(jax.tree.map(jnp.asarray, batch), dtype)
        rows = to_dense_rows(rounded, ITEMS)
        found = find_relevant(rows, rounded, 4.0, left.biases)
        counts.add(int(found.any(1).sum()))
    relevant = (dense(later) >= 4) & (dense(known) == 0)
    assert counts == {int(relevant.any(1).sum())}


@pytest.mark.parametrize("trained", ["users"], indirect=True)
def test_user_biases_come_from_the_ratings_file_in_use(trained, capsys, tmp_path):
    lines = (trained.parent / "train.txt").read_text().splitlines()
    user = lines[0].split()[0]
    own = [line for line in lines if line.split()[0] == user]
    (tmp_path / "new.txt").write_text("\n".join(own).replace(user, "77"))
    args = f"recommend --checkpoint {trained} --top 3 --user "
    known = command(capsys, args + user).out.splitlines()[1:]
    args += f"77 --training-data-file {tmp_path}/new.txt"
    ended = command(capsys, args)
    assert ended.status == 0, ended.err
    assert ended.out.splitlines()[1:] == known


def test_a_resumed_run_keeps_its_biases(trained, capsys):
    before_resume = (trained / BIASES).read_bytes()
    folder = trained.parent
    rows = load_recommender(trained).config.data.rows
    files = f"--training-data-file {folder}/train.txt "
    files += f"--validation-data-file {folder}/valid.txt "
    args = f"train {RECIPE}{files}--rows {rows} --run-dir {trained} --resume"
    ended = command(capsys, args)
    assert ended.status == 0, ended.err
    assert (trained / BIASES).read_bytes() == before_resume
    train = folder / "train.txt"
    before = train.read_text()
    train.write_text(before.replace("\t5\n", "\t4.5\n"))
    ended = command(capsys, args)
    train.write_text(before)
    assert ended.status == 2 and "train.txt has changed since the run" in ended.err
    ended = command(capsys, f"{args} --subtract-biases False")
    assert ended.status == 2 and "subtract_biases" in ended.err.replace("-", "_")


def test_a_resumed_run_subtracts_the_biases_that_it_has_kept(trained, capsys, expected):
    """Those of an older version may differ from what would be fitted now."""

    def score_biases():
        return summary_of(trained)["baselines"]["validation_rmse"]["biases"]

    known, later, _ = expected
    rows = load_recommender(trained).config.data.rows
    turn = transpose if rows == "items" else lambda ratings: ratings
    fitted = fit_biases(turn(known))
    old = replace(fitted, of_column=fitted.of_column - 2)
    kept, before = (trained / BIASES).read_bytes(), score_biases()
    np.savez(trained / BIASES, **asdict(old))
    files = f"--training-data-file {trained.parent}/train.txt "
    files += f"--validation-data-file {trained.parent}/valid.txt "
    ended = command(
        capsys, f"train {RECIPE}{files}--rows {rows} --run-dir {trained} --resume"
    )
    (trained / BIASES).write_bytes(kept)
    assert ended.status == 0, ended.err
    wanted = np.square(old.subtract(turn(later), turn(known)).values).mean() ** 0.5
    assert score_biases() == pytest.approx(wanted, abs=0.01)
    assert abs(wanted - before) > 0.1
