"""What is read from ratings files is kept beside the test, not in the user's cache."""

import logging

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("MILLRACE_DATA", str(folder))


@pytest.fixture(autouse=True)
def same_log():
    """A run points the package's log to its own console; put it back."""
    logger = logging.getLogger("millrace")
    kept = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = kept
