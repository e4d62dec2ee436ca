"""Every command line of Graphcore's documents, letter by letter, from seed_lines.txt.

Only placeholders such as ``<path to benchmarks.yml file>`` are filled in. Where a line is
run, options at its end make it small.
"""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from autoencoder_runs import write_ratings
from image_files import write_folders
from launched import environment
from seed_lines import LINES as ALL_LINES

from millrace.cli import main, resolve_launched
from millrace.commands.registry import COMMANDS
from millrace.commands.scripts import SCRIPTS, find_script
from millrace.commands.shim import ShimConfig, write_shims
from millrace.config import option_value, parse
from millrace.data import cifar as cifar_files
from millrace.distributed.environment import add_launcher_replicas
from millrace.distributed.launcher import Launcher
from millrace.distributed.options import LaunchConfig, split_command

SETUP = ("virtualenv", "source", "pip", "pytest")
"""Programs that prepare the reference's own environment."""
LINES = [(seed, line) for seed, line in ALL_LINES if line.split()[0] not in SETUP]
IDS = [f"{seed}-{number}" for number, (seed, _) in enumerate(LINES)]
BATCH_SIZES = {
    # By program and model: what the document says to put for --batch-size.
    ("python3", "resnet"): (1, 4, 16, 32, 64, 90),
    ("python3", "resnext"): (1, 2, 4, 8, 16),
    ("python3", "efficientnet"): (1, 8, 16, 32),
    ("poprun", "resnet"): (1, 4, 16, 32, 64, 80),
    ("poprun", "resnext"): (1, 2, 4, 8, 16),
    ("poprun", "efficientnet"): (1, 8, 16, 32),
}
SWITCHES = {
    "--disable-variable-offloading": ("optimizer_state_offloading", False),
    "--no-validation": ("validation", False),
    "--epoch": ("num_epochs", 2),
    "--pipeline": ("pipeline", True),
    "--eight-bit-io": ("eight_bit_transfer", True),
    "--enable-conv-dithering": ("conv_dithering", True),
    "--standard-imagenet": ("standard_imagenet", True),
    "--generated-data": ("synthetic_data", "host"),
    "--synthetic-data": ("synthetic_data", "device"),
    "--xla-recompute": ("recomputation", True),
    "--wandb": ("wandb", True),
}
"""Words of the lines, and the options that they set."""
PER_FILE = 32
NESTED = {"model": [{"args": {"training": {"n_epoch": 1}}}]}
SPEC = {"first": {"description": "a test", "cmd": "python3 main.py -b 50 --no-testing"}}


