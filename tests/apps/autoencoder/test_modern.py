"""The modern recipe: what it chooses, and that it beats the simple models."""

import json
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest
from autoencoder_runs import command, dense, events_of, summary_of

import millrace as mr
from millrace.apps.autoencoder import baselines
from millrace.apps.autoencoder.baselines import find_better, score_baselines
from millrace.apps.autoencoder.config import AutoencoderConfig, recipe
from millrace.apps.autoencoder.config.commands import SweepConfig
from millrace.apps.autoencoder.config.recipe import expand_training_options
from millrace.apps.autoencoder.data import RatingData, subtract_biases
from millrace.config import ConfigurationError, parse
from millrace.data.ratings.counts import Counts
from millrace.data.ratings.matrix import fit_biases, from_events, hold_out, transpose
from millrace.report.record import read_phases
from millrace.report.sections import read_sections

NUM_USERS, NUM_ITEMS = 150, 120


def make_ratings(seed=0):
    """Return users, items and ratings from biases and two factors that people share."""
    random = np.random.default_rng(seed)
    tastes = random.standard_normal((NUM_USERS, 2)) @ random.standard_normal((2, NUM_ITEMS))
    biases = random.normal(0, 0.5, (NUM_USERS, 1)) + random.normal(0, 0.4, NUM_ITEMS)
    ratings = 3.5 + biases + 0.8 * tastes + random.normal(0, 0.3, tastes.shape)
    ratings = np.clip(np.round(2 * ratings) / 2, 0.5, 5)
    users, items = np.nonzero(random.random(tastes.shape) < 0.5)
    return users, items, ratings[users, items]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with ratings to train on and to test."""
    folder = tmp_path_factory.mktemp("modern")
    users, items, ratings = make_ratings()
    is_test = np.random.default_rng(1).random(len(users)) < 0.2
    for name, mask in (("ratings", ~is_test), ("test", is_test)):
        chosen = zip(users[mask], items[mask], ratings[mask], strict=True)
        lines = [f"u{user},{item},{rating:g}\n" for user, item, rating in chosen]
        (folder / f"{name}.csv").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    args = f"train --training-data-file {folder}/ratings.csv --quiet --epochs 40 "
    args += f"--test-data-file {folder}/test.csv --run-dir {folder}/run"
    assert command(None, args).status == 0
    return folder / "run"


def test_a_file_of_ratings_is_all_it_needs_to_beat_the_simple_models(trained):
    summary = summary_of(trained)
    assert summary["status"] == "completed" and summary["loses_to"] == []
    activities = {name for name, _, _ in read_phases(trained)}
    assert {"fitting simple models", "testing"} <= activities  # those that have a bar
    simple = summary["baselines"]["test_rmse"]
    assert list(simple) == ["global mean", "biases", "linear items"]
    assert summary["metrics"]["test_rmse"] < 0.95 * min(simple.values())
    assert simple["biases"] < simple["global mean"]
    table = read_sections(trained)["baselines"]
    assert table.columns == ["", *simple, "this model"]
    rows = {row[0]: [float(value) for value in row[1:]] for row in table.rows}
    ours = summary["metrics"]["test_rmse"]
    assert rows["test RMSE"] == pytest.approx([*simple.values(), ours], rel=1e-3)
    assert "Simple models on the same ratings" in (trained / "report.html").read_text()


def test_training_starts_at_the_biases(folder, trained, tmp_path):
    args = f"train --training-data-file {folder}/ratings.csv --quiet --epochs 1 "
    args += f"--learning-rate 1e-9 --run-dir {tmp_path}/run"
    assert command(None, args).status == 0
    (event,) = [e for e in events_of(tmp_path / "run") if "validation_rmse" in e]
    biases = summary_of(tmp_path / "run")["baselines"]["validation_rmse"]["biases"]
    assert event["validation_rmse"] == pytest.approx(biases, rel=1e-5)


def test_held_out_ratings_are_known_when_items_are_recommended(folder, trained):
    options = json.loads((trained / "summary.json").read_text())["facts"]
    assert "for validation" in options["ratings"]
    model = mr.autoencoder.load(trained)
    lines = (folder / "ratings.csv").read_text().split()
    rated = {int(line.split(",")[1]) for line in lines if line.startswith("u7,")}
    found = model.recommend_to("u7", top=NUM_ITEMS)
    assert {int(item) for item, _ in found}.isdisjoint(rated)
    assert len(found) + len(rated) == len(model.item_ids)
    assert all(0.5 <= rating <= 5 for _, rating in found)


def test_new_users_are_folded_in(folder, trained, tmp_path, capsys):
    """A copy of a known user under another name gets nearly the same predictions."""
    model = mr.autoencoder.load(trained)
    lines = [line.split(",") for line in (folder / "ratings.csv").read_text().split()]
    errors, of_biases = [], []
    tests = [line.split(",") for line in (folder / "test.csv").read_text().split()]
    for user in ("u3", "u4", "u5", "u6"):
        own = {int(item): float(rating) for u, item, rating in lines if u == user}
        predicted = model.predict(own)
        for u, item, rating in tests:
            if u == user:
                errors.append(predicted[int(item)] - float(rating))
                of_biases.append(np.mean(list(own.values())) - float(rating))
    assert np.square(errors).mean() < 0.7 * np.square(of_biases).mean()
    new = tmp_path / "new.csv"
    new.write_text("".join(f"ann,{i},{r}\n" for u, i, r in lines if u == "u3"))
    args = f"recommend {trained} --top 3 --user ann --training-data-file {new}"
    ended = command(capsys, args)
    assert ended.status == 0, ended.err
    shown = [line.split() for line in ended.out.splitlines()]
    ended = command(capsys, f"recommend {trained} --user ann")
    assert ended.status == 2 and "without user ann. Give ratings of this user" in ended.err
    own = {int(i): float(r) for u, i, r in lines if u == "u3"}
    assert [int(item) for _, _, item, *_ in shown[1:]] == [
        item for item, _ in model.recommend(own, top=3)
    ]
    args = args.replace("--user ann", f"--all --out {tmp_path}/all.csv")
    ended = command(capsys, args)
    assert ended.status == 0, ended.err
    assert "3 recommendations for 1 users" in ended.out
    new.write_text(new.read_text() + "u3,1,5\nbob,9999,5\n")
    ended = command(capsys, args)
    assert ended.status == 0, ended.err
    assert "6 recommendations for 2 users" in ended.out


def rename_users(path, folder, name, users=("u3", "u4", "u5", "u6")):
    """Write the ratings of some users under other names; return the file and ratings."""
    lines = [line.split(",") for line in path.read_text().split()]
    own = [(f"new{u[1:]}", int(i), float(r)) for u, i, r in lines if u in users]
    file = folder / name
    file.write_text("".join(f"{user},{item},{rating:g}\n" for user, item, rating in own))
    return file, own


def test_new_users_are_folded_in_when_they_are_validated(folder, trained, tmp_path, capsys):
    given, known = rename_users(folder / "ratings.csv", tmp_path, "given.csv")
    later, targets = rename_users(folder / "test.csv", tmp_path, "later.csv")
    args = f"validate {trained} --validation-data-file {later} --top 5 --run-dir {tmp_path}"
    ended = command(capsys, f"{args}/v --training-data-file {given}")
    assert ended.status == 0, ended.err
    assert "all of them are folded in from their ratings" in " ".join(ended.err.split())
    found = summary_of(tmp_path / "v")["metrics"]
    assert not any(name.startswith("test_") for name in found)  # those of the run's users
    model = mr.autoencoder.load(trained)
    errors, recalls = [], []
    for user in sorted({user for user, *_ in targets}):
        own = {item: rating for u, item, rating in known if u == user}
        predicted = model.predict(own)
        wanted = {item: rating for u, item, rating in targets if u == user}
        errors += [predicted[item] - rating for item, rating in wanted.items()]
        relevant = {item for item, rating in wanted.items() if rating >= 4}
        best = {item for item, _ in model.recommend(own, top=5)}
        if relevant:
            recalls.append(len(best & relevant) / len(relevant))
    assert found["validation_rmse"] == pytest.approx(np.sqrt(np.mean(np.square(errors))))
    assert found["validation_mae"] == pytest.approx(np.mean(np.abs(errors)))
    assert found["validation_recall_at_5"] == pytest.approx(np.mean(recalls))


def test_without_files_the_held_out_and_the_test_ratings_are_validated(trained, tmp_path):
    assert command(None, f"validate {trained} --run-dir {tmp_path}/v --quiet").status == 0
    found, summary = summary_of(tmp_path / "v")["metrics"], summary_of(trained)
    assert found["validation_rmse"] == pytest.approx(summary["best"]["validation_rmse"])
    assert found["test_rmse"] == pytest.approx(summary["metrics"]["test_rmse"])


def test_new_users_without_known_ratings_are_an_error_or_left_out(
    folder, trained, tmp_path, capsys
):
    later, _ = rename_users(folder / "test.csv", tmp_path, "later.csv")
    args = f"validate {trained} --validation-data-file {later} --run-dir {tmp_path}"
    ended = command(capsys, f"{args}/none")
    assert ended.status == 2
    assert "Ratings of new users are predicted from others of theirs" in ended.err
    assert "Traceback" not in ended.err
    later.write_text(later.read_text() + (folder / "test.csv").read_text())
    ended = command(capsys, f"{args}/some")
    assert ended.status == 0, ended.err
    shown = " ".join(ended.err.split())
    assert "4 users and 0 items do not occur" in shown
    assert "give these users known ratings in --training-data-file" in shown
    found = summary_of(tmp_path / "some")["metrics"]["validation_rmse"]
    assert found == pytest.approx(summary_of(trained)["metrics"]["test_rmse"], rel=0.05)


@pytest.mark.parametrize("rows", ["users", "items"])
def test_simple_models_match_numpy(rows):
    users, items, values = make_ratings(2)
    ids = {"user_ids": np.arange(NUM_USERS), "item_ids": np.arange(NUM_ITEMS)}
    known, later = hold_out(from_events(users, items, values, **ids), 0.2, seed=3)
    data = RatingData(known, later)
    if rows == "items":
        data = data.map(transpose)
    data = subtract_biases(data, fit_biases(data.training, 5.0))
    found = score_baselines(
        data, rows, strength=5.0, with_linear=True, device=jax.devices()[0]
    )["validation"]
    left = data.map(transpose) if rows == "items" else data
    actual = later.values.astype(np.float64)
    biases = left.training.biases
    base = biases.lookup(later.users, later.items).astype(np.float64)
    mean = known.values.astype(np.float64).mean()
    assert found["global mean"] == pytest.approx(np.sqrt(np.mean((mean - actual) ** 2)))
    clipped = np.clip(base, known.smallest, known.largest)
    assert found["biases"] == pytest.approx(np.sqrt(np.mean((clipped - actual) ** 2)))
    x = dense(left.training).astype(np.float64)
    unit = np.square(left.training.values.astype(np.float64)).mean()
    expected = []
    for penalty in (400, 1200):
        inverse = np.linalg.inv(x.T @ x + penalty * unit * np.eye(NUM_ITEMS))
        weights = -inverse / np.diag(inverse)
        np.fill_diagonal(weights, 0)
        output = np.clip((x @ weights)[later.users, later.items] + base, 0.5, 5)
        expected.append(np.sqrt(np.mean((output - actual) ** 2)))
    assert found["linear items"] == pytest.approx(min(expected), rel=1e-5)


@pytest.mark.parametrize("objective", ["rating", "ranking"])
def test_a_run_without_linear_items_says_so(
    folder, objective, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(baselines._MOST_ITEMS, jax.devices()[0].platform, NUM_ITEMS - 1)
    args = f"train --training-data-file {folder}/ratings.csv --epochs 1 "
    ended = command(capsys, f"{args}--objective {objective} --run-dir {tmp_path}/run")
    assert ended.status == 0, ended.err
    reason = "not computed: there are 120 items, and its closed form is for up to 119 on a"
    assert " ".join(ended.err.split()).count(reason) == 2  # at the start and at the end
    summary = summary_of(tmp_path / "run")
    assert summary["linear_items"].startswith(reason)
    assert ("the network ranks alone" in ended.err) == (objective == "ranking")
    assert all("linear items" not in simple for simple in summary["baselines"].values())


def test_a_model_that_loses_says_so(folder, tmp_path, capsys):
    args = f"train --training-data-file {folder}/ratings.csv --epochs 1 --quiet "
    args += f"--learning-rate 1e-9 --run-dir {tmp_path}/run"
    ended = command(capsys, args)
    assert ended.status == 0, ended.err
    assert "does not predict better than" in ended.err and "linear items" in ended.err
    assert "linear items" in summary_of(tmp_path / "run")["loses_to"]
    assert find_better(0.9, {"a": 0.9, "b": 0.91}) == ["a"]


def test_ratings_are_held_out_but_no_user_or_item_loses_all():
    users, items, values = make_ratings(4)
    ids = {"user_ids": np.arange(NUM_USERS), "item_ids": np.arange(NUM_ITEMS)}
    ratings = from_events(users, items, values, **ids)
    kept, held_out = hold_out(ratings, 0.1, seed=0)
    assert held_out.num_ratings == round(0.1 * ratings.num_ratings)
    np.testing.assert_array_equal(dense(kept) + dense(held_out), dense(ratings))
    again, _ = hold_out(ratings, 0.1, seed=0)
    np.testing.assert_array_equal(again.items, kept.items)
    single = from_events(np.arange(9), np.arange(9), np.ones(9), **ids)
    assert hold_out(single, 0.5, seed=0)[1].num_ratings == 0


def choose(folder, args="", **values):
    given = {"training_data_file": folder / "ratings.csv", **values}
    return expand_training_options(given)


def test_options_depend_on_the_size_of_the_ratings(folder):
    small = choose(folder)
    assert small["recipe"] == "modern" and small["rows"] == "items"
    assert small["batch_size"] == 8 and small["weight_decay"] == 0.01
    assert small["validation_fraction"] == 0.1
    large = expand_training_options(
        {"recipe": "modern", "data": "generated", "num_users": 60_000, "num_items": 500}
    )
    assert large["rows"] == "users" and large["batch_size"] == 256
    assert large["epochs"] == 14 and large["weight_decay"] == 1e-4
    assert large["input_offset"] == 1 and large["bias_strength"] == 10
    middle = expand_training_options(
        {"recipe": "modern", "data": "generated", "num_users": 5000, "num_items": 2000}
    )
    assert middle["batch_size"] == 64 and middle["weight_decay"] == pytest.approx(5.5e-4)


def test_of_many_ratings_few_are_held_out_for_a_wide_network(folder, monkeypatch):
    counts = Counts(users=6000, items=3700, ratings=900_000)
    monkeypatch.setattr(recipe, "count_file", lambda *_, **__: counts)
    chosen = choose(folder)
    assert chosen["size"] == 256 and choose(folder, rows="users")["size"] == 128
    assert chosen["validation_fraction"] == pytest.approx(30_000 / 900_000, rel=0.01)


def test_given_options_are_kept(folder):
    chosen = choose(folder, batch_size=32, rows="users", weight_decay=0.0)
    assert chosen["batch_size"] == 32 and chosen["weight_decay"] == 0.0
    assert chosen["rows"] == "users" and chosen["input_dropout_rate"] == 0.7
    with_file = choose(folder, validation_data_file=folder / "test.csv")
    assert "validation_fraction" not in with_file
    assert "early_stopping" not in choose(folder, no_validation=True)
    assert "early_stopping" not in choose(folder, validation_fraction=0.0)
    assert choose(folder, data="file") == choose(folder) | {"data": "file"}


@pytest.mark.parametrize(
    "options",
    [
        {"base_learning_rate": -10.0},
        {"detached_refeeding": True},
        {"training_data_file": Path("3m_train.txt.gz")},
        {"recipe": "graphcore"},
        {"data": "random", "training_data_file": None},
    ],
)
def test_options_of_the_reference_choose_its_recipe(folder, options):
    chosen = choose(folder, **options)
    assert chosen["recipe"] == "graphcore" and "subtract_biases" not in chosen


@pytest.mark.parametrize(
    "args",
    [
        "--gradient-clipping --no-selu --no-prng --batches-per-step 20 --loss-scaling 8",
        "--no-dropout",
        "--learning-rate-decay 1,0.1,0.01",
        "--multiprocessing",
        "--select-devices 0 --build-init --logdir logs",
        "--precision 16.16",
    ],
)
def test_ordinary_options_do_not_change_the_recipe(folder, args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = shlex.split(f"--training-data-file {folder}/ratings.csv {args}")
    config, _ = parse(AutoencoderConfig, given, program="x")
    assert config.recipe == "modern" and config.recipe_reason is None
    assert config.data.subtract_biases and config.resolved_batch_size == 8
    for name, value in {
        "no_dropout": config.model.dropout_rate is None,
        "gradient_clipping": config.plan.loss_scaling == 8 and config.model.no_selu,
        "learning_rate_decay": config.training.decay_factors == [1, 0.1, 0.01]
        and not config.training.has_cosine_schedule,
        "multiprocessing": config.early_stopping is None and config.validates_async,
        "precision": config.training.loss_scaling == "dynamic",
    }.items():
        assert value == (f"--{name.replace('_', '-')}" in given), name


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ("--base-learning-rate -14 --size 128 --batch-size 8", "--base-learning-rate"),
        ("--detached-refeeding --size 128 --batch-size 8", "--detached-refeeding"),
        ("", "the file name 3m_train.txt"),
        ("--base-learning-rate -14", "--base-learning-rate and the file name 3m_train.txt"),
    ],
)
def test_what_has_chosen_the_recipe_of_the_reference(folder, tmp_path, args, reason):
    file = tmp_path / ("3m_train.txt" if "file name" in reason else "mine.txt")
    file.write_text((folder / "ratings.csv").read_text())
    given = ["--training-data-file", str(file), *args.split()]
    for chosen, expected in (("auto", reason), ("graphcore", None)):
        config, _ = parse(AutoencoderConfig, [*given, "--recipe", chosen], program="x")
        assert (config.recipe, config.recipe_reason) == ("graphcore", expected)


def test_a_run_says_what_has_chosen_the_recipe_of_the_reference(folder, tmp_path, capsys):
    file = tmp_path / "3m_train.txt"
    file.write_text((folder / "ratings.csv").read_text())
    run = f"train --training-data-file {file} --epochs 0.1 --run-dir {tmp_path}/run"
    ended = command(capsys, run)
    assert ended.status == 0, ended.err
    shown = " ".join(ended.err.split())
    assert "The graphcore recipe is chosen by the file name 3m_train.txt: it has" in shown
    assert "--recipe modern has settings for your own ratings" in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--recipe modern --data random", "random ones have nothing to learn"),
        ("--data generated --input-offset 2", "input_offset needs no_dense_refeeding"),
        ("--data generated --zero-output-layer", "needs untied_decoder"),
        ("--data generated --clip-predictions", "needs subtract_biases"),
        ("--data generated --validation-fraction 0.9", "must be from 0 to 0.5"),
        ("--data generated --bias-strength -1", "bias_strength must be 0 or more"),
    ],
)
def test_a_mistake_is_explained(args, message):
    with pytest.raises(ConfigurationError, match=message):
        parse(AutoencoderConfig, shlex.split(args), program="x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3\n1,2\n", "ratings.csv, line 2"),
        ("1,2,3\n1,3,9\n", "line 2: the rating 9 is not between 0.5 and 5"),
        ("", "is empty"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, capsys, text, message):
    """The recipe reads it before there is a run."""
    (tmp_path / "ratings.csv").write_text(text)
    args = f"train --training-data-file {tmp_path}/ratings.csv --run-dir {tmp_path}/run"
    ended = command(capsys, args)
    assert ended.status == 1 and message in ended.err
    assert len(ended.err.splitlines()) == 1 and ended.err.startswith("millrace: ")


def test_few_ratings_do_not_diverge(tmp_path):
    users, items = np.nonzero(np.random.default_rng(0).random((20, 15)) < 0.5)
    ratings = np.random.default_rng(1).integers(1, 6, len(users))
    result = mr.autoencoder.train(
        data=(users, items, ratings), epochs=10, run_dir=tmp_path / "run", quiet=True
    )
    summary = result.summary
    mean = summary["baselines"]["validation_rmse"]["global mean"]
    assert summary["status"] == "completed" and summary["best"]["value"] < 1.2 * mean


def test_batches_of_few_ratings_have_a_small_learning_rate(folder, monkeypatch):
    def choose_rate(**values):
        return choose(folder, **values)["learning_rate"]

    counts = {"users": 20, "items": 15, "ratings": 150}
    monkeypatch.setattr(recipe, "count_file", lambda *_, **__: Counts(**counts))
    assert choose_rate() == pytest.approx(0.02 * 10 / 100)
    assert choose_rate(batch_size=4) == pytest.approx(0.02 * 40 / 100)
    assert choose_rate(rows="users") == pytest.approx(0.03 * 2 * 7.5 / 100, abs=1e-4)
    assert choose_rate(learning_rate=0.1) == 0.1
    assert choose_rate(objective="ranking") == 1e-3
    counts["ratings"] = 100_000
    assert choose_rate() == 0.02


def test_items_are_liked_from_a_fraction_of_the_scale(folder):
    assert choose(folder)["positive_from"] == 4
    assert choose(folder, rating_range=[0.5, 10.0])["positive_from"] == 8
    assert choose(folder, rating_range=[0.5, 10.0], positive_from=6)["positive_from"] == 6


def test_a_sweep_of_own_ratings_has_the_settings_of_the_recipe(folder):
    words = f"--training-data-file {folder}/ratings.csv --dropout-rates 0.2 0.4"
    config, _ = parse(SweepConfig, words.split(), program="x")
    alone, _ = parse(AutoencoderConfig, words.split()[:2], program="x")
    assert config.recipe == "modern" and config.num_trials == 8
    assert (config.data, config.model) == (alone.data, alone.model)
    assert config.training == alone.training and config.steps_per_log == 40
    assert alone.learning_rate in config.learning_rates
    own = f"{words} --learning-rates 0.1 --batch-size 4 --steps-per-log 3"
    config, _ = parse(SweepConfig, own.split(), program="x")
    assert config.learning_rates == [0.1] and config.resolved_batch_size == 4
    assert config.steps_per_log == 3


@pytest.mark.slow
def test_the_best_of_a_sweep_of_own_ratings_can_be_trained_alone(folder, tmp_path):
    args = f"sweep --training-data-file {folder}/ratings.csv --epochs 2 --quiet "
    args += "--learning-rates 1e-4 0.02 --input-offset 0 --weight-decay 1e-4 "
    assert command(None, f"{args}--run-dir {tmp_path}/sweep").status == 0
    best = summary_of(tmp_path / "sweep")["best"]
    assert best["learning_rate"] == 0.02
    args = f"train --config best --config-path {tmp_path}/sweep/best.yml --quiet "
    assert command(None, f"{args}--run-dir {tmp_path}/run").status == 0
    trained = summary_of(tmp_path / "run")
    assert trained["best"]["validation_rmse"] == pytest.approx(best["value"], rel=1e-4)
    assert "linear items" in trained["baselines"]["validation_rmse"]


def test_too_few_ratings_to_hold_out_are_an_error(tmp_path, capsys):
    (tmp_path / "few.txt").write_text("1,2,3\n4,5,4\n")
    args = f"train --training-data-file {tmp_path}/few.txt --run-dir {tmp_path}/run"
    ended = command(capsys, args)
    assert ended.status == 1 and "too few to hold some out" in ended.err


def test_arrays_from_python_are_held_out_as_well(tmp_path):
    users, items, ratings = make_ratings(5)
    result = mr.autoencoder.train(
        data=(users, items, ratings), epochs=2, run_dir=tmp_path / "run", quiet=True
    )
    assert "validation_rmse" in result.summary["best"]
    assert result.model.config.recipe == "modern"


@pytest.mark.parametrize("rows", ["users", pytest.param("items", marks=pytest.mark.slow)])
def test_the_scale_of_the_ratings_does_not_matter(rows, tmp_path):
    users, items, ratings = make_ratings(6)
    held_out = np.random.default_rng(2).random(len(users)) < 0.1
    found = {}
    for scale in (1, 20):
        columns = (users, items, scale * ratings)
        training = tuple(column[~held_out] for column in columns)
        validation = tuple(column[held_out] for column in columns)
        result = mr.autoencoder.train(
            data=training,
            validation_data=validation,
            rating_range=[0.5, 5.0 * scale],
            rows=rows,
            epochs=3,
            run_dir=tmp_path / str(scale),
            quiet=True,
        )
        model = mr.autoencoder.load(
            tmp_path / str(scale), data=training, validation_data=validation
        )
        rated = {item: scale * rating for item, rating in ((1, 4.5), (2, 1.0), (3, 3.0))}
        simple = result.summary["baselines"]["validation_rmse"]
        shown = read_sections(tmp_path / str(scale))["residuals"]
        found[scale] = {
            **{
                name: result.summary["best"][name]
                for name in ("validation_rmse", "validation_mae", "train_rmse")
            },
            **simple,
            **{f"item {item}": rating for item, rating in model.predict(rated).items()},
            **dict(enumerate(rating for _, rating in model.recommend_to(7, top=5))),
            "largest error": shown.edges[-1],
            "liked from": model.config.data.positive_from,
        }
    assert found[1]["validation_rmse"] < found[1]["biases"]
    scaled = {name: value / 20 for name, value in found[20].items()}
    assert scaled == pytest.approx(found[1], rel=2e-4)
