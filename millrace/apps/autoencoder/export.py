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
from millrace.data.ratings.matrix import ALMOST_ZERO
from millrace.durable import write_atomically
from millrace.exports.card import format_header, format_metrics
from millrace.exports.folder import (
    WEIGHTS_ONLY,
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

_COLUMN_IDS = "column_ids.json"


def export(config: ExportConfig) -> None:
    """Write the recommender and print the files."""
    for name in config.format:
        check_format(name)
    recommender = load_recommender(config.run, config.which)
    directory = find_run(config.run, command="autoencoder train").directory
    assert directory is not None, "checked by load_recommender"
    folder = config.output or directory / "export"
    programs = set(config.format) - set(WEIGHTS_ONLY)
    if recommender.config.data.rows == "items" and programs:
        raise ConfigurationError(
            "A model with rows of items predicts only for users of its training ratings, "
            "so it has no program from ratings to scores. Use --format safetensors or "
            "torch."
        )
    facts = describe_recommender(recommender)
    files = write_model(folder, build_export(recommender, facts), config.format)
    with writing(folder):
        ids = recommender.files.column_ids.tolist()
        write_atomically(folder / _COLUMN_IDS, json.dumps(ids) + "\n")
        files.append(folder / _COLUMN_IDS)
    endings = {file.suffix for file in files}
    for file in (*files, *write_card(folder, format_card(facts, endings))):
        print(publish(file))


def build_export(recommender: Recommender, facts: dict[str, Any]) -> Model:
    """Return what is written about a recommender."""
    params = jax.device_get(recommender.params)
    arrays = name_arrays(params)
    biases = recommender.column_biases
    if biases is not None:
        arrays["column_biases"] = biases.of_column
    if recommender.linear is not None:
        arrays["linear_items"] = recommender.linear
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
    """Return the predicted rating, or the score, of every item; a pure function."""
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), recommender.params)
    if recommender.ranks:
        return recommender.score_rows(params, rows)
    biases = recommender.column_biases
    if biases is None:
        return predict_rows(recommender.model, params, rows)
    is_known = rows != 0
    base = jnp.float32(biases.mean) + jnp.asarray(biases.of_column)
    residuals = jnp.where(is_known, rows - base, 0)
    count = is_known.astype(jnp.float32).sum(1)
    # As in ColumnBiases: a user may have no ratings, and a residual may be exactly 0.
    weight = jnp.maximum(count + biases.strength, jnp.finfo(count.dtype).tiny)
    of_row = (residuals.sum(1) / weight)[:, None]
    inputs = (residuals - of_row) / biases.unit
    inputs = jnp.where(is_known, jnp.where(inputs == 0, ALMOST_ZERO, inputs), 0)
    output = predict_rows(recommender.model, params, inputs)
    predicted = output * biases.unit + base + of_row
    return jnp.clip(predicted, biases.smallest, biases.largest)


def describe_recommender(recommender: Recommender) -> dict[str, Any]:
    """Return the contents of ``config.json``."""
    model, manifest = recommender.model, recommender.manifest
    biases = recommender.column_biases
    return {
        "architecture": "autoencoder",
        "objective": recommender.config.training.objective,
        "rows": recommender.config.data.rows,
        "num_columns": model.num_items,
        "widths": list(model.widths),
        "activation": "selu" if model.selu else None,
        "linear_output": model.linear_output,
        "tied_decoder": model.tied,
        "positive_from": model.positive_from,
        "network_weight": (
            None if recommender.linear is None else recommender.network_weight
        ),
        "biases": biases
        and {"mean": biases.mean, "strength": biases.strength, "unit": biases.unit},
        "update": manifest.get("update"),
        "epoch": manifest.get("epoch"),
        "metrics": select_metrics(manifest),
    }


def format_card(facts: dict[str, Any], endings: set[str]) -> str:
    """Return the text of ``README.md``, with the header that Hugging Face reads."""
    columns = "items" if facts["rows"] == "users" else "users"
    parts = [
        format_header(
            "Autoencoder for ratings",
            facts["metrics"],
            tags=["recommender", "collaborative-filtering"],
        ),
        "# Autoencoder for ratings",
        f"{_describe_output(facts, columns)} These are the weights of update "
        f"{facts['update']:,}.",
        format_metrics(facts["metrics"]),
        f"Column n of the network is the {columns[:-1]} with ID n of `{_COLUMN_IDS}`, from "
        "0 on. `config.json` has the widths of the layers and the mean rating.",
    ]
    if ".pt" in endings:
        parts += ["## PyTorch", _TORCH]
    if ".stablehlo" in endings:
        parts += ["## JAX, without millrace", _JAX]
    if ".onnx" in endings:
        parts += ["## ONNX Runtime", _ONNX]
    return "\n\n".join(part for part in parts if part) + "\n"


def _describe_output(facts: dict[str, Any], columns: str) -> str:
    count = f"{facts['num_columns']:,} {columns}"
    if facts["objective"] == "rating":
        return f"It predicts the ratings of {count} from those that are known."
    return (
        f"It scores {count} from the known ratings; those of {facts['positive_from']:g} or "
        "more are items that a user likes. Recommend the unrated items with the highest "
        "scores, of which only the order has a meaning."
    )


_TORCH = """The weights are a state dict. Kernels are (inputs, outputs): `x @ kernel`.

```python
import torch

weights = torch.load("model.pt", weights_only=True)
```"""
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
