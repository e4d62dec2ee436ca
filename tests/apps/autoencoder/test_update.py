"""Weight updates of the compiled program match NumPy, differentiated by hand."""

import autoencoder_oracle as oracle
import jax
import numpy as np
import pytest

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.model import (
    draw_dropout_masks,
    drop_input_ratings,
    get_known_ratings,
)
from millrace.apps.autoencoder.program import (
    build_model,
    build_program,
    init_weights,
    plan_steps,
)
from millrace.config import build

ITEMS, USERS, UPDATES = 23, 4, 3
RATE = 0.001
FORWARD, MICRO_BATCH = 0, 0  # folded into the key of an update by the runtime


def build_batches(count, *, refed=False):
    """Return sparse batches with padding, as from an infeed, and the dense rows."""
    random = np.random.default_rng(0)
    sparse, dense = [], []
    for _ in range(count):
        rows = np.where(
            random.random((USERS, ITEMS)) < 0.4,
            random.integers(1, 11, (USERS, ITEMS)) / 2,
            0,
        )
        row, item = np.nonzero(rows)
        padding = USERS * ITEMS - len(row)
        sparse.append(
            {
                "user": np.arange(USERS, dtype=np.int32),
                "row": np.append(row, np.full(padding, USERS)).astype(np.int32),
                "item": np.append(item, np.full(padding, 0)).astype(np.int32),
                "value": np.append(rows[row, item], np.zeros(padding)).astype(np.float32),
            }
        )
        dense.append(rows)
    for batch in sparse:
        for name in ("row", "item", "value"):
            batch[name] = batch[name].reshape(USERS, -1)
    if refed:
        empty = {name: np.full_like(a, USERS) for name, a in sparse[0].items()}
        sparse = [
            batch | {"refed": np.full(USERS, is_refed)}
            for each in sparse
            for batch, is_refed in ((each, False), (empty, True))
        ]
    return {n: np.stack([batch[n] for batch in sparse]) for n in sparse[0]}, dense


def run_program(options, chunk):
    """Run updates with the compiled program; return the states before and after."""
    settings = {
        "data": "random", "batch_size": USERS, "size": 128, "precision": "32.32",
        "learning_rate": RATE, "batches_per_step": 1000, "epochs": 1,
    }  # fmt: skip
    config = build(AutoencoderConfig, settings | options)
    model = build_model(config, ITEMS)
    program = build_program(config, model, plan_steps(config, 1000), jax.devices()[0])
    state = program.init(*init_weights(config, model), seed=3)
    before = jax.device_get(state)
    state, info = program.run(state, jax.device_put(chunk, program.chunk_sharding))
    return config, model, before, jax.device_get(state), jax.device_get(info)


def get_key(state, update):
    """Return the key of the only micro-batch of an update."""
    key = jax.random.wrap_key_data(state.key)
    for part in (update, FORWARD, MICRO_BATCH):
        key = jax.random.fold_in(key, part)
    return key


def factors_on_ratings(model, state, update, chunk):
    """Return the factors of input dropout, drawn as in the program."""
    batch = {name: leaf[update] for name, leaf in chunk.items()}
    ones = get_known_ratings(batch | {"value": np.ones_like(batch["value"])})
    seen = drop_input_ratings(model, ones, get_key(state, update))
    rows = np.zeros((USERS + 1, ITEMS))  # padding is in the row past the end
    rows[np.asarray(seen.row), np.asarray(seen.item)] = seen.value
    return rows[:USERS]


def factors_on_codes(model, state, update, num_passes):
    """Return the factors of dropout on the codes, drawn as in the program."""
    kept = draw_dropout_masks(model, get_key(state, update), num_passes, USERS)
    return [1.0 if k is None else np.asarray(k) / (1 - model.dropout_rate) for k in kept]


def as_float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def assert_moved_alike(before, after, expected):
    """Compare the changes of the weights, which are a small part of them."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(after)]
    leaves = (jax.tree.leaves(tree) for tree in (before, after, expected))
    for path, old, new, wanted in zip(paths, *leaves, strict=True):
        moved = np.abs(wanted - old).max()
        error = np.abs(new - wanted).max() / moved
        assert moved > 1e-5 and error < 2e-3, f"{jax.tree_util.keystr(path)}: {error:g}"


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 1e-4},
        {"no_dense_refeeding": True, "weight_decay": 0.0},
        {"untied_decoder": True, "loss_scaling": 1.0},
        {"input_dropout_rate": 0.4, "learning_rate": 1e-4},
        {"input_dropout_rate": 0.4, "no_dense_refeeding": True},
        {"no_selu": True, "no_dropout": True, "optimizer": "SGD", "learning_rate": 1e-4},
    ],
    ids=str,
)
def test_updates_match_the_oracle(options):
    chunk, dense = build_batches(UPDATES)
    config, model, before, after, info = run_program(options, chunk)
    weights = as_float64(before.params)
    velocity = oracle.zeros_like(weights)
    for update, rows in enumerate(dense):
        kept = factors_on_codes(
            model, before, update, 2 if config.training.refeeding == "joint" else 1
        )
        seen = factors_on_ratings(model, before, update, chunk)
        loss, rmse, gradients, _ = oracle.loss_and_gradients(
            weights, rows, kept, config.training.refeeding, active=model.selu, seen=seen
        )
        assert info["loss"][update] == pytest.approx(loss, rel=1e-5)
        assert info["rmse"][update] == pytest.approx(rmse, rel=1e-5)
        weights, velocity = oracle.update(
            weights,
            velocity,
            gradients,
            rate=config.learning_rate,
            decay=config.training.weight_decay,
            momentum=0.9 if config.training.optimizer == "Momentum" else 0.0,
        )
    assert_moved_alike(before.params, after.params, weights)


@pytest.mark.parametrize("hidden", [0.0, 0.4])
def test_detached_refeeding_makes_two_updates_per_batch(hidden):
    chunk, dense = build_batches(2, refed=True)
    options = {"detached_refeeding": True, "untied_decoder": True}
    options |= {"input_dropout_rate": hidden}
    _, model, before, after, info = run_program(options, chunk)
    weights = as_float64(before.params)
    velocity = oracle.zeros_like(weights)
    for number, rows in enumerate(dense):
        for is_refed in (0, 1):
            update = 2 * number + is_refed
            kept = factors_on_codes(model, before, update, 1)
            seen = 1.0 if is_refed else factors_on_ratings(model, before, update, chunk)
            loss, rmse, gradients, output = oracle.loss_and_gradients(
                weights, rows, kept, "none", seen=seen
            )
            assert info["loss"][update] == pytest.approx(loss, rel=1e-4)
            weights, velocity = oracle.update(weights, velocity, gradients, rate=RATE)
            if not is_refed:
                given = rmse
                rows = output  # from the weights before the update, and constant
            assert info["rmse"][update] == pytest.approx(given, rel=1e-4)
    assert_moved_alike(before.params, after.params, weights)
