"""The recipe of a run: what options that are not given stand for. Imports nothing heavy.

Two recipes exist. *modern* has settings for each dataset, with which most people would
start today. *graphcore* has the defaults of Graphcore's applications, which its commands
and the named configurations rely on.
"""

import dataclasses
import math
import os
from typing import Any, NamedTuple

from millrace.apps.cnn.config.graphcore import (
    GraphcoreTrainingOptions,
    Values,
    default_params,
    default_recipe,
    expand_shorthands,
    global_batch_size,
    schedule_params,
    set_momentum,
)
from millrace.apps.cnn.models.spec import FAMILIES, has_small_images
from millrace.config import ConfigurationError, flag
from millrace.data.layouts import count_images
from millrace.distributed.hardware import uses_gpu

# Which recipe

_GRAPHCORE_ONLY = (
    *(field.name for field in dataclasses.fields(GraphcoreTrainingOptions)),
    *("lr_schedule_params", "lr_warmup_params", "lr_staircase", "stable_norm"),
    *("gather_conv_output", "min_remote_tensor_size"),
    *("accelerator_side_preprocess", "eight_bit_transfer", "stochastic_rounding"),
)
"""Options that nobody gives who does not know Graphcore's applications."""
_GRAPHCORE_VALUES = {
    "precision": ("16.16",),
    "dataset": ("gc-imagenet",),
}
"""Values of other options of which the same is true."""


def find_graphcore_option(values: Values) -> str | None:
    """Return an option, as a flag, that only Graphcore's applications have."""
    for name in _GRAPHCORE_ONLY:
        if name in values:
            return flag(name)
    # A number of stages, which chooses the layers itself, is not Graphcore's.
    if any(isinstance(split, str) for split in values.get("pipeline_splits") or ()):
        return flag("pipeline_splits")
    for name, known in _GRAPHCORE_VALUES.items():
        if values.get(name) in known:
            return f"{flag(name)} {values[name]}"
    if (name := values.get("optimizer")) in ("lars", "rmsprop") and (
        "optimizer_params" in values or values.get("model_name") in FAMILIES
    ):
        return f"--optimizer {name}"
    return None


def expand_training_options(values: Values) -> Values:
    """Choose the recipe, and complete the options with it."""
    recipe = values.get("recipe", "auto")
    if recipe == "auto":
        recipe = "modern" if find_graphcore_option(values) is None else "graphcore"
    _check_rates(values)
    values = expand_shorthands(values) | {"recipe": recipe}
    values = _complete(values) if recipe == "modern" else default_recipe(values)
    _set_warmup(values)
    _set_schedule(values)
    return values


def start_from_named(named: Values, given: Values) -> Values:
    """Return the options of a named configuration without those that flags replace."""
    kept: Values = {"recipe": "graphcore"} | named
    if given.get("learning_rate") is not None:
        kept.pop("base_learning_rate", None)
        params = dict(kept.get("lr_schedule_params") or {})
        params.pop("initial_learning_rate", None)
        params.pop("values", None)
        kept["lr_schedule_params"] = params
    rates = {"initial_learning_rate", "values"} & {*(given.get("lr_schedule_params") or {})}
    if given.get("base_learning_rate") is not None or rates:
        kept.pop("learning_rate", None)
    if given.get("lr_schedule") not in (None, kept.get("lr_schedule", "const")):
        kept["lr_schedule_params"] = _other_schedule(kept | given, kept)
    sgd = ("sgd", "momentum", "nesterov")
    old, new = kept.get("optimizer", "sgd"), given.get("optimizer")
    if new is not None and new != old and not (new in sgd and old in sgd):
        kept.pop("optimizer_params", None)
    if given.get("warmup_epochs") is not None:
        kept.pop("lr_warmup_params", None)
    return kept


def _other_schedule(values: Values, named: Values) -> Values:
    """Return the parameters of a schedule that replaces that of a named configuration."""
    rate = (named.get("lr_schedule_params") or {}).get("initial_learning_rate")
    # Those of an ordinary learning rate are completed later.
    return {} if rate is None else schedule_params(values["lr_schedule"], rate, values)


# The modern recipe


class _Dataset(NamedTuple):
    """The settings for a dataset."""

    model_name: str
    batch: int
    num_epochs: int
    learning_rate: float
    """Of SGD, for this batch."""
    warmup_epochs: float
    l2: float
    is_heavy: bool
    """Whether a GPU computes in 16 bits."""
    random_erasing: float = 0.0


