"""Training on generated ratings approaches their noise, the best possible RMSE."""

import os
import subprocess
import sys

import pytest
from autoencoder_runs import summary_of

NOISE = 0.25
SMALL = "--num-users 1000 --num-items 200 --valid-per-epoch 0 --quiet"


def train_and_test(folder, options):
    """Train in a separate process with the default XLA flags; return the test RMSE.

    The flags of the test suite make compilation fast and programs slow; these runs spend
    their time in the program.
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


@pytest.mark.slow
def test_a_short_run_gets_close_to_the_noise(tmp_path):
    assert train_and_test(tmp_path / "run", SMALL) < 1.15 * NOISE


@pytest.mark.slow
def test_the_demo_gets_within_five_percent_of_the_noise(tmp_path):
    assert train_and_test(tmp_path / "run", "--quiet") < 1.05 * NOISE


@pytest.mark.slow
def test_sixteen_bits_match_32_with_stochastic_rounding_only(tmp_path):
    # Rounding to nearest loses small steps.
    slowly = f"{SMALL} --learning-rate 0.01"
    full = train_and_test(tmp_path / "full", slowly)
    # Rounding to nearest was measured to be worse by 2 % and 42 %.
    for half, worse in (("float16", 1.01), ("bfloat16", 1.2)):
        options = f"{slowly} --precision 16.16 --half-type {half}"
        stochastic = train_and_test(tmp_path / half, options)
        nearest = train_and_test(tmp_path / f"{half}-nearest", f"{options} --no-prng")
        assert stochastic < 1.01 * full
        assert nearest > worse * stochastic
