"""Reports in a real Chromium: at the width of a phone and a desktop, light and dark."""

import pytest
from browser import DESKTOP, PHONE, look_at
from made_runs import add_sections, make_run

from millrace.report.comparison import comparison_page
from millrace.report.record import read_run
from millrace.report.run_page import write_report


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    add_sections(make_run(folder / "full"))
    error = "ValueError: " + "nobreak" * 40
    make_run(folder / "failed", status="failed", error=error)
    make_run(folder / "a-run-with-a-rather-long-name-that-cannot-be-broken-anywhere")
    runs = sorted(path for path in folder.iterdir())
    for run in runs:
        write_report(run)
    page = comparison_page([read_run(run) for run in runs])
    (folder / "comparison.html").write_text(page)
    return folder


@pytest.fixture(scope="module")
def pages(folder):
    reports = sorted(path.relative_to(folder) for path in folder.glob("*/report.html"))
    return [*map(str, reports), "comparison.html"]


@pytest.fixture(scope="module")
def light(folder, pages, tmp_path_factory):
    wanted = [(page, width) for page in pages for width in (PHONE, DESKTOP)]
    return look_at(folder, wanted, tmp_path_factory.mktemp("light"))


def test_the_browser_reports_no_errors(light):
    assert light.console == []
    assert [seen.missing for seen in light.pages] == [[]] * len(light.pages)
    assert max(seen.images for seen in light.pages) == 5


def test_no_page_is_wider_than_a_phone(light):
    assert [seen.overflow for seen in light.pages] == [0] * len(light.pages)


def test_the_text_of_charts_is_large_enough_on_a_phone(light):
    assert all(seen.charts for seen in light.pages)
    assert min(seen.smallest for seen in light.pages) >= 9.5


def test_all_text_can_be_selected_including_that_of_charts(light, pages):
    full = light.pages[2 * pages.index("full/report.html")]
    for text in ("validation accuracy", "0.9611", "steady state", "pip install"):
        assert text in full.selected


def test_dark_is_dark_and_light_is_light(folder, light, tmp_path):
    dark = look_at(folder, [("full/report.html", PHONE)], tmp_path, dark=True)
    assert dark.console == []

    def brightness(color: str) -> int:
        return sum(map(int, color.removeprefix("rgb(").removesuffix(")").split(",")))

    assert brightness(dark.pages[0].background) < 120 < brightness(dark.pages[0].ink)
    assert brightness(light.pages[0].ink) < 120 < brightness(light.pages[0].background)
