"""Fixtures: checkpoints to read and to damage."""

import logging

import pytest
from small_checkpoints import small_state

from millrace.checkpoint.store import (
    Checkpoints,
)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpoints(folder):
    opened = Checkpoints(folder)
    yield opened
    opened.close()


@pytest.fixture
def three(checkpoints):
    """Checkpoints after updates 1, 2 and 3, whose weights are 1, 2 and 3."""
    for update in (1, 2, 3):
        checkpoints.save(small_state(update), update, data_position=10 * update)
    checkpoints.wait()
    return checkpoints


@pytest.fixture
def warned():
    """The warnings of the package. A Console would disconnect caplog."""
    messages = []

    class Collect(logging.Handler):
        def emit(self, record):
            messages.append((record.levelname, record.getMessage()))

    handler, logger = Collect(logging.WARNING), logging.getLogger("millrace")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