class Parsed(NamedTuple):
    command: str
    config: Any
    given: dict[str, Any]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """Fill in what the documents leave open, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATASETS_DIR", str(tmp_path / "datasets"))
    Path("your_config_file").write_text("your_config: {num-epochs: 3, dataset: mnist}\n")
    Path("path/to").mkdir(parents=True)
    Path("path/to/config.json").write_text(json.dumps(NESTED))
    Path("benchmarks.yml").write_text(json.dumps(SPEC))
    return tmp_path


def fill(line: str) -> list[str]:
    """Return the words of a line, with its placeholders filled in."""
    placeholders = {
        "<path to benchmarks.yml file>": "benchmarks.yml",
        "<name of benchmark>": "first",
        "--some-param new_value": "--num-epochs 4",
    }
    for placeholder, value in placeholders.items():
        line = line.replace(placeholder, value)
    return [os.path.expandvars(word) for word in shlex.split(line)]


def read(words: list[str], monkeypatch) -> Parsed:
    """Return what a line means; as in a process of the launcher, if it starts some."""
    if words[0] == "poprun":
        own, command = split_command(words[1:])
        launch, _ = parse(LaunchConfig, own, program="poprun")
        words = resolve_launched(command)
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        variables = Launcher(launch, words)._get_variables(1, "127.0.0.1:5", "/folder")
        for name, value in variables.items():
            if name.startswith("MILLRACE_"):
                monkeypatch.setenv(name, value)
        assert words[0] == "millrace"
        words = words[1:]
    found = find_script(words)
    assert found is not None, words
    script = SCRIPTS[found.script]
    command = COMMANDS[script.command]
    config_type = command.load_config_type()
    config, given = parse(
        config_type,
        add_launcher_replicas(config_type, found.arguments),
        program=found.script,
        named_configs=command.named_configs_path(),
        command=script.command.replace(" ", "-"),
        defaults=script.defaults,
    )
    return Parsed(script.command, config, given)


def precision_of(config: Any) -> str:
    return option_value(config, "precision")


@pytest.mark.parametrize(("seed", "line"), LINES, ids=IDS)
def test_every_line_is_understood_completely(seed, line, workplace, monkeypatch):
    words = fill(line)
    parsed = read(words, monkeypatch)
    if seed == "003":
        given = "16.32" if "16.32" in line else "16.16"
        assert precision_of(parsed.config) == given
    if seed in ("000", "002") and "--config" not in words:
        assert precision_of(parsed.config) == "16.16"
    for flag, (name, value) in SWITCHES.items():
        if flag in words:
            assert option_value(parsed.config, name) == value


@pytest.mark.parametrize(
    ("program", "model", "size"),
    [(*key, size) for key, sizes in BATCH_SIZES.items() for size in sizes],
)
def test_every_batch_size_of_inference_is_understood(program, model, size, monkeypatch):
    (line,) = (
        line
        for seed, line in LINES
        if seed == "003" and line.startswith(f"{program} ") and "validation.py" in line
        if f"--model {model} " in line
    )
    words = fill(line)
    words[words.index("--batch-size") + 1] = str(size)
    assert read(words, monkeypatch).config.batch_size == [size]


@pytest.mark.parametrize(
    ("line", "replicas", "devices", "batch"),
    [
        ("python train.py --model resnet ", 1, 4, 16_384),
        ("poprun --numa-aware=yes", 4, 16, 16_384),
        ("python train.py --model resnext ", 2, 4, 768),
        ("poprun --numa-aware 1 --num-replicas 8 ", 8, 16, 768),
        ("python3 train.py --model=efficientnet ", 1, 4, 200),
        ("poprun --numa-aware 1 --num-replicas 4 ", 4, 16, 800),
    ],
)
def test_training_lines_have_the_batch_of_the_reference(
    line, replicas, devices, batch, workplace, monkeypatch
):
    (found,) = (text for _, text in LINES if text.startswith(line))
    plan = read(fill(found), monkeypatch).config.plan
    assert (plan.num_replicas, plan.num_replicas * plan.num_stages) == (replicas, devices)
    assert plan.batching.global_batch_size == batch


# Running


@pytest.fixture
def small_data(workplace, monkeypatch):
    """Small versions of all datasets: CIFAR-10, ImageNet, Netflix, binarized MNIST."""
    monkeypatch.setattr(cifar_files, "_num_images", lambda name, layout, file: PER_FILE)
    folder = workplace / "cifar-10-batches-bin"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        pixels = random.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8)
        labels = random.integers(0, 10, PER_FILE, dtype=np.uint8)
        (folder / f"{name}.bin").write_bytes(np.c_[labels, pixels].tobytes())
    netflix = workplace / "netflix_data"
    netflix.mkdir()
    write_ratings(netflix)
    for period in ("3m", "6m", "1y", "full"):
        for part in ("train", "valid"):
            (netflix / f"{period}_{part}.txt").write_bytes(
                (netflix / f"{part}.txt").read_bytes()
            )
    return workplace


SMALL_CIFAR = "--dataset-path . --weight-updates-per-epoch 1 --micro-batch-size 4"
SMALL_IMAGES = (
    "--generated-data --image-size 32 --batch-size 2 --weight-updates-per-epoch 1"
)
SMALL_INFERENCE = "--num-batches 2 --latency-calls 1 --repeat 1"
SMALL_MODELS = {
    "resnet": "--image-size 32 --model-size 18",
    "resnext": "--image-size 32 --model-size 50",
    "efficientnet": "--image-size 32",
}
SMALL_RATINGS = "--batch-size 4 --batches-per-step 2 --epochs 1"
SMALL_VCD = "--dataset digits --num-epochs 1 --num-hidden 8 --num-importance-samples 50"
SMALL_VCD += " --num-test-burn-in-steps 1 --num-test-hmc-steps 1 --n-burn-in-steps 1"
SMALL_VCD += " --n-leapfrog-steps 1 --pictures False"


def shrink(words: list[str], folder: Path) -> list[str]:
    """Return options that make a line small; the last of an option counts."""
    text = " ".join(words)
    if "autoencoder" in text:
        file = "" if "--training-data-file" in text else " --num-ratings 500"
        file += " --num-users 40 --num-items 30" if file else ""
        learning_rates = " --num-ipus 2 --base-learning-rates 16,17"
        default = "benchmark" in text and "--num-ipus" not in text
        small = SMALL_RATINGS + file + (learning_rates if default else "")
    elif "main.py" in text:
        small = SMALL_VCD
    elif "validation.py" in text:
        model = next(name for name in SMALL_MODELS if name in text)
        small = f"{SMALL_INFERENCE} {SMALL_MODELS[model]}"
        if words[0] == "poprun" and model == "resnet":  # a quick test
            small = f"{SMALL_INFERENCE} --dataset cifar10 --model-size 8"
    elif "mk2_resnet50_8k" in text:
        small = f"{SMALL_IMAGES} --num-epochs 1 --num-replicas 1 --global-batch-size 16"
        small += " --validation False"
    elif "--model" not in text or "cifar" in text:
        small = SMALL_CIFAR
        small += " --dataset cifar10" if "your_config" in text else ""
    else:
        count = 4 if "resnext" in text else 8
        size = {"resnext": 50, "efficientnet": 1}
        model = next((name for name in size if name in text), "resnet")
        small = f"{SMALL_IMAGES} --gradient-accumulation-count {count} "
        small += f"--model-size {size.get(model, 34)}"
    if "gc-imagenet" in text:
        data = write_folders(folder / "imagenet-data", num_classes=2, per_class=32)
        small = f"--dataset-path {data} --image-size 32"
    return shlex.split(small)


QUICK = (
    "python3 autoencoder_main.py$",
    r"python3 autoencoder_main.py --training-data-file netflix_data/3m_train\.txt",
    "python3 autoencoder_benchmark.py .*--num-ipus 2",
    "python3 main.py -r",
    "python3 train.py$",
    "python3 train.py --config .*--some-param",
    "python3 train.py --model-name cifar_resnet8 --pipeline-splits",
    "python3 train.py .*--num-epochs 6 .*--logs-per-epoch 1$",
    "python3 train.py --accelerator-side-preprocess True",
    "python3 validation.py --model resnet ",
    "poprun .*validation.py --model resnet ",
)
"""Lines that the quick tests run, some of each program."""


def with_speed(number: str, seed: str, line: str):
    """Return the parameters of a test that is slow for most lines."""
    is_quick = any(re.match(pattern, line) for pattern in QUICK)
    marks = [] if is_quick else [pytest.mark.slow]
    if re.search("--pipeline-split|_pipeline", line) and not line.startswith("poprun"):
        marks.append(pytest.mark.devices(4))  # for poprun, the launcher creates them
    return pytest.param(seed, line, id=number, marks=marks)


RUNNABLE = [
    with_speed(number, seed, line)
    for number, (seed, line) in zip(IDS, LINES, strict=True)
    if "examples_utils" not in line
]


@pytest.fixture
def run(small_data, monkeypatch, capsys):
    """Run a line in this process; return its status and what it printed."""
    logger = logging.getLogger("millrace")
    kept = logger.handlers, logger.level, logger.propagate
    methods = ("log", "define_metric", "finish")
    session = SimpleNamespace(**{name: lambda *_, **__: None for name in methods})
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: session))

    def call(words: list[str]) -> tuple[int, str]:
        found = find_script(words)
        assert found is not None
        with pytest.raises(SystemExit) as left:
            main([found.script, *found.arguments, *shrink(words, small_data)])
        printed = capsys.readouterr()
        return left.value.code, printed.out + printed.err

    yield call
    logger.handlers, logger.level, logger.propagate = kept


def run_processes(words: list[str], folder: Path) -> tuple[int, str]:
    """Run a line that starts processes, two at most."""
    text = shlex.join([*words, *shrink(words, folder)])
    for option in ("num-replicas", "num-instances"):
        text = re.sub(rf"--{option}[= ]\d", f"--{option}=2", text)
    program, *rest = shlex.split(text)
    done = subprocess.run(
        [sys.executable, "-m", "millrace", program, *rest],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(("seed", "line"), RUNNABLE)
def test_every_line_runs_when_made_small(seed, line, small_data, run):
    words = fill(line)
    is_launched = words[0] == "poprun"
    status, output = run_processes(words, small_data) if is_launched else run(words)
    if "--num-epochs 5" in line:  # the document says that this one is an error
        assert status == 2 and "not possible to log 2.0 epochs at a time" in output
        return
    assert status == 0, output
    places = {
        "main.py -r": "where/to/store_results/default",
        "main.py -c": "results/config",
    }
    place = next((path for part, path in places.items() if part in line), "runs/*")
    (folder,) = small_data.glob(place)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert all(np.isfinite(value) for value in summary["metrics"].values())


def test_pytest_without_arguments_runs_the_tests_on_a_cpu(pytestconfig):
    assert ("001", "pytest") in ALL_LINES
    assert pytestconfig.getini("testpaths") == ["tests"]
    assert "not gpu" in " ".join(pytestconfig.getini("addopts"))


BENCHMARKS = [line for _, line in LINES if "examples_utils" in line]


@pytest.mark.parametrize("line", BENCHMARKS)
def test_a_benchmark_of_the_reference_is_found(line, workplace, capsys):
    _, _, *words = fill(line)
    with pytest.raises(SystemExit) as left:
        main([*words, "--list"])
    assert left.value.code == 0
    assert capsys.readouterr().out.split() == ["first", "a", "test"]


@pytest.mark.parametrize("line", BENCHMARKS)
def test_a_benchmark_of_the_reference_is_found_in_a_folder_of_shims(line, workplace):
    write_shims(ShimConfig(dir=workplace))
    line = f"source enable.sh && {shlex.join(fill(line))} --list"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["first", "a", "test"]), done


@pytest.mark.slow
@pytest.mark.parametrize("line", BENCHMARKS)
def test_a_benchmark_of_the_reference_is_measured(line, workplace):
    write_shims(ShimConfig(dir=workplace))
    spec = {"first": {"description": "a test", "cmd": f"python3 main.py {SMALL_VCD}"}}
    Path("benchmarks.yml").write_text(json.dumps(spec))
    small = "--seconds 0.01 --repeat 1 --log-dir measured"
    line = f"source enable.sh && {shlex.join(fill(line))} {small}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(Path("measured/results.json").read_text())["entries"]
    assert (entry["status"], entry["about"]) == ("measured", "a test")
