"""``millrace cnn validate``: throughput, latency and accuracy."""

import json
import logging
import math
import shlex
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from millrace.apps.cnn import data
from millrace.apps.cnn.config.commands import ValidateConfig
from millrace.apps.cnn.inference import command
from millrace.apps.cnn.inference import network as networks
from millrace.apps.cnn.inference.feed import DatasetFeed, build_feed, divide_into_calls
from millrace.apps.cnn.inference.latency import drop_unsupported, latency_figures
from millrace.cli import main
from millrace.config import ConfigurationError, parse
from millrace.distributed import coordination
from millrace.nn import layers
from millrace.nn.folding import SMALL_BATCH
from millrace.program.compiling import deterministic
from millrace.program.step import Weights

# From torchvision, for pixels from 0 to 1.
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


def test_no_training_progress_is_printed(tmp_path, capsys):
    run("--synthetic-data --num-batches 2 --latency-calls 0", tmp_path / "a")
    output = capsys.readouterr().err
    assert "batch_size 1" in output and "\ntime " in output
    assert "update" not in output and "epoch" not in output


def test_latency_calls_are_limited_by_time(tmp_path, monkeypatch):
    monkeypatch.setattr("millrace.apps.cnn.inference.command._MAX_LATENCY_SECONDS", 0.0)
    found = run("--synthetic-data --num-batches 2", tmp_path / "a")
    (result,) = found["results"]
    assert result["latency_calls"] == 1
    assert set(result["latency_ms"]) == {"mean", "p50"}


def test_throughput_and_latency_are_measured_for_each_batch_size(tmp_path, capsys):
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
    output = capsys.readouterr().err
    assert "random: neither checkpoint_dir nor pretrained" in output
    assert "--enable-half-partials has no effect: " in output
    assert "batch 4" in output and "p99.9" in output


