"""Find the line of the user's own code in a traceback.

An error in a loss function passes through this package and JAX, so the interesting line is
somewhere in the middle of a long traceback.
"""

import contextlib
import functools
import linecache
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_MAX_SOURCE = 100
_CELL_FOLDER = "ipykernel_"
"""A part of the file names that IPython gives to cells of a notebook."""


class UserLine(NamedTuple):
    """A line of code that does not belong to an installed package."""

    path: str
    line: int
    function: str
    source: str

    def __str__(self) -> str:
        name = Path(self.path).name
        if _CELL_FOLDER in self.path or self.path.startswith("<"):
            name = "notebook cell"
        place = "" if self.function == "<module>" else f" in {self.function}"
        return f"{name}:{self.line}{place}: {self.source}"


def find_user_line(error: BaseException) -> UserLine | None:
    """Return the last line of the user's code that led to an error; None if there is none.

    The cause of an error comes first: a thread may have raised it.
    """
    seen = set()
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        chain.append(current)
        current = current.__cause__
    for link in reversed(chain):
        if (found := _last_user_frame(link.__traceback__)) is not None:
            return found
    return None


def _last_user_frame(traceback: TracebackType | None) -> UserLine | None:
    found = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        source = linecache.getline(code.co_filename, traceback.tb_lineno).strip()
        if source and not _is_installed(code.co_filename):
            shortened = source[:_MAX_SOURCE] + ("…" if len(source) > _MAX_SOURCE else "")
            found = UserLine(code.co_filename, traceback.tb_lineno, code.co_name, shortened)
        traceback = traceback.tb_next
    return found


@functools.cache
def _is_installed(filename: str) -> bool:
    """Whether a file belongs to this package, another installed one or Python itself."""
    if filename.startswith("<frozen"):
        return True
    if _CELL_FOLDER in filename or filename.startswith("<"):
        return False
    parts = Path(filename).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    folders = [Path(__file__).parent, *map(Path, _python_folders())]
    return any(Path(filename).is_relative_to(folder) for folder in folders)


def _python_folders() -> set[str]:
    paths = sysconfig.get_paths()
    return {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}


@contextlib.contextmanager
def noting_user_line() -> Iterator[None]:
    """Add the user's own line to the end of the traceback of an error."""
    try:
        yield
    except Exception as error:
        note = f"  {find_user_line(error)}"
        if note != "  None" and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise
