"""Where downloaded data sets are kept, and looked for."""

import os
from pathlib import Path


def data_folder() -> Path:
    """Return where data sets are kept: MILLRACE_DATA, or in the user's cache."""
    if chosen := os.environ.get("MILLRACE_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "millrace"


def fetched_folder(name: str) -> Path:
    """Return the folder that a data set is downloaded into."""
    return data_folder() / name
