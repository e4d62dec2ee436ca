"""Paths of runs: folders of this machine, or addresses in object storage."""

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.config.checks import ConfigurationError
from millrace.storage.address import StorageError, is_url, to_local
from millrace.storage.download import refresh

STORED = {"stored": True}
"""Marks options that take the path of a run, which may be in object storage."""


def open_run(path: Path | str) -> Path:
    """Return the folder of a run; one in object storage is first brought up to date."""
    try:
        folder = to_local(path)
        refresh(folder)
        return folder
    except StorageError as error:
        raise ConfigurationError(str(error)) from error


def locate(value: Any, hint: Any, metadata: Mapping[str, Any], option: str) -> Any:
    """Replace the address of a run by the folder of its working copy.

    Args:
        value: The value of any option.
        hint: Its type.
        metadata: The metadata of its field.
        option: Name of the option, for errors.
    """
    if isinstance(value, list | tuple):
        return [locate(item, hint, metadata, option) for item in value]
    if not is_url(value) or not _has_paths(hint):
        return value
    if not metadata.get("stored"):
        raise ConfigurationError(
            f"{option} must be a path of this machine, got {value}. Only runs can be in "
            "object storage."
        )
    try:
        return to_local(value)
    except StorageError as error:
        raise ConfigurationError(str(error)) from error


def _has_paths(hint: Any) -> bool:
    return hint is Path or any(map(_has_paths, typing.get_args(hint)))
