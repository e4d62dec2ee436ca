"""Build models by name, as lists of named layers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from millrace.apps.cnn.models import efficientnet, resnet, resnext, small
from millrace.apps.cnn.models.spec import FAMILIES, check_model_name
from millrace.nn.layers import Layer
from millrace.nn.norms import NormFactory, batch_norm

_MODELS: dict[str, Callable[..., list[Layer]]] = {
    "digits_cnn": small.digits_cnn,
    "toy_model": small.toy_model,
    **{
        f"cifar_resnet{6 * blocks + 2}": functools.partial(resnet.cifar_resnet, blocks)
        for blocks in (1, 3, 5, 7, 9)
    },
    "resnet18": functools.partial(resnet.resnet, (2, 2, 2, 2), bottleneck=False),
    "resnet34": functools.partial(resnet.resnet, (3, 4, 6, 3), bottleneck=False),
    "resnet50": functools.partial(resnet.resnet, (3, 4, 6, 3), bottleneck=True),
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
