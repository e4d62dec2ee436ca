"""A run in workers of Ray continues after one of them was lost."""

import importlib.util
import sys
from pathlib import Path

import pytest
from launched import assert_same_history, assert_same_weights, finish, start

SCRIPT = Path(__file__).parents[1] / "ray_run.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="ray is not installed: pip install '.[ray]'",
    ),
]


def test_new_workers_continue_a_run_that_has_lost_one(tmp_path, undisturbed, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # it would write to the home folder
    directory = tmp_path / "run"
    output = finish(start([sys.executable, str(SCRIPT), str(directory)]), timeout=240)
    assert "Process 1 " in output and "has sent no heartbeat for 30 s." in output
    assert "the other worker has ended, too" in output
    assert "statuses [0, 0]" in output
    assert_same_weights(directory, undisturbed)
    assert_same_history(directory, undisturbed)
