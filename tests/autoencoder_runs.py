"""Small files of ratings, and commands of the recommender run in this process."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from millrace.cli import main

USERS, ITEMS = 48, 30
FIRST_USER, FIRST_ITEM = 1000, 500
SMALL = "--size 128 --batch-size 8 --precision 32.32 --quiet"
"""Options without a default for these file names, and full precision."""
PLAIN = f"--recipe graphcore {SMALL}"


def write_ratings(folder, *, extra=""):
    """Write training and validation files with ratings of rank 2."""
    random = np.random.default_rng(0)
    taste = random.standard_normal((USERS, 2)) @ random.standard_normal((2, ITEMS))
    ratings = np.clip(np.round(2 * (3 + taste)) / 2, 0.5, 5)
    chosen = random.random((USERS, ITEMS))
    for name, low, high in (("train", 0.0, 0.5), ("valid", 0.5, 0.7)):
        lines = [
            f"{FIRST_USER + user}\t{FIRST_ITEM + item}\t{ratings[user, item]:g}\n"
            for user, item in np.argwhere((low <= chosen) & (chosen < high))
        ]
        (folder / f"{name}.txt").write_text("".join(lines) + extra * (name == "valid"))
    files = f"--training-data-file {folder}/train.txt "
    return files + f"--validation-data-file {folder}/valid.txt "


def command(capsys, args):
    """Run a command; return its status and what it printed."""
    args = args.split()
    with pytest.raises(SystemExit) as left:
        main(["autoencoder", *args])
    printed = capsys.readouterr() if capsys else SimpleNamespace(out="", err="")
    return SimpleNamespace(status=left.value.code, out=printed.out, err=printed.err)


def dense(ratings):
    """Return ratings as (users, items), 0 where there is none."""
    rows = np.zeros((ratings.num_users, ratings.num_items), np.float32)
    users = np.repeat(np.arange(ratings.num_users), ratings.num_ratings_by_user)
    rows[users, ratings.items] = ratings.values
    return rows


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def events_of(folder):
    return [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def clip(ratings):
    """Limit ratings to the scale of the files."""
    return np.clip(ratings, 0.5, 5)
