"""The commands in Graphcore's README, with ``millrace cnn train`` instead of its script.

The arguments are verbatim. Paths are added, and sizes reduced: 11 updates per epoch are
like the original 781 in that both are odd and not divisible by 10.
"""

import json
import logging
import shlex
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from image_files import write_folders

from millrace.apps.cnn import data, program
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.program import build_norm
from millrace.apps.cnn.train import plan_events
from millrace.cli import main
from millrace.config import ConfigurationError, option_value, parse
from millrace.data import cifar as cifar_files
from millrace.nn.norms import ReplicaGroups
from millrace.program.replicas import REPLICA_AXIS

PER_FILE, UPDATES = 144, 11  # five files: 720 samples, 11 updates of 64

LOGGING = (
    "--model cifar_resnet8 --num-epochs {epochs} --precision 16.16 --micro-batch-size 8 "
    "--validation False --half-partials True --gradient-accumulation 8 "
    "--logs-per-epoch {logs}"
)


@pytest.fixture(autouse=True)
def small_cifar(monkeypatch):
    """Accept files of PER_FILE images as complete."""
    monkeypatch.setattr(cifar_files, "_num_images", lambda name, layout, file: PER_FILE)


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """A small CIFAR-10 in the official format."""
    folder = tmp_path_factory.mktemp("cifar") / "cifar-10-batches-bin"
    folder.mkdir()
    random = np.random.default_rng(0)
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    for name in names:
        pixels = random.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8)
        labels = random.integers(0, 10, PER_FILE, dtype=np.uint8)
        (folder / f"{name}.bin").write_bytes(np.c_[labels, pixels].tobytes())
    return folder


@pytest.fixture
def train(tmp_path, capsys, monkeypatch):
    """Run the command in this process; return its status, output and files."""
    logger = logging.getLogger("millrace")
    kept = logger.handlers, logger.level, logger.propagate
    monkeypatch.chdir(tmp_path)

    def call(words, *added):
        with pytest.raises(SystemExit) as left:
            main(["cnn", "train", *shlex.split(words), "--run-dir", "run", *added])
        run = tmp_path / "run"
        lines = (run / "metrics.jsonl").read_text() if run.exists() else ""
        summary = json.loads((run / "summary.json").read_text()) if run.exists() else None
        return SimpleNamespace(
            status=left.value.code,
            output=capsys.readouterr().err,
            summary=summary,
            events=[json.loads(line) for line in lines.splitlines()],
        )

    yield call
    logger.handlers, logger.level, logger.propagate = kept


def test_the_simplest_command_runs(train):
    ended = train("", "--micro-batch-size", "64")
    assert (ended.status, ended.summary["status"]) == (0, "completed")
    assert "digits_cnn" in ended.output
    assert ended.summary["metrics"]["validation_accuracy"] >= 0


def test_resnet8_from_the_command_line_with_weights_and_biases(train, cifar, monkeypatch):
    logged = []
    session = SimpleNamespace(
        log=lambda values: logged.append((values["update"], values)),
        define_metric=lambda *_, **__: None,
        finish=lambda **_: None,
    )
    opened = []
    wandb = SimpleNamespace(init=lambda **options: opened.append(options) or session)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    words = "--model cifar_resnet8 --wandb --num-epochs 11 --precision 16.16 "
    words += f"--micro-batch-size 32 --dataset-path {cifar}"
    # One update per epoch, so that eleven epochs are fast.
    ended = train(
        words, "--weight-updates-per-epoch", "1", "--validations-per-epoch", "0",
        "--wandb-run-name", "mill", "--wandb-tags", "first", "second",
    )  # fmt: skip
    assert ended.status == 0, ended.output
    assert ended.summary["updates"] == 11
    assert "16.16 (bfloat16)" in ended.output
    assert [step for step, values in logged if "train_loss" in values] == [*range(1, 12)]
    assert (opened[0]["name"], opened[0]["tags"]) == ("mill", ["first", "second"])


@pytest.mark.devices(4)
def test_recomputation_in_a_pipeline_of_four_stages(train, cifar):
    words = (
        "--model-name cifar_resnet8 --pipeline-splits conv2_block1_post_addition_relu "
        "conv3_block1_post_addition_relu conv4_block1_post_addition_relu "
        "--device-mapping 0 1 2 3 --gradient-accumulation-count 8 --recomputation True"
    )
    small = ["--dataset-path", str(cifar), "--weight-updates-per-epoch", "1"]
    small += ["--validation-micro-batch-size", "36"]
    ended = train(words, *small)
    assert (ended.status, ended.summary["status"]) == (0, "completed")
    assert ended.summary["device"]["count"] == 4
    assert "4 stages, grouped, recomputed" in ended.output
    assert 0 <= ended.summary["metrics"]["validation_accuracy"] <= 1


def test_a_pipeline_needs_a_multiple_of_twice_its_stages_as_micro_batches(train, cifar):
    words = "--model-name cifar_resnet8 --pipeline-splits conv3_block1_add "
    words += f"--gradient-accumulation-count 6 --dataset-path {cifar}"
    ended = train(words)
    assert ended.status == 2
    assert "multiple of 4" in ended.output
    assert "Use 4 or 8" in ended.output