_DATASETS = {
    "digits": _Dataset("digits_cnn", 32, 30, 0.1, 2, 5e-4, False),
    "mnist": _Dataset("cifar_resnet8", 128, 10, 0.1, 1, 5e-4, False),
    "fashion-mnist": _Dataset("cifar_resnet20", 128, 20, 0.1, 2, 5e-4, False),
    "cifar10": _Dataset("resnet9", 256, 50, 0.2, 5, 5e-4, True, 0.5),
    "cifar100": _Dataset("resnet9", 256, 60, 0.2, 5, 5e-4, True, 0.5),
    "imagenet": _Dataset("resnet50", 256, 90, 0.1, 5, 5e-5, True),
    "imagefolder": _Dataset("resnet50", 128, 60, 0.05, 5, 5e-5, True),
}
_FINE_TUNING = {"num_epochs": 15, "warmup_epochs": 1}
_FINE_TUNING_FACTOR = 0.1
"""Fine-tuning has a tenth of the learning rate."""
_CPU_BATCH = 32
"""Largest default batch of large images without a GPU."""
_UPDATES_PER_EPOCH = 20
"""Updates of an epoch that the default batch leaves for a small dataset."""
_VALIDATION_BATCH = 500
_DIGITS_SIDE, _SMALL_SIDE = 16, 64
"""Height and width of arrays below which they are treated like digits, and up to which
like other small images."""

_ADAPTIVE = {
    # Learning rate for a batch of 256, and weight decay.
    "adam": (1e-3, 0.0),
    "adamw": (1e-3, 0.05),
    "lamb": (5e-3, 0.05),
    "lion": (1e-4, 0.5),
    "muon": (2e-3, 0.05),
    "muon_sgd": (0.09, 0.0),
    "lars": (10.0, 0.0),
    "rmsprop": (0.03, 0.0),
}
_ADAPTIVE_BATCH = 256


def _complete(values: Values) -> Values:
    """Return the options with those that are not given from the modern recipe."""
    name = _find_dataset_name(values)
    known = _arrays_like(values["arrays"]) if _has_arrays(values) else _DATASETS[name]
    values = _settings(values, known, name) | values
    values = _batching(values, known, name) | values
    values = _optimizer(values, known) | values
    set_momentum(values)
    if _has_rate(values):
        return values
    return values | {"learning_rate": _default_rate(values, known)}


def _find_dataset_name(values: Values) -> str:
    small = values.get("model_name") in (None, "digits_cnn")
    name = values.get("dataset") or ("digits" if small else "cifar10")
    name = "arrays" if _has_arrays(values) else name
    return "imagenet" if name == "gc-imagenet" else name


def _has_arrays(values: Values) -> bool:
    return values.get("arrays") is not None


def _arrays_like(record: Values) -> _Dataset:
    """Return the settings for arrays from Python, by the size of their images."""
    side = min(record["shapes"]["image"][1:3])
    if side < _DIGITS_SIDE:
        return _DATASETS["digits"]
    if side <= _SMALL_SIDE:
        return _DATASETS["fashion-mnist"]
    return _DATASETS["imagefolder"]._replace(model_name="resnet18")


def _settings(values: Values, known: _Dataset, name: str) -> Values:
    """Return the settings of a dataset that do not depend on other options."""
    augment = values.get("augment")
    settings: Values = {
        **({} if _has_arrays(values) else {"dataset": name}),
        "model_name": known.model_name,
        "num_epochs": 1 if values.get("synthetic_data") else known.num_epochs,
        "warmup_epochs": known.warmup_epochs,
        "lr_schedule": "cosine",
        "label_smoothing": 0.1,
        "random_erasing": 0.0 if augment == "none" else known.random_erasing,
        "norm_layer": {"name": "batch_norm", "epsilon": 1e-5},
    }
    if values.get("pretrained") is not None:
        settings |= _FINE_TUNING | {"model_name": "resnet"}
        large = not has_small_images(name)
        if large and values.get("model_name") in (None, "resnet"):
            settings["model_size"] = "50"
    epochs = values.get("num_epochs", settings["num_epochs"])
    if isinstance(epochs, int):  # a short run should not only warm up
        settings["warmup_epochs"] = min(settings["warmup_epochs"], epochs / 5)
    if has_small_images(name):
        settings |= {"accelerator_side_preprocess": True}
        settings["eight_bit_transfer"] = not _has_arrays(values) or (
            values["arrays"]["types"]["image"] == "uint8"
        )
        settings["validation_micro_batch_size"] = _VALIDATION_BATCH
    if known.is_heavy and _has_gpu(values):
        settings["precision"] = "16.32"
    return settings


def _has_gpu(values: Values) -> bool:
    return values.get("virtual_devices") is None and uses_gpu(os.environ)


