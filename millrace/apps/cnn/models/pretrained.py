"""Published weights for the families, from and for safetensors files.

ResNet and ResNeXt files use the names of torchvision (timm has the same), EfficientNet
files those of either. Their kernels are (out, in, height, width), their matrices (out, in).
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
_MEAN, _UNUSED = "running_mean", "num_batches_tracked"
_MAX_SHOWN = 3
_TO_TORCH, _FROM_TORCH = (3, 2, 0, 1), (2, 3, 1, 0)  # HWIO to OIHW and back

_LAYERS = {
    # ResNet and ResNeXt
    r"b0/conv": "conv1",
    r"b0/norm": "bn1",
    r"b(\d)/(\d+)/conv(\d)": r"layer\1.\2.conv\3",
    r"b(\d)/(\d+)/norm(\d)": r"layer\1.\2.bn\3",
    r"b(\d)/(\d+)/shortcut/conv": r"layer\1.\2.downsample.0",
    r"b(\d)/(\d+)/shortcut/norm": r"layer\1.\2.downsample.1",
    # timm's EfficientNet, except for its blocks
    "block0/conv": "conv_stem",
    "block0/norm": "bn1",
    "Top/conv": "conv_head",
    "Top/norm": "bn2",
}
_BLOCK_PARTS = {
    # By whether the block starts with an expansion.
    True: {"a/conv": "conv_pw", "a/norm": "bn1", "b/conv": "conv_dw", "b/norm": "bn2",
           "c/conv": "conv_pwl", "c/norm": "bn3"},
    False: {"b/conv": "conv_dw", "b/norm": "bn1", "c/conv": "conv_pw", "c/norm": "bn2"},
}  # fmt: skip
_SQUEEZE_PARTS = {"reduce": "se.conv_reduce", "expand": "se.conv_expand"}
_TORCHVISION_LAYERS = {
    # timm's name of an EfficientNet layer: torchvision's name
    "conv_stem": "features.0.0",
    "bn1": "features.0.1",
    "conv_head": "features.8.0",
    "bn2": "features.8.1",
    "classifier": "classifier.1",
}
_TORCHVISION_PARTS = {
    # The same for parts of a block, by whether it starts with an expansion.
    True: {"conv_pw": "0.0", "bn1": "0.1", "conv_dw": "1.0", "bn2": "1.1",
           "se.conv_reduce": "2.fc1", "se.conv_expand": "2.fc2",
           "conv_pwl": "3.0", "bn3": "3.1"},
    False: {"conv_dw": "0.0", "bn1": "0.1", "se.conv_reduce": "1.fc1",
            "se.conv_expand": "1.fc2", "conv_pw": "2.0", "bn2": "2.1"},
}  # fmt: skip
_ONLY_IN_TORCHVISION = "features.0.0.weight"
_VARIABLES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}


class _Source(NamedTuple):
    """The name and shape that one of our variables has in the file."""

    name: str
    shape: tuple[int, ...]


def read_pretrained(path: Path) -> Tree:
    """Return the arrays of a safetensors file by name."""
    try:
        return read_safetensors(path)
    except SafetensorsError as error:
        reason = _pickle_message(path) if _is_pickle(path) else error
        raise ConfigurationError(f"--pretrained: {reason}") from error


def _is_pickle(path: Path) -> bool:
    """Whether ``torch.save`` wrote the file: a zip archive, or a bare pickle before 1.6."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(9)
    # A safetensors header length can start with the first byte of a pickle.
    return start.startswith(b"PK\x03\x04") or (start[:1] == b"\x80" and start[8:] != b"{")


def _pickle_message(path: Path) -> str:
    new = path.with_suffix(".safetensors")
    return (
        f"{path} looks like a PyTorch pickle, which is not loaded because a pickle can run "
        "code. Convert it to a safetensors file: "
        'python -c "import torch, safetensors.torch as s; '
        f's.save_file(torch.load({str(path)!r}, weights_only=True), {str(new)!r})"'
    )


def fit_pretrained(
    path: Path, arrays: Tree, params: Tree, model_state: Tree
) -> tuple[Tree, Tree, list[str]]:
    """Return the weights and state of a model from published arrays, and notices.

    Args:
        path: The file that the arrays come from.
        arrays: The arrays by name, from ``read_pretrained``.
        params: The initial weights of the model.
        model_state: The initial state of the model.
    """
    if not model_state:
        raise ConfigurationError(
            "--pretrained: published weights use batch norm, and this model uses another "
            "norm. Give --batch-norm."
        )
    sources = _sources(params, model_state, torchvision=_ONLY_IN_TORCHVISION in arrays)
    classifier = sources[0][_CLASSIFIER]
    notices = []
    if _has_other_classes(arrays, classifier):
        notices.append(
            f"{path.name} has other classes: the last layer starts from random weights."
        )
        arrays = arrays | dict.fromkeys(source.name for source in classifier.values())
    _check(path, arrays, jax.tree.leaves(sources, is_leaf=_is_source))
    loaded = jax.tree.map(
        lambda source, own: _convert(arrays[source.name], own),
        sources,
        (params, model_state),
        is_leaf=_is_source,
    )
    return *loaded, notices


