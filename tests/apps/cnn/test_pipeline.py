"""Pipelines from the command line: resumed, validated, profiled."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import optax
import pytest
import yaml

from millrace.apps.cnn.models import catalog
from millrace.apps.cnn.models.efficientnet import efficientnet
from millrace.apps.cnn.models.spec import EfficientNetShape
from millrace.cli import main
from millrace.loop.progress import TIMED
from millrace.nn.layers import init_layers
from millrace.nn.losses import LayeredLoss, cross_entropy
from millrace.nn.norms import group_norm
from millrace.plan import Plan
from millrace.program.training import training_program

PIPELINE = [
    *("--dataset", "digits", "--micro-batch-size", "8", "--num-epochs", "2"),
    *("--gradient-accumulation-count", "4", "--weight-updates-per-epoch", "3"),
    *("--pipeline-splits", "conv2", "--validation-micro-batch-size", "36"),
]


def train(*words):
    with pytest.raises(SystemExit) as left:
        main(["cnn", "train", *PIPELINE, *words])
    return left.value.code


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipeline") / "run"
    assert train("--run-dir", str(path), "--profile-pipeline") == 0
    return path


def events(run):
    return [
        {k: v for k, v in json.loads(line).items() if k not in TIMED}
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.slow
@pytest.mark.devices(2)
def test_a_resumed_pipeline_gives_the_same_metrics(run, tmp_path):
    other = tmp_path / "run"
    shutil.copytree(run, other)
    newest = max((other / "checkpoints").glob("update-*"))
    assert newest.name.endswith("6")
    shutil.rmtree(newest)
    assert train("--run-dir", str(other), "--profile-pipeline", "--resume") == 0
    assert events(other) == events(run)
    assert events(run)[-1]["update"] == 6


@pytest.mark.devices(2)
def test_the_report_shows_the_measured_pipeline(run):
    page = (run / "report.html").read_text()
    assert "<h2>Pipeline</h2>" in page
    drawn = page[page.index("<h2>Pipeline</h2>") :]
    assert "predicted from median stage times" in drawn and ">measured<" in drawn


@pytest.mark.devices(2)
def test_checkpoints_of_a_pipeline_can_be_validated_without_it(run, tmp_path):
    words = ["--training", "False", "--checkpoint-dir", str(run), "--validate", "last"]
    alone = tmp_path / "alone"
    with pytest.raises(SystemExit) as left:
        main(["cnn", "train", "--dataset", "digits", *words, "--run-dir", str(alone)])
    assert left.value.code == 0
    found = json.loads((alone / "summary.json").read_text())["metrics"]
    before = json.loads((run / "summary.json").read_text())["metrics"]
    assert found["validation_accuracy"] == before["validation_accuracy"]
    assert found["validation_loss"] == pytest.approx(before["validation_loss"], rel=1e-5)


@pytest.mark.devices(2)
def test_a_profiled_pipeline_is_drawn_and_summarized(run):
    assert "predicted" in (run / "pipeline.html").read_text()
    facts = json.loads((run / "summary.json").read_text())["pipeline"]
    assert len(facts["forward_seconds"]) == 2
    assert facts["measured_seconds"] > 0


@pytest.mark.parametrize(
    "mapping", [["0", "0"], pytest.param(["0", "1"], marks=pytest.mark.slow)]
)
def test_a_pipeline_of_convolutions_runs_in_16_bits(mapping, tmp_path):
    assert (
        train(
            *("--device-mapping", *mapping, "--precision", "16.32"),
            *("--eight-bit-transfer", "--accelerator-side-preprocess"),
            *("--num-epochs", "1", "--weight-updates-per-epoch", "1"),
            *("--run-dir", str(tmp_path / "run")),
        )
        == 0
    )


@pytest.mark.devices(2)
def test_shards_without_a_pipeline_take_turns_and_train_the_same(tmp_path):
    words = [
        *("--dataset", "digits", "--micro-batch-size", "8", "--num-epochs", "1"),
        *("--gradient-accumulation-count", "3", "--weight-updates-per-epoch", "2"),
        *("--validation-micro-batch-size", "36", "--recipe", "graphcore"),
    ]
    losses = []
    for name, more in (("plain", []), ("sharded", ["--shards", "2"])):
        path = tmp_path / name
        with pytest.raises(SystemExit) as left:
            main(["cnn", "train", *words, *more, "--run-dir", str(path)])
        assert left.value.code == 0
        losses.append([event["loss"] for event in events(path) if "loss" in event])
    config = yaml.safe_load((tmp_path / "sharded" / "config.yml").read_text())
    assert config["pipeline_schedule"] == "sequential"
    assert config["pipeline_splits"] == [2]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.devices(2)
@pytest.mark.parametrize(
    ("blocks", "split"),
    [
        pytest.param((1, 2), "block2a", id="two blocks"),
        pytest.param(range(1, 8), "block4a", id="all blocks", marks=pytest.mark.slow),
    ],
)
def test_a_pipelined_efficientnet_g16_equals_the_plain_loop(blocks, split):
    """With the splits, norm and blocks of Graphcore's B4, but a block of each kind."""
    norm = functools.partial(group_norm, num_groups=4, epsilon=1e-3)
    shape = EfficientNetShape(0.5, 0.1, 0.0, 32)
    layers = efficientnet(shape, 5, norm, group_dim=16, expand_ratio=4)
    left_out = tuple(f"block{n}a" for n in range(1, 8) if n not in blocks)
    model = [layer for layer in layers if not layer.name.startswith(left_out)]
    rng = np.random.default_rng(0)
    chunk = {
        "image": rng.standard_normal((4, 2, 32, 32, 3)).astype(np.float32),
        "label": rng.integers(0, 5, (4, 2)).astype(np.int32),
    }
    params, model_state = init_layers(model, jax.random.key(0), chunk["image"][0])

    def outputs(logits, batch):
        return cross_entropy(logits, batch["label"]).mean(), {}

    loss = LayeredLoss(model, lambda batch, key: batch["image"], outputs)
    found = []
    for options in ({}, {"pipeline_splits": [split], "recomputation": True}):
        plan = Plan(micro_batch_size=2, gradient_accumulation_count=4, **options)
        splits = catalog.find_split_layers(model, plan.pipeline_splits)
        plan = dataclasses.replace(plan, pipeline_splits=splits)
        program = training_program(loss, optax.rmsprop(1e-3, momentum=0.9), plan)
        state = program.init(params, model_state)
        state, _ = program.run(state, jax.device_put(chunk, program.chunk_sharding))
        found.append(jax.device_get(program.unpack_state(state).params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *found)


@pytest.mark.slow
@pytest.mark.devices(4)
def test_batch_norm_is_shared_between_replicas_in_a_pipeline(tmp_path):
    assert (
        train(
            *("--num-replicas", "2", "--dbn-replica-group-size", "2"),
            *("--model", "cifar_resnet8", "--pipeline-splits", "2"),
            *("--num-epochs", "1", "--weight-updates-per-epoch", "1"),
            *("--run-dir", str(tmp_path / "run")),
        )
        == 0
    )
