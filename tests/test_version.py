"""The version is written in three files; they agree."""

import re
from pathlib import Path

import yaml

import millrace

ROOT = Path(__file__).parents[1]


def test_the_citation_has_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == millrace.__version__


def test_the_changelog_starts_with_the_version_of_the_package_and_its_date():
    first = re.search(r"^## (\d.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert first is not None
    assert first[1] == f"{millrace.__version__} ({citation['date-released']})"
