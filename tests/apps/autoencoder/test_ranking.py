"""The objective ranking: its loss, its metrics, and what commands make of its models."""

import csv
import json
import shlex
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autoencoder_oracle import Pass, selu_slope, zeros_like
from autoencoder_runs import command, dense, events_of, summary_of
from jax import export

import millrace as mr
from millrace.apps.autoencoder.baselines import (
    binarize,
    find_better,
    fit_linear_items,
    score_ranking_baselines,
)
from millrace.apps.autoencoder.config import AutoencoderConfig, recipe
from millrace.apps.autoencoder.config.commands import SweepConfig
from millrace.apps.autoencoder.config.recipe import expand_training_options
from millrace.apps.autoencoder.data import RatingData
from millrace.apps.autoencoder.loss import build_loss
from millrace.apps.autoencoder.metrics import RankingOptions
from millrace.apps.autoencoder.model import (
    Model,
    get_known_ratings,
    init_params,
    split_liked,
)
from millrace.apps.autoencoder.ranking import (
    NETWORK_WEIGHTS,
    Scorer,
    choose_network_weight,
    measure_ranking,
)
from millrace.config import ConfigurationError, parse
from millrace.data.ratings.counts import Counts
from millrace.data.ratings.generated import random_ratings
from millrace.data.ratings.matrix import from_events
from millrace.report.sections import read_sections

NUM_USERS, NUM_ITEMS = 160, 60
TOP = (3, 10, 100)


def make_events(seed=0):
    """Return users, items and ratings: users rate, and like, items of their own kind."""
    random = np.random.default_rng(seed)
    kinds = random.integers(0, 4, NUM_USERS)[:, None] == np.arange(NUM_ITEMS) % 4
    users, items = np.nonzero(random.random(kinds.shape) < np.where(kinds, 0.7, 0.12))
    noise = random.integers(-1, 2, len(users))
    return users, items, np.where(kinds[users, items], 4, 2) + noise


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranking")
    users, items, ratings = make_events()
    part = np.random.default_rng(1).random(len(users))
    ranges = {"train": (0, 0.7), "valid": (0.7, 0.85), "test": (0.85, 1)}
    for name, (low, high) in ranges.items():
        mask = (low <= part) & (part < high)
        chosen = zip(users[mask], items[mask], ratings[mask], strict=True)
        lines = [f"u{user},{item},{rating}\n" for user, item, rating in chosen]
        (folder / f"{name}.csv").write_text("".join(lines))
    return folder


def train_args(folder, extra=""):
    files = f"--training-data-file {folder}/train.csv "
    files += f"--validation-data-file {folder}/valid.csv "
    files += f"--test-data-file {folder}/test.csv"
    return f"train {files} --objective ranking --quiet {extra}"


@pytest.fixture(scope="module")
def trained(folder):
    args = train_args(folder, f"--epochs 12 --top 5 10 --run-dir {folder}/run")
    assert command(None, args).status == 0
    return folder / "run"


def make_batch(num_users=6, num_items=30):
    """Users with 1 to 6 ratings each, and three entries of padding."""
    random = np.random.default_rng(0)
    row = np.repeat(np.arange(num_users), np.arange(1, num_users + 1) * 2)
    item = np.concatenate(
        [random.permutation(num_items)[: 2 * n + 2] for n in range(num_users)]
    )
    value = random.integers(1, 6, len(row))
    padded = {
        "row": np.append(row, [num_users] * 3),
        "item": np.append(item, [0, 1, 2]),
        "value": np.append(value, [5, 5, 5]),
    }
    batch = {name: jnp.asarray(x, jnp.int32) for name, x in padded.items()}
    batch["value"] = jnp.asarray(padded["value"], float)
    return batch | {"user": jnp.arange(num_users)}


