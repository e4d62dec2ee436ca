"""Find checkpoints on disk by name. Imports nothing heavy."""

import re
from pathlib import Path

_NAME = re.compile(r"update-\d+", re.ASCII)


def checkpoint_name(update: int) -> str:
    """Return the folder name of the checkpoint after `update` updates."""
    return f"update-{update:09d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, complete or damaged, oldest first."""
    paths = [path for path in folder.glob("update-*") if _NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("update-")))


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, or an average of checkpoints."""
    return path.is_dir() and (
        _NAME.fullmatch(path.name) is not None or (path / "manifest.json").is_file()
    )