@pytest.mark.devices(lambda replicas: replicas)
@pytest.mark.parametrize(
    ("groups", "batch", "replicas", "fused"),
    [
        (1, 1, 1, False),
        (4, SMALL_BATCH, 1, True),
        (4, SMALL_BATCH + 1, 1, False),
        (4, 2 * SMALL_BATCH, 2, True),
    ],
)
def test_a_network_is_compiled_into_one_cuda_graph(
    monkeypatch, groups, batch, replicas, fused
):
    """Except many small batches with depthwise convolutions, which are fused instead."""
    asked = []

    def compile_for(mesh, function, *arguments, preferred, **options):
        asked.append(str(preferred["gpu"]))
        # Neither programs nor autotuning results may come from an earlier process.
        assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == math.inf
        if "CONVOLUTION" in asked[-1]:
            assert preferred["gpu"]["xla_gpu_per_fusion_autotune_cache_dir"] == ""

    monkeypatch.setattr(networks, "compile_for", compile_for)
    shape = jax.ShapeDtypeStruct((batch, 8, 8, 4), np.float32)
    model = [layers.conv("conv", 4, groups=groups)]
    params = {"conv": {"kernel": np.zeros((3, 3, 4 // groups, 4), np.float32)}}
    network = networks.Network(model, Weights(params, {}))
    made = networks.Inference(network, None, shape, num_replicas=replicas)
    made.compile_one()
    made.compile_many(1, 2)
    assert "CONVOLUTION" in asked[0]
    assert ("conv_fusion" if fused else "CONVOLUTION") in asked[1]


def test_deterministic_networks_are_not_graphs(monkeypatch):
    """XLA does not autotune them, and cuDNN cannot record kernels it has not run."""
    asked = []
    monkeypatch.setattr(
        networks, "compile_for", lambda *_, preferred, **__: asked.append(preferred)
    )
    params = {"conv": {"kernel": np.zeros((3, 3, 4, 4), np.float32)}}
    network = networks.Network([layers.conv("conv", 4)], Weights(params, {}))
    shape = jax.ShapeDtypeStruct((1, 8, 8, 4), np.float32)
    with deterministic():
        made = networks.Inference(network, None, shape)
        made.compile_one()
        made.compile_many(1, 2)
    assert asked == [{}, {}]


def test_a_call_for_one_batch_passes_weights_only_on_a_cpu():
    shape = jax.ShapeDtypeStruct((2, 8, 8, 4), np.float32)
    kernel = np.random.default_rng(0).standard_normal((3, 3, 4, 4), np.float32)
    network = networks.Network(
        [layers.conv("conv", 4)], Weights({"conv": {"kernel": kernel}}, {})
    )
    made = networks.Inference(network, lambda images, _: images, shape)
    made.compile_one()
    made.compile_many(1, 2)
    made.place_weights()
    passed = 2 * 8 * 8 * 4 * 4
    if jax.default_backend() == "cpu":
        passed += kernel.nbytes
    assert made.programs["one"].memory_analysis().argument_size_in_bytes == passed
    images = np.random.default_rng(1).standard_normal(shape.shape, np.float32)
    one = made.one(jax.device_put(images, made.batch_sharding))
    many = made.many(jax.device_put(images[None], made.chunk_sharding))
    np.testing.assert_allclose(one, many[1], rtol=1e-6)


@pytest.mark.usefixtures("measured_once")
def test_a_checkpoint_has_the_accuracy_found_in_training(trained, tmp_path):
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


@pytest.mark.usefixtures("measured_once")
def test_processes_that_share_a_pass_add_up_to_its_speed(monkeypatch):
    feed = object.__new__(DatasetFeed)
    feed._config, feed.num_samples = SimpleNamespace(repeat=1), 100
    feed._evaluate = lambda: {"accuracy": 0.5}
    ticks = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(coordination, "broadcast", lambda name, value: value)
    rates = []
    for processes in (1, 4):
        monkeypatch.setattr(coordination, "num_processes", lambda n=processes: n)
        rates.append(feed.run(None).samples_per_second)
    assert rates == [100.0, 25.0]


@pytest.mark.parametrize("folds", [True, False])
def test_batch_norm_is_folded_by_default(folds, tmp_path, monkeypatch):
    seen = []

    class Watched(networks.Inference):
        def __init__(self, network, *arguments, **options):
            seen.append(network)
            super().__init__(network, *arguments, **options)

    monkeypatch.setattr(command, "Inference", Watched)
    words = f"--synthetic-data --num-batches 2 --latency-calls 1 --fold-batch-norm {folds}"
    run(words, tmp_path / "a")
    (network,) = seen
    statistics = [name for name, values in network.weights.model_state.items() if values]
    scales = [name for name, values in network.weights.params.items() if "scale" in values]
    norms = [] if folds else ["conv1_bn", "conv2_bn", "conv3_bn"]
    assert sorted(statistics) == sorted(scales) == norms
    assert ("bias" in network.weights.params["conv1"]) == folds


@pytest.mark.parametrize("where", ["", "--eight-bit-io"])
def test_images_that_are_not_normalized_lose_only_their_mean(where):
    words = "--dataset imagenet --model resnet18 --generated-data --image-size 16"
    found = []
    for normalizes in (True, False):
        config = parsed(f"{words} {where} --normalize-input {normalizes}")
        images = data.load(config.train_config)
        with build_feed(config, images, 2) as feed:
            found.append(np.asarray(images.preprocess(feed.one_batch(), None)))
    (mean, std), bytes_mean = IMAGENET_STATISTICS, np.array((123.68, 116.78, 103.94))
    pixels = 255 * (found[0] * std + mean)
    np.testing.assert_allclose(found[1], pixels - bytes_mean, atol=1e-3)


def test_model_data_and_precision_default_to_those_of_the_run(trained):
    folder, _ = trained
    config = parsed(f"--checkpoint-dir {folder}")
    assert config.train_config.resolved_model == "digits_cnn"
    assert config.precision == "16.32"
    one = next((folder / "checkpoints").glob("update-*"))
    assert parsed(f"--restore-path {one} --precision 32.32").precision == "32.32"


@pytest.mark.devices(4)
def test_generated_data_are_sent_as_bytes_to_several_replicas(tmp_path):
    words = "--model cifar_resnet8 --dataset cifar10 --generated-data --eight-bit-io"
    summary = run(
        f"{words} --batch-size 2 --num-replicas 4 --num-batches 4 --latency-calls 2",
        tmp_path / "a",
    )
    assert summary["device"]["count"] == 4
    assert summary["results"][0]["num_replicas"] == 4


@pytest.mark.parametrize(
    ("batch", "calls"),
    # Values of Graphcore's benchmark for 50,000 images.
    [(1, (50, 1000)), (4, (12, 1041)), (16, (3, 1041)), (64, (1, 781)), (90, (1, 555))],
)
def test_a_pass_is_divided_into_calls_as_in_graphcores_benchmark(batch, calls):
    assert divide_into_calls(50_000 // batch, 1000) == calls


def test_latency_is_reported_in_milliseconds():
    figures = latency_figures([value / 1e3 for value in range(1, 1002)])
    assert figures == pytest.approx({"mean": 501, "p50": 501, "p99": 991, "p99.9": 1000})
    assert latency_figures([]) == {}


@pytest.mark.parametrize(
    ("source", "distinct"),
    # Images generated on the host repeat after 256.
    [("", 6), ("--synthetic-data --num-batches 3", 3), ("--generated-data", 4)],
)
def test_latency_calls_cycle_through_the_batches(
    source, distinct, tmp_path, monkeypatch, request
):
    if not source:
        request.getfixturevalue("measured_once")
    seen = []

    def one(self, images):
        seen.append(np.asarray(images).tobytes())
        return plain(self, images)

    plain = networks.Inference.one
    monkeypatch.setattr(networks.Inference, "one", one)
    found = run(f"--batch-size 64 --latency-calls 99 {source}", tmp_path / "a")
    (result,) = found["results"]
    assert result["latency_calls"] == 99
    assert len(seen) == 100  # with one warmup call
    assert len(set(seen)) == distinct
    assert set(result["latency_ms"]) == {"mean", "p50"}


def test_latency_can_be_turned_off(tmp_path):
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
def test_percentiles_need_enough_calls(calls, names):
    assert set(drop_unsupported(latency_figures([1.0] * calls), calls)) == names


def test_throughput_is_summed_and_latency_is_the_maximum_over_processes(
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
    output = " ".join(capsys.readouterr().err.split())
    mean = result["latency_ms"]["mean"]
    assert "samples/s in 2 processes (" in output
    assert f"latency of the slowest process in ms, 3 calls: mean {mean:.3f}" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch-size 0", "batch_size must be at least 1, got 0"),
        ("--batch-size 1 --repeat 0", "repeat must be at least 1"),
        ("--latency-calls -1", "latency_calls must be 0 or more"),
        ("--num-batches 3", "num_batches is for synthetic data"),
        ("--checkpoint-dir nowhere", "There is no nowhere"),
        ("--momentum 0.9", "Unknown option --momentum"),
        ("--model resnet --batch-norm --groups 4", "groups is for group norm"),
        ("--resume --run-dir x", "Only training can be resumed"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected(words, message):
    with pytest.raises(ConfigurationError, match=message):
        parsed(words)


def test_a_directory_without_checkpoints_is_an_error(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    run(f"--checkpoint-dir {tmp_path / 'empty'}", tmp_path / "a", status=2)
    assert "There are no checkpoints in" in capsys.readouterr().err


def test_logits_that_are_not_finite_are_an_error(tmp_path, capsys, monkeypatch):
    def broken(*arguments):
        weights, origin = load_weights(*arguments)
        params = jax.tree.map(lambda x: np.full_like(x, np.nan), weights.params)
        return weights._replace(params=params), origin

    load_weights = command.load_weights
    monkeypatch.setattr(command, "load_weights", broken)
    run("--synthetic-data --num-batches 2", tmp_path / "a", status=1)
    assert "logits of the model are not finite" in capsys.readouterr().err


def test_a_batch_that_does_not_fit_names_one_that_does(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "memory_limit", lambda _: 1 << 18)
    words = "--synthetic-data --num-batches 2 --latency-calls 0 --batch-size 64"
    run(words, tmp_path / "a", status=2)
    output = capsys.readouterr().err
    assert "Batch 64 needs" in output and "of 256.0 KiB" in output
    assert "the largest power of two that fits is" in output


@pytest.mark.parametrize(("repeat", "seconds"), [(1, 30), (3, 10), (10, 3), (100, 3)])
@pytest.mark.parametrize("data_from", ["--synthetic-data", "--generated-data"])
def test_measurements_share_thirty_seconds(repeat, seconds, data_from):
    config = parsed(
        f"--model resnet --dataset imagenet --image-size 32 {data_from} --repeat {repeat}"
    )
    images = data.load(config.train_config)
    with build_feed(config, images, 1) as feed:
        assert feed._max_seconds == seconds


@pytest.mark.parametrize(
    ("pass_seconds", "passes", "how"),
    [
        ([0.125] * 9, 5, "stable after 0.6 s"),
        ([0.03125] * 99, 20, "stable after 0.6 s"),  # four passes make a block
        ([8.0, 12.0] * 9, 4, "±11.5% after 40.0 s"),
        ([40.0, 40.0], 1, "one measurement of 40.0 s"),
    ],
)
def test_real_data_are_measured_in_whole_passes_until_the_figure_is_stable(
    pass_seconds, passes, how, monkeypatch
):
    def evaluate():
        now[0] += pass_seconds[done[0]]
        done[0] += 1
        return {"accuracy": 0.5}

    now, done = [100.0], [0]
    config = parsed("--batch-size 64")
    monkeypatch.setattr(
        "millrace.apps.cnn.inference.feed.time.perf_counter", lambda: now[0]
    )
    with build_feed(config, data.load(config.train_config), 64) as feed:
        monkeypatch.setattr(feed, "_evaluate", evaluate)
        measured = feed.run(None)
    assert (done[0], measured.how) == (passes, how)
    assert measured.metrics == {"accuracy": 0.5}
    expected = 360 * passes / sum(pass_seconds[:passes])
    assert measured.samples_per_second == pytest.approx(expected)
