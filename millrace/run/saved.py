"""Find a saved run and its checkpoints from a path. Imports nothing heavy."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from millrace.checkpoint.find import checkpoints_in, is_checkpoint
from millrace.config import ConfigurationError, build, load_yaml

T = TypeVar("T")

_CONFIG = "config.yml"
_SKIPPED_OPTIONS = ("run_dir", "resume")
"""Options about where a run was written, not about what it did."""


class SavedRun(NamedTuple):
    """A run on disk."""

    directory: Path | None
    """The run directory; None if there are only checkpoints."""
    options: dict[str, Any]
    """The options in its ``config.yml``, including ``command``."""
    checkpoints: list[Path]
    """All checkpoints, oldest first, or the one that the path names."""

    def check_command(self, command: str) -> None:
        """Raise an error unless this is a run of `command`, such as ``cnn-train``."""
        if (actual := self.options.get("command")) != command:
            raise ConfigurationError(
                f"{self.directory} is a run of {actual}, not of {command}."
            )

    def build_config(self, config_type: type[T], *, without: Iterable[str] = ()) -> T:
        """Return the configuration of the run, without where it was written.

        Args:
            config_type: The configuration class of its command.
            without: More options to leave out.
        """
        skipped = {"command", *_SKIPPED_OPTIONS, *without}
        kept = {name: v for name, v in self.options.items() if name not in skipped}
        return build(config_type, kept)

    def newest(self) -> Path:
        """Return the newest checkpoint."""
        return self.checkpoints[-1]


def find_run(path: Path, *, command: str, needs_checkpoints: bool = True) -> SavedRun:
    """Find the run that a path belongs to.

    Args:
        path: A run directory, its folder of checkpoints, or one checkpoint.
        command: The command that writes such runs, named if nothing is found.
        needs_checkpoints: Whether a run without a checkpoint is an error.
    """
    # From a checkpoint, the run directory is two levels up.
    folders = (path, *path.absolute().parents[:2])
    directory = next((folder for folder in folders if (folder / _CONFIG).is_file()), None)
    options = load_yaml(directory / _CONFIG) if directory is not None else {}
    checkpoints = _find_checkpoints(path, options)
    if needs_checkpoints and not checkpoints:
        raise ConfigurationError(
            f"There are no checkpoints in {path}. Give the directory of a run of "
            f"`millrace {command}` that wrote some, or one of its checkpoints."
        )
    return SavedRun(directory, options, checkpoints)


def _find_checkpoints(path: Path, options: dict[str, Any]) -> list[Path]:
    if is_checkpoint(path):
        return [path]
    folders = [path, path / "checkpoints"]
    if configured := options.get("checkpoint_dir"):
        folders.append(Path(configured))
    return next((paths for folder in folders if (paths := checkpoints_in(folder))), [])
