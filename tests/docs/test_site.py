"""The documentation site builds without warnings and works in a real Chromium."""

import importlib.util
import re
import subprocess
import sys

import pytest
from browser import DESKTOP, PHONE, look_at
from devtools import open_tab
from docs_blocks import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet: strict mode does not count the warnings that it hides.
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return sorted(p.name for p in site.glob("*.html") if p.name != "404.html")


@pytest.fixture(scope="module")
def looked(site, pages, tmp_path_factory):
    wanted = [(page, width) for page in pages for width in (PHONE, DESKTOP)]
    return look_at(site, wanted, tmp_path_factory.mktemp("profile"))


def test_every_page_is_built(pages):
    written = {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
    assert set(pages) == written


def test_the_browser_reports_no_errors(looked):
    assert looked.console == []
    assert [seen.missing for seen in looked.pages] == [[]] * len(looked.pages)
    assert sum(seen.images for seen in looked.pages) >= 8


def test_no_page_is_wider_than_a_phone(looked, pages):
    wide = [
        page for page, seen in zip(pages, looked.pages[::2], strict=True) if seen.overflow
    ]
    assert wide == []


def test_no_table_of_results_is_cut_off_on_a_desktop(site, pages, tmp_path):
    wraps = "[...document.querySelectorAll('.md-typeset__scrollwrap')]"
    with open_tab(tmp_path) as tab:
        for page in (page for page in pages if page.startswith("results")):
            tab.open(f"file://{site}/{page}", width=1280)
            tab.wait_for(f"{wraps}.length > 0")
            hidden = tab.evaluate(f"{wraps}.map(e => e.scrollWidth - e.clientWidth)")
            assert max(hidden) == 0, page


def test_text_can_be_selected(looked, pages):
    first = looked.pages[2 * pages.index("first_run.html")]
    assert "validation accuracy" in first.selected
    api = looked.pages[2 * pages.index("api_training.html")]
    assert "training_program" in api.selected and "Plan" in api.selected


def test_pages_load_nothing_from_other_sites(site, pages):
    for page in pages:
        text = (site / page).read_text()
        sources = re.findall(
            r'<(?:script|img|link|iframe)[^>]*(?:src|href)="([^"]+)"', text
        )
        external = [source for source in sources if re.match(r"(https?:)?//", source)]
        assert external == [], page