def expect_loss(model, params, batch, key):
    """Return the loss and the gradients by NumPy, in float64."""
    num_users = len(batch["user"])
    known = get_known_ratings(batch)
    liked = split_liked(model, known, num_users, key)
    seen, target = (np.zeros((num_users, model.num_items)) for _ in range(2))
    row, item, value = (np.asarray(x) for x in known)
    is_liked = (value >= model.positive_from) & (row < num_users)
    is_input = np.asarray(liked.is_input)
    is_target = is_liked & ~is_input if model.input_dropout_rate else is_liked
    assert not (is_input & ~is_liked).any()
    seen[row[is_input], item[is_input]] = 1
    target[row[is_target], item[is_target]] = 1
    norm = np.maximum(np.sqrt(seen.sum(1, keepdims=True)), 1)
    weights = jax.tree.map(np.asarray, params)
    network = Pass(weights, seen / norm)
    logits = network.sums[-1]  # the last layer has no activation
    is_candidate = seen == 0 if model.input_dropout_rate else np.ones_like(seen, bool)
    shares = np.where(is_candidate, np.exp(logits), 0)
    shares /= shares.sum(1, keepdims=True)
    count = target.sum(1)
    by_user = target / np.maximum(count, 1)[:, None]
    num_ranked = max(1, (count > 0).sum())
    logs = np.log(np.where(by_user > 0, shares, 1))
    loss = -(by_user * logs).sum() / num_ranked
    slope = ((count > 0)[:, None] * shares - by_user) / num_ranked
    gradients = zeros_like(weights)
    # The oracle multiplies by the derivative of the last activation: take it out.
    network.backward(slope / selu_slope(network.sums[-1]), gradients)
    return loss, gradients


@pytest.mark.parametrize("hidden", [0.5, 0.0])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_loss_and_its_gradients_match_numpy(platform, hidden):
    model = Model(
        30, 128, 0.0, tied=False, linear_output=True,
        input_dropout_rate=hidden, positive_from=3.0,
    )  # fmt: skip
    with jax.enable_x64(True):
        params = init_params(model, jax.random.key(1))
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        key, batch = jax.random.fold_in(jax.random.key(2), 3), make_batch()
        loss_fn = build_loss(model, "none", platform=platform)
        both = jax.value_and_grad(lambda p: loss_fn(p, None, batch, key), has_aux=True)
        (loss, _), found = jax.jit(both)(params)
        expected, gradients = expect_loss(model, params, batch, key)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7),
        found,
        gradients,
    )


def expect_metrics(scores, rows, targets, k, relevant_from=4):
    """Return the metrics at k as RecBole defines them, one user at a time."""
    lists, found, num_users = [], [], len(rows)
    popularity = (rows != 0).sum(0)
    for row, later, score in zip(rows, targets, scores, strict=True):
        relevant = set(np.flatnonzero((later >= relevant_from) & (row == 0)))
        if not relevant:
            continue
        ranked = [i for i in np.argsort(-score, kind="stable") if row[i] == 0][:k]
        hits = [item in relevant for item in ranked]
        places = [place for place, hit in enumerate(hits, 1) if hit]
        best = sum(1 / np.log2(n + 2) for n in range(min(k, len(relevant))))
        precisions = [(n + 1) / place for n, place in enumerate(places)]
        novelty = np.log2(num_users / np.maximum(popularity[ranked], 1))
        found.append(
            {
                "recall": len(places) / len(relevant),
                "ndcg": sum(1 / np.log2(place + 1) for place in places) / best,
                "precision": len(places) / k,
                "hit_rate": float(bool(places)),
                "mrr": 1 / places[0] if places else 0.0,
                "map": sum(precisions) / min(k, len(relevant)),
                "popularity": popularity[ranked].mean(),
                "novelty": novelty.mean(),
            }
        )
        lists.append(ranked)
    means = {f"{n}_at_{k}": np.mean([own[n] for own in found]) for n in found[0]}
    covered = len(set().union(*lists)) / rows.shape[1]
    return means | {f"coverage_at_{k}": covered}


@pytest.mark.parametrize("batch_size", [8, 53])
def test_metrics_match_numpy_on_a_dataset_that_does_not_divide(batch_size):
    known = random_ratings(53, 40, 500, seed=0)
    targets = random_ratings(53, 40, 150, seed=1)
    scores = np.random.default_rng(2).standard_normal((53, 40)).astype(np.float32)
    scorer = Scorer(lambda weights, rows, users: weights[users], scores)
    options = RankingOptions(TOP, 4.0)
    found = measure_ranking(scorer, known, targets, options, batch_size, jax.devices()[0])
    rows, later = dense(known), dense(targets)
    users = (later != 0).any(1)
    for k in TOP:
        expected = expect_metrics(scores[users], rows[users], later[users], k)
        # Popularity and novelty are those among all users.
        whole = expect_metrics(scores, rows, later, k)
        expected |= {n: whole[n] for n in whole if n[:4] in ("popu", "nove")}
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-6), name
    assert 0 < found["map_at_3"] < found["hit_rate_at_3"] < 1


