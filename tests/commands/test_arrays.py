"""Training on arrays that are passed from Python."""

import ast
import contextlib
import gc
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millrace as mr
from millrace.apps.autoencoder import data as ratings_data
from millrace.apps.autoencoder.arrays import build_ratings, hold_ratings
from millrace.apps.autoencoder.config.data import DataOptions as RatingOptions
from millrace.apps.cnn.arrays import hold_images
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.data import load
from millrace.apps.cnn.preview import augment_samples
from millrace.apps.vcd.config.sections import DataOptions as ImageOptions
from millrace.apps.vcd.data import hold_images as hold_binary_images
from millrace.apps.vcd.data import load_images
from millrace.config import ConfigurationError, build, load_yaml, replace_options
from millrace.data import memory
from millrace.data.mnist import read_digits

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"
IMAGES, LABELS = read_digits()


# The notebook, which trains on arrays


def run_cell(source: str, space: dict) -> Any:
    """Run a cell and return the value of its last expression, as a notebook does."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), space)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), space)


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> list[Any]:
    """What the cells of the notebook show."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    space: dict = {}
    with (
        contextlib.chdir(tmp_path_factory.mktemp("notebook")),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        values = [run_cell(source, space) for source in sources]
        space["run"].summary["folder"] = str(Path.cwd())
    return [*values, printed.getvalue()]


@pytest.fixture(scope="module")
def path(shown) -> Path:
    """The directory of the run in the notebook."""
    return Path(shown[1].summary["folder"]) / shown[1].path


def test_the_cells_of_the_notebook_show_results(shown):
    _, run, curve, model, predicted, _, printed = shown
    assert "completed" in run._repr_html_() and "validation accuracy" in run._repr_html_()
    assert "<svg" in curve._repr_html_()
    assert "digits_cnn" in model._repr_html_()
    assert sum(int(name) == label for name, label in predicted) >= 4
    assert "Did you mean num_epochs?" in printed


def test_the_notebook_is_saved_without_outputs():
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, 4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=300, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum(bool(out.get("data", {}).get("text/html")) for out in outputs) == 3
    # The settings, one widget that is empty at the end, the results, and the card.
    (training,) = [cell for cell in notebook.cells if "mr.cnn.train(\n" in cell.source]
    kinds = ["stream", "display_data", "stream", "execute_result"]
    assert [output["output_type"] for output in training.outputs] == kinds
    assert training.outputs[1]["data"]["text/plain"] == ""


# Images and labels


def test_a_network_learns_from_arrays(shown):
    _, run, _, model, *_ = shown
    assert run.metrics["validation_accuracy"] > 0.85
    names, _ = model.predict(IMAGES[:200, ..., None])
    assert np.mean(np.array(names, int) == LABELS[:200]) > 0.9


def test_the_run_records_shapes_and_a_checksum(shown, path):
    record = load_yaml(path / "config.yml")["arrays"]
    assert record["shapes"]["image"] == [1400, 8, 8, 1]
    assert record["types"]["image"] == "uint8" and record["num_classes"] == 10
    assert len(record["checksum"]) == 16
    summary = shown[1].summary
    assert summary["command"].startswith("mr.cnn.train(data=…, num_epochs=4")
    assert "arrays" in summary["facts"]["dataset"]


def resume(path: Path, labels: np.ndarray) -> Any:
    return mr.cnn.train(
        data=(IMAGES[:1400], labels[:1400]),
        validation_data=mr.ArraySource({"image": IMAGES[1400:], "label": LABELS[1400:]}),
        num_epochs=4,
        micro_batch_size=32,
        optimizer="momentum",
        learning_rate=0.05,
        run_dir=path,
        quiet=True,
        resume=True,
    )


def test_a_resumed_run_checks_the_arrays(path):
    with pytest.raises(ConfigurationError, match="arrays was data with the checksum"):
        resume(path, 9 - LABELS)
    assert resume(path, LABELS).summary["status"] == "completed"


def test_the_model_is_loaded_without_the_arrays_but_not_trained(path, monkeypatch):
    monkeypatch.setattr(memory, "_held", {})
    model = mr.cnn.load(path)
    assert model.image_shape == (8, 8, 1) and len(model.classes) == 10
    assert model.predict(IMAGES[:2, ..., None])[0]
    record = load_yaml(path / "config.yml")["arrays"]
    with pytest.raises(ConfigurationError, match=r"Pass the same arrays again: mr\.cnn"):
        mr.cnn.train(arrays=record, run_dir=path.parent / "again", quiet=True)


def test_files_and_exports_are_scaled_as_the_arrays_of_training(path, tmp_path):
    model, images = mr.cnn.load(path), IMAGES[:20, ..., None]
    wanted = model.logits(images)
    np.testing.assert_allclose(model.pixels_to_logits(images), wanted, atol=1e-4)
    mr.cnn.export(path, output=tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text())
    steps, record = facts["preprocessing"], load_yaml(path / "config.yml")["arrays"]
    assert (steps["scale"], facts["pixel_type"]) == (1, "uint8")
    assert (steps["mean"], steps["std"]) == (record["mean"], record["std"])
    assert "(bilinear), and subtract" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("scale", [1, 1000.0])
def test_the_report_shows_the_pixels_of_arrays(scale):
    random = np.random.default_rng(0)
    images = random.integers(90, 140, (16, 8, 8, 3), np.uint8)
    images[0, 0, 0], images[0, 0, 1] = 0, 255
    held = hold_images((images if scale == 1 else images / scale, np.arange(16) % 2))
    options = {"arrays": held.record, "validation": False, "augment": "none"}
    config = build(CnnConfig, options)
    shown, _ = augment_samples(config, load(config), np.arange(16), seed=0)
    np.testing.assert_array_equal(shown[:, ::8, ::8], images)


def test_files_do_not_have_the_scale_of_arrays_that_are_not_bytes(path):
    model = mr.cnn.load(path)
    record = {**load_yaml(path / "config.yml")["arrays"], "types": {"image": "float32"}}
    model = model._replace(config=replace_options(model.config, arrays=record))
    with pytest.raises(ConfigurationError, match="trained on arrays of float32"):
        model.predict_files(["photo.jpg"])


def test_arrays_are_released_with_their_result():
    held = hold_images((IMAGES[:8], LABELS[:8]))
    assert memory.find_held(held.record) is held
    record = held.record
    del held
    gc.collect()
    assert memory.find_held(record) is None


def test_floats_and_names_of_classes_are_accepted():
    names = np.array(["cat", "dog", "emu"])[LABELS % 3]
    held = hold_images((IMAGES / 16, names))
    assert held.record["classes"] == ["cat", "dog", "emu"]
    assert held.arrays["image"].dtype == np.float32
    assert held.arrays["label"].tolist() == (LABELS % 3).tolist()
    assert held.record["mean"][0] == pytest.approx((IMAGES / 16).mean(), rel=1e-6)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((IMAGES, LABELS[:3]), "1,797 images but 3 labels"),
        ((IMAGES[0], LABELS), r"must have the shape \(images, height"),
        ((np.zeros((4, 3, 32, 32)), [0, 1, 2, 3]), r"transpose\(0, 2, 3, 1\)"),
        ((IMAGES, np.eye(10)[LABELS]), r"pass labels.argmax\(1\)"),
        ((IMAGES, LABELS * 1.0), r"class numbers or names.* Pass labels.astype\(int\)"),
        ((IMAGES[:0], LABELS[:0]), r"must not be empty, got the shape \(0, 8, 8, 1\)"),
        ((np.full((2, 8, 8), None), [0, 1]), "must be an array, got one of objects"),
        ((IMAGES, LABELS - 1), "start at 0, but one is -1"),
        ((np.full((2, 8, 8), np.nan), [0, 1]), "must be finite"),
        ({"x": IMAGES}, "needs the arrays image and label, got x"),
        (None, "validation_data needs data"),
    ],
)
def test_arrays_that_do_not_fit_are_one_sentence(data, message):
    with pytest.raises(ConfigurationError, match=message):
        hold_images(data)


