"""Options of Graphcore's applications, and the recipes that come with their models.

Shorthands are replaced by the options they stand for before a configuration is built. If
the model is a family, options that are still missing come from its recipe in the
TensorFlow 1 application, as far as they affect what is learned. Imports nothing heavy.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from millrace.apps.cnn.config.augmentation import expand_augmentation
from millrace.apps.cnn.config.data import find_dataset
from millrace.apps.cnn.models.spec import FAMILIES, has_small_images
from millrace.config import ConfigurationError, as_typed, field_docs, flag
from millrace.plan import resolve_batching

_SHORTHAND = {"shorthand": True}
"""Marks options that only stand for others, which ``config.yml`` has as well."""

Values = dict[str, Any]
"""Options by name, not yet sorted into sections."""


def _stands_for(*names: str) -> Any:
    return field(default=None, metadata={"stands_for": names, "shorthand": True})


def _no_effect(*aliases: str) -> Any:
    metadata = {"without_effect": True, "may_change": True, "aliases": aliases}
    return field(default=None, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class GraphcoreOptions:
    """Graphcore options: shorthands, and options that have no effect here."""

    batch_norm: bool | None = _stands_for("norm_layer")
    """Same as norm_layer batch_norm; False: group_norm."""
    groups: int | None = field(default=None, metadata=_SHORTHAND)
    """Same as norm_layer group_norm with this many groups."""
    eight_bit_io: bool | None = _stands_for(
        "eight_bit_transfer", "accelerator_side_preprocess"
    )
    """Same as eight_bit_transfer and accelerator_side_preprocess."""
    generated_data: bool | None = _stands_for("synthetic_data")
    """Same as synthetic_data host."""
    on_demand: bool | None = _no_effect()
    """No effect: JAX attaches devices when the first of them is used, and not later."""
    half_partials: bool | None = _no_effect("--enable-half-partials")
    """No effect: XLA accumulates matrix products and convolutions in 32 bits; 16-bit
    sums were tried: XLA rejects them on an H200 and ignores them on a CPU."""
    internal_exchange_optimization_target: (
        Literal["cycles", "memory", "balanced"] | None
    ) = _no_effect("--internal-exchange-optimisation-target")
    """No effect: there are no tiles to exchange between, and none of XLA's options is
    of the kind."""
    available_memory_proportion: list[float] | None = _no_effect()
    """No effect: XLA manages the memory of products on its own; as a limit on all
    device memory, which was tried, 0.15 makes runs fail."""
    max_reduce_many_buffer_size: int | None = _no_effect()
    """No effect: XLA fuses the reductions on a device, and none of its options limits
    that; for those between devices, there is --max-cross-replica-buffer-size."""
    conv_dithering: bool | None = _no_effect("--enable-conv-dithering")
    """No effect: it spreads work over the tiles of an IPU, and none of XLA's options is
    of the kind."""
    scheduling_algorithm: str | None = _no_effect()
    """No effect: it names schedulers of Poplar; that of XLA is chosen with
    XLA_FLAGS."""
    nanoo: bool | None = _no_effect()
    """No effect: numbers overflow to infinity; --fp-exceptions stops at the first."""
    accelerator_side_reduction: bool | None = _no_effect()
    """No effect: metrics are always averaged over the replicas on the devices."""
    fused_preprocessing: bool | None = _no_effect()
    """No effect: XLA fuses the preprocessing of --accelerator-side-preprocess."""
    standard_imagenet: bool | None = _no_effect()
    """No effect: images always come from all files, in a new order each epoch."""

    def notices(self) -> list[str]:
        """Return a notice about each option that was given and has no effect."""
        given = [
            field.name
            for field in dataclasses.fields(self)
            if "without_effect" in field.metadata
            and getattr(self, field.name) not in (None, [])
        ]
        docs = {
            name: " ".join(text.split())
            for name, text in field_docs(GraphcoreOptions).items()
        }
        return [
            f"{as_typed(flag(name))} has {docs[name].replace('No', 'no', 1)}"
            for name in given
        ]


@dataclass(frozen=True, kw_only=True)
class GraphcoreTrainingOptions(GraphcoreOptions):
    """Graphcore options: shorthands, and options that have no effect here."""

    base_learning_rate: float | None = field(
        default=None,
        metadata={"aliases": ("--base-learning-rate-exponent",), **_SHORTHAND},
    )
    """An exponent: sets initial_learning_rate in lr_schedule_params to 2 to this power, per
    sample of the global batch. The other parameters of the schedule follow from num_epochs.
    For an ordinary learning rate, use learning_rate."""
    auto_loss_scaling: bool = field(default=False, metadata=_SHORTHAND)
    """Same as loss_scaling dynamic."""
    pipeline: bool | None = field(default=None, metadata=_SHORTHAND)
    """Train in a pipeline, with the stages given by pipeline_splits or shards."""
    shards: int | None = field(default=None, metadata=_SHORTHAND)
    """Number of stages, one per device; without pipeline_splits, the splits are chosen by
    cost. Without pipeline, one micro-batch at a time passes through them."""

    def check_memory_proportion(self, num_stages: int) -> None:
        """Refuse values of available_memory_proportion that Graphcore refuses."""
        shares = self.available_memory_proportion or []
        if len(shares) > 1 and (num_stages == 1 or len(shares) != 2 * num_stages):
            per_stage = f", or {2 * num_stages} (two per stage)" if num_stages > 1 else ""
            raise ValueError(
                f"available_memory_proportion takes one percentage{per_stage}; got "
                f"{len(shares)}."
            )
        for share in shares:
            if not 0 < share <= 100:
                raise ValueError(
                    "available_memory_proportion must be a percentage, more than 0 and at "
                    f"most 100; got {share:g}."
                )


def expand_options(values: Values) -> Values:
    """Replace shorthands by the options they stand for, and complete the recipe."""
    return default_recipe(expand_shorthands(values))


def expand_shorthands(values: Values) -> Values:
    """Replace shorthands by the options they stand for."""
    values = find_dataset(dict(values))
    model = str(values.get("model_name")).lower()
    if model in FAMILIES:
        values["model_name"] = model
    for expand in (_expand_data, _expand_pipeline, _expand_norm, _expand_optimizer):
        expand(values)
    expand_augmentation(values)
    return values


def _set(values: Values, shorthand: str, name: str, meaning: Any) -> None:
    if values.get(name, meaning) != meaning:
        raise ConfigurationError(
            f"{shorthand} means {name} {meaning}, but {name} is {values[name]}. Give only "
            "one of them."
        )
    values[name] = meaning


def _expand_data(values: Values) -> None:
    if values.get("eight_bit_io"):
        _set(values, "eight_bit_io", "eight_bit_transfer", True)
        _set(values, "eight_bit_io", "accelerator_side_preprocess", True)
    if values.get("generated_data"):
        _set(values, "generated_data", "synthetic_data", "host")
    if values.get("synthetic_data") and values.get("training", True):
        values.setdefault("validation", False)  # accuracy on random labels says nothing


def _expand_pipeline(values: Values) -> None:
    shards, splits = values.get("shards"), values.get("pipeline_splits")
    pipeline = values.get("pipeline")
    if shards is not None and shards < 1:
        raise ConfigurationError(f"shards must be at least 1, got {shards}.")
    if pipeline is False and splits:
        raise ConfigurationError("pipeline is False, but pipeline_splits is given.")
    if pipeline and not splits and (shards or 1) == 1:
        raise ConfigurationError(
            "pipeline needs pipeline_splits, or the number of stages in shards; got "
            f"{'neither' if shards is None else f'shards {shards}'}."
        )
    if shards is None or (shards == 1 and not splits):
        return
    if not (pipeline or splits):
        _set_sequential(values)
    if not splits:
        values["pipeline_splits"] = [shards]
    elif splits != [shards] and len(splits) + 1 != shards:
        raise ConfigurationError(
            f"shards ({shards}) needs {shards - 1} pipeline_splits; got {len(splits)}: "
            f"{' '.join(map(str, splits))}."
        )


def _set_sequential(values: Values) -> None:
    """Shard the model without a pipeline: one micro-batch at a time, stage after stage."""
    schedule = values.setdefault("pipeline_schedule", "sequential")
    if str(schedule).lower() != "sequential":
        raise ConfigurationError(
            f"pipeline_schedule {schedule} is for a pipeline: give pipeline as well. "
            "shards alone runs one stage after the other."
        )


def _expand_norm(values: Values) -> None:
    batch_norm, groups = values.get("batch_norm"), values.get("groups")
    if groups is not None and groups < 1:
        raise ConfigurationError(f"groups must be at least 1, got {groups}.")
    if groups is not None and batch_norm:
        raise ConfigurationError("groups is for group norm, but batch_norm is on.")
    if batch_norm is not None or (groups is not None and "norm_layer" not in values):
        _set(values, "batch_norm", "norm_layer", default_norm(values, batch_norm))
    if groups is not None:
        norm = {k: v for k, v in values["norm_layer"].items() if k != "channels_per_group"}
        values["norm_layer"] = norm | {"num_groups": groups}


def _expand_optimizer(values: Values) -> None:
    name = values.get("optimizer", "sgd")
    if name in ("momentum", "nesterov"):
        values["optimizer"] = "sgd"
        params = values.get("optimizer_params", {"momentum": 0.9})
        values["optimizer_params"] = params | (
            {"nesterov": True} if name == "nesterov" else {}
        )
    elif name in _WITH_MOMENTS or name == "muon_sgd":
        values.setdefault("optimizer_params", {})
    if values.get("auto_loss_scaling"):
        if (scaling := values.get("loss_scaling", 0)) not in (0, "dynamic"):
            raise ConfigurationError(
                "Give auto_loss_scaling or a fixed loss_scaling, not both; got "
                f"loss_scaling {scaling}."
            )
        values["loss_scaling"] = "dynamic"


# Recipes of the families

_WITH_MOMENTS = ("adam", "adamw", "lamb", "lion", "muon")
"""Optimizers whose parameters all have defaults."""
_EFFICIENTNET = "efficientnet"
_WARMUP_EPOCHS = 5
_LOGS_PER_EPOCH = 16
_LR_EXPONENTS = {
    # By whether it is EfficientNet: the learning rate per sample is 2 to this power.
    True: {"sgd": -7, "momentum": -10, "rmsprop": -14},
    False: {"sgd": -8, "momentum": -11},
}
_SMALL_LR_EXPONENT = -6
_EPOCHS = {True: {True: 300, False: 350}, False: {True: 160, False: 100}}
"""By whether it is EfficientNet, and whether images are small."""
_RMSPROP = {"base_decay_exponent": -14, "epsilon": 0.001, "initial_accumulator": 1.0}
_LARS = {"eeta": 0.001, "epsilon": 0}
_FAMILY_DECAY = 1e-4
_STEPS = {True: (0.5, 0.75), False: (0.3, 0.6, 0.8, 0.9)}
"""Fractions of the run at which the learning rate drops, by whether images are small."""


def default_recipe(values: Values) -> Values:
    """Complete options with the recipe of their family, and compute the learning rate."""
    values = dict(values)
    is_family = values.get("model_name") in FAMILIES
    if is_family:
        values = _family_defaults(values) | values
    values.setdefault("optimizer_params", default_params(values.get("optimizer")))
    set_momentum(values)
    has_rate = values.get("learning_rate") is not None
    if not has_rate and (is_family or values.get("base_learning_rate") is not None):
        _set_learning_rate(values, is_family)
    return values


def default_params(optimizer: str | None, decay: float = _FAMILY_DECAY) -> dict[str, Any]:
    """Return the parameters of an optimizer; those of Adam and the like are optional."""
    if optimizer == "rmsprop":
        return {"momentum": 0.9, **_RMSPROP}
    if optimizer == "lars":
        return {"momentum": 0.9, "weight_decay": decay, **_LARS}
    return {"momentum": 0}


def set_momentum(values: Values) -> None:
    """Set the parameter of the optimizer that the option momentum stands for."""
    if (momentum := values.get("momentum")) is None:
        return
    optimizer, params = values.get("optimizer", "sgd"), values.get("optimizer_params", {})
    is_first_moment = optimizer in _WITH_MOMENTS and optimizer != "muon"
    key = "b1" if is_first_moment else "momentum"
    values["optimizer_params"] = {**params, key: momentum}


def _family_defaults(values: Values) -> Values:
    small, efficientnet = _is_small(values), values["model_name"] == _EFFICIENTNET
    optimizer = values.get("optimizer", "sgd")
    decay = 1e-6 if small else (1e-5 if efficientnet else _FAMILY_DECAY)
    decays_elsewhere = optimizer == "lars" or "weight_decay" in values
    return {
        "norm_layer": default_norm(values),
        "num_epochs": _EPOCHS[efficientnet][small],
        "logs_per_epoch": _LOGS_PER_EPOCH,
        "optimizer_params": default_params(optimizer, decay),
        "l2_regularization": 0.0 if decays_elsewhere else decay,
        "decay_kernels_only": True,
        "lr_schedule": "stepped",
        "label_smoothing": 0.1 if efficientnet and not small else 0.0,
        "label_smoothing_over": "others",
    }


def default_norm(values: Values, batch_norm: bool | None = None) -> dict[str, Any]:
    """Return the norm layer: batch norm for small images and for published weights."""
    if values.get("model_name") not in FAMILIES:
        return {"name": "batch_norm"} if batch_norm else _group_norm(32, 1.001e-5)
    if batch_norm is None and values.get("groups") is None:
        batch_norm = _is_small(values) or values.get("pretrained") is not None
    if batch_norm:
        return {"name": "batch_norm", "epsilon": 1e-5}
    if values["model_name"] == _EFFICIENTNET:
        return _group_norm(4, 1e-3)
    return _group_norm(16 if _is_small(values) else 32, 1e-6)


def _group_norm(num_groups: int, epsilon: float) -> dict[str, Any]:
    return {"name": "group_norm", "num_groups": num_groups, "epsilon": epsilon}


def _is_small(values: Values) -> bool:
    return has_small_images(values.get("dataset"))


def _set_learning_rate(values: Values, is_family: bool) -> None:
    exponent = values.get("base_learning_rate")
    if "lr_schedule_params" in values:
        if exponent is not None:
            rate = {"initial_learning_rate": 2.0**exponent}
            values["lr_schedule_params"] = {**values["lr_schedule_params"], **rate}
        return
    if exponent is None:
        exponent = _default_exponent(values)
    name = values.get("lr_schedule", "const")
    values["lr_schedule_params"] = schedule_params(name, 2.0**exponent, values)
    if is_family and name != "const":
        mode = "shift" if name == "polynomial" else "mask"
        warmup = {"warmup_mode": mode, "warmup_epochs": _WARMUP_EPOCHS}
        values.setdefault("lr_warmup_params", warmup)


def _default_exponent(values: Values) -> float:
    efficientnet = values["model_name"] == _EFFICIENTNET
    if _is_small(values) and not efficientnet:
        return _SMALL_LR_EXPONENT
    optimizer = values.get("optimizer", "sgd")
    if optimizer == "sgd" and values["optimizer_params"].get("momentum"):
        optimizer = "momentum"
    if optimizer not in _LR_EXPONENTS[efficientnet]:
        raise ConfigurationError(
            f"{values['model_name']} has no default learning rate for {optimizer}: give "
            "learning_rate, or base_learning_rate (2 to this power is the rate per sample)."
        )
    return _LR_EXPONENTS[efficientnet][optimizer]


def schedule_params(name: str, rate: float, values: Values) -> dict[str, Any]:
    """Return the parameters of a schedule over the whole run, for a rate per sample."""
    epochs = values.get("num_epochs", 1)
    decaying = {"initial_learning_rate": rate, "epochs_to_total_decay": epochs}
    if name == "cosine":
        return decaying
    if name == "exponential":
        return decaying | {"num_decays": 146, "decay_rate": 0.97}
    if name == "polynomial":
        after_warmup = {"epochs_to_total_decay": max(1, epochs - _WARMUP_EPOCHS)}
        return decaying | after_warmup | {"end_learning_rate_ratio": 1e-5, "power": 2}
    if name == "stepped":
        batch, steps = global_batch_size(values), _STEPS[_is_small(values)]
        return {
            "boundaries": [step * epochs for step in steps],
            "values": [rate * batch * 0.1**drops for drops in range(len(steps) + 1)],
        }
    return {"initial_learning_rate": rate}


def global_batch_size(values: Values) -> int:
    """Return the samples of an update with these options."""
    return resolve_batching(
        micro_batch_size=values.get("micro_batch_size", 1),
        num_replicas=values.get("num_replicas", 1),
        gradient_accumulation_count=values.get("gradient_accumulation_count"),
        global_batch_size=values.get("global_batch_size"),
    ).global_batch_size
