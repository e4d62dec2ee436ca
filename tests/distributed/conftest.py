"""The reference runs that the others are compared with."""

import pytest
from launched import DIGITS, alone, end_all, run


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    end_all()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """One process with four devices that is never interrupted."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    run(alone(directory, "--virtual-devices", "4", "--num-replicas", "4"))
    return directory


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """``DIGITS`` in one process with four devices."""
    directory = tmp_path_factory.mktemp("digits") / "run"
    run([*DIGITS, "--virtual-devices", "4", "--run-dir", str(directory)])
    return directory
