"""Options that stand for others, as Graphcore's TensorFlow 1 application has them.

They are expanded before a configuration is made; where the model is of a family, what is
then still missing is taken from the family's recipe. Imports nothing heavy.
"""

from dataclasses import dataclass, field
from typing import Any

from millrace.apps.cnn.config.family_recipe import norm_of, usual_recipe
from millrace.apps.cnn.families import FAMILIES
from millrace.config import ConfigurationError


def _stands_for(*names: str, **metadata: Any) -> Any:
    return field(default=None, metadata={"stands_for": names, **metadata})


@dataclass(frozen=True, kw_only=True)
class ShorthandOptions:
    """In other words: each of these stands for options above."""

    momentum: float | None = None
    """optimizer_params: its momentum."""
    base_learning_rate: float | None = field(
        default=None, metadata={"aliases": ("--base-learning-rate-exponent",)}
    )
    """lr_schedule_params: initial_learning_rate is 2 to this power; what else the schedule
    needs comes from num_epochs."""
    batch_norm: bool | None = _stands_for("norm_layer")
    """norm_layer: batch_norm; False: group_norm."""
    groups: int | None = None
    """norm_layer: group_norm with so many groups."""
    eight_bit_io: bool | None = _stands_for(
        "eight_bit_transfer", "accelerator_side_preprocess"
    )
    """eight_bit_transfer and accelerator_side_preprocess."""
    generated_data: bool | None = _stands_for("synthetic_data")
    """synthetic_data host."""
    pipeline: bool | None = None
    """The stages of pipeline_splits, or as many as shards says."""
    shards: int | None = None
    """Stages of the pipeline; without pipeline_splits they are chosen by their cost."""


def expand_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options that `values` stand for, completed by a family's recipe."""
    values = dict(values)
    model = str(values.get("model_name")).lower()
    if model in FAMILIES:
        values["model_name"] = model
    for expand in (_expand_data, _expand_pipeline, _expand_norm, _expand_optimizer):
        expand(values)
    return usual_recipe(values)


def _put(values: dict[str, Any], shorthand: str, name: str, meaning: Any) -> None:
    if values.get(name, meaning) != meaning:
        raise ConfigurationError(
            f"{shorthand} means {name} {meaning}; got {name} {values[name]} as well. Give "
            "one of them."
        )
    values[name] = meaning


def _expand_data(values: dict[str, Any]) -> None:
    if values.get("eight_bit_io"):
        _put(values, "eight_bit_io", "eight_bit_transfer", True)
        _put(values, "eight_bit_io", "accelerator_side_preprocess", True)
    if values.get("generated_data"):
        _put(values, "generated_data", "synthetic_data", "host")


def _expand_pipeline(values: dict[str, Any]) -> None:
    shards, splits = values.get("shards"), values.get("pipeline_splits")
    wanted = values.get("pipeline")
    if shards is not None and shards < 1:
        raise ConfigurationError(f"shards must be at least 1, got {shards}.")
    if wanted is False and splits:
        raise ConfigurationError("pipeline is False, but pipeline_splits is given.")
    if wanted and not splits and (shards or 1) == 1:
        raise ConfigurationError(
            "pipeline needs pipeline_splits, or shards for how many stages to make; got "
            f"{'neither' if shards is None else f'shards {shards}'}."
        )
    if shards is None or not (wanted or splits):
        if (shards or 1) > 1:
            raise ConfigurationError(
                f"shards ({shards}) divides the model only in a pipeline: give pipeline "
                "as well."
            )
        return
    if not splits:
        values["pipeline_splits"] = [shards]
    elif splits != [shards] and len(splits) + 1 != shards:
        raise ConfigurationError(
            f"shards ({shards}) needs {shards - 1} pipeline_splits; got {len(splits)}: "
            f"{' '.join(map(str, splits))}."
        )


def _expand_norm(values: dict[str, Any]) -> None:
    batch_norm, groups = values.get("batch_norm"), values.get("groups")
    if groups is not None and groups < 1:
        raise ConfigurationError(f"groups must be at least 1, got {groups}.")
    if groups is not None and batch_norm:
        raise ConfigurationError("groups is about group norm, and batch_norm is on.")
    if batch_norm is not None or (groups is not None and "norm_layer" not in values):
        _put(values, "batch_norm", "norm_layer", norm_of(values, batch_norm=batch_norm))
    if groups is not None:
        norm = {k: v for k, v in values["norm_layer"].items() if k != "channels_per_group"}
        values["norm_layer"] = norm | {"num_groups": groups}


def _expand_optimizer(values: dict[str, Any]) -> None:
    if values.get("optimizer") == "momentum":
        values["optimizer"] = "sgd"
        values.setdefault("optimizer_params", {"momentum": 0.9})
