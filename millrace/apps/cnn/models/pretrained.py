"""Published weights for the families, from safetensors files.

Names are torchvision's for ResNet and ResNeXt (timm has the same), and those of either for
EfficientNet. Kernels there are (out, in, height, width), and matrices (out, in).
"""

import re
import string
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from millrace.config import ConfigurationError
from millrace.data.safetensors import SafetensorsError, read_safetensors
from millrace.nn.layers import Tree

_CLASSIFIER = "fc1"
_NOT_NEEDED = "num_batches_tracked"
_MAX_SHOWN = 3
_TO_TORCH, _FROM_TORCH = (3, 2, 0, 1), (2, 3, 1, 0)

_LAYERS = {
    # ResNet and ResNeXt
    r"b0/conv": "conv1",
    r"b0/norm": "bn1",
    r"b(\d)/(\d+)/conv(\d)": r"layer\1.\2.conv\3",
    r"b(\d)/(\d+)/norm(\d)": r"layer\1.\2.bn\3",
    r"b(\d)/(\d+)/shortcut/conv": r"layer\1.\2.downsample.0",
    r"b(\d)/(\d+)/shortcut/norm": r"layer\1.\2.downsample.1",
    # timm's EfficientNet, besides its blocks
    "block0/conv": "conv_stem",
    "block0/norm": "bn1",
    "Top/conv": "conv_head",
    "Top/norm": "bn2",
}
_BLOCK_PARTS = {
    # Of a block that starts by widening, and of one that does not.
    True: {"a/conv": "conv_pw", "a/norm": "bn1", "b/conv": "conv_dw", "b/norm": "bn2",
           "c/conv": "conv_pwl", "c/norm": "bn3"},
    False: {"b/conv": "conv_dw", "b/norm": "bn1", "c/conv": "conv_pw", "c/norm": "bn2"},
}  # fmt: skip
_SQUEEZE_PARTS = {"reduce": "se.conv_reduce", "expand": "se.conv_expand"}
_TORCHVISION_LAYERS = {
    # timm's name of a layer of EfficientNet, and torchvision's
    "conv_stem": "features.0.0",
    "bn1": "features.0.1",
    "conv_head": "features.8.0",
    "bn2": "features.8.1",
    "classifier": "classifier.1",
}
_TORCHVISION_PARTS = {
    # The same of the parts of a block: the first stage's do not start by widening.
    True: {"conv_pw": "0.0", "bn1": "0.1", "conv_dw": "1.0", "bn2": "1.1",
           "se.conv_reduce": "2.fc1", "se.conv_expand": "2.fc2",
           "conv_pwl": "3.0", "bn3": "3.1"},
    False: {"conv_dw": "0.0", "bn1": "0.1", "se.conv_reduce": "1.fc1",
            "se.conv_expand": "1.fc2", "conv_pw": "2.0", "bn2": "2.1"},
}  # fmt: skip
_OF_TORCHVISION = "features.0.0.weight"
_VARIABLES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}


class _Source(NamedTuple):
    """Where a variable of ours is found: its name there and its shape there."""

    name: str
    shape: tuple[int, ...]


def read_pretrained(path: Path) -> Tree:
    """Return the arrays of a safetensors file; what is not one is a mistake of the user."""
    try:
        return read_safetensors(path)
    except SafetensorsError as error:
        said = _refusal_of_pickle(path) if _is_pickle(path) else error
        raise ConfigurationError(f"--pretrained: {said}") from error


