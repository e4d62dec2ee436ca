"""Saved runs: find a run and its checkpoints from a path. Imports nothing heavy."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from millrace.checkpoint.find import checkpoints_in, is_checkpoint
from millrace.config import ConfigurationError, build, load_yaml

T = TypeVar("T")

_RECORD = "config.yml"
_OF_THE_RUN = ("run_dir", "resume")
"""Options that say where a run was written, not what it did."""


class SavedRun(NamedTuple):
    """A run on disk, found from the path of its directory or of one of its checkpoints."""

    directory: Path | None
    """The run directory; None where there are only checkpoints."""
    options: dict[str, Any]
    """The options in its ``config.yml``, with ``command``."""
    checkpoints: list[Path]
    """Oldest first; only the one that the path names, if it names one."""

    def check_command(self, command: str) -> None:
        """Refuse a run of another command, such as ``cnn-train``."""
        if (found := self.options.get("command")) != command:
            raise ConfigurationError(
                f"{self.directory} is a run of {found}, not of {command}."
            )

    def build_config(self, config_type: type[T], *, without: Iterable[str] = ()) -> T:
        """Return the configuration of the run, without options about where it was written.

        Args:
            config_type: The configuration of its command.
            without: More options to leave out.
        """
        skipped = {"command", *_OF_THE_RUN, *without}
        kept = {name: v for name, v in self.options.items() if name not in skipped}
        return build(config_type, kept)

    def newest(self) -> Path:
        """Return the newest checkpoint."""
        return self.checkpoints[-1]


def find_run(path: Path, *, command: str, needs_checkpoints: bool = True) -> SavedRun:
    """Find the run that a path belongs to.

    Args:
        path: A run directory, its folder of checkpoints, or one checkpoint.
        command: Named in the error if nothing is found, such as ``cnn train``.
        needs_checkpoints: Whether a run without a checkpoint is an error.
    """
    near = (path, *path.absolute().parents[:2])
    directory = next((folder for folder in near if (folder / _RECORD).is_file()), None)
    options = load_yaml(directory / _RECORD) if directory is not None else {}
    checkpoints = _checkpoints(path, options)
    if needs_checkpoints and not checkpoints:
        raise ConfigurationError(
            f"There are no checkpoints in {path}. Give the directory of a run of "
            f"`millrace {command}` that wrote some, or one of its checkpoints."
        )
    return SavedRun(directory, options, checkpoints)


def _checkpoints(path: Path, options: dict[str, Any]) -> list[Path]:
    if is_checkpoint(path):
        return [path]
    elsewhere = options.get("checkpoint_dir")
    folders = [path, path / "checkpoints", *([Path(elsewhere)] if elsewhere else [])]
    return next((found for folder in folders if (found := checkpoints_in(folder))), [])