def test_validation_images_must_have_the_same_size():
    with pytest.raises(ConfigurationError, match="validation_data have the shape"):
        hold_images((IMAGES, LABELS), (IMAGES[:, :4], LABELS))


def test_data_and_a_dataset_exclude_each_other(tmp_path):
    with pytest.raises(ConfigurationError, match="Give data or dataset, not both"):
        mr.cnn.train(data=(IMAGES, LABELS), dataset="digits", run_dir=tmp_path / "x")


# Ratings


class Table(dict):
    """A table with columns, like a DataFrame."""

    @property
    def columns(self):
        return list(self)


def make_ratings(count=600):
    generator = np.random.default_rng(0)
    users, items = generator.integers(0, 30, count), generator.integers(0, 20, count)
    return users, items, generator.integers(1, 6, count)


def test_ratings_are_aligned_with_those_of_training():
    users, items, ratings = make_ratings()
    held = hold_ratings((users, items, ratings), ([users[0], 99], [items[0], 0], [3, 4]))
    loaded = ratings_data.load(RatingOptions(arrays=held.record), seed=0)
    assert loaded.training.num_users == 30
    assert loaded.validation is not None and loaded.validation.num_ratings == 1
    assert loaded.unseen is not None and loaded.unseen.num_users == 1
    with pytest.raises(ValueError, match="not both"):
        RatingOptions(arrays=held.record, num_users=3).check_source()


