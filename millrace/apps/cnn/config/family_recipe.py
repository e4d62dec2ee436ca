"""The recipes of the families: what Graphcore's TensorFlow 1 application does unless told.

Only what changes what is learned. How it is computed (precision, pipelines, offloading)
does not depend on the model here. Imports nothing heavy.
"""

from typing import Any

from millrace.apps.cnn.families import FAMILIES, LARGE_PICTURES
from millrace.batching import resolve_batching
from millrace.config import ConfigurationError

_EFFICIENTNET = "efficientnet"
_WARMUP_EPOCHS = 5
_LOGS_PER_EPOCH = 16

_EXPONENTS = {
    # By whether it is EfficientNet: the learning rate is 2 to this power, per sample.
    True: {"sgd": -7, "momentum": -10, "rmsprop": -14},
    False: {"sgd": -8, "momentum": -11},
}
_SMALL_EXPONENT = -6
_EPOCHS = {True: {True: 300, False: 350}, False: {True: 160, False: 100}}
"""By whether it is EfficientNet, and whether pictures are small."""
_RMSPROP = {"base_decay_exponent": -14, "epsilon": 0.001, "initial_accumulator": 1.0}
_LARS = {"eeta": 0.001, "epsilon": 0}
_STEPS = {True: (0.5, 0.75), False: (0.3, 0.6, 0.8, 0.9)}
"""Parts of the run after which the learning rate falls, for small pictures and large."""


def usual_recipe(values: dict[str, Any]) -> dict[str, Any]:
    """Complete options by their family's recipe, and work out the learning rate."""
    values = dict(values)
    is_family = values.get("model_name") in FAMILIES
    if is_family:
        values = _usual(values) | values
    if values.get("momentum") is not None:
        params = values.get("optimizer_params", {})
        values["optimizer_params"] = {**params, "momentum": values["momentum"]}
    if is_family or values.get("base_learning_rate") is not None:
        _set_learning_rate(values, is_family)
    return values


def _usual(values: dict[str, Any]) -> dict[str, Any]:
    small, efficient = _small(values), values["model_name"] == _EFFICIENTNET
    optimizer = values.get("optimizer", "sgd")
    decay = 1e-6 if small else (1e-5 if efficient else 1e-4)
    params = {
        "sgd": {"momentum": 0},
        "rmsprop": {"momentum": 0.9, **_RMSPROP},
        "lars": {"momentum": 0.9, "weight_decay": decay, **_LARS},
    }
    decays_elsewhere = optimizer == "lars" or "weight_decay" in values
    return {
        "norm_layer": norm_of(values),
        "num_epochs": _EPOCHS[efficient][small],
        "logs_per_epoch": _LOGS_PER_EPOCH,
        "optimizer_params": params[optimizer],
        "l2_regularization": 0.0 if decays_elsewhere else decay,
        "decay_kernels_only": True,
        "lr_schedule": "stepped",
        "label_smoothing": 0.1 if efficient and not small else 0.0,
        "label_smoothing_over": "others",
    }


def norm_of(values: dict[str, Any], *, batch_norm: bool | None = None) -> dict[str, Any]:
    """Return the norm layer of a model: batch norm for small pictures and old weights."""
    if values.get("model_name") not in FAMILIES:
        return {"name": "batch_norm"} if batch_norm else _groups(32, 1.001e-5)
    if batch_norm is None and values.get("groups") is None:
        batch_norm = _small(values) or values.get("pretrained") is not None
    if batch_norm:
        return {"name": "batch_norm", "epsilon": 1e-5}
    if values["model_name"] == _EFFICIENTNET:
        return _groups(4, 1e-3)
    return _groups(16 if _small(values) else 32, 1e-6)


def _groups(count: int, epsilon: float) -> dict[str, Any]:
    return {"name": "group_norm", "num_groups": count, "epsilon": epsilon}


def _small(values: dict[str, Any]) -> bool:
    return values.get("dataset") not in LARGE_PICTURES


def _set_learning_rate(values: dict[str, Any], is_family: bool) -> None:
    exponent = values.get("base_learning_rate")
    if "lr_schedule_params" in values:
        if exponent is not None:
            rate = {"initial_learning_rate": 2.0**exponent}
            values["lr_schedule_params"] = {**values["lr_schedule_params"], **rate}
        return
    if exponent is None:
        exponent = _usual_exponent(values)
    name = values.get("lr_schedule", "const")
    values["lr_schedule_params"] = _schedule_params(name, 2.0**exponent, values)
    if is_family and name != "const":
        mode = "shift" if name == "polynomial" else "mask"
        warmup = {"warmup_mode": mode, "warmup_epochs": _WARMUP_EPOCHS}
        values.setdefault("lr_warmup_params", warmup)


def _usual_exponent(values: dict[str, Any]) -> float:
    efficient = values["model_name"] == _EFFICIENTNET
    if _small(values) and not efficient:
        return _SMALL_EXPONENT
    kind = values.get("optimizer", "sgd")
    if kind == "sgd" and values["optimizer_params"].get("momentum"):
        kind = "momentum"
    if kind not in _EXPONENTS[efficient]:
        raise ConfigurationError(
            f"There is no usual learning rate for {values['model_name']} with {kind}: give "
            "base_learning_rate (of which 2 to the power is the rate per sample), or "
            "lr_schedule_params."
        )
    return _EXPONENTS[efficient][kind]


def _schedule_params(name: str, rate: float, values: dict[str, Any]) -> dict[str, Any]:
    epochs = values.get("num_epochs", 1)
    decaying = {"initial_learning_rate": rate, "epochs_to_total_decay": epochs}
    if name == "cosine":
        return decaying
    if name == "exponential":
        return decaying | {"num_decays": 146, "decay_rate": 0.97}
    if name == "polynomial":
        left = max(1, epochs - _WARMUP_EPOCHS)
        end = {"end_learning_rate_ratio": 1e-5, "power": 2}
        return decaying | {"epochs_to_total_decay": left} | end
    if name == "stepped":
        batch = _global_batch(values)
        parts = _STEPS[_small(values)]
        return {
            "boundaries": [part * epochs for part in parts],
            "values": [rate * batch * 0.1**step for step in range(len(parts) + 1)],
        }
    return {"initial_learning_rate": rate}


def _global_batch(values: dict[str, Any]) -> int:
    return resolve_batching(
        micro_batch_size=values.get("micro_batch_size", 1),
        num_replicas=values.get("num_replicas", 1),
        gradient_accumulation_count=values.get("gradient_accumulation_count"),
        global_batch_size=values.get("global_batch_size"),
    ).global_batch_size