def test_simple_rankings_match_numpy():
    users, items, values = make_events(3)
    is_known = np.random.default_rng(4).random(len(users)) < 0.8
    ids = {"user_ids": np.arange(NUM_USERS), "item_ids": np.arange(NUM_ITEMS)}
    known, later = (
        from_events(users[mask], items[mask], values[mask], **ids)
        for mask in (is_known, ~is_known)
    )
    device, options = jax.devices()[0], RankingOptions((10,), 4.0)
    linear = fit_linear_items(known, later, 4.0, device)
    found = score_ranking_baselines(RatingData(known, later), linear, options, device)
    rows, targets = dense(known), dense(later)
    chosen = (targets != 0).any(1)
    x = (rows >= 4).astype(np.float64)
    np.testing.assert_array_equal(dense(binarize(known, 4.0)), x)

    def ndcg(scores):
        return expect_metrics(scores[chosen], rows[chosen], targets[chosen], 10)

    expected = ndcg(np.broadcast_to(x.sum(0), x.shape))["ndcg_at_10"]
    assert found["validation_ndcg_at_10"]["popularity"] == pytest.approx(expected, rel=1e-5)
    best = 0.0
    for penalty in (100, 250, 500, 1000):
        inverse = np.linalg.inv(x.T @ x + penalty * np.eye(NUM_ITEMS))
        weights = -inverse / np.diag(inverse)
        np.fill_diagonal(weights, 0)
        best = max(best, ndcg(x @ weights)["ndcg_at_10"])
    assert found["validation_ndcg_at_10"]["linear items"] == pytest.approx(best, rel=1e-5)
    assert best > 1.2 * expected


def test_a_run_reports_rankings_next_to_simple_ones(trained):
    summary = summary_of(trained)
    assert summary["status"] == "completed"
    for name in ("recall_at_5", "map_at_10", "coverage_at_10", "novelty_at_5"):
        assert 0 < summary["metrics"][f"test_{name}"]
    simple = summary["baselines"]["test_ndcg_at_10"]
    assert list(simple) == ["popularity", "linear items"]
    reached = summary["metrics"]["test_ndcg_at_10"]
    assert reached > 1.2 * simple["popularity"]
    assert summary["loses_to"] == [
        name for name in simple
        if reached <= simple[name]
        or summary["metrics"]["test_recall_at_10"]
        <= summary["baselines"]["test_recall_at_10"][name]
    ]  # fmt: skip
    best = summary["best"]
    assert best["metric"] == "validation_ndcg_at_10" and best["mode"] == "max"
    values = [e[best["metric"]] for e in events_of(trained) if best["metric"] in e]
    assert best["value"] == max(values)
    assert best["validation_network_weight"] in NETWORK_WEIGHTS
    page = (trained / "report.html").read_text()
    assert "Simple models on the same ratings" in page
    table = read_sections(trained)["baselines"]
    assert table.columns == ["", "popularity", "linear items", "this model"]
    assert "test NDCG@10" in [row[0] for row in table.rows]


def test_validate_agrees_with_the_run(trained, tmp_path, capsys):
    args = f"validate {trained} --top 5 10 --run-dir {tmp_path}/v --quiet"
    ended = command(capsys, args)
    assert ended.status == 0, ended.err
    found, summary = summary_of(tmp_path / "v")["metrics"], summary_of(trained)
    assert "validation_rmse" not in found
    for name, value in summary["ranking"].items():
        assert found[name] == pytest.approx(value, rel=1e-6), name
    best = summary["best"]["value"]
    assert found["validation_ndcg_at_10"] == pytest.approx(best, rel=1e-6)


