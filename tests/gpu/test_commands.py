"""Commands that have failed only on a GPU."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


def test_a_network_is_validated_again_in_another_process(tmp_path):
    """What the first process has cached must not break the second."""
    environment = dict(os.environ, XDG_CACHE_HOME=str(tmp_path / "cache"))
    for name in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        environment.pop(name, None)
    words = "cnn validate --dataset digits --synthetic-data --batch-size 2 --num-batches 3"
    for number, more in enumerate(([], [], ["--deterministic"])):
        run = ["--run-dir", str(tmp_path / f"run{number}"), *more]
        ended = subprocess.run(
            [sys.executable, "-m", "millrace", *words.split(), *run],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
