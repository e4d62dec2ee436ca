"""What a run says about its optimizer, and the moving average of its weights."""

import json
import shlex
from typing import Any, NamedTuple

import numpy as np
import pytest
from plain_loop import largest_difference

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.learning import learning_rate_warnings
from millrace.apps.cnn.predictor import load_trained
from millrace.apps.cnn.train import plan_events
from millrace.checkpoint.files import restore_part
from millrace.cli import main
from millrace.config import parse
from millrace.nn.losses import correct_in_top


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A run with a moving average; return its directory."""
    folder = tmp_path_factory.mktemp("ema") / "run"
    words = "--epochs 2 --lr 0.05 --ema 0.9 --clip-norm 5 --quiet --run-dir"
    with pytest.raises(SystemExit) as left:
        main(["cnn", "train", *words.split(), str(folder)])
    assert left.value.code == 0
    return folder


def test_the_header_states_optimizer_peak_rate_schedule_and_decay(averaged):
    facts = json.loads((averaged / "summary.json").read_text())["facts"]
    assert facts["recipe"].startswith("modern: defaults for digits")
    assert facts["optimizer"] == (
        "sgd with Nesterov momentum 0.9, learning rate 0.05 (cosine, 0.4 epochs warmup), "
        "L2 regularization 0.0005, gradients clipped to norm 5, weights averaged with "
        "decay 0.9"
    )


class Unaveraged(NamedTuple):
    """The weights that training updates."""

    params: Any
    optimizer_state: Any = None


@pytest.mark.usefixtures("measured_once")
def test_the_average_is_validated_and_loaded(averaged):
    model = load_trained(averaged)
    (raw,) = restore_part(model.checkpoint, Unaveraged(model.params)).state[:1]
    assert largest_difference(model.params, raw) > 1e-4
    validation = data.load(model.config).validation
    samples = validation[np.arange(len(validation))]
    names, _ = model.predict(samples["image"])
    accuracy = np.mean([int(name) for name in names] == samples["label"])
    events = [json.loads(x) for x in (averaged / "metrics.jsonl").read_text().splitlines()]
    logged = [e["validation_accuracy"] for e in events if "validation_accuracy" in e]
    assert logged[-1] == pytest.approx(accuracy)
    # cnn validate does not know the option, and reads the same weights.
    out = averaged.parent / "validated"
    words = f"--checkpoint-dir {averaged} --latency-calls 0 --quiet --run-dir {out}"
    with pytest.raises(SystemExit) as left:
        main(["cnn", "validate", *words.split()])
    assert left.value.code == 0
    metrics = json.loads((out / "summary.json").read_text())["metrics"]
    assert metrics["validation_accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--base-learning-rate 0.1",
            "The learning rate reaches 1.07. --base-learning-rate is an exponent: 0.1 "
            "means 2^0.1 for each of the 1 samples of a batch. For a learning rate of 0.1, "
            "give --learning-rate 0.1.",
        ),
        (
            "--base-learning-rate 0.1 --batch-size 32",
            "The learning rate reaches 34.3. sgd hardly ever learns with more than 10. "
            "--base-learning-rate is an exponent: 0.1 means 2^0.1 for each of the 32 "
            "samples of a batch. For a learning rate of 0.1, give --learning-rate 0.1.",
        ),
        (
            "--lr-schedule-params '{initial_learning_rate: 0.5}' --batch-size 100",
            "The learning rate reaches 50. sgd hardly ever learns with more than 10. "
            "initial_learning_rate is multiplied by the global batch of 100; "
            "--learning-rate is not.",
        ),
        (
            "--optimizer adamw --lr 0.5",
            "The learning rate reaches 0.5. adamw hardly ever learns with more than 0.1. "
            "Give a smaller --learning-rate.",
        ),
        ("--lr 0.5", None),
    ],
)
def test_an_absurd_learning_rate_is_a_warning(words, message):
    config, _ = parse(CnnConfig, shlex.split(words), program="x")
    warnings = learning_rate_warnings(config, plan_events(config, 1437))
    assert warnings == ([] if message is None else [message])


def test_top_five_counts_labels_among_the_five_largest_logits():
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 6, (200, 12)).astype(np.float32)  # with ties
    labels = rng.integers(0, 12, 200)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :5]
    expected = [label in best for label, best in zip(labels, order, strict=True)]
    np.testing.assert_array_equal(correct_in_top(logits, labels, 5), expected)