def test_recommendations_are_ordered_by_score_and_show_popularity(
    folder, trained, tmp_path, capsys
):
    model = mr.autoencoder.load(trained)
    lines = [line.split(",") for line in (folder / "train.csv").read_text().split()]
    own = {int(item): float(rating) for u, item, rating in lines if u == "u3"}
    expected = model.recommend(own, top=4)
    assert [s for _, s in expected] == sorted((s for _, s in expected), reverse=True)
    out = tmp_path / "best.csv"
    args = f"recommend {trained} --user u3 --top 4 --training-data-file {folder}/train.csv"
    ended = command(capsys, f"{args} --out {out}")
    assert ended.status == 0, ended.err
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["item"]) for row in rows] == [item for item, _ in expected]
    for row, (item, score) in zip(rows, expected, strict=True):
        assert float(row["score"]) == pytest.approx(score, abs=1e-3)
        count = sum(int(other) == item for _, other, _ in lines)
        assert int(row["popularity"]) == count
        novelty = np.log2(len({u for u, _, _ in lines}) / count)
        assert float(row["novelty"]) == pytest.approx(novelty, abs=1e-3)
    printed = command(capsys, args).out.splitlines()
    mean = np.mean([int(row["popularity"]) for row in rows])
    assert printed[0].startswith(f"user u3  (mean: {mean:,.0f} ratings, novelty ")
    assert f"({rows[0]['popularity']} ratings" in printed[1]


def test_liked_items_are_enough_to_recommend(trained):
    model = mr.autoencoder.load(trained)
    liked = [1, 5, 9, 13, 17]  # all of the same kind
    found = [item for item, _ in model.recommend(liked, top=6)]
    assert found == [item for item, _ in model.recommend(dict.fromkeys(liked, 5.0), top=6)]
    assert set(found).isdisjoint(liked)
    assert sum(item % 4 == 1 for item in found) >= 5
    with pytest.raises(ValueError, match="as a list or a set"):
        model.recommend("13")


def test_an_export_has_the_scores(trained, tmp_path):
    pytest.importorskip("flatbuffers")
    mr.autoencoder.export(trained, output=tmp_path, format=["stablehlo"])
    facts = json.loads((tmp_path / "config.json").read_text())
    assert facts["objective"] == "ranking" and facts["positive_from"] == 4
    assert "scores" in (tmp_path / "README.md").read_text()
    program = export.deserialize(bytearray((tmp_path / "model.stablehlo").read_bytes()))
    model = mr.autoencoder.load(trained)
    row = np.zeros((1, NUM_ITEMS), np.float32)
    row[0, [1, 5, 9]] = [5, 4, 1]
    expected = model.predict({1: 5.0, 5: 4.0, 9: 1.0})
    np.testing.assert_allclose(
        np.asarray(program.call(row))[0], list(expected.values()), rtol=1e-4, atol=1e-5
    )


def leaves_of(run):
    return jax.tree.leaves(mr.autoencoder.load(run, which="last").params)