@pytest.mark.parametrize(
    ("logs", "epochs", "execution", "executions"),
    [
        ("1", 6, 781, 6),
        ("2", 6, 781, 6),
        ("10", 6, 71, 66),
        ("0.5", 6, 2 * 781, 3),
        ("0.3333333333333333333", 6, 3 * 781, 2),
        ("1/3", 6, 3 * 781, 2),
        ("0", 6, 6 * 781, 1),
    ],
)
def test_cifar_is_divided_into_executions_as_in_the_readme(
    logs, epochs, execution, executions
):
    words = LOGGING.format(epochs=epochs, logs=logs).split()
    config, _ = parse(CnnConfig, words, program="x")
    schedule = plan_events(config, 50_000)
    assert schedule.updates_per_epoch == 781
    assert schedule.updates_per_execution == execution
    assert schedule.total_updates == execution * executions
    assert bool(schedule.warnings) == (logs in ("2", "10", "0"))


@pytest.mark.parametrize(
    ("logs", "updates_of_logs", "warning"),
    [
        ("2", range(11, 67, 11), "logs per epoch: 2 does not fall on whole weight updates"),
        pytest.param(
            *("10", range(1, 67), "the nearest that does is 11, which is used instead"),
            marks=pytest.mark.slow,
        ),
        pytest.param("0.5", (22, 44, 66), None, marks=pytest.mark.slow),
        pytest.param(
            *("0", (66,), "all 66 updates run on the device without returning to the host"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_logs_are_moved_to_whole_updates_with_a_warning(
    train, cifar, logs, updates_of_logs, warning
):
    words = LOGGING.format(epochs=6, logs=logs) + f" --dataset-path {cifar}"
    ended = train(words, "--model", "toy_model")
    assert ended.status == 0, ended.output
    assert [event["update"] for event in ended.events] == list(updates_of_logs)
    assert (warning or "") in ended.output
    assert ("warning" in ended.output) == (warning is not None)
    assert "--half-partials has no effect: " in ended.output


def test_logging_every_two_epochs_of_five_is_an_error(train, cifar):
    words = LOGGING.format(epochs=5, logs=0.5) + f" --dataset-path {cifar}"
    ended = train(words)
    assert ended.status == 2
    assert "It is not possible to log 2.0 epochs at a time for 5 epochs" in ended.output
    assert len(ended.output.splitlines()) == 1


def test_cifar_is_sent_in_eight_bits_and_preprocessed_on_the_device(train, cifar):
    words = "--accelerator-side-preprocess True --eight-bit-transfer True"
    ended = train(
        words, "--dataset", "cifar10", "--dataset-path", str(cifar.parent),
        "--micro-batch-size", "64", "--fused-preprocessing",
    )  # fmt: skip
    assert ended.status == 0, ended.output
    assert ended.summary["updates"] == UPDATES
    assert "toy_model, 242 parameters" in ended.output
    assert "--fused-preprocessing has no effect: " in ended.output


def test_imagenet_is_preprocessed_on_the_host(train, tmp_path):
    folder = write_folders(tmp_path / "imagenet-data", num_classes=2, per_class=32)
    words = "--accelerator-side-preprocess False --dataset gc-imagenet "
    words += f"--dataset-path {folder} --gradient-accumulation-count 8 --micro-batch-size 8"
    ended = train(words)
    assert ended.status == 0, ended.output
    assert ended.summary["updates"] == 1
    assert "64 = micro batch 8 x accumulation 8 x replicas 1" in ended.output


def test_an_option_overrides_a_configuration_file(tmp_path):
    path = tmp_path / "your_config_file"
    path.write_text("your_config: {num-epochs: 3, dataset: cifar10, optimizer: lars}\n")
    words = f"--config your_config --config_path {path} --num-epochs 4".split()
    config, _ = parse(CnnConfig, words, program="x", named_configs=tmp_path / "none")
    assert (config.workflow.num_epochs, config.recipe.optimizer, config.data.dataset) == (
        4,
        "lars",
        "cifar10",
    )


def test_a_missing_imagenet_is_an_error(train):
    ended = train("--config mk2_resnet50_8k_bn_pipeline")
    assert ended.status == 2
    assert "imagenet" in ended.output
    assert ended.summary is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pipline-schedule Grouped", "Did you mean --pipeline-schedule?"),
        ("--stochastic-roundings ON", "Did you mean --stochastic-rounding?"),
        ("--optimizer sdg", "Did you mean sgd?"),
        ("--checkpoint x", "It could be --checkpoints, --checkpoint-dir"),
        ("--dataset cifar", "Did you mean cifar10?"),
    ],
)
def test_a_mistyped_option_suggests_the_nearest(words, message):
    with pytest.raises(ConfigurationError) as caught:
        parse(CnnConfig, shlex.split(words), program="x")
    assert message in str(caught.value)


EVERY_OPTION = """
--on-demand True --seed 3 --checkpoints True --checkpoint-dir ckpts --clean-dir True
--dataset cifar10 --dataset-path . --model-name toy_model --eight-bit-transfer True
--training True --micro-batch-size 4 --num-epochs 2 --logs_per_epoch 1
--weight-updates-per-epoch 5 --num-replicas 2 --gradient-accumulation-count 16
--precision 16.16 --pipeline-splits conv2d_1 --device-mapping 0 1
--pipeline-schedule Interleaved --optimizer sgd --optimizer-params '{"momentum": 0.9}'
--loss-scaling 128 --weight_decay 0.0001 --l2-regularization 0.0001 --recomputation True
--accelerator-side-preprocess True --stochastic-rounding ON
--optimizer-state-offloading False --fp-exceptions True --lr-schedule cosine
--lr-warmup-params '{"warmup_mode": "shift", "warmup_epochs": 1}'
--lr-schedule-params '{"initial_learning_rate": 0.0001, "epochs_to_total_decay": 2}'
--lr-staircase True --bn-momentum 0.9 --label-smoothing 0.1
--pipeline-num-parallel 48 --half-partials True
--internal-exchange-optimisation-target balanced --max-cross-replica-buffer-size 100
--max-reduce-many-buffer-size 100 --gather-conv-output True --stable-norm True
--available-memory-proportion 15 15 20 20 --wandb False --validation True
--validation-micro-batch-size 8 --validation-num-replicas 2
"""


def test_every_option_of_the_readme_is_accepted():
    config, given = parse(CnnConfig, shlex.split(EVERY_OPTION), program="x")
    assert len(given) == EVERY_OPTION.count("--")
    assert config.plan.stochastic_rounding is True
    assert config.plan.pipeline_schedule == "interleaved"
    assert config.recipe.weight_decay == 0.0001
    assert CnnConfig().recipe.weight_decay == 0
    assert config.graphcore.available_memory_proportion == [15, 15, 20, 20]
    sizes = ("micro_batch_size", "validation_micro_batch_size", "validation_num_replicas")
    assert [option_value(config, name) for name in sizes] == [4, 8, 2]
    assert (config.plan.types.compute, config.plan.types.weights) == ("bfloat16",) * 2
    assert config.plan.batching.global_batch_size == 4 * 2 * 16
    assert config.plan.num_stages == config.plan.devices_per_replica == 2


def test_a_global_batch_gives_the_accumulation_count():
    words = "--micro-batch-size 16 --num-replicas 4 --global-batch-size 16384"
    config, _ = parse(CnnConfig, words.split(), program="x")
    assert config.plan.batching.gradient_accumulation_count == 256


def test_options_of_the_optimizer_and_the_learning_rate_reach_them(monkeypatch):
    words = """
        --dataset digits --optimizer lars --weight-decay 0.1 --l2-regularization 0.2
        --optimizer-params '{"momentum": 0.8, "weight_decay": 0, "eeta": 1, "epsilon": 0}'
        --lr-schedule polynomial --lr-staircase True --lr-schedule-params
        '{"initial_learning_rate": 0.5, "epochs_to_total_decay": 3, "power": 2,
          "end_learning_rate_ratio": 0.1}'
        --lr-warmup-params '{"warmup_mode": "mask", "warmup_epochs": 1}'
    """
    config, _ = parse(CnnConfig, shlex.split(words), program="x")
    calls = {}
    for name in ("build_optimizer", "learning_rate_schedule"):
        real = getattr(program, name)

        def spy(*args, name=name, real=real, **options):
            calls[name] = (args, options)
            return real(*args, **options)

        monkeypatch.setattr(program, name, spy)
    images = data.load(config)
    schedule = plan_events(config, len(images.training))
    program.build_program(config, images, program.build_model(config, images), schedule)
    args, options = calls["build_optimizer"]
    assert args == ("lars", {"momentum": 0.8, "weight_decay": 0, "eeta": 1, "epsilon": 0})
    assert (options["weight_decay"], options["l2_regularization"]) == (0.1, 0.2)
    (name, params), options = calls["learning_rate_schedule"]
    assert (name, params["power"], params["epochs_to_total_decay"]) == ("polynomial", 2, 3)
    assert options["warmup"] == {"warmup_mode": "mask", "warmup_epochs": 1}
    assert options["staircase"] is True


def test_options_of_batch_norm_reach_the_norm():
    words = "--num-replicas 4 --dbn-replica-group-size 2 --bn-momentum 0.5"
    norms = {}
    for more in ("", " --gather-conv-output True --stable-norm True"):
        config, _ = parse(CnnConfig, shlex.split(words + more), program="x")
        norms[more] = build_norm(config)
    plain, given = (norm.keywords for norm in norms.values())
    assert plain["momentum"] == given["momentum"] == 0.5
    assert (plain["stable"], given["stable"]) == (False, True)
    groups = [ReplicaGroups(REPLICA_AXIS, 4, 2, gathers) for gathers in (False, True)]
    assert [plain["groups"], given["groups"]] == groups
