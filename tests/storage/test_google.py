"""A run in Google Cloud Storage, with a server on this machine that stands for it."""

import os
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import millrace as mr
from millrace.distributed.hardware import find_free_port

pytestmark = pytest.mark.slow

TRAIN = ["-m", "millrace", "cnn", "train", "--quiet", "--config", "digits_demo"]


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Return the address of a bucket of an emulator."""
    pytest.importorskip("gcsfs", reason="gcsfs is not installed: pip install '.[gs]'")
    pytest.importorskip("gcp_storage_emulator", reason="pip install gcp-storage-emulator")
    port = find_free_port()
    place = ["--host", "127.0.0.1", "--port", str(port)]
    command = ["gcp_storage_emulator", "start", *place, "--in-memory"]
    log = tmp_path / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", *command, "--default-bucket", "tests"],
            stdout=file,
            stderr=file,
        )
    while "All services started" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    yield "gs://tests"
    process.kill()
    process.wait()


def train(*options: str) -> None:
    command = [sys.executable, *TRAIN, *options]
    subprocess.run(command, env=os.environ, check=True, timeout=240)


def test_another_machine_continues_a_run_in_google_cloud_storage(
    server, tmp_path, monkeypatch
):
    address = f"{server}/runs/first"
    train("--num-epochs", "2", "--run-dir", address)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    train("--num-epochs", "3", "--run-dir", address, "--resume")
    train("--num-epochs", "3", "--run-dir", str(tmp_path / "alone"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
    ours = mr.load(address, which="last").params
    theirs = mr.load(tmp_path / "alone", which="last").params
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, other)
