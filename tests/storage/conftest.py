"""An empty cache for each test."""

import pytest


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Return the cache of this machine; `move_to` makes it that of another one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def on_another_machine(monkeypatch, tmp_path):
    """Return a function that replaces the cache by an empty one, or one used before."""

    def move(name: str = "another") -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    return move