def to_published(
    params: Tree, model_state: Tree, *, torchvision: bool = True
) -> dict[str, np.ndarray]:
    """Return the weights and state of a family as ``fit_pretrained`` reads them.

    Args:
        params: The weights of the model.
        model_state: The state of the model.
        torchvision: Whether EfficientNet gets the names of torchvision, or those of timm.
    """
    sources = _sources(params, model_state, torchvision=torchvision)
    leaves = jax.tree.leaves(sources, is_leaf=_is_source)
    values = jax.tree.leaves((params, model_state))
    found = {
        source.name: _to_torch(value, source.shape)
        for source, value in zip(leaves, values, strict=True)
    }
    # PyTorch wants this one as well; with a momentum, its value does not matter.
    norms = [name.removesuffix(_MEAN) for name in found if name.endswith(_MEAN)]
    return found | {f"{norm}{_UNUSED}": np.zeros((), np.int64) for norm in norms}


def _sources(
    params: Tree, model_state: Tree, *, torchvision: bool = False
) -> tuple[Tree, Tree]:
    """Return the source of each variable; `torchvision` is the naming of EfficientNet."""
    expanding = {layer.split("/")[0] for layer in params if "/a/" in layer}
    is_resnet = "b0/conv" in params
    classifier = "fc" if is_resnet else "classifier"

    def source(path: Any, own: Any) -> _Source:
        layer, *parts, variable = (entry.key for entry in path)
        prefix = classifier if layer == _CLASSIFIER else _timm_name(layer, expanding)
        shape = own.shape[::-1] if own.ndim < 4 else [own.shape[dim] for dim in _TO_TORCH]
        if parts:  # squeeze and excite: dense layers here, 1 x 1 convolutions in the file
            prefix = f"{prefix}.{_SQUEEZE_PARTS[parts[0]]}"
            shape = (*shape, 1, 1) if own.ndim > 1 else shape
        if torchvision and not is_resnet:
            prefix = _torchvision_name(prefix)
        return _Source(f"{prefix}.{_VARIABLES[variable]}", tuple(shape))

    mapped = jax.tree_util.tree_map_with_path
    return mapped(source, params), mapped(source, model_state)


def _timm_name(layer: str, expanding: Collection[str]) -> str:
    """Return the name of a layer in timm."""
    for pattern, name in _LAYERS.items():
        if match := re.fullmatch(pattern, layer):
            return match.expand(name)
    block, _, part = layer.partition("/")
    stage, repeat = int(block[5:-1]) - 1, string.ascii_lowercase.index(block[-1])
    inside = _BLOCK_PARTS[block in expanding].get(part)
    return ".".join(["blocks", str(stage), str(repeat), *([inside] if inside else [])])


def _torchvision_name(timm_name: str) -> str:
    """Return the torchvision name of an EfficientNet layer."""
    if not timm_name.startswith("blocks."):
        return _TORCHVISION_LAYERS[timm_name]
    _, stage, repeat, part = timm_name.split(".", 3)
    inside = _TORCHVISION_PARTS[stage != "0"][part]
    return f"features.{int(stage) + 1}.{repeat}.block.{inside}"


def _is_source(node: Any) -> bool:
    return isinstance(node, _Source)


def _has_other_classes(arrays: Tree, classifier: Tree) -> bool:
    """Whether the last layer differs only in its number of outputs."""
    source = classifier["kernel"]
    value = arrays.get(source.name)
    if value is None or value.ndim != len(source.shape):
        return False
    return value.shape[0] != source.shape[0] and value.shape[1:] == source.shape[1:]


def _check(path: Path, arrays: Tree, sources: Sequence[_Source]) -> None:
    """Raise an error unless the file has every variable in its shape and nothing else."""
    wrong = []
    for source in sources:
        if source.name not in arrays:
            wrong.append(f"{source.name} is missing")
        elif (value := arrays[source.name]) is not None and value.shape != source.shape:
            wrong.append(
                f"{source.name} is {list(value.shape)}, this model has {list(source.shape)}"
            )
    names = {source.name for source in sources}
    wrong += [
        f"{name} is not in this model"
        for name in arrays
        if name not in names and not name.endswith(_UNUSED)
    ]
    if wrong:
        more = len(wrong) - _MAX_SHOWN
        raise ConfigurationError(
            f"--pretrained: {path} does not fit this model: "
            f"{'; '.join(wrong[:_MAX_SHOWN])}{f'; and {more} more' if more > 0 else ''}."
        )


def _to_torch(own: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Convert a variable to the dimension order of the file, in float32."""
    value = np.asarray(own, np.float32)
    turned = value.transpose(_TO_TORCH) if value.ndim == 4 else value.T
    return np.ascontiguousarray(turned.reshape(shape))


def _convert(value: np.ndarray | None, own: Any) -> Any:
    """Convert an array to our dimension order; None keeps our own value."""
    if value is None:
        return own
    if own.ndim == 4:
        return np.asarray(value.transpose(_FROM_TORCH), own.dtype)
    return np.asarray(value.reshape(own.shape[::-1]).T, own.dtype)
