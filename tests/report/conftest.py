"""One browser for all tests of reports."""

import pytest
from devtools import open_tab


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with open_tab(tmp_path_factory.mktemp("profile")) as tab:
        yield tab
