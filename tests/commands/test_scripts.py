"""Graphcore's programs: their defaults, the shims, and what the launcher recognizes."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.models import spec
from millrace.cli import main, resolve_launched
from millrace.commands.registry import COMMANDS
from millrace.commands.scripts import FAMILIES, SCRIPTS, find_script
from millrace.config import as_plain, option_value, parse
from millrace.distributed.environment import LAUNCH_DIR


def read(script, words="", monkeypatch=None):
    entry = SCRIPTS[script]
    command = COMMANDS[entry.command]
    config, _ = parse(
        command.load_config_type(),
        shlex.split(words),
        program=script,
        named_configs=command.named_configs_path(),
        defaults=entry.defaults,
    )
    return config


def call(*args):
    with pytest.raises(SystemExit) as left:
        main([*map(str, args)])
    return left.value.code


# The defaults that the documents state.
STATED = {
    "checkpoints": True,
    "clean_dir": True,
    "dataset": "cifar10",
    "dataset_path": ".",
    "model_name": "toy_model",
    "eight_bit_transfer": False,
    "pipeline_num_parallel": 48,
    "training": True,
    "micro_batch_size": 1,
    "num_epochs": 1,
    "logs_per_epoch": 1,
    "weight_updates_per_epoch": -1,
    "num_replicas": 1,
    "gradient_accumulation_count": None,
    "global_batch_size": None,
    "precision": "16.16",
    "pipeline_splits": [],
    "device_mapping": None,
    "pipeline_schedule": "grouped",
    "optimizer": "sgd",
    "optimizer_params": {"momentum": 0},
    "loss_scaling": 0,
    "l2_regularization": 0,
    "recomputation": False,
    "accelerator_side_preprocess": False,
    "stochastic_rounding": False,
    "optimizer_state_offloading": True,
    "fp_exceptions": False,
    "lr_schedule": "const",
    "lr_warmup_params": None,
    "lr_schedule_params": {"initial_learning_rate": 0.0001},
    "lr_staircase": False,
    "dbn_replica_group_size": 1,
    "bn_momentum": 0.97,
    "label_smoothing": 0,
    "stable_norm": False,
    "wandb": False,
    "validation": True,
    "validation_micro_batch_size": None,
    "validation_num_replicas": None,
}
# The document has False, 0 or nothing; these are not set, which is the same.
STATED_UNSET = {
    *("half_partials", "internal_exchange_optimization_target", "gather_conv_output"),
    *("max_cross_replica_buffer_size", "max_reduce_many_buffer_size"),
    "available_memory_proportion",
}


def test_train_without_options_has_every_default_of_the_document():
    config = as_plain(read("train.py"))
    assert {name: config[name] for name in STATED} == STATED
    assert {name: config[name] for name in STATED_UNSET} == dict.fromkeys(STATED_UNSET)
    # Not 1, as documented: the program itself has 0, and 1 would erase the weights.
    assert config["weight_decay"] == 0


def test_options_go_before_a_configuration_and_both_before_the_defaults(tmp_path):
    path = tmp_path / "configs.yml"
    path.write_text("mine: {precision: 32.32, num-epochs: 3, clean-dir: False}\n")
    config = read("train.py", f"--config mine --config-path {path} --num-epochs 4")
    assert (config.plan.precision, config.workflow.num_epochs) == ("32.32", 4)
    assert config.workflow.clean_dir is False
    assert config.plan.optimizer_state_offloading is True  # a default


def test_a_family_has_the_defaults_of_the_other_application():
    config = read("train.py", "--model resnext --dataset imagenet --synthetic-data")
    assert (config.plan.precision, config.plan.pipeline_schedule) == (
        *("16.16", "interleaved"),
    )
    assert (config.plan.loss_scaling, config.plan.micro_batch_size) == (128, 1)
    assert config.plan.stochastic_rounding and config.model.stable_norm
    assert config.workflow.clean_dir is False and config.data.normalize_input is False
    config = read("train.py", "--model resnet --precision 16.32")
    assert config.plan.stochastic_rounding is False
    assert (config.plan.micro_batch_size, config.resolved_dataset) == (32, "cifar10")
    assert tuple(FAMILIES) == tuple(spec.FAMILIES)


def test_checkpoints_of_another_run_are_not_deleted_by_default(tmp_path):
    words = f"--training False --checkpoint-dir {tmp_path}"
    assert read("train.py", words).workflow.clean_dir is False


def test_seeds_differ_but_not_between_the_processes_of_a_run(monkeypatch):
    seeds = {read("train.py").run.seed for _ in range(3)}
    assert len(seeds) == 3
    assert read("train.py", "--seed 7").run.seed == 7
    monkeypatch.setenv(LAUNCH_DIR, "/tmp/millrace-launch-1")
    (seed,) = {read("train.py").run.seed for _ in range(3)}
    monkeypatch.setenv(LAUNCH_DIR, "/tmp/millrace-launch-2")
    assert read("train.py").run.seed != seed


def test_the_other_programs_have_the_defaults_of_their_documents(tmp_path):
    ratings = read("autoencoder_main.py")
    assert (ratings.data.kind, ratings.training.precision) == ("random", "16.16")
    assert (ratings.resolved_batch_size, ratings.resolved_size) == (64, 128)
    assert ratings.base_learning_rate == -16
    sweep = read("autoencoder_benchmark.py")
    assert sweep.exponents == [-12.5 - number / 2 for number in range(16)]
    assert sweep.data.kind == "random"
    assert read("validation.py", "--model resnet").precision == "16.16"
    assert SCRIPTS["validation.py"].defaults({"checkpoint_dir": tmp_path}) == {}
    assert read("main.py").run.run_dir == Path("results/default")
    assert read("main.py", "-r here").run.run_dir == Path("here/default")
    assert read("main.py", "--run-dir there").run.run_dir == Path("there")
    assert read("verify_dataset.py").dataset == "cifar10"


def test_a_run_that_is_resumed_keeps_its_own_options(tmp_path):
    (tmp_path / "config.yml").write_text("command: cnn-train\nprecision: '32.32'\n")
    command = COMMANDS["cnn train"]
    config, _ = parse(
        CnnConfig,
        ["--resume", str(tmp_path)],
        program="train.py",
        named_configs=command.named_configs_path(),
        command="cnn-train",
        defaults=SCRIPTS["train.py"].defaults,
    )
    assert config.plan.precision == "32.32" and config.workflow.clean_dir is False


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_the_program_and_its_defaults(script, capsys):
    assert call(script, "--help") == 0
    shown = capsys.readouterr().out
    assert "usage: millrace" in shown
    assert ("defaults of Graphcore's program" in shown) == bool(SCRIPTS[script].about)


# Shims


def test_shims_are_programs_that_any_python_can_start(tmp_path, capsys):
    folder = tmp_path / "shims"
    assert call("shim", folder) == 0
    assert "source" in capsys.readouterr().out
    names = {path.name for path in folder.iterdir()}
    assert names == {*SCRIPTS, "enable.sh"}
    assert os.access(folder / "train.py", os.X_OK) and os.access(folder / "poprun", os.X_OK)
    script = (
        f"source {shlex.quote(str(folder / 'enable.sh'))}\n"
        "poprun --version-is-no-option; echo status $?\n"
        "train.py --no-such-option; echo status $?\n"
        "python3 -m examples_utils benchmark --spec none.yml; echo status $?\n"
        f"{sys.executable} {shlex.quote(str(folder / 'main.py'))} -c none.json\n"
    )
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert done.stdout.split() == ["status", "2"] * 3 and done.returncode == 2
    assert "Unknown option --no-such-option" in done.stderr
    assert "none.yml" in done.stderr and "none.json" in done.stderr


def test_shims_replace_themselves_but_no_other_file(tmp_path, capsys):
    assert call("shim", tmp_path) == 0 and call("shim", tmp_path) == 0
    (tmp_path / "main.py").write_text("print('mine')\n")
    assert call("shim", tmp_path) == 2
    assert "main.py exists and was not written by millrace shim" in capsys.readouterr().err
    assert (tmp_path / "main.py").read_text() == "print('mine')\n"
    assert call("shim", tmp_path / "main.py") == 2


# What the launcher starts


@pytest.mark.parametrize(
    ("typed", "started"),
    [
        ("cnn train --seed 1", "millrace cnn train --seed 1"),
        ("devices", "millrace devices"),
        ("millrace cnn train", "millrace cnn train"),
        ("python3 train.py --seed 1", "millrace train.py --seed 1"),
        ("python train.py", "millrace train.py"),
        ("train.py", "millrace train.py"),
        (
            "python3 -m examples_utils benchmark --spec x",
            "millrace examples_utils --spec x",
        ),
        ("examples_utils benchmark --spec x", "millrace examples_utils --spec x"),
        ("python3 --config mk2", "millrace train.py --config mk2"),
        ("python3 src/train.py", "python3 src/train.py"),
        ("python3 other.py", "python3 other.py"),
        ("python3 -m other", "python3 -m other"),
        ("mpirun train.py", "mpirun train.py"),
    ],
)
def test_the_launcher_recognizes_programs(typed, started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_launched(typed.split()) == started.split()


def test_a_file_goes_before_a_program_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert resolve_launched(["python3", "train.py"]) == ["python3", "train.py"]
    assert resolve_launched(["train.py", "x"]) == [sys.executable, "train.py", "x"]


def test_a_line_without_one_of_the_programs_is_not_found():
    assert find_script(["python3"]) is None
    assert find_script(["ls", "train.py"]) is None
    found = find_script(["python3", "/somewhere/main.py", "-r", "x"])
    assert found is not None and (found.script, found.arguments) == ("main.py", ["-r", "x"])


# Messages


def test_messages_have_the_spelling_that_was_typed(capsys, tmp_path):
    assert call("train.py", "--replicas", "0") == 2
    assert "--replicas must be at least 1, got 0" in capsys.readouterr().err
    assert call("cnn", "train", "--batch-size=0") == 2
    assert "--batch-size must be at least 1" in capsys.readouterr().err
    assert call("cnn", "train", "--num-replicas", "0") == 2
    assert "--num-replicas must be at least 1" in capsys.readouterr().err
    assert call("cnn", "train", "--num_replicas", "0") == 2
    assert "--num_replicas must be at least 1" in capsys.readouterr().err
    assert call("cnn", "train", "--seed", "-1") == 2  # a name of one word
    assert "millrace: --seed must be between" in capsys.readouterr().err
    assert call("train.py", "--stochastic-rounding", "--precision", "32.32") == 2
    assert "--stochastic-rounding" in capsys.readouterr().err
    file = "data/training_data_file"
    assert call("autoencoder_main.py", "--training-data-file", file) == 2
    assert f"There is no --training-data-file {file}." in capsys.readouterr().err
    config, _ = parse(CnnConfig, ["--enable-half-partials"], program="x")
    assert config.graphcore.notices()[0].startswith("--enable-half-partials has no effect")
    assert option_value(config, "half_partials") is True
