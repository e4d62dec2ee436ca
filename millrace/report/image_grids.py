"""The pictures a run has drawn of its own work: ``pictures/<kind>-<update>.png``."""

import base64
import html
from pathlib import Path

FOLDER = "pictures"
_SHOWN = 6
"""Of each kind, from the first to the last."""

_TITLES = {
    "prior": "Samples from the prior",
    "reconstructions": "Originals above their reconstructions",
    "chain": "Originals and their chains, step by step",
}


def picture_kinds(run: Path) -> dict[str, list[Path]]:
    """Return the pictures of each kind, in the order of updates."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted((run / FOLDER).glob("*-*.png")):
        kinds.setdefault(path.stem.rsplit("-", 1)[0], []).append(path)
    return kinds


def picture_sections(run: Path) -> str:
    """Show some of each kind, from the first to the last."""
    return "".join(
        f"<h2>{html.escape(_TITLES.get(kind, kind))}</h2>{picture_row(paths)}"
        for kind, paths in picture_kinds(run).items()
    )


def picture_row(paths: list[Path]) -> str:
    """Show some of these pictures, evenly spaced, with the update each is of."""
    last, count = len(paths) - 1, min(_SHOWN, len(paths))
    some = [paths[round(n * last / max(1, count - 1))] for n in range(count)]
    return f'<div class="figures">{"".join(map(_figure, some))}</div>'


def _figure(path: Path) -> str:
    # In the page itself: it needs no other file.
    data = base64.b64encode(path.read_bytes()).decode()
    number = path.stem.rsplit("-", 1)[1]
    words = f"after {int(number):,} updates" if number.isdecimal() else path.stem
    caption = html.escape(words)
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<img alt="{caption}" src="data:image/png;base64,{data}"></figure>'
    )
