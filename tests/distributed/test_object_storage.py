"""Several processes whose run is in object storage, here another folder."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from launched import (
    assert_same_history,
    assert_same_weights,
    finish,
    launched,
    pid_of,
    run,
    start,
    wait_for,
)

from millrace.storage.address import to_local

pytest.importorskip("fsspec")


@pytest.mark.slow
def test_a_killed_process_is_restarted_and_the_run_is_continued_elsewhere(
    tmp_path, undisturbed, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    stored, url = tmp_path / "stored", Path(f"file://{tmp_path}/stored")
    own = ("--delay", "0.05")
    process = start(launched(url, 2, *own, options=("--max-restarts", "1")))
    wait_for(to_local(url), 12, process)
    os.kill(pid_of(1, process), signal.SIGKILL)
    output = finish(process)
    assert "restarting all processes (1 of 1 restarts)" in output
    assert_same_weights(stored, undisturbed)
    assert_same_history(stored, undisturbed)

    # Another machine finds only what is in storage, here without the newest checkpoint.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    newest = max((stored / "checkpoints").glob("update-*"))
    shutil.rmtree(newest)
    assert "Resuming after update" in run(launched(url, 2, "--resume"))
    assert (newest / "manifest.json").exists()
    assert_same_weights(stored, undisturbed)
    assert_same_history(stored, undisturbed)
