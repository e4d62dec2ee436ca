"""A simulated disk that keeps only what was synced, as after a power cut.

The contents of a file are kept once the file is synced, names once their folder is synced.
Deletions take effect at once or when the folder is synced: a real disk may do either.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest


class _Moment(NamedTuple):
    files: dict[int, bytes]
    folders: dict[int, dict[str, int]]
    note: object


class Disk:
    """Records what this process syncs and deletes in a folder.

    Args:
        root: The folder, which counts as synced.
        note: Returns what a test wants to remember about each moment.
        deletes_late: Whether deleted files come back unless their folder is synced.
    """

    def __init__(
        self,
        root: Path,
        note: Callable[[], object] = lambda: None,
        *,
        deletes_late: bool = False,
    ) -> None:
        self._root = root
        self._deletes_late = deletes_late
        self._note = note
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, int]] = {root.stat().st_ino: {}}
        self.moments: list[_Moment] = []
        """What would be left at each moment, and its note."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record what happens inside the block."""
        with pytest.MonkeyPatch.context() as patch:
            for name, watch in (
                ("fsync", self._synced),
                ("unlink", self._deleted),
                ("rmdir", self._deleted),
            ):
                patch.setattr(os, name, self._watched(getattr(os, name), watch))
            yield

    def _watched(self, real: Callable, watch: Callable) -> Callable:
        def call(*arguments, **named):
            watch(*arguments, **named)
            done = real(*arguments, **named)
            self._keep()
            return done

        return call

    def _synced(self, descriptor: int) -> None:
        about = os.fstat(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            names = {entry.name: entry.inode() for entry in os.scandir(path)}
            self._folders[about.st_ino] = names
        else:
            self._files[about.st_ino] = path.read_bytes()

    def _deleted(self, path, *, dir_fd=None) -> None:
        if self._deletes_late:
            return
        with contextlib.suppress(FileNotFoundError):
            gone = os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_ino
            self._files.pop(gone, None)
            self._folders.pop(gone, None)
            for names in self._folders.values():
                for name in [name for name, inode in names.items() if inode == gone]:
                    del names[name]

    def _keep(self) -> None:
        folders = {inode: dict(names) for inode, names in self._folders.items()}
        now = _Moment(dict(self._files), folders, self._note())
        if not self.moments or now != self.moments[-1]:
            self.moments.append(now)

    def restore(self, moment: _Moment, folder: Path) -> Path:
        """Create the folder as it would be after a power cut at that moment."""
        folder.mkdir()
        self._restore(moment, self._root.stat().st_ino, folder)
        return folder

    def _restore(self, moment: _Moment, inode: int, folder: Path) -> None:
        for name, inside in moment.folders.get(inode, {}).items():
            if inside in moment.folders:
                (folder / name).mkdir()
                self._restore(moment, inside, folder / name)
            else:  # or a folder that was not synced, which counts as damage too
                (folder / name).write_bytes(moment.files.get(inside, b""))
