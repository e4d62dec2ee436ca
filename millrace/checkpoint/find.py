"""Checkpoints on disk by name. Imports nothing heavy."""

import re
from pathlib import Path

_NAMED = re.compile(r"update-\d+", re.ASCII)


def checkpoint_name(update: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"update-{update:09d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, complete or damaged, oldest first."""
    found = [path for path in folder.glob("update-*") if _NAMED.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("update-")))


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, or an average of checkpoints."""
    return path.is_dir() and (
        _NAMED.fullmatch(path.name) is not None or (path / "manifest.json").is_file()
    )
