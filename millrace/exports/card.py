"""Model cards: ``README.md`` with the header that Hugging Face reads."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from millrace.numbers import format_number

FILES = {
    ".safetensors": "the weights",
    ".pt": "the weights as a state dict of PyTorch",
    ".stablehlo": "the model with its weights, for `jax.export`",
    ".onnx": "the model with its weights, for ONNX Runtime and others",
    ".json": "facts about the model",
}
"""What the files of an exported model hold, by ending."""

_TAG = "\n- millrace\n"
"""In the header of every card of ours, whatever the library that loads the folder."""


def format_header(
    name: str,
    metrics: Mapping[str, Any],
    *,
    library: str = "millrace",
    task: str | None = None,
    dataset: str | None = None,
    tags: Sequence[str] = (),
) -> str:
    """Return the header of a card, with the metrics as Hugging Face lists them.

    Args:
        name: Name of the model.
        metrics: Its metrics by name.
        library: The library that loads the folder.
        task: Its task in the words of Hugging Face, such as "image-classification".
        dataset: Name of the dataset of the metrics.
        tags: More words to find it by.
    """
    header: dict[str, Any] = {"library_name": library}
    if task is not None:
        header["pipeline_tag"] = task
    header["tags"] = [*([task] if task else []), *tags, "millrace"]
    values = [
        {"type": key.removeprefix("validation_"), "name": _words(key), "value": value}
        for key, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    ]
    if values and task is not None:
        data = dataset or "unknown"
        result = {"task": {"type": task}, "dataset": {"name": data, "type": data}}
        header["model-index"] = [{"name": name, "results": [result | {"metrics": values}]}]
    text = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    return f"---\n{text}---"


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Return a table of metrics; nothing if there are none."""
    # Manifests have numbers that are not finite as text.
    rows = [f"| {_words(n)} | {format_number(float(x))} |" for n, x in metrics.items()]
    return "\n".join(["| metric | value |", "| --- | --- |", *rows]) if rows else ""


def format_own_card(name: str, metrics: Mapping[str, Any], files: Collection[Path]) -> str:
    """Return the card of a model of which nothing is known but its files and metrics."""
    endings = {file.suffix for file in files}
    parts = [
        format_header(name, metrics),
        f"# {name}",
        format_metrics(metrics),
        "\n".join(f"- `{file.name}`: {FILES[file.suffix]}" for file in files),
        *(_USAGE[ending] for ending in _USAGE if ending in endings),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def may_replace(path: Path) -> bool:
    """Whether a card was written here, or there is none yet."""
    if not path.exists():
        return True
    header, end, _ = path.read_text(errors="replace").partition("\n---\n")
    return _TAG in header + end


def _words(name: str) -> str:
    return name.replace("_", " ")


_USAGE = {
    ".safetensors": """```python
from safetensors.numpy import load_file

arrays = load_file("model.safetensors")
```""",
    ".pt": """```python
import torch

state_dict = torch.load("model.pt", weights_only=True)
```""",
    ".stablehlo": """```python
from pathlib import Path

from jax import export

model = export.deserialize(bytearray(Path("model.stablehlo").read_bytes()))
output = model.call(x)  # for any size of the batch; needs jax and flatbuffers
```""",
    ".onnx": """```python
import onnxruntime

model = onnxruntime.InferenceSession("model.onnx")
(output,) = model.run(None, {"input": x})
```""",
}