def test_a_resumed_run_and_batches_on_the_device_give_the_same_weights(folder, tmp_path):
    short = "--epochs 2 --early-stopping 9 --deterministic"
    assert command(None, train_args(folder, f"{short} --run-dir {tmp_path}/a")).status == 0
    other = f"{short} --data-on-device True --run-dir {tmp_path}/b"
    assert command(None, train_args(folder, other)).status == 0
    for ours, theirs in zip(
        leaves_of(tmp_path / "a"), leaves_of(tmp_path / "b"), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    run = tmp_path / "a"
    kept = sorted((run / "checkpoints").iterdir())
    assert len(kept) == 2
    before = leaves_of(run)
    for path in kept[1:]:
        shutil.rmtree(path)
    assert command(None, f"train --resume {run} --quiet").status == 0
    for ours, theirs in zip(leaves_of(run), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_replicas_give_the_loss_of_one_device(folder, tmp_path):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    losses = []
    for count in (1, 2):
        extra = f"--epochs 1 --num-replicas {count} --input-dropout-rate 0 "
        extra += f"--steps-per-log 1 --run-dir {tmp_path}/{count}"
        assert command(None, train_args(folder, extra)).status == 0
        losses.append(leaves_of(tmp_path / str(count)))
    for ours, theirs in zip(*losses, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)


def test_training_stops_when_ndcg_no_longer_rises(folder, tmp_path):
    extra = f"--epochs 30 --early-stopping 2 --learning-rate 1e-9 --run-dir {tmp_path}/run"
    assert command(None, train_args(folder, extra)).status == 0
    summary = summary_of(tmp_path / "run")
    assert summary["stopped_early"] and summary["best"]["epoch"] == 1
    values = [e["validation_ndcg_at_10"] for e in events_of(tmp_path / "run")
              if "validation_ndcg_at_10" in e]  # fmt: skip
    assert len(values) == 3


def test_a_ranking_that_loses_says_so(folder, tmp_path, capsys):
    """Without learning, a last layer of zeros ranks by popularity."""
    extra = f"--epochs 1 --learning-rate 1e-9 --recipe graphcore --run-dir {tmp_path}/run "
    extra += (
        "--size 128 --batch-size 16 --precision 32.32 --untied-decoder --zero-output-layer"
    )
    ended = command(capsys, train_args(folder, extra))
    assert ended.status == 0, ended.err
    assert "does not rank better than popularity" in ended.err
    assert find_better(0.2, {"a": 0.2, "b": 0.1}, "max") == ["a"]


def test_the_best_weight_of_the_network_is_chosen():
    means = {"has_relevant": 0.5, "is_finite": 1.0}
    for number in range(len(NETWORK_WEIGHTS)):
        means |= {f"ndcg_{number}": 0.1 + 0.01 * (number == 3), f"recall_{number}": 0.2}
    assert choose_network_weight(means) == {
        "ndcg_at_10": pytest.approx(0.22),
        "recall_at_10": pytest.approx(0.4),
        "network_weight": NETWORK_WEIGHTS[3],
    }
    diverged = choose_network_weight(means | {"is_finite": 0.99})
    assert np.isnan(diverged["ndcg_at_10"])


def test_the_recipe_of_a_ranking(folder, monkeypatch):
    given = {"training_data_file": folder / "train.csv", "objective": "ranking"}
    chosen = expand_training_options(given)
    assert chosen["rows"] == "users" and chosen["optimizer"] == "Adam"
    assert chosen["batch_size"] == 16 and "subtract_biases" not in chosen
    large = expand_training_options(
        {"objective": "ranking", "data": "generated", "num_users": 60_000}
    )
    assert large["batch_size"] == 256 and large["epochs"] == 10
    counts = Counts(100, 50, 2000, implicit=True)
    monkeypatch.setattr(recipe, "count_file", lambda *_, **__: counts)
    assert expand_training_options(given)["positive_from"] == 1
    example = AutoencoderConfig.expand_options({"objective": "ranking"})
    assert example["data"] == "generated" and example["optimizer"] == "Adam"
    assert example["recipe"] == "modern" and example["num_users"] == 2000


@pytest.mark.parametrize(
    ("config", "args", "message"),
    [
        (AutoencoderConfig, "--subtract-biases", "subtract_biases is for the objective"),
        (AutoencoderConfig, "--rows items", "needs rows of users"),
        (AutoencoderConfig, "--positive-from 6", r"positive_from \(6\) is above"),
        (AutoencoderConfig, "--input-offset 2", "input_offset is for the objective"),
        (AutoencoderConfig, "--detached-refeeding", "detached_refeeding is for"),
        (AutoencoderConfig, "--top 5 5", "different lengths of at least 1"),
        (SweepConfig, "", "a sweep predicts ratings"),
    ],
)
def test_a_mistake_is_explained(config, args, message):
    args = f"--data generated --objective ranking {args}"
    with pytest.raises(ConfigurationError, match=message):
        parse(config, shlex.split(args), program="x")


def test_ratings_without_a_liked_item_are_an_error(tmp_path, capsys):
    lines = [f"{user},{item},2\n" for user in range(30) for item in range(user % 9 + 2)]
    (tmp_path / "low.csv").write_text("".join(lines))
    args = f"train --training-data-file {tmp_path}/low.csv --objective ranking "
    ended = command(capsys, f"{args} --run-dir {tmp_path}/run")
    assert ended.status == 1
    assert "No training rating is 4 or more" in ended.err and "--positive-from" in ended.err


@pytest.mark.parametrize("later", ["1,99,3", "1,1,5"])
def test_later_ratings_without_an_item_to_find_are_an_error(tmp_path, capsys, later):
    lines = [f"{user},{item},5\n" for user in range(30) for item in range(user % 9 + 2)]
    (tmp_path / "train.csv").write_text("".join(lines) + "2,99,4\n")
    (tmp_path / "later.csv").write_text(f"{later}\n")
    args = f"train --training-data-file {tmp_path}/train.csv --objective ranking "
    for role in ("validation", "test"):
        given = f"--{role}-data-file {tmp_path}/later.csv --run-dir {tmp_path}/{role}"
        ended = command(capsys, f"{args} {given}")
        assert ended.status == 1
        assert f"No {role} rating is 4 or more for an item" in ended.err
