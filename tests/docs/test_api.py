"""The API pages list every public name of the package."""

import re

import pytest
from docs_blocks import ROOT

import millrace

PAGE = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("api_*.md")))


@pytest.mark.parametrize("name", millrace.__all__)
def test_every_public_name_is_on_a_page(name):
    module = re.escape(f"::: millrace.{millrace._HOME[name]}")
    if name in millrace._MODULES:
        assert re.search(rf"^{module}$", PAGE, re.MULTILINE)
    else:
        listed = re.findall(
            rf"^{module}\n +options: .*members: \[(.*)\]", PAGE, re.MULTILINE
        )
        assert name in ", ".join(listed).split(", ")
