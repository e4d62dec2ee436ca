"""The examples of the README run and do what they claim, on generated files."""

import json
from pathlib import Path

import numpy as np
import pytest
from docs_blocks import ROOT, Block, blocks, run_command, run_python, split_commands
from PIL import Image

README = blocks(ROOT / "README.md")


def python_with(text: str) -> str:
    """Return the Python block that contains this text."""
    (code,) = [b.text for b in README if b.language == "python" and text in b.text]
    return code


def console_with(text: str) -> Block:
    """Return the console block that contains this text."""
    (block,) = [b for b in README if b.language == "console" and text in b.text]
    return block


def test_the_fifteen_line_example_learns_ones(tmp_path):
    output = run_python(python_with("all ones"), tmp_path)
    assert output.split() == ["[1.", *["1."] * 6, "1.]"]


@pytest.fixture
def flowers(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    colors = {"daisy": (240, 240, 200), "poppy": (200, 30, 30), "violet": (120, 40, 160)}
    for split, count in (("train", 40), ("val", 10)):
        for name, color in colors.items():
            folder = tmp_path / "flowers" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.array(color) + rng.normal(0, 40, (48, 64, 3))
                image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
                image.save(folder / f"{number}.jpg")
    return tmp_path


def test_a_model_trained_on_a_folder_of_jpegs_recognizes_them(flowers):
    outputs = [
        run_command(command, flowers)
        for command, _ in split_commands(console_with("flowers"))
    ]
    assert "daisy" in (flowers / "runs/flowers/report.html").read_text()
    assert "daisy" in " ".join(outputs[1])
    assert (flowers / "flowers-model" / "model.safetensors").is_file()
    assert run_python(python_with("predict_files"), flowers).strip() == "['daisy', 'poppy']"


@pytest.fixture
def ratings(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    tastes, traits = rng.normal(0, 0.8, (800, 3)), rng.normal(0, 0.8, (60, 3))
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(800):
        for item in rng.choice(60, 30, replace=False):
            value = 3.2 + tastes[user] @ traits[item] + rng.normal(0, 0.25)
            when = 1_100_000_000 + rng.integers(0, 30_000_000)
            lines.append(f"{user + 1},{item + 100},{np.clip(round(value), 1, 5)},{when}")
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.slow
def test_custom_ratings_are_learned_and_lead_to_recommendations(ratings):
    outputs = [
        run_command(command, ratings)
        for command, _ in split_commands(console_with("convert"))
    ]
    assert outputs[0][0].startswith("split/train.txt  19,200 ratings by 800 users")
    assert "train --training-data-file split/train.txt" in outputs[0][-1]
    (summary,) = (ratings / "runs").glob("autoencoder-validate-*/summary.json")
    rmse = json.loads(summary.read_text())["metrics"]["validation_rmse"]
    assert rmse < 0.85  # the standard deviation of the ratings is 1.03
    assert outputs[3][0].startswith("using the best checkpoint: update ")
    assert outputs[3][1].startswith("user 7  (mean: ") and len(outputs[3]) == 5
    assert run_python(python_with("recommender"), ratings).count("(") == 3