def _batching(values: Values, known: _Dataset, name: str) -> Values:
    """Return the micro-batch size that makes the usual batch of the dataset."""
    if "micro_batch_size" in values:
        return {}
    batch = values.get("global_batch_size") or known.batch
    steps = values.get("num_replicas") or 1
    if values.get("global_batch_size") is None:
        steps *= values.get("gradient_accumulation_count") or 1
        if not has_small_images(name):
            batch = _fitting_batch(values, batch)
    elif batch // steps > known.batch:
        # The rest is accumulated.
        return {"micro_batch_size": math.gcd(batch // steps, known.batch)}
    return {"micro_batch_size": max(1, batch // steps)}


def _fitting_batch(values: Values, batch: int) -> int:
    """Return a batch for large images that suits the machine and the dataset."""
    if not _has_gpu(values):
        batch = min(batch, _CPU_BATCH)
    folder = values.get("dataset_path")
    if folder is None or values.get("synthetic_data"):
        return batch
    count = count_images(folder, at_most=batch * _UPDATES_PER_EPOCH)
    while count is not None and batch > 1 and batch * _UPDATES_PER_EPOCH > count:
        batch //= 2
    return batch


def _optimizer(values: Values, known: _Dataset) -> Values:
    """Return the optimizer with its decay."""
    name = values.get("optimizer")
    decays = {"weight_decay", "l2_regularization"} & set(values)
    settings: Values = {"decay_kernels_only": True}
    if name in ("lars", "rmsprop"):
        decay = {"decay": 0.0} if decays else {}
        settings["optimizer_params"] = default_params(name, **decay)
    if name in _ADAPTIVE:
        _, decay = _ADAPTIVE[name]
        return settings if decays else settings | {"weight_decay": decay}
    if not decays:
        settings["l2_regularization"] = known.l2
    if name is None:
        settings |= {"optimizer": "sgd"}
        settings |= {"optimizer_params": {"momentum": 0.9, "nesterov": True}}
    return settings


def _has_rate(values: Values) -> bool:
    given = ("learning_rate", "base_learning_rate", "lr_schedule_params")
    return any(values.get(name) is not None for name in given)


def _default_rate(values: Values, known: _Dataset) -> float:
    """Return the learning rate for the batch: linear for SGD, with its root for others."""
    batch = global_batch_size(values)
    if (name := values["optimizer"]) in _ADAPTIVE:
        rate = _ADAPTIVE[name][0] * math.sqrt(batch / _ADAPTIVE_BATCH)
    else:
        rate = known.learning_rate * batch / known.batch
        if not values.get("optimizer_params", {}).get("momentum"):
            rate *= 2  # momentum 0.9 takes steps ten times as long
    if values.get("pretrained") is not None:
        rate *= _FINE_TUNING_FACTOR
    return float(f"{rate:.3g}")


# Learning rates


def _check_rates(values: Values) -> None:
    """Raise if a learning rate or a warmup is given in two ways."""
    params = values.get("lr_schedule_params") or {}
    rate, steps = values.get("learning_rate"), params.get("values")
    other = None
    if values.get("base_learning_rate") is not None:
        other = "base_learning_rate, an exponent of the rate per sample"
    elif "initial_learning_rate" in params:
        other = "initial_learning_rate, which is per sample"
    elif isinstance(steps, list) and steps and steps[0] != rate:
        other = "values of a stepped schedule"
    if rate is not None and other is not None:
        raise ConfigurationError(
            f"Give learning_rate, which the optimizer sees, or {other}, not both."
        )
    warmup = values.get("lr_warmup_params")
    epochs = values.get("warmup_epochs")
    if epochs is not None and warmup and warmup.get("warmup_epochs") != epochs:
        raise ConfigurationError("Give warmup_epochs or lr_warmup_params, not both.")


def _set_warmup(values: Values) -> None:
    epochs = values.get("warmup_epochs")
    if epochs is None or values.get("lr_warmup_params"):
        return
    if not 0 <= epochs < math.inf:
        raise ConfigurationError(f"warmup_epochs must be 0 or more, got {epochs:g}.")
    warmup = {"warmup_mode": "shift", "warmup_epochs": epochs}
    values["lr_warmup_params"] = warmup if epochs else None


def _set_schedule(values: Values) -> None:
    """Complete the parameters of the schedule of an ordinary learning rate."""
    if (rate := values.get("learning_rate")) is None:
        return
    name = values.get("lr_schedule", "const")
    given: dict[str, Any] = dict(values.get("lr_schedule_params") or {})
    params = schedule_params(name, rate, values)
    # It follows from num_epochs, which may grow when a run is resumed.
    params.pop("epochs_to_total_decay", None)
    if name == "stepped":
        boundaries = given.get("boundaries", params["boundaries"])
        params["values"] = [rate * 0.1**drops for drops in range(len(boundaries) + 1)]
    params.pop("initial_learning_rate", None)
    values["lr_schedule_params"] = params | given
