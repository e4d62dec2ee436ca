"""The model card of an exported model: what it is, how good it is, and how to load it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.models.spec import (
    RESNEXT_GROUPS,
    EfficientNetShape,
    ResNetShape,
    has_small_images,
)
from millrace.exports.card import format_header, format_metrics

_TIMM_SIZES = {
    "resnet": {"18", "26", "34", "50", "101", "152"},
    "resnext": {"50", "101"},
    "efficientnet": {f"B{n}" for n in range(8)},
}
_FILES = {
    ".safetensors": "the weights, as float32",
    ".pt": "the same as a state dict of PyTorch",
    ".stablehlo": "the model with its weights and preprocessing, for `jax.export`",
    ".onnx": "the model with its weights and preprocessing, for ONNX Runtime and others",
    ".json": "classes, image size, preprocessing and metrics",
}


def timm_name(config: CnnConfig, names: str) -> str | None:
    """Return the name of the model in timm, if it has this model with these names.

    Args:
        config: The configuration of the run.
        names: Whose names an EfficientNet has: "torchvision" or "timm".
    """
    family, size = config.model.model_name, config.size
    is_plain = config.model.norm_layer["name"] != "group_norm"
    is_plain &= config.model.expand_ratio in (None, 6)
    if family is None or size is None or not is_plain:
        return None
    if has_small_images(config.resolved_dataset) or size.name not in _TIMM_SIZES[family]:
        return None
    if family == "efficientnet":
        is_known = names == "timm" and config.model.group_dim in (None, 1)
        return f"efficientnet_{size.name.lower()}" if is_known else None
    is_resnext = family == "resnext"
    if is_resnext and config.model.group_dim not in (None, 4):
        return None
    return f"{family}{size.name}{'_32x4d' if is_resnext else ''}"


def torchvision_code(config: CnnConfig, num_classes: int, names: str) -> str | None:
    """Return the expression that builds the model in torchvision, if it can.

    The names `models`, `nn` and `partial` are those of torchvision, torch and functools.
    """
    size = config.size
    if size is None or has_small_images(config.resolved_dataset):
        return None
    arguments = f"num_classes={num_classes}, norm_layer={_norm_code(config)}"
    if isinstance(size.shape, ResNetShape):
        block = "Bottleneck" if size.shape.bottleneck else "BasicBlock"
        if config.model.model_name == "resnext":
            width = config.model.group_dim or 4
            arguments += f", groups={RESNEXT_GROUPS}, width_per_group={width}"
        blocks = list(size.shape.blocks)
        return f"models.resnet.ResNet(models.resnet.{block}, {blocks}, {arguments})"
    assert isinstance(size.shape, EfficientNetShape)
    is_plain = config.model.group_dim in (None, 1) and config.model.expand_ratio in (
        None,
        6,
    )
    if names != "torchvision" or not is_plain or size.name == "cifar":
        return None
    return f"models.efficientnet_{size.name.lower()}({arguments})"


def _norm_code(config: CnnConfig) -> str:
    options = config.model.norm_layer
    epsilon = options.get("epsilon", 1.001e-5)
    if options["name"] != "group_norm":
        return f"partial(nn.BatchNorm2d, eps={epsilon})"
    groups = options.get("num_groups") or f"c // {options['channels_per_group']}"
    return f"lambda c: nn.GroupNorm({groups}, c, eps={epsilon})"


def format_card(config: CnnConfig, facts: dict[str, Any], files: Sequence[Path]) -> str:
    """Return the text of ``README.md``, with the header that Hugging Face reads.

    Args:
        config: The configuration of the run.
        facts: Contents of ``config.json``.
        files: The other files of the folder.
    """
    epoch = "" if facts["epoch"] is None else f", epoch {facts['epoch']:g}"
    height, width = facts["image_size"]
    channels = facts["num_channels"]
    kind = {1: "gray", 3: "RGB"}.get(channels, f"{channels}-channel")
    has_timm = "pretrained_cfg" in facts
    parts = [
        format_header(
            config.model_title,
            facts["metrics"],
            library="timm" if has_timm else "millrace",
            task="image-classification",
            dataset=facts["dataset"],
        ),
        f"# {config.model_title}",
        f"An image classifier with {facts['num_classes']} classes for {kind} images of "
        f"{height} x {width} pixels, trained on {facts['dataset']}. These are the weights "
        f"of update {facts['update']:,}{epoch}.",
        format_metrics(facts["metrics"]),
        "## Files",
        "\n".join(
            f"- `{file.name}`: {_FILES[file.suffix]}" for file in files if file.suffix
        ),
        "## Preprocessing",
        _format_preprocessing(facts["preprocessing"]),
        *_format_usage(facts, {file.suffix for file in files}),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _format_preprocessing(steps: dict[str, Any]) -> str:
    crop = f"Resize the shorter side to {steps['resize']} pixels (bilinear)"
    if steps["crop"] != steps["resize"]:
        crop += f", take the central {steps['crop']} x {steps['crop']} pixels"
    return f"{crop}, and {_format_scaling(steps)}."


def _format_scaling(steps: dict[str, Any]) -> str:
    if steps.get("standardize_each_image"):
        return "subtract the mean of each image and divide by its standard deviation"
    scale = f"multiply pixels by {steps['scale']:.8g}"
    if set(steps["mean"]) == {0.0} and set(steps["std"]) == {1.0}:
        return scale
    mean, std = (", ".join(f"{x:.6g}" for x in steps[name]) for name in ("mean", "std"))
    first = "" if steps["scale"] == 1 else f"{scale}, "
    return f"{first}subtract {mean} and divide by {std} channel by channel"


def _format_usage(facts: dict[str, Any], endings: set[str]) -> list[str]:
    parts = []
    code = facts["weights"]["torchvision"]
    if ".safetensors" in endings and code is not None:
        parts += ["## PyTorch", _TORCHVISION.format(code=code)]
    if ".pt" in endings and code is not None:
        parts += ["## PyTorch, state dict", _STATE_DICT.format(code=code)]
    if ".safetensors" in endings and "pretrained_cfg" in facts:
        parts += ["Or with timm:", _TIMM]
    has_weights = bool(endings & {".safetensors", ".pt"})
    if has_weights and code is None and "pretrained_cfg" not in facts:
        weights = facts["weights"]
        parts.append(
            f"The weights have the names of {weights['names']}, and kernels in the order "
            f"{weights['layout']}."
        )
    if ".stablehlo" in endings:
        parts += ["## JAX, without millrace", _JAX.format(type=facts["pixel_type"])]
    if ".onnx" in endings:
        parts += ["## ONNX Runtime", _ONNX.format(type=facts["pixel_type"])]
    return parts


_TORCHVISION = """```python
from functools import partial

from safetensors.torch import load_file
from torch import nn
from torchvision import models

model = {code}
model.load_state_dict(load_file("model.safetensors"))
model.eval()  # takes scaled images, (number, channels, height, width)
```"""
_STATE_DICT = """```python
from functools import partial

import torch
from torch import nn
from torchvision import models

model = {code}
model.load_state_dict(torch.load("model.pt", weights_only=True))
model.eval()  # takes scaled images, (number, channels, height, width)
```"""
_TIMM = """```python
import timm

model = timm.create_model("local-dir:.", pretrained=True).eval()
```"""
_JAX = """`pip install jax flatbuffers`. The program scales images itself: it takes any
number of them, unscaled, as {type} (number, height, width, channels).

```python
from pathlib import Path

from jax import export

model = export.deserialize(bytearray(Path("model.stablehlo").read_bytes()))
logits = model.call(images)
```"""
_ONNX = """It takes the same images as {type} (number, height, width, channels), unscaled.

```python
import onnxruntime

model = onnxruntime.InferenceSession("model.onnx")
(logits,) = model.run(None, {{"images": images}})
```"""
