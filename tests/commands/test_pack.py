"""``millrace data pack`` from the command line, and training on the result."""

import json
import logging

import numpy as np
import pytest
from image_files import SMALL, encode, make_image, write_folders

from millrace.cli import main
from millrace.data.imagenet import load_images


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp("source"))


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run a command in this process; return its status and output."""
    logger = logging.getLogger("millrace")
    kept = logger.handlers, logger.level, logger.propagate
    monkeypatch.chdir(tmp_path)

    def call(*words):
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        output = capsys.readouterr()
        return left.value.code, output.out, output.err

    yield call
    logger.handlers, logger.level, logger.propagate = kept


def test_a_packed_dataset_can_be_trained_on_without_naming_the_dataset(
    command, source, tmp_path
):
    pack = ("data", "pack", source, "packed", "--num-workers", "1")
    status, out, errors = command(*pack)
    assert status == 0, errors
    lines = out.splitlines()
    assert lines[0].startswith("15 train and 15 validation images of 3 classes, ")
    assert lines[0].endswith(" KiB")
    assert lines[1].startswith("packed 30 images in ") and "images/s)" in lines[1]
    assert lines[-1] == "Use it with: millrace cnn train --dataset-path packed"
    assert errors.splitlines() == [
        "train: 15 of 15 images",
        "validation: 15 of 15 images",
    ]
    status, out, errors = command(*pack)
    assert status == 0 and "packed was already complete." in out
    status, out, errors = command(
        *("cnn", "train", "--dataset-path", "packed", "--image-size", "32"),
        *("--micro-batch-size", "4", "--num-workers", "1", "--run-dir", "run"),
        *("--recipe", "graphcore"),
    )
    assert status == 0, errors
    assert "packed, 15 training and 15 validation samples, 3 classes" in out + errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 <= summary["input_wait"] <= 1


def test_images_can_be_resized_or_stored_as_pixels(command, source, tmp_path):
    status, out, errors = command(
        *("data", "pack", source, "small", "--short-side", "20", "--quality", "80"),
        *("--num-workers", "1", "--quiet"),
    )
    assert (status, out, errors) == (0, "", "")
    status, out, _ = command("data", "pack", source, "raw", "--raw", "--num-workers", "1")
    assert status == 0
    encoded, raw = (load_images(tmp_path / x, SMALL).training for x in ("small", "raw"))
    assert bytes(encoded.reader(encoded.locate(0))[0])[:2] == b"\xff\xd8"
    assert raw.reader(raw.locate(0))[0].shape == (40, 48, 3)  # 256 is larger
    assert raw[np.arange(15)]["label"].tolist() == [0] * 5 + [1] * 5 + [2] * 5


def test_unreadable_images_are_counted_and_some_named(command, tmp_path):
    folder = write_folders(tmp_path / "source") / "train" / "class_0"
    for number in (0, 2, 3, 4):
        (folder / f"{number}.JPEG").write_bytes(b"nothing")
    words = ("--short-side", "32", "--num-workers", "1")
    status, out, errors = command("data", "pack", "source", "packed", *words)
    assert status == 0
    assert "11 train and 15 validation images" in out
    assert "4 unreadable images were left out; see packed/dataset.json." in out
    named = [line for line in errors.splitlines() if line.startswith("left out: ")]
    assert len(named) == 3
    assert named[0].endswith("class_0/0.JPEG: not a JPEG, PNG or WebP image")


def test_the_same_folder_by_another_name_is_the_same_dataset(command, source, tmp_path):
    words = ("packed", "--num-workers", "1")
    (tmp_path / "link").symlink_to(source)
    assert command("data", "pack", source, *words)[0] == 0
    status, out, errors = command("data", "pack", "link", *words)
    assert status == 0, errors
    assert "already complete" in out


def test_progress_is_a_line_per_tenth(command, tmp_path):
    folder = tmp_path / "source" / "train" / "a"
    folder.mkdir(parents=True)
    for number in range(640):
        (folder / f"{number}.jpg").write_bytes(encode(make_image(0, size=(8, 8))))
    status, _, errors = command("data", "pack", "source", "packed", "--num-workers", "1")
    assert status == 0
    expected = [f"train: {64 * tenth} of 640 images" for tenth in range(1, 11)]
    assert errors.splitlines() == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["SOURCE"], "DEST"),
        (["nowhere", "packed"], "SOURCE: nowhere is not a folder."),
        ([".", "packed"], "SOURCE: . has none of: train/<class>/*.jpg"),
        (["SOURCE", "SOURCE"], "DEST must be another folder than SOURCE."),
        (["SOURCE", "packed", "--short-side", "7"], "--short-side must be at least 8"),
        (["SOURCE", "packed", "--quality", "80"], "--quality is for resized JPEGs"),
        (
            ["SOURCE", "packed", "--raw", "--short-side", "64", "--quality", "80"],
            "--quality is for resized JPEGs",
        ),
        (
            ["SOURCE", "packed", "--short-side", "64", "--quality", "96"],
            "--quality must be between 1 and 95, got 96.",
        ),
        (["SOURCE", "packed", "--num-workers", "0"], "--num-workers must be at least 1"),
        (["SOURCE", "a_file"], "DEST: a_file is not a folder."),
        (["SOURCE", "used"], "used is not empty. Choose another folder."),
    ],
)
def test_mistakes_in_the_command_give_status_2(command, source, tmp_path, words, message):
    (tmp_path / "a_file").touch()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "other").touch()
    words = [str(source) if word == "SOURCE" else word for word in words]
    status, out, errors = command("data", "pack", *words)
    assert (status, out) == (2, "")
    assert message in errors and "Traceback" not in errors
    assert not (tmp_path / "packed").exists()


def test_an_interrupted_pack_says_how_to_continue(command, source, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("millrace.data.packed.pack", interrupt)
    status, _, errors = command("data", "pack", source, "interrupted")
    assert status == 130
    assert "interrupted; the same command continues where it stopped" in errors
