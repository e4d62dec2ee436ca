"""Writes ratings as text, user, tab, item, tab, rating, many lines at a time."""

from pathlib import Path

import numpy as np

from millrace.data.ratings.text import Coded

_LINES_AT_A_TIME = 1 << 18


def write_text(
    path: Path, users: Coded, items: Coded, values: np.ndarray, chosen: np.ndarray
) -> None:
    """Write the ratings whose places are `chosen`, in that order."""
    user_texts, item_texts = _texts(users.ids), _texts(items.ids)
    with path.open("wb") as file:
        for first in range(0, len(chosen), _LINES_AT_A_TIME):
            places = chosen[first : first + _LINES_AT_A_TIME]
            different, codes = np.unique(values[places], return_inverse=True)
            value_texts = _texts(np.array([f"{value:.7g}" for value in different]))
            fields = [
                (user_texts[users.codes[places]], b"\t"),
                (item_texts[items.codes[places]], b"\t"),
                (value_texts[codes], b"\n"),
            ]
            file.write(_joined(fields))


def _texts(ids: np.ndarray) -> np.ndarray:
    """Return texts as rows of bytes, zeros after the end."""
    encoded = np.char.encode(ids.astype(str), "utf-8")
    return encoded.view(np.uint8).reshape(len(encoded), -1)


def _joined(fields: list[tuple[np.ndarray, bytes]]) -> bytes:
    columns = []
    for texts, mark in fields:
        columns += [texts, np.full((len(texts), 1), mark[0], np.uint8)]
    lines = np.concatenate(columns, axis=1)
    return lines[lines != 0].tobytes()
