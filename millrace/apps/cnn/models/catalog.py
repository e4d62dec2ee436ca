"""Build models by name, as lists of named layers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from millrace.apps.cnn.models import efficientnet, resnet, resnext, speednet
from millrace.apps.cnn.models.spec import FAMILIES, check_model_name
from millrace.nn import layers
from millrace.nn.layers import Layer
from millrace.nn.norms import NormFactory, batch_norm


def digits_cnn(num_classes: int, norm: NormFactory) -> list[Layer]:
    """Return three convolutions for 8 x 8 images; 24,058 parameters for ten classes."""
    model: list[Layer] = []
    for number, (features, strides) in enumerate([(16, 1), (32, 2), (64, 2)], 1):
        model += [
            layers.conv(f"conv{number}", features, strides=strides),
            norm(f"conv{number}_bn"),
            layers.relu(f"conv{number}_relu"),
        ]
    return [
        *model,
        layers.global_average_pool("avg_pool"),
        layers.dense("fc_layer", num_classes),
    ]


def toy_model(num_classes: int, norm: NormFactory) -> list[Layer]:
    """Return two convolutions with large pools; 242 parameters for CIFAR-10."""
    del norm
    model: list[Layer] = []
    for number, (features, kernel) in enumerate([(4, 3), (8, 1)]):
        model += [
            layers.conv(f"conv2d_{number}", features, kernel, padding="VALID", bias=True),
            layers.relu(f"conv2d_{number}_relu"),
            layers.max_pool(f"max_pooling2d_{number}", 5, 5),
        ]
    return [*model, layers.flatten("flatten"), layers.dense("dense", num_classes)]


_MODELS: dict[str, Callable[..., list[Layer]]] = {
    "digits_cnn": digits_cnn,
    "toy_model": toy_model,
    **{
        f"cifar_resnet{6 * blocks + 2}": functools.partial(resnet.cifar_resnet, blocks)
        for blocks in (1, 3, 5, 7, 9)
    },
    "resnet9": resnet.resnet9,
    "resnet18_small": functools.partial(
        resnet.resnet, (2, 2, 2, 2), bottleneck=False, small=True
    ),
    "resnet18": functools.partial(resnet.resnet, (2, 2, 2, 2), bottleneck=False),
    "resnet34": functools.partial(resnet.resnet, (3, 4, 6, 3), bottleneck=False),
    "resnet50": functools.partial(resnet.resnet, (3, 4, 6, 3), bottleneck=True),
    "speednet": speednet.speednet,
    "speednet_wide": functools.partial(
        speednet.speednet, widths=(128, 384, 512), is_residual=True
    ),
}
_FAMILIES: dict[str, Callable[..., list[Layer]]] = {
    "resnet": resnext.resnet,
    "resnext": resnext.resnext,
    "efficientnet": efficientnet.efficientnet,
}


def build_layers(
    name: str, num_classes: int, norm: NormFactory = batch_norm, **options: Any
) -> list[Layer]:
    """Return the layers of a model.

    Args:
        name: A model such as ``cifar_resnet20``, or a family such as ``resnext``.
        num_classes: Outputs of the last layer.
        norm: Returns a normalization layer for a name; with ``zero_scale=True``, one
            whose scale is initialized to zero.
        options: The shape of a family and its other options: ``CnnConfig.network``.
    """
    check_model_name(name)
    if name in FAMILIES:
        shape = options.pop("shape")
        return _FAMILIES[name](shape, num_classes, norm, **options)
    return _MODELS[name](num_classes, norm)


def find_split_layers(
    model: Sequence[Layer], splits: Sequence[int | str]
) -> list[int | str]:
    """Return the layers at which pipeline stages start.

    A block stands for its first layer: ``b1/2`` for ``b1/2/conv1``. Anything that is
    neither a layer nor a block is returned unchanged.
    """

    def first_layer(split: int | str) -> int | str:
        names = [layer.name for layer in model]
        if split in names:
            return split
        return next((n for n in names if n.startswith(f"{split}/")), split)

    return [first_layer(split) for split in splits]
