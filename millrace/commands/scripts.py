"""Graphcore's programs: which command runs instead of each, and their own defaults.

``millrace train.py ...`` is ``millrace cnn train ...`` with the defaults of Graphcore's
``train.py``; ``millrace shim`` writes programs that call it. Imports nothing heavy.
"""

import os
import secrets
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from millrace.config import Defaults
from millrace.distributed.environment import LAUNCH_DIR

Values = Mapping[str, Any]

FAMILIES = ("resnet", "resnext", "efficientnet")
"""Models of the TensorFlow 1 application; the other one has none of these names."""

TENSORFLOW_2 = {
    "recipe": "graphcore",
    "dataset": "cifar10",
    "model_name": "toy_model",
    "precision": "16.16",
    "optimizer_state_offloading": True,
    "clean_dir": True,
    "pipeline_num_parallel": 48,
}
"""What ``train.py`` of the TensorFlow 2 application does without options.

Its other defaults are ours as well. Two are not taken over: the documented weight decay of
1, which would erase the weights (the program itself uses 0), and checkpoints in /tmp.
"""
TENSORFLOW_1 = {
    "recipe": "graphcore",
    "precision": "16.16",
    "optimizer_state_offloading": True,
    "pipeline_schedule": "interleaved",
    "loss_scaling": 128.0,
    "pipeline_num_parallel": 48,
}
"""What ``train.py`` of the TensorFlow 1 application does, besides a family's recipe."""
_TENSORFLOW_1_IMAGENET = {"normalize_input": False}
_TENSORFLOW_1_BATCH = {
    # On ImageNet, and on CIFAR.
    "resnet": (4, 32),
    "resnext": (1, 8),
    "efficientnet": (4, 8),
}
_STABLE_NORM = ("resnext", "efficientnet")
"""Models whose norms are always stable on ImageNet."""
AUTOENCODER = {"recipe": "graphcore", "data": None}
"""Without a file, ``autoencoder_main.py`` trains on random ratings."""
SWEEP = {"num_ipus": 16}
VCD = {"results_dir": Path("results")}


def _is_tensorflow_1(values: Values) -> bool:
    return str(values.get("model_name")).lower() in FAMILIES


def _is_imagenet(values: Values) -> bool:
    return "imagenet" in str(values.get("dataset"))


def _train(values: Values) -> dict[str, Any]:
    defaults: dict[str, Any] = {"seed": _draw_seed()}
    if not _is_tensorflow_1(values):
        defaults |= TENSORFLOW_2
        if values.get("training") is False:  # the checkpoints are not of this run
            defaults["clean_dir"] = False
        return defaults
    defaults |= TENSORFLOW_1
    model = str(values["model_name"]).lower()
    on_imagenet, on_cifar = _TENSORFLOW_1_BATCH[model]
    defaults["micro_batch_size"] = on_imagenet if _is_imagenet(values) else on_cifar
    if _is_imagenet(values):
        defaults |= _TENSORFLOW_1_IMAGENET
        if model in _STABLE_NORM:
            defaults["stable_norm"] = True
    if values.get("precision", defaults["precision"]) == "16.16":
        defaults["stochastic_rounding"] = True
    return defaults


def _validate(values: Values) -> dict[str, Any]:
    if values.get("checkpoint_dir") is not None:  # the run has its own options
        return {}
    defaults = {"precision": "16.16", "pipeline_num_parallel": 48}
    if _is_tensorflow_1(values) and _is_imagenet(values):
        defaults |= _TENSORFLOW_1_IMAGENET
    return defaults


def _train_autoencoder(values: Values) -> dict[str, Any]:
    return {"seed": _draw_seed()} | AUTOENCODER


def _sweep(values: Values) -> dict[str, Any]:
    chosen = values.get("learning_rates")
    return {"seed": _draw_seed(), "data": None} | ({} if chosen else SWEEP)


def _train_vcd(values: Values) -> dict[str, Any]:
    results = {} if values.get("run_dir") else VCD
    return {"seed": _draw_seed()} | results


def _draw_seed() -> int:
    """Return a new seed, the same one for all processes of a launch."""
    folder = os.environ.get(LAUNCH_DIR)
    return secrets.randbits(31) if folder is None else zlib.crc32(folder.encode()) >> 1


class Script(NamedTuple):
    """One of Graphcore's programs."""

    command: str
    """The command that runs instead."""
    defaults: Defaults | None = None
    """Its own defaults, if they differ from those of the command."""
    about: str = ""
    """What ``--help`` says about them."""


_SEED = "a new seed for every run"
_MODULE = "examples_utils"
SCRIPTS = {
    "train.py": Script(
        "cnn train",
        _train,
        "cifar10 with toy_model in 16.16, the optimizer state in host memory, 48 images "
        f"prepared at a time, checkpoints deleted at the end, {_SEED}. With --model "
        "resnet, resnext or efficientnet: 16.16 with stochastic rounding, a loss scale of "
        "128, an interleaved pipeline, the batch size of the model, images that are only "
        "centered.",
    ),
    "validation.py": Script("cnn validate", _validate, "precision 16.16."),
    "verify_dataset.py": Script("cnn verify-dataset"),
    "autoencoder_main.py": Script(
        "autoencoder train", _train_autoencoder, f"random ratings in 16.16, {_SEED}."
    ),
    "autoencoder_benchmark.py": Script(
        "autoencoder sweep", _sweep, f"16 learning rates on random ratings, {_SEED}."
    ),
    "main.py": Script("vcd train", _train_vcd, f"results in results/NAME, {_SEED}."),
    _MODULE: Script("bench"),
    "poprun": Script("launch"),
}
"""Graphcore's programs by the name of their file or module."""

_PYTHON = ("python", "python3")


class Found(NamedTuple):
    """A program in a command line, and its arguments."""

    script: str
    path: Path | None
    """The file; None for a module."""
    arguments: list[str]


def find_script(words: Sequence[str]) -> Found | None:
    """Return which of Graphcore's programs a command line runs; None for any other.

    The documents have one line without a program, ``python3 --config NAME``: that of
    train.py was meant.
    """
    words = list(words)
    if Path(words[0]).name in _PYTHON:
        words = words[1:]
        if words[:1] == ["-m"]:
            is_known = words[1:2] == [_MODULE]
            return _find_benchmark(words[2:]) if is_known else None
        if words and words[0].startswith("--"):
            return Found("train.py", None, words)
    if not words or (name := Path(words[0]).name) not in SCRIPTS:
        return None
    if name == _MODULE:
        return _find_benchmark(words[1:])
    return Found(name, Path(words[0]), words[1:])


def _find_benchmark(arguments: list[str]) -> Found:
    """Return ``examples_utils`` with the arguments of its command ``benchmark``."""
    if arguments[:1] == ["benchmark"]:
        arguments = arguments[1:]
    return Found(_MODULE, None, arguments)
