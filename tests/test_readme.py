"""The README's examples run and do what they say, on files made for them."""

from pathlib import Path

import numpy as np
import pytest
from docs_blocks import ROOT, Block, blocks, commands, run_command, run_python
from PIL import Image

README = blocks(ROOT / "README.md")


def python_after(words: str) -> str:
    """The Python block that has these words in it."""
    (code,) = [b.text for b in README if b.language == "python" and words in b.text]
    return code


def console_with(words: str) -> Block:
    (found,) = [b for b in README if b.language == "console" and words in b.text]
    return found


def test_the_fifteen_line_example_learns_ones(tmp_path):
    said = run_python([python_after("all ones")], tmp_path)
    assert said.split() == ["[1.", *["1."] * 6, "1.]"]


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
                picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
                picture.save(folder / f"{number}.jpg")
    return tmp_path


def test_a_folder_of_jpegs_is_trained_on_and_recognized(flowers):
    checked, trained = commands(console_with("imagefolder"))
    assert "120 training and 30 validation samples, 3 classes" in " ".join(
        run_command(checked[0], flowers)
    )
    run_command(trained[0], flowers)
    assert "daisy" in (flowers / "runs/flowers/report.html").read_text()
    said = run_python([python_after("predict_files")], flowers)
    assert said.strip() == "['daisy', 'poppy']"


@pytest.fixture
def ratings(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    likes, is_like = rng.normal(0, 0.8, (800, 3)), rng.normal(0, 0.8, (60, 3))
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(800):
        for item in rng.choice(60, 30, replace=False):
            value = 3.2 + likes[user] @ is_like[item] + rng.normal(0, 0.25)
            when = 1_100_000_000 + rng.integers(0, 30_000_000)
            lines.append(f"{user + 1},{item + 100},{np.clip(round(value), 1, 5)},{when}")
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_ratings_of_ones_own_are_learnt_and_lead_to_recommendations(ratings):
    told = [
        run_command(command, ratings) for command, _ in commands(console_with("convert"))
    ]
    assert told[0][0].startswith("split/train.txt  19,200 ratings by 800 users")
    assert "--config small_ratings" in told[0][-1]  # which is the next command
    (kept,) = (ratings / "runs").glob("autoencoder-validate-*/summary.json")
    import json

    rmse = json.loads(kept.read_text())["metrics"]["validation_rmse"]
    assert rmse < 0.85  # the ratings' own deviation is 1.03
    assert told[3][0] == "user 7" and len(told[3]) == 4
    code = "import millrace as mr\n" + python_after("recommender")
    assert run_python([code], ratings).count("(") == 3


def test_a_loss_of_ones_own_finds_the_percentile(tmp_path):
    code = "import millrace as mr\n" + python_after("pinball_loss")
    slope, offset = map(float, run_python([code], tmp_path).split())
    assert slope == pytest.approx(2, abs=0.2)
    assert offset == pytest.approx(np.log(10), abs=0.2)
