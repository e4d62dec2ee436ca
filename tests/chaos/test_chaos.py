"""Faults at random moments, in all applications: results stay those of a quiet run."""

import os
import subprocess

import pytest

from chaos.campaign import disturb, find_differences
from chaos.faults import Disk


@pytest.fixture
def folder(tmp_path):
    """Return a folder, on a machine that can mount a file system."""
    try:
        Disk(tmp_path / "try").unmount()
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"") or str(error)
        pytest.skip(f"a power cut is simulated with a mounted ext4 image: {reason!r}")
    return tmp_path


@pytest.mark.slow
def test_half_an_hour_of_faults_changes_no_result(folder):
    minutes = float(os.environ.get("CHAOS_MINUTES", "30"))
    found = disturb(seed=1, seconds=60 * minutes, parallel=2, folder=folder)
    assert not found.problems, found.problems[0]
    assert found.faults and found.runs


def test_a_weight_or_event_that_differs_is_found():
    import numpy as np

    expected = {"weights": [np.ones(2), np.zeros(3)], "events": [{"update": 1}]}
    assert find_differences(expected, expected) == []
    other = {"weights": [np.ones(2), np.full(3, 1e-9)], "events": [{"update": 1}]}
    assert find_differences(other, expected) == ["1 of 2 weights differ"]
    without = expected | {"events": []}
    assert find_differences(without, expected) == ["log events differ (0 and 1)"]