def _is_pickle(path: Path) -> bool:
    """Tell what ``torch.save`` writes: a zip file or, long ago, a bare pickle."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(9)
    # The length of a safetensors header may begin with the byte of a pickle.
    return start.startswith(b"PK\x03\x04") or (start[:1] == b"\x80" and start[8:] != b"{")


def _refusal_of_pickle(path: Path) -> str:
    new = path.with_suffix(".safetensors")
    return (
        f"{path} looks like a PyTorch pickle, which is not read because a pickle can run "
        'code. Make it a safetensors file: python -c "import torch, safetensors.torch as '
        f's; s.save_file(torch.load({str(path)!r}, weights_only=True), {str(new)!r})"'
    )


def fit_pretrained(
    path: Path, found: Tree, params: Tree, model_state: Tree
) -> tuple[Tree, Tree, list[str]]:
    """Return a model's weights and model state, and what there is to say of them.

    Args:
        path: Where the arrays come from.
        found: The arrays.
        params: The model's own, whose names and shapes are wanted.
        model_state: Likewise.
    """
    if not model_state:
        raise ConfigurationError(
            "--pretrained: published weights have batch norm, and this model has another "
            "norm. Give --batch-norm."
        )
    sources = _sources(params, model_state, torchvision=_OF_TORCHVISION in found)
    last = sources[0][_CLASSIFIER]
    notes = []
    if _has_other_classes(found, last):
        notes.append(f"{path.name} is for other classes: the last layer starts anew.")
        found = found | dict.fromkeys(source.name for source in last.values())
    _check(path, found, jax.tree.leaves(sources, is_leaf=_is_source))
    loaded = jax.tree.map(
        lambda source, own: _ours(found[source.name], own),
        sources,
        (params, model_state),
        is_leaf=_is_source,
    )
    return *loaded, notes


def _sources(
    params: Tree, model_state: Tree, *, torchvision: bool = False
) -> tuple[Tree, Tree]:
    """Return where each variable is found, as trees like those of the variables.

    Args:
        params: The model's own.
        model_state: Likewise.
        torchvision: Whether names of an EfficientNet are torchvision's and not timm's.
    """
    widening = {layer.split("/")[0] for layer in params if "/a/" in layer}
    is_resnet = "b0/conv" in params
    classifier = "fc" if is_resnet else "classifier"

    def source(path: Any, own: Any) -> _Source:
        layer, *parts, variable = (entry.key for entry in path)
        prefix = classifier if layer == _CLASSIFIER else _prefix(layer, widening)
        shape = own.shape[::-1] if own.ndim < 4 else [own.shape[dim] for dim in _TO_TORCH]
        if parts:  # of squeeze and excite: matrices here, 1 x 1 convolutions there
            prefix = f"{prefix}.{_SQUEEZE_PARTS[parts[0]]}"
            shape = (*shape, 1, 1) if own.ndim > 1 else shape
        if torchvision and not is_resnet:
            prefix = _torchvisions(prefix)
        return _Source(f"{prefix}.{_VARIABLES[variable]}", tuple(shape))

    mapped = jax.tree_util.tree_map_with_path
    return mapped(source, params), mapped(source, model_state)


def _prefix(layer: str, widening: Collection[str]) -> str:
    """Return what a layer is called there."""
    for pattern, name in _LAYERS.items():
        if match := re.fullmatch(pattern, layer):
            return match.expand(name)
    block, _, part = layer.partition("/")
    stage, repeat = int(block[5:-1]) - 1, string.ascii_lowercase.index(block[-1])
    inside = _BLOCK_PARTS[block in widening].get(part)
    return ".".join(["blocks", str(stage), str(repeat), *([inside] if inside else [])])


def _torchvisions(prefix: str) -> str:
    """Return what torchvision calls a layer of timm's EfficientNet."""
    if not prefix.startswith("blocks."):
        return _TORCHVISION_LAYERS[prefix]
    _, stage, repeat, part = prefix.split(".", 3)
    inside = _TORCHVISION_PARTS[stage != "0"][part]
    return f"features.{int(stage) + 1}.{repeat}.block.{inside}"


def _is_source(node: Any) -> bool:
    return isinstance(node, _Source)


def _has_other_classes(found: Tree, classifier: Tree) -> bool:
    """Tell whether only the number of outputs of the last layer is another."""
    source = classifier["kernel"]
    value = found.get(source.name)
    if value is None or value.ndim != len(source.shape):
        return False
    return value.shape[0] != source.shape[0] and value.shape[1:] == source.shape[1:]


def _check(path: Path, found: Tree, sources: Sequence[_Source]) -> None:
    """Raise unless every variable is there, in its shape, and nothing else is."""
    wrong = []
    for source in sources:
        if source.name not in found:
            wrong.append(f"{source.name} is not in it")
        elif (value := found[source.name]) is not None and value.shape != source.shape:
            wrong.append(
                f"{source.name} is {list(value.shape)}, this model has {list(source.shape)}"
            )
    names = {source.name for source in sources}
    wrong += [
        f"{name} is not in this model"
        for name in found
        if name not in names and not name.endswith(_NOT_NEEDED)
    ]
    if wrong:
        more = len(wrong) - _MAX_SHOWN
        raise ConfigurationError(
            f"--pretrained: {path} does not fit this model: "
            f"{'; '.join(wrong[:_MAX_SHOWN])}{f'; and {more} more' if more > 0 else ''}."
        )


def _ours(value: np.ndarray | None, own: Any) -> Any:
    """Bring a variable into our order; None leaves our own."""
    if value is None:
        return own
    if own.ndim == 4:
        return np.asarray(value.transpose(_FROM_TORCH), own.dtype)
    return np.asarray(value.reshape(own.shape[::-1]).T, own.dtype)
