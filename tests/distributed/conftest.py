"""The reference run that the others are compared with."""

import pytest
from launched import alone, end_all, run


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
