"""``millrace autoencoder export``: recommenders that other programs load."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from autoencoder_runs import FIRST_ITEM, ITEMS, PLAIN, command, write_ratings

import millrace as mr
from millrace.apps.autoencoder.export import predict_ratings
from millrace.data.safetensors import read_safetensors

GIVEN = {FIRST_ITEM + 2: 4.0, FIRST_ITEM + 7: 1.5, FIRST_ITEM + 11: 3.5}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("autoencoder")
    args = f"train {write_ratings(folder)} {PLAIN} --epochs 1 --subtract-biases"
    args += " --normalize-ratings"
    assert command(None, f"{args} --run-dir {folder}/run").status == 0
    return folder / "run"


def rows(folder):
    """Return a user with ratings, and one without."""
    ids = json.loads((folder / "column_ids.json").read_text())
    ratings = np.zeros((2, len(ids)), np.float32)
    for item, value in GIVEN.items():
        ratings[0, ids.index(item)] = value
    return ids, ratings


def check(run, ids, scores):
    model = mr.autoencoder.load(run)
    for found, given in zip(scores, (GIVEN, {}), strict=True):
        wanted = model.predict(given)
        np.testing.assert_allclose(found, [wanted[n] for n in ids], rtol=1e-5, atol=1e-5)


def test_weights_item_ids_and_biases_are_written(run, capsys):
    printed = command(capsys, f"export {run}")
    folder = run / "export"
    names = ["model.safetensors", "config.json", "column_ids.json", "README.md"]
    assert printed.status == 0
    assert printed.out.split() == [str(folder / name) for name in names]
    arrays, model = read_safetensors(folder / "model.safetensors"), mr.autoencoder.load(run)
    ids = model.item_ids
    assert json.loads((folder / "column_ids.json").read_text()) == ids.tolist()
    np.testing.assert_array_equal(arrays["column_ids"], ids)
    kernel = model.params["encoder"]["fc_1"]["kernel"]
    np.testing.assert_array_equal(arrays["encoder.fc_1.kernel"], kernel)
    np.testing.assert_array_equal(arrays["column_biases"], model.column_biases.of_column)
    facts = json.loads((folder / "config.json").read_text())
    assert facts["biases"]["mean"] == model.column_biases.mean
    assert facts["biases"]["unit"] == model.column_biases.unit != 1
    assert facts["widths"][0] == ITEMS and "validation_rmse" in facts["metrics"]
    assert "| validation rmse |" in (folder / "README.md").read_text()


def test_a_card_of_others_stays(run, tmp_path, capsys):
    (tmp_path / "README.md").write_text("mine")
    mr.autoencoder.export(run, output=tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert "README.md" not in capsys.readouterr().out


def test_the_program_predicts_what_the_recommender_does(run, tmp_path):
    pytest.importorskip("flatbuffers")
    from jax import export

    mr.autoencoder.export(run, output=tmp_path, format=["stablehlo"])
    ids, ratings = rows(tmp_path)
    content = (tmp_path / "model.stablehlo").read_bytes()
    check(run, ids, np.asarray(export.deserialize(bytearray(content)).call(ratings)))


@pytest.mark.parametrize("given", [{}, {FIRST_ITEM + 2: 4.0}])
def test_the_program_does_without_shrinkage_of_the_biases(run, given):
    model = mr.autoencoder.load(run)
    biases = dataclasses.replace(model.column_biases, strength=0.0)
    model = model._replace(
        files=model.files._replace(column_biases=biases),
        model=model.model._replace(input_offset=1.0),
    )
    row = np.array([given.get(n, 0) for n in model.item_ids.tolist()], np.float32)
    found = predict_ratings(model, jnp.asarray(row[None]))[0]
    wanted = list(model.predict(given).values())
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_onnx_runtime_predicts_what_the_recommender_does(run, tmp_path):
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    mr.autoencoder.export(run, output=tmp_path, format=["onnx"])
    ids, ratings = rows(tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    check(run, ids, session.run(["scores"], {"ratings": ratings})[0])


def test_a_run_of_something_else_is_one_line(tmp_path, capsys):
    printed = command(capsys, f"export {tmp_path}")
    assert printed.status == 2 and "There are no checkpoints" in printed.err
    assert len(printed.err.splitlines()) == 1
