"""``millrace cnn export``: a trained model as files that other programs load."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from millrace.apps.cnn.augment import describe_scaling
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.commands import ExportConfig
from millrace.apps.cnn.model_card import format_card, timm_name, torchvision_code
from millrace.apps.cnn.models.pretrained import to_published
from millrace.apps.cnn.models.spec import has_small_images
from millrace.apps.cnn.predictor import TrainedCnn, load_trained
from millrace.checkpoint.manifest import read_manifest
from millrace.data.decoding import SHORT_SIDE_RATIO
from millrace.exports.folder import (
    Model,
    Program,
    check_format,
    name_arrays,
    select_metrics,
    write_card,
    write_model,
)
from millrace.run.saved import find_run
from millrace.storage.upload import publish

_FOLDER = "export"


def export(config: ExportConfig) -> None:
    """Write the model and print the files."""
    for name in config.format:
        check_format(name)
    trained = load_trained(config.run, config.which)
    directory = find_run(config.run, command="cnn train").directory or config.run
    folder = config.output or directory / _FOLDER
    facts = describe_model(trained, config.names, read_manifest(trained.checkpoint))
    for file in write_folder(folder, trained, facts, config):
        print(publish(file))


def write_folder(
    folder: Path, trained: TrainedCnn, facts: dict[str, Any], config: ExportConfig
) -> list[Path]:
    """Write all files of an exported model; return their paths."""
    files = write_model(folder, build_export(trained, facts, config.names), config.format)
    return [*files, *write_card(folder, format_card(trained.config, facts, files))]


def build_export(trained: TrainedCnn, facts: dict[str, Any], names: str) -> Model:
    """Return what is written about a trained model.

    Args:
        trained: The model.
        facts: Contents of ``config.json``.
        names: Whose names an EfficientNet gets: "torchvision" or "timm".
    """
    program = Program(
        trained.pixels_to_logits,
        jax.ShapeDtypeStruct((1, *trained.image_shape), trained.pixel_type),
        names=("images", "logits"),
    )
    is_family = trained.config.model.is_family
    # The format that loaders of Hugging Face look for.
    metadata = {"format": "pt"} if is_family else {}
    metadata |= {name: json.dumps(value) for name, value in facts.items()}
    return Model(_name_weights(trained, names), program, facts, metadata)


def _name_weights(trained: TrainedCnn, names: str) -> dict[str, np.ndarray]:
    params, model_state = jax.device_get((trained.params, trained.model_state))
    if trained.config.model.is_family:
        return to_published(params, model_state, torchvision=names == "torchvision")
    # Weights and moving statistics of a layer have different names.
    layers = {name: {**params.get(name, {}), **model_state.get(name, {})}
              for name in dict.fromkeys((*params, *model_state))}  # fmt: skip
    return name_arrays(layers)


def describe_model(
    trained: TrainedCnn, names: str, manifest: dict[str, Any]
) -> dict[str, Any]:
    """Return the contents of ``config.json``; those of timm where it has the model.

    Args:
        trained: The model.
        names: Whose names an EfficientNet gets: "torchvision" or "timm".
        manifest: The manifest of its checkpoint, with the metrics.
    """
    config, (height, width, channels) = trained.config, trained.image_shape
    facts: dict[str, Any] = {
        "architecture": timm_name(config, names) or config.model_title.replace(" ", ""),
        "num_classes": len(trained.classes),
        "label_names": trained.classes,
        "id2label": {str(n): name for n, name in enumerate(trained.classes)},
        "label2id": {name: n for n, name in enumerate(trained.classes)},
        "image_size": [height, width],
        "num_channels": channels,
        "pixel_type": trained.pixel_type,
        "dataset": config.resolved_dataset,
        "preprocessing": _describe_preprocessing(config, trained.image_shape),
        "norm_layer": _describe_norm(config),
        "weights": {
            "names": names if config.model.is_family else "millrace",
            "layout": "OIHW" if config.model.is_family else "HWIO",
            "torchvision": torchvision_code(config, len(trained.classes), names),
        },
        "update": manifest.get("update"),
        "epoch": manifest.get("epoch"),
        "metrics": select_metrics(manifest),
    }
    if timm_name(config, names) is not None:
        facts["pretrained_cfg"] = _describe_for_timm(facts)
    return facts


def _describe_preprocessing(
    config: CnnConfig, shape: tuple[int, int, int]
) -> dict[str, Any]:
    dataset = config.resolved_dataset
    sizes = {"resize": shape[0], "crop": shape[0]}
    if not has_small_images(dataset):
        sizes["resize"] = round(shape[0] * SHORT_SIDE_RATIO)
    scaling = describe_scaling(dataset, arrays=config.data.arrays, **config.data.scaling)
    return {**sizes, "interpolation": "bilinear", **scaling}


def _describe_norm(config: CnnConfig) -> dict[str, Any]:
    return {"epsilon": 1.001e-5, **config.model.norm_layer}


def _describe_for_timm(facts: dict[str, Any]) -> dict[str, Any]:
    size, steps = facts["image_size"], facts["preprocessing"]
    return {
        "input_size": [facts["num_channels"], *size],
        "num_classes": facts["num_classes"],
        "crop_pct": round(steps["crop"] / steps["resize"], 4),
        "interpolation": steps["interpolation"],
        "mean": steps["mean"],
        "std": steps["std"],
        "label_names": facts["label_names"],
    }
