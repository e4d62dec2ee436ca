"""``millrace autoencoder export``: a recommender as files that other programs load."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.autoencoder.config.commands import ExportConfig
from millrace.apps.autoencoder.model import predict_rows
from millrace.apps.autoencoder.predictor import Recommender, load_recommender
from millrace.config import ConfigurationError, writing
from millrace.durable import write_atomically
from millrace.exports.folder import (
    CARD,
    Model,
    Program,
    check_format,
    name_arrays,
    select_metrics,
    write_model,
)
from millrace.numbers import format_number
from millrace.run.saved import find_run

_COLUMN_IDS = "column_ids.json"


def export(config: ExportConfig) -> None:
    """Write the recommender and print the files."""
    for name in config.format:
        check_format(name)
    recommender = load_recommender(config.run, config.which)
    directory = find_run(config.run, command="autoencoder train").directory
    assert directory is not None, "checked by load_recommender"
    folder = config.output or directory / "export"
    if recommender.config.data.rows == "items" and config.format != ["safetensors"]:
        raise ConfigurationError(
            "A model with rows of items predicts only for users of its training ratings, "
            "so it has no program from ratings to scores. Use --format safetensors."
        )
    facts = describe_recommender(recommender)
    files = write_model(folder, build_export(recommender, facts), config.format)
    with writing(folder):
        ids = recommender.files.column_ids.tolist()
        write_atomically(folder / _COLUMN_IDS, json.dumps(ids) + "\n")
        files.append(folder / _COLUMN_IDS)
        endings = {file.suffix for file in files}
        write_atomically(folder / CARD, format_card(facts, endings))
    for file in (*files, folder / CARD):
        print(file)


def build_export(recommender: Recommender, facts: dict[str, Any]) -> Model:
    """Return what is written about a recommender."""
    params = jax.device_get(recommender.params)
    arrays = name_arrays(params)
    biases = recommender.column_biases
    if biases is not None:
        arrays["column_biases"] = biases.of_column
    ids = recommender.files.column_ids
    if ids.dtype.kind in "iu":  # IDs that are texts are in column_ids.json only
        arrays["column_ids"] = ids.astype(np.int64)
    program = None
    if recommender.config.data.rows == "users":
        example = jax.ShapeDtypeStruct((1, recommender.model.num_items), jnp.float32)
        names = ("ratings", "scores")
        program = Program(lambda rows: predict_ratings(recommender, rows), example, names)
    metadata = {name: json.dumps(value) for name, value in facts.items()}
    return Model(arrays, program, facts, metadata)


def predict_ratings(
    recommender: Recommender,
    rows: jax.Array,  # (users, items), 0 where there is no rating
) -> jax.Array:  # (users, items)
    """Return the predicted rating of every item; a pure function."""
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), recommender.params)
    biases = recommender.column_biases
    if biases is None:
        return predict_rows(recommender.model, params, rows)
    is_known = rows != 0
    base = jnp.float32(biases.mean) + jnp.asarray(biases.of_column)
    residuals = jnp.where(is_known, rows - base, 0)
    count = is_known.astype(jnp.float32).sum(1)
    of_row = (residuals.sum(1) / (count + biases.strength))[:, None]
    inputs = jnp.where(is_known, residuals - of_row, 0)
    predicted = predict_rows(recommender.model, params, inputs) + base + of_row
    return jnp.clip(predicted, biases.smallest, biases.largest)


def describe_recommender(recommender: Recommender) -> dict[str, Any]:
    """Return the contents of ``config.json``."""
    model, manifest = recommender.model, recommender.manifest
    biases = recommender.column_biases
    return {
        "architecture": "autoencoder",
        "rows": recommender.config.data.rows,
        "num_columns": model.num_items,
        "widths": list(model.widths),
        "activation": "selu" if model.selu else None,
        "linear_output": model.linear_output,
        "tied_decoder": model.tied,
        "biases": biases and {"mean": biases.mean, "strength": biases.strength},
        "update": manifest.get("update"),
        "epoch": manifest.get("epoch"),
        "metrics": select_metrics(manifest),
    }


def format_card(facts: dict[str, Any], endings: set[str]) -> str:
    """Return the text of ``README.md``, with the header that Hugging Face reads."""
    rows = [
        f"| {name.replace('_', ' ')} | {format_number(value)} |"
        for name, value in facts["metrics"].items()
    ]
    columns = "items" if facts["rows"] == "users" else "users"
    parts = [
        "---\nlibrary_name: millrace\ntags:\n- recommender\n- millrace\n---",
        "# Autoencoder for ratings",
        f"It predicts the ratings of {facts['num_columns']:,} {columns} from those that "
        f"are known. These are the weights of update {facts['update']:,}.",
        "\n".join(["| metric | value |", "| --- | --- |", *rows]) if rows else "",
        f"Column n of the network is the {columns[:-1]} with ID n of `{_COLUMN_IDS}`, from "
        "0 on. `config.json` has the widths of the layers and the mean rating.",
    ]
    if ".stablehlo" in endings:
        parts += ["## JAX, without millrace", _JAX]
    if ".onnx" in endings:
        parts += ["## ONNX Runtime", _ONNX]
    return "\n\n".join(part for part in parts if part) + "\n"


_JAX = """`pip install jax flatbuffers`. The ratings are float32 (users, items), with 0
where there is none, for any number of users.

```python
from pathlib import Path

from jax import export

model = export.deserialize(bytearray(Path("model.stablehlo").read_bytes()))
scores = model.call(ratings)
```"""
_ONNX = """The ratings are float32 (users, items), with 0 where there is none.

```python
import onnxruntime

model = onnxruntime.InferenceSession("model.onnx")
(scores,) = model.run(None, {"ratings": ratings})
```"""
