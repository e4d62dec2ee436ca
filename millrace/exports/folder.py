"""A folder with a trained model, for use without millrace."""

import contextlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.config import ConfigurationError, writing
from millrace.data.safetensors import write_safetensors
from millrace.durable import finite_json, make_folder, replacing, write_atomically
from millrace.exports.card import format_own_card, may_replace
from millrace.exports.onnx_graph import UnsupportedOperation
from millrace.exports.onnx_graph import build_model as build_onnx
from millrace.exports.stablehlo import build_program as build_stablehlo
from millrace.exports.torch_file import check_types, write_state_dict
from millrace.nn.convolution import portable_convolutions

Format = Literal["safetensors", "torch", "stablehlo", "onnx"]

CONFIG, CARD = "config.json", "README.md"
_NEEDED = {"stablehlo": "flatbuffers", "onnx": "onnx"}
"""The library that writes a format."""
WEIGHTS_ONLY = ("safetensors", "torch")
"""Formats without a program."""


class Program(NamedTuple):
    """A function from one array to another, whose first dims are the batch."""

    function: Callable[[Any], Any]
    example: Any
    """Shape and type of the input."""
    names: tuple[str, str] = ("input", "output")
    """Names of the input and of the output."""


class Model(NamedTuple):
    """What is written about a trained model."""

    arrays: Mapping[str, np.ndarray]
    """The weights by name."""
    program: Program | None
    """The model as a function, with its weights inside."""
    config: Mapping[str, Any]
    """The contents of ``config.json``."""
    metadata: Mapping[str, str]
    """Texts in the header of the safetensors file."""


def export(
    folder: Path | str,
    params: Any,
    function: Callable[[Any, Any], Any] | None = None,
    example: Any = None,
    *,
    formats: Sequence[Format] | None = None,
    config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> list[Path]:
    """Write the weights of your own model, and the function that uses them, to a folder.

    ``model.safetensors`` has the weights by name: the keys on the way to each array, joined
    by dots. 16-bit floats become float32. ``model.pt`` has the same as a state dict for
    ``torch.load``. ``model.stablehlo`` and ``model.onnx`` have ``function`` with the
    weights inside, for any size of its batch. ``README.md`` is a model card, which Hugging
    Face shows; one that was written by others stays.

    Args:
        folder: The folder; created if needed.
        params: A tree of arrays, such as ``state.params``.
        function: ``(params, input) -> output``; a pure function of arrays.
        example: Shape and type of the input, such as a ``jax.ShapeDtypeStruct``. Its first
            dim is the batch.
        formats: What to write (default: safetensors, and stablehlo if there is a function).
        config: Contents of ``config.json``: anything that JSON has.
        metrics: Metrics for the model card.

    Returns:
        The files.
    """
    if (function is None) != (example is None):
        raise ValueError("Give both function and example, or neither.")
    chosen = formats or (
        ["safetensors"] if function is None else ["safetensors", "stablehlo"]
    )
    weights = jax.device_get(params)
    program = None
    if function is not None:
        program = Program(lambda x: function(weights, x), example)
    arrays = name_arrays(weights)
    metadata = {name: json.dumps(value) for name, value in (config or {}).items()}
    folder = Path(folder)
    files = write_model(folder, Model(arrays, program, config or {}, metadata), chosen)
    text = format_own_card(folder.resolve().name, metrics or {}, files)
    return [*files, *write_card(folder, text)]


def write_card(folder: Path, text: str) -> list[Path]:
    """Write the model card and return its path, or nothing if there is one of others."""
    card = folder / CARD
    if not may_replace(card):
        return []
    with writing(card):
        write_atomically(card, text)
    return [card]


def write_model(folder: Path, model: Model, formats: Iterable[str]) -> list[Path]:
    """Write a model in some formats, and ``config.json``; return the files."""
    chosen = list(dict.fromkeys(formats))
    for name in chosen:
        check_format(name, has_program=model.program is not None)
    _check_folder(folder, chosen)
    if "torch" in chosen:  # before anything is written
        check_types(model.arrays)
    contents = {
        name: _build(name, model.program)
        for name in chosen
        if name not in WEIGHTS_ONLY and model.program is not None
    }
    paths = [folder / model_file(name) for name in chosen]
    with writing(folder):
        make_folder(folder)
        for name, path in zip(chosen, paths, strict=True):
            if name == "safetensors":
                write_safetensors(path, model.arrays, model.metadata)
                continue
            if name == "torch":
                write_state_dict(path, model.arrays)
                continue
            with replacing(path, binary=True) as file:
                file.write(contents[name])
        text = json.dumps(finite_json(dict(model.config)), indent=2, ensure_ascii=False)
        write_atomically(folder / CONFIG, text + "\n")
    return [*paths, folder / CONFIG]


def model_file(name: str) -> str:
    """Return the name of the file of a format."""
    return f"model.{'pt' if name == 'torch' else name}"


def check_format(name: str, *, has_program: bool = True) -> None:
    """Raise an error if a format cannot be written: unknown, or its library is missing."""
    known = Format.__args__
    if name not in known:
        raise ConfigurationError(
            f"There is no format {name}. Available: {', '.join(known)}."
        )
    needed = _NEEDED.get(name)
    if needed is not None and not has_program:
        raise ConfigurationError(f"The format {name} needs a function and an example.")
    if needed is not None and importlib.util.find_spec(needed) is None:
        raise ConfigurationError(
            f"The format {name} needs the library {needed}: pip install {needed}."
        )


def _check_folder(folder: Path, formats: Sequence[str]) -> None:
    """Raise an error if a folder has other formats, which may be of another model."""
    others = [name for name in Format.__args__ if name not in formats]
    earlier = [name for name in others if (folder / model_file(name)).exists()]
    if earlier:
        raise ConfigurationError(
            f"{folder} has {' and '.join(map(model_file, earlier))} of an earlier export. "
            f"Delete them, write them again as well ({' '.join([*formats, *earlier])}), or "
            "choose another folder."
        )


def _build(name: str, program: Program) -> bytes:
    with _explaining(name), portable_convolutions():
        if name == "stablehlo":
            return build_stablehlo(program.function, program.example)
        return build_onnx(program.function, program.example, names=program.names)


@contextlib.contextmanager
def _explaining(name: str) -> Iterator[None]:
    """Turn what JAX and the translation cannot do into an error of one line."""
    try:
        yield
    except UnsupportedOperation as error:
        raise ConfigurationError(f"{name}: {error}") from error
    except jax.errors.InconclusiveDimensionOperation as error:
        first = str(error).splitlines()[0]
        raise ConfigurationError(
            f"{name}: the function needs to know the size of the batch: {first}"
        ) from error


def select_metrics(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a checkpoint, from its manifest.

    Those of validation are of its own weights; the newest ones may be of earlier weights.
    """
    newest = manifest.get("metrics", {})
    of_training = {n: v for n, v in newest.items() if n.startswith("train_")}
    scores = manifest.get("scores", {})
    return of_training | {n: v for n, v in scores.items() if n.startswith("validation_")}


def name_arrays(tree: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a tree by the keys on the way to them, joined by dots."""
    arrays: dict[str, np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in arrays:
            raise ValueError(f"Two arrays would have the name {name}.")
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ValueError(f"{name} is a random key, not an array of numbers.")
        array = np.asarray(leaf)
        is_narrow = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
        arrays[name] = array.astype(np.float32) if is_narrow else array
    return arrays
