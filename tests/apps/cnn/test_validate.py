"""``millrace cnn validate``: throughput, latency, accuracy."""

import json
import logging
import math
import shlex

import jax
import numpy as np
import pytest

from millrace.apps.cnn import data
from millrace.apps.cnn.config.inference import ValidateConfig
from millrace.apps.cnn.inference import command
from millrace.apps.cnn.inference import network as networks
from millrace.apps.cnn.inference.feed import calls_of, feed_of
from millrace.apps.cnn.inference.latency import latency_figures, supported_figures
from millrace.cli import main
from millrace.config import ConfigurationError, parse
from millrace.distributed import coordination
from millrace.nn import layers
from millrace.nn.folding import SMALL_BATCH
from millrace.program.compiling import deterministic

# As torchvision has them, of pixels from 0 to 1.
IMAGENET_STATISTICS = np.array([(0.485, 0.456, 0.406), (0.229, 0.224, 0.225)])


@pytest.fixture(autouse=True)
def kept_logger():
    logger = logging.getLogger("millrace")
    kept = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = kept


def run(words, folder, *, status=0, verb="validate"):
    with pytest.raises(SystemExit) as left:
        main(["cnn", verb, *shlex.split(words), "--run-dir", str(folder)])
    assert left.value.code == status
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


def parsed(words):
    return parse(ValidateConfig, shlex.split(words), program="x")[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    logger = logging.getLogger("millrace")
    kept = logger.handlers, logger.level, logger.propagate
    words = "--config digits_demo --num-epochs 1 --precision 16.32"
    summary = run(words, folder, verb="train")
    logger.handlers, logger.level, logger.propagate = kept
    return folder, summary


def test_what_trains_nothing_says_no_update_and_no_epoch(tmp_path, capsys):
    run("--synthetic-data --num-batches 2 --latency-calls 0", tmp_path / "a")
    said = capsys.readouterr().err
    assert "batch_size 1" in said and "\ntime " in said
    assert "update" not in said and "epoch" not in said


def test_a_slow_network_is_called_for_half_a_minute_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr("millrace.apps.cnn.inference.command._LATENCY_SECONDS", 0.0)
    found = run("--synthetic-data --num-batches 2", tmp_path / "a")
    (result,) = found["results"]
    assert result["latency_calls"] == 1
    assert set(result["latency_ms"]) == {"mean", "p50"}


def test_each_batch_size_has_its_throughput_and_its_latency(tmp_path, capsys):
    words = "--synthetic-data --batch-size 2 4 --repeat 3 --num-batches 8"
    summary = run(f"{words} --enable-half-partials", tmp_path / "a")
    assert summary["status"] == "completed"
    assert [result["batch_size"] for result in summary["results"]] == [2, 4]
    for result in summary["results"]:
        assert len(result["samples_per_second"]) == 3
        assert result["latency_calls"] == 1000
        latency = result["latency_ms"]
        assert 0 < latency["p50"] <= latency["p99"] <= latency["p99.9"]
        assert result["compile_seconds"] > 0 and result["memory_bytes"] > 0
    events = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    assert len(events) == 6
    said = capsys.readouterr().err
    assert "random: neither checkpoint_dir nor pretrained" in said
    assert "--half-partials changes nothing here" in said
    assert "batch 4" in said and "p99.9" in said


@pytest.mark.devices(lambda replicas: replicas)
@pytest.mark.parametrize(
    ("groups", "batch", "replicas", "joined"),
    [
        (1, 1, 1, False),
        (4, SMALL_BATCH, 1, True),
        (4, SMALL_BATCH + 1, 1, False),
        (4, 2 * SMALL_BATCH, 2, True),
    ],
)
def test_a_network_is_compiled_for_one_cuda_graph(
    monkeypatch, groups, batch, replicas, joined
):
    """But many small ones through depthwise convolutions, joined with their bias."""
    asked = []

    def compile_for(mesh, function, *arguments, preferred, **options):
        asked.append(str(preferred["gpu"]))
        # Neither the program nor what XLA timed may come from an earlier process.
        assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == math.inf
        if "CONVOLUTION" in asked[-1]:
            assert preferred["gpu"]["xla_gpu_per_fusion_autotune_cache_dir"] == ""

    monkeypatch.setattr(networks, "compile_for", compile_for)
    shape = jax.ShapeDtypeStruct((batch, 8, 8, 4), np.float32)
    model = [layers.conv("conv", 4, groups=groups)]
    params = {"conv": {"kernel": np.zeros((3, 3, 4 // groups, 4), np.float32)}}
    network = networks.Network(model, params, {})
    made = networks.Inference(network, None, shape, num_replicas=replicas)
    made.compile_one()
    made.compile_many(1, 2)
    assert "CONVOLUTION" in asked[0]
    assert ("conv_fusion" if joined else "CONVOLUTION") in asked[1]


def test_deterministic_networks_are_no_graphs(monkeypatch):
    """XLA times nothing for them, and cuDNN cannot record what it has never run."""
    asked = []
    monkeypatch.setattr(
        networks, "compile_for", lambda *_, preferred, **__: asked.append(preferred)
    )
    params = {"conv": {"kernel": np.zeros((3, 3, 4, 4), np.float32)}}
    network = networks.Network([layers.conv("conv", 4)], params, {})
    shape = jax.ShapeDtypeStruct((1, 8, 8, 4), np.float32)
    with deterministic():
        made = networks.Inference(network, None, shape)
        made.compile_one()
        made.compile_many(1, 2)
    assert asked == [{}, {}]


def test_a_call_for_one_batch_hands_over_nothing_but_the_batch():
    shape = jax.ShapeDtypeStruct((2, 8, 8, 4), np.float32)
    kernel = np.random.default_rng(0).standard_normal((3, 3, 4, 4), np.float32)
    network = networks.Network([layers.conv("conv", 4)], {"conv": {"kernel": kernel}}, {})
    made = networks.Inference(network, lambda images, _: images, shape)
    made.compile_one()
    made.compile_many(1, 2)
    made.place_weights()
    assert (
        made.programs["one"].memory_analysis().argument_size_in_bytes == 2 * 8 * 8 * 4 * 4
    )
    images = np.random.default_rng(1).standard_normal(shape.shape, np.float32)
    one = made.one(jax.device_put(images, made.batch_sharding))
    many = made.many(jax.device_put(images[None], made.chunk_sharding))
    np.testing.assert_allclose(one, many[1], rtol=1e-6)


def test_a_run_s_checkpoint_is_as_accurate_as_training_said(trained, tmp_path):
    folder, training = trained
    expected = training["metrics"]["validation_accuracy"]
    replicas = min(2, jax.device_count())
    for extra in ("", "--fold-batch-norm False", f"--num-replicas {replicas}"):
        found = run(
            f"--checkpoint-dir {folder} --batch-size 64 --latency-calls 2 {extra}",
            tmp_path / f"run{len(extra)}",
        )
        assert found["metrics"]["validation_accuracy"] == pytest.approx(expected, abs=5e-3)
        assert found["results"][0]["accuracy"] == found["metrics"]["validation_accuracy"]


@pytest.mark.parametrize("folds", [True, False])
def test_what_is_run_has_its_batch_norm_folded_unless_told_not_to(
    folds, tmp_path, monkeypatch
):
    seen = []

    class Watched(networks.Inference):
        def __init__(self, network, *arguments, **options):
            seen.append(network)
            super().__init__(network, *arguments, **options)

    monkeypatch.setattr(command, "Inference", Watched)
    words = f"--synthetic-data --num-batches 2 --latency-calls 1 --fold-batch-norm {folds}"
    run(words, tmp_path / "a")
    (network,) = seen
    statistics = [name for name, values in network.model_state.items() if values]
    scales = [name for name, values in network.params.items() if "scale" in values]
    norms = [] if folds else ["conv1_bn", "conv2_bn", "conv3_bn"]
    assert sorted(statistics) == sorted(scales) == norms
    assert ("bias" in network.params["conv1"]) == folds


@pytest.mark.parametrize("where", ["", "--eight-bit-io"])
def test_pictures_that_are_not_normalized_only_lose_their_mean(where):
    words = "--dataset imagenet --model resnet18 --generated-data --image-size 16"
    found = []
    for normalizes in (True, False):
        config = parsed(f"{words} {where} --normalise-input {normalizes}")
        images = data.load(config.training)
        with feed_of(config, images, 2) as feed:
            found.append(np.asarray(images.prepare(feed.one_batch(), None)))
    (mean, std), bytes_mean = IMAGENET_STATISTICS, np.array((123.68, 116.78, 103.94))
    pixels = 255 * (found[0] * std + mean)
    np.testing.assert_allclose(found[1], pixels - bytes_mean, atol=1e-3)


def test_network_data_and_precision_are_the_run_s_unless_given(trained):
    folder, _ = trained
    config = parsed(f"--checkpoint-dir {folder}")
    assert config.training.resolved_model == "digits_cnn"
    assert config.precision == "16.32"
    one = next((folder / "checkpoints").glob("update-*"))
    assert parsed(f"--restore-path {one} --precision 32.32").precision == "32.32"


@pytest.mark.devices(4)
def test_data_from_the_host_travel_as_bytes_over_several_replicas(tmp_path):
    words = "--model cifar_resnet8 --dataset cifar10 --generated-data --eight-bit-io"
    summary = run(
        f"{words} --batch-size 2 --num-replicas 4 --num-batches 4 --latency-calls 2",
        tmp_path / "a",
    )
    assert summary["device"]["count"] == 4
    assert summary["results"][0]["num_replicas"] == 4


@pytest.mark.parametrize(
    ("batch", "calls"),
    # As the reference has it for 50,000 pictures.
    [(1, (50, 1000)), (4, (12, 1041)), (16, (3, 1041)), (64, (1, 781)), (90, (1, 555))],
)
def test_a_pass_is_divided_into_calls_as_in_the_reference(batch, calls):
    assert calls_of(50_000 // batch, 1000) == calls


def test_latency_is_reported_in_milliseconds():
    figures = latency_figures([value / 1e3 for value in range(1, 1002)])
    assert figures == pytest.approx({"mean": 501, "p50": 501, "p99": 991, "p99.9": 1000})
    assert latency_figures([]) == {}


@pytest.mark.parametrize(
    ("pictures", "distinct"),
    # Those that the host makes up repeat after 256 pictures.
    [("", 6), ("--synthetic-data --num-batches 3", 3), ("--generated-data", 4)],
)
def test_latency_is_of_as_many_calls_as_asked_for_round_over_the_batches(
    pictures, distinct, tmp_path, monkeypatch
):
    seen = []

    def one(self, images):
        seen.append(np.asarray(images).tobytes())
        return plain(self, images)

    plain = networks.Inference.one
    monkeypatch.setattr(networks.Inference, "one", one)
    found = run(f"--batch-size 64 --latency-calls 99 {pictures}", tmp_path / "a")
    (result,) = found["results"]
    assert result["latency_calls"] == 99
    assert len(seen) == 100  # one to warm up
    assert len(set(seen)) == distinct
    assert set(result["latency_ms"]) == {"mean", "p50"}


def test_latency_is_left_out_where_it_is_not_asked_for(tmp_path):
    words = "--synthetic-data --num-batches 2 --latency-calls 0"
    assert run(words, tmp_path / "a")["results"][0]["latency_ms"] == {}


@pytest.mark.parametrize(
    ("calls", "names"),
    [
        (99, {"mean", "p50"}),
        (100, {"mean", "p50", "p99"}),
        (999, {"mean", "p50", "p99"}),
        (1000, {"mean", "p50", "p99", "p99.9"}),
    ],
)
def test_percentiles_that_few_calls_say_nothing_about_are_left_out(calls, names):
    assert set(supported_figures(latency_figures([1.0] * calls), calls)) == names


def test_speeds_of_processes_are_added_up_and_the_longest_latency_is_told(
    tmp_path, capsys, monkeypatch
):
    def gather(name, value):
        if name == "latency":
            return [value, {kind: 2 * figure for kind, figure in value.items()}]
        return [value, 3 * value] if name == "rate" else [value]

    monkeypatch.setattr(coordination, "gather", gather)
    words = "--synthetic-data --num-batches 2 --repeat 2 --latency-calls 3"
    summary = run(words, tmp_path / "a")
    (result,) = summary["results"]
    first, second = result["samples_per_second_of_each"]
    assert second == pytest.approx([3 * speed for speed in first])
    expected = [4 * speed for speed in first]
    assert result["samples_per_second"] == pytest.approx(expected)
    assert summary["samples_per_second"] == pytest.approx(np.median(expected))
    events = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    reported = [json.loads(event)["samples_per_second"] for event in events]
    assert reported == pytest.approx(expected)
    said = " ".join(capsys.readouterr().err.split())
    mean = result["latency_ms"]["mean"]
    assert "samples/s in 2 processes (" in said
    assert f"latency of the slowest process in ms, 3 calls: mean {mean:.3f}" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--batch-size 0", "batch_size must be at least 1, got 0"),
        ("--batch-size 1 --repeat 0", "repeat must be at least 1"),
        ("--latency-calls -1", "latency_calls must be 0 or more"),
        ("--num-batches 3", "num_batches is for synthetic data"),
        ("--checkpoint-dir nowhere", "there is no nowhere"),
        ("--momentum 0.9", "Unknown option --momentum"),
        ("--model resnet --batch-norm --groups 4", "groups is about group norm"),
        ("--resume --run-dir x", "resume is for training"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(words, said):
    with pytest.raises(ConfigurationError, match=said):
        parsed(words)


def test_a_directory_without_checkpoints_is_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    run(f"--checkpoint-dir {tmp_path / 'empty'}", tmp_path / "a", status=2)
    assert "There are no checkpoints in" in capsys.readouterr().err


def test_logits_that_are_not_finite_are_not_passed_over(tmp_path, capsys, monkeypatch):
    def broken(*arguments):
        params, model_state, about = weights_of(*arguments)
        return jax.tree.map(lambda x: np.full_like(x, np.nan), params), model_state, about

    weights_of = command.weights_of
    monkeypatch.setattr(command, "weights_of", broken)
    run("--synthetic-data --num-batches 2", tmp_path / "a", status=1)
    assert "logits are not finite" in capsys.readouterr().err


def test_a_batch_too_large_for_memory_says_what_would_fit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "memory_limit", lambda _: 1 << 18)
    words = "--synthetic-data --num-batches 2 --latency-calls 0 --batch-size 64"
    run(words, tmp_path / "a", status=2)
    said = capsys.readouterr().err
    assert "Batch 64 needs" in said and "of 256.00 KiB" in said
    assert "the largest power of two that fits is" in said