@pytest.mark.slow
def test_a_recommender_learns_from_arrays(tmp_path):
    users, items, ratings = make_ratings()
    names = np.array([f"u{user}" for user in users])
    done = mr.autoencoder.train(
        data=(names, items, ratings),
        validation_data=(names[:50], items[:50], ratings[:50]),
        epochs=1,
        batch_size=10,
        precision="32.32",
        loss_scaling=1,
        no_dense_refeeding=True,
        run_dir=tmp_path / "run",
        quiet=True,
    )
    assert done.summary["status"] == "completed"
    assert "arrays in memory" in str(done.summary["facts"])
    assert len(done.model.recommend({int(items[0]): 5.0}, top=3)) == 3
    assert repr(done.model).startswith("Recommender(rows=users, items=20")


def test_a_table_and_a_tuple_give_the_same_ratings():
    users, items, ratings = make_ratings()
    table = Table(user_id=users, item_id=items, rating=ratings, time=users)
    one, other = hold_ratings(table), hold_ratings((users, items, ratings))
    assert one.record == other.record
    matrix = build_ratings(one.arrays, "", (0.5, 5.0))
    assert matrix.num_users == 30 and matrix.num_items == 20
    last = {(u, i): r for u, i, r in zip(users, items, ratings, strict=True)}
    found = {
        (int(matrix.user_ids[u]), int(matrix.item_ids[i])): float(value)
        for u in range(matrix.num_users)
        for i, value in zip(*matrix.get_user(u), strict=True)
    }
    assert found == last


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((1, 2, 3, 4), r"must be \(users, items, ratings\), got 4"),
        ((1, 2), "data user must be an array, got int"),
        (([1, 2], [1], [3.0, 4.0]), "as many users as items"),
        (([1.5], [1], [3.0]), "users of data must be integers or text"),
        (([1], [1], [np.nan]), "must be finite numbers"),
        (Table(user=[1], rating=[2]), "does not identify the column of the item"),
        (7, "or a table, got int"),
    ],
)
def test_ratings_that_do_not_fit_are_one_sentence(data, message):
    with pytest.raises(ConfigurationError, match=message):
        hold_ratings(data)


def test_ratings_outside_the_range_say_what_to_set():
    held = hold_ratings(([1], [2], [9.0]))
    with pytest.raises(ConfigurationError, match=r"Set rating_range=\[low, high\]"):
        build_ratings(held.arrays, "", (0.5, 5.0))


# Binary images


def test_images_are_binarized_at_half_intensity():
    held = hold_binary_images(IMAGES / 16, IMAGES[:10] / 16)
    splits = load_images(ImageOptions(arrays=held.record), num_validation=100)
    assert len(splits.training) == 1697 and len(splits.test) == 10
    assert splits.validation is not None and len(splits.validation) == 100
    pixels = np.unpackbits(splits.test.packed, axis=1)[:, :64]
    assert np.array_equal(pixels.reshape(-1, 8, 8), IMAGES[:10] > 8)
    as_bytes = hold_binary_images(np.where(IMAGES > 8, 255, 0).astype(np.uint8))
    assert np.array_equal(as_bytes.arrays["image"], held.arrays["image"])
    record = held.record
    del held
    gc.collect()
    empty = load_images(ImageOptions(arrays=record), needs_images=False)
    assert len(empty.training) == 0 and empty.training.shape == (8, 8)
    with pytest.raises(ConfigurationError, match=r"mr\.vcd\.train\(data=…\)"):
        load_images(ImageOptions(arrays=record))


@pytest.mark.slow
def test_a_generator_learns_from_arrays(tmp_path):
    options = {"num_hidden": 8, "num_burn_in_steps": 1, "num_leapfrog_steps": 1}
    done = mr.vcd.train(
        data=IMAGES / 16,
        num_epochs=1,
        pictures=False,
        run_dir=tmp_path / "run",
        quiet=True,
        **options,
    )
    assert done.summary["status"] == "completed"
    assert "arrays in memory, 1,797 training" in str(done.summary["facts"])
    path = done.path
    del done
    gc.collect()
    model = mr.vcd.load(path)
    assert model.sample(2).shape == (2, 8, 8)
    assert repr(model).startswith("Generator(objective=vcd")
    with pytest.raises(ConfigurationError, match="testing needs test_data"):
        mr.vcd.train(data=IMAGES / 16, testing=True, run_dir=tmp_path / "x", **options)
    with pytest.raises(ConfigurationError, match="black and white, got 3 channels"):
        mr.vcd.train(data=np.zeros((2, 8, 8, 3)), run_dir=tmp_path / "x")
