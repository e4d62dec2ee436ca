"""``millrace cnn predict``: classes of image files on the command line."""

import csv
import json

import numpy as np
import pytest
from image_files import encode, make_image, write_folders
from PIL import Image
from saved_cnn import write_cnn_run

import millrace as mr
from millrace.apps.cnn.classify import read_image
from millrace.cli import main
from millrace.data.mnist import read_digits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with images and a run on them."""
    folder = tmp_path_factory.mktemp("predict")
    write_folders(folder / "data")
    options = {"model_name": "toy_model", "dataset": "imagefolder", "image_size": 32}
    write_cnn_run(folder / "run", dataset_path=folder / "data", **options)
    (folder / "data" / "broken.jpg").write_bytes(encode(make_image(0))[:300])
    (folder / "data" / "notes.txt").write_text("not an image")
    (folder / "data" / ".hidden.png").write_bytes(encode(make_image(0), "PNG"))
    return folder


@pytest.fixture
def predict(folder, monkeypatch, capsys):
    """Run the command in the folder; return its status, output and errors."""
    monkeypatch.chdir(folder)

    def call(*words):
        with pytest.raises(SystemExit) as left:
            main(["cnn", "predict", *words])
        printed = capsys.readouterr()
        return left.value.code, printed.out, printed.err

    return call


def test_the_classes_are_those_that_the_model_computes(predict, folder):
    status, out, err = predict("run", "data/val", "--format", "csv", "--batch-size", "4")
    assert status == 0 and err.startswith("using the best checkpoint")
    assert len(err.splitlines()) == 1
    rows = list(csv.DictReader(out.splitlines()))
    paths = sorted((folder / "data" / "val").rglob("*.*"))
    assert [row["image"] for row in rows[::3]] == [
        str(path.relative_to(folder)) for path in paths
    ]
    model = mr.cnn.load(folder / "run")
    images = np.stack([read_image(path, (32, 32, 3), "imagefolder") for path in paths])
    logits = model.logits(images)
    wanted = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for place in range(15):
        own = rows[3 * place : 3 * place + 3]
        assert [row["rank"] for row in own] == ["1", "2", "3"]
        numbers = [int(row["class"].removeprefix("class_")) for row in own]
        assert numbers == (-wanted[place]).argsort().tolist()
        found = [float(row["probability"]) for row in own]
        np.testing.assert_allclose(found, wanted[place][numbers], atol=2e-6)


def test_a_table_names_each_image_once(predict):
    status, out, _ = predict("run", "data/val/class_1/0.JPEG", "--top", "2")
    header, first, second = out.splitlines()
    assert status == 0 and header.split() == ["image", "class", "probability"]
    assert first.startswith("data/val/class_1/0.JPEG  class_")
    assert second.split()[0].startswith("class_")


def test_files_folders_and_patterns_are_taken_once_each(predict):
    words = ("data/val/class_0/1.png", "data/val/class_0", "data/v*/class_0/*.JPEG")
    _, out, _ = predict("run", *words, "--format", "json", "--top", "1")
    found = json.loads(out)
    assert [entry["image"] for entry in found] == [
        f"data/val/class_0/{name}"
        for name in ("1.png", "0.JPEG", "2.JPEG", "3.JPEG", "4.JPEG")
    ]
    assert all(len(entry["classes"]) == 1 for entry in found)


def test_an_image_that_cannot_be_read_is_named_and_left_out(predict):
    status, out, err = predict(
        "run", "data/broken.jpg", "data/notes.txt", "data/val/class_0/1.png", "--top", "1"
    )
    assert status == 1
    assert "class_0/1.png" in out and "broken" not in out
    _, broken, notes, count = err.splitlines()
    assert broken.startswith("millrace: data/broken.jpg cannot be read: ")
    assert notes.startswith("millrace: data/notes.txt cannot be read: ")
    assert count == "millrace: 2 of 3 images could not be read."


def test_a_file_is_written_in_the_format_of_its_name(predict, folder):
    status, out, _ = predict("run", "data/val", "--output", "new/found.json", "--top", "1")
    assert (status, out) == (0, "15 images: new/found.json\n")
    assert len(json.loads((folder / "new" / "found.json").read_text())) == 15


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run",), "IMAGES is required"),
        (("run", "nowhere.jpg"), "there is no file or folder nowhere.jpg"),
        (("run", "data/*.gif"), "there is no match data/*.gif"),
        (("run", "run"), "The folder run has no images"),
        (("data", "data/val"), "There are no checkpoints in data"),
        (("nowhere", "data/val"), "There is no nowhere. Give the directory"),
        (("run", "data/val", "--which", "7"), "no checkpoint after update 7, only after 3"),
        (("run", "data/val", "--top", "0"), "top must be at least 1, got 0"),
        (("run", "data/val", "--format", "xml"), "--format must be one of"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(words, message, predict):
    status, out, err = predict(*words)
    assert (status, out) == (2, "") and message in err
    assert len(err.splitlines()) == 1


def test_one_program_is_compiled_for_all_batches(folder, monkeypatch):
    model = mr.cnn.load(folder / "run")
    paths = [*sorted((folder / "data" / "train").rglob("*.*")), folder / "nowhere"]
    traced = []
    original = type(model).pixels_to_logits

    def traced_logits(self, images):
        traced.append(images.shape)
        return original(self, images)

    monkeypatch.setattr(type(model), "pixels_to_logits", traced_logits)
    found = list(model.classify_files(paths, batch_size=4))
    assert traced == [(4, 32, 32, 3)]
    assert [file.path for file in found] == paths
    assert found[-1].probabilities is None and "cannot be read" in str(found[-1].error)


def test_an_unreadable_file_is_an_error_in_python(folder):
    model = mr.cnn.load(folder / "run")
    with pytest.raises(ValueError, match=r"broken\.jpg cannot be read"):
        model.predict_files([folder / "data" / "broken.jpg"])
    with pytest.raises(ValueError, match=r"must be a list of files, got 'a\.jpg'"):
        model.predict_files("a.jpg")
    names, probabilities = model.predict_files([])
    assert names == [] and probabilities.shape == (0,)


def test_images_in_files_equal_those_of_the_dataset(tmp_path):
    """Small images keep all of their pixels; the digits have values from 0 to 16."""
    digits = read_digits()[0][:20]
    for number, digit in enumerate(digits):
        path = tmp_path / f"{number}.png"
        Image.fromarray(np.uint8(np.round(digit * (255 / 16)))).save(path)
        np.testing.assert_array_equal(read_image(path, (8, 8, 1), "digits")[..., 0], digit)
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    found = read_image(tmp_path / "x.png", (32, 32, 3), "cifar10")
    np.testing.assert_array_equal(found, pixels)


def test_the_middle_of_a_wide_image_is_taken(tmp_path):
    pixels = np.zeros((8, 24, 3), np.uint8)
    pixels[:, 8:16] = 200
    Image.fromarray(pixels).save(tmp_path / "x.png")
    assert (read_image(tmp_path / "x.png", (4, 4, 1), "mnist") == 200).all()
