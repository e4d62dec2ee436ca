"""Learning on ratings whose truth is known: nothing foretells better than their noise."""

import os
import subprocess
import sys

import pytest
from autoencoder_runs import summary_of

NOISE = 0.25
SMALL = "--num-users 1000 --num-items 200 --valid-per-epoch 0 --quiet"


def error_of(folder, options):
    """Train in a process of its own, compiled as a user's would be; return the test RMSE.

    The other tests are compiled fast, to run slowly: here running is what takes time.
    """
    command = f"autoencoder train --config generated_demo {options} --run-dir {folder}"
    environment = {name: v for name, v in os.environ.items() if name != "XLA_FLAGS"}
    ended = subprocess.run(
        [sys.executable, "-c", "from millrace.cli import main; main()", *command.split()],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return summary_of(folder)["metrics"]["test_rmse"]


def test_a_short_run_comes_near_the_noise(tmp_path):
    assert error_of(tmp_path / "run", SMALL) < 1.15 * NOISE


@pytest.mark.slow
def test_the_demo_comes_within_five_percent_of_the_noise(tmp_path):
    assert error_of(tmp_path / "run", "--quiet") < 1.05 * NOISE


@pytest.mark.slow
def test_sixteen_bits_need_stochastic_rounding_to_do_as_well_as_32(tmp_path):
    # Small steps are what rounding to the nearest loses.
    slowly = f"{SMALL} --learning-rate 0.01"
    full = error_of(tmp_path / "full", slowly)
    # How much worse it makes the result; measured: 2 % and 42 %.
    for half, worse in (("float16", 1.01), ("bfloat16", 1.2)):
        options = f"{slowly} --precision 16.16 --half-type {half}"
        at_random = error_of(tmp_path / half, options)
        nearest = error_of(tmp_path / f"{half}-nearest", f"{options} --no-prng")
        assert at_random < 1.01 * full
        assert nearest > worse * at_random
