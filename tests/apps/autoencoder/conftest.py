"""Fixtures: keep the ratings cache in a temporary folder, and restore the log."""

import logging

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("MILLRACE_DATA", str(folder))


@pytest.fixture(autouse=True)
def restored_log():
    """Restore the package's logger, which a run redirects to its own console."""
    logger = logging.getLogger("millrace")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before
