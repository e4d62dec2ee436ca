"""CNNs as lists of named layers, found by name."""

import difflib
import functools
from collections.abc import Callable

from millrace.apps.cnn.models import resnet, small
from millrace.config import ConfigurationError
from millrace.nn.layers import Layer
from millrace.nn.norms import NormFactory, batch_norm

_MODELS: dict[str, Callable[[int, NormFactory], list[Layer]]] = {
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


def build(name: str, num_classes: int, norm: NormFactory = batch_norm) -> list[Layer]:
    """Return the layers of a model.

    Args:
        name: Such as ``cifar_resnet20``.
        num_classes: Outputs of the last layer.
        norm: Makes a normalisation layer from its name; ``zero_scale=True`` asks for
            one that starts at zero.
    """
    if name not in _MODELS:
        nearest = difflib.get_close_matches(name, _MODELS, n=1)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise ConfigurationError(
            f"--model-name: there is no model {name!r}.{hint} There is: "
            f"{', '.join(_MODELS)}."
        )
    return _MODELS[name](num_classes, norm)
