"""Interactive charts in a real Chromium: mouse, keys, and the same numbers as in Python."""

import itertools
import json
import math
import random
import re

import pytest
from made_runs import add_sections, make_run

from millrace.drawing.charts import Series, select_points
from millrace.drawing.interactive import curve_data
from millrace.numbers import (
    format_number,
    format_tick,
    format_ticks,
    linear_ticks,
    log_ticks,
)
from millrace.report.comparison import comparison_page
from millrace.report.record import read_run
from millrace.report.run_page import write_report

SCRIPT = '<script>document.documentElement.id="hacked"</script>'
HOSTILE = f"</script>{SCRIPT}<img src=x onerror=alert(1)>"
LOSS, ACCURACY = "figure:nth-child(1) .plot", "figure:nth-child(2) .plot"
SCREENS = list(itertools.product((1280, 380), (False, True)))
"""Widths of a desktop and a phone, each light and dark."""
on_each_screen = pytest.mark.parametrize("tab", SCREENS, indirect=True)


def events(offset=0.0):
    """Train for ten epochs of ten updates: the loss falls from 10 to 1, with noise."""
    logged = [{"update": 5, "epoch": 0.5, "time": 1.5, "train_accuracy": 0.05}]
    for epoch in range(1, 11):
        where = {"update": 10 * epoch, "epoch": float(epoch), "time": 3.0 * epoch}
        loss = 11.0 - epoch + offset
        logged.append(where | {"train_loss": loss, "train_accuracy": epoch / 10})
        logged.append(where | {"validation_loss": loss + 0.5 + epoch % 2})
        logged[-1]["validation_accuracy"] = epoch / 20
    return logged


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    first, second = (
        make_run(folder / n, events=events(d)) for n, d in (("a", 0), ("b", 5))
    )
    add_sections(first)
    write_report(first)
    page = comparison_page([read_run(first), read_run(second)])
    (folder / "comparison.html").write_text(page)
    return folder


@pytest.fixture
def tab(browser, folder, request):
    """A freshly opened report, which must cause no message of the browser."""
    width, dark = getattr(request, "param", SCREENS[0])
    browser.open(f"file://{folder}/a/report.html", width=width, dark=dark)
    yield browser
    assert browser.problems == []


def texts(tab, selector):
    return tab.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
    )


def axis(tab, plot=LOSS):
    """Return the labels at the x axis of a chart."""
    return [float(t) for t in texts(tab, f"{plot} .x-tick")]


def curves(tab, plot=LOSS, css_class="curve"):
    return tab.evaluate(
        f"[...document.querySelectorAll('{plot} .{css_class}')].map(e => e.dataset.name)"
    )


@on_each_screen
def test_hovering_shows_the_values_of_all_curves_in_all_charts(tab):
    tab.hover(LOSS, 0.98)
    assert texts(tab, f"{LOSS} .tip.shown p") == ["epoch 10 · update 100 · 30.0 s"]
    assert texts(tab, f"{LOSS} .tip.shown div") == ["validation1.5", "train1"]
    assert texts(tab, f"{ACCURACY} .tip.shown div") == ["train1", "validation0.5"]
    assert len(texts(tab, f"{ACCURACY} .cursor line")) == 1
    tab.hover("h1")
    assert texts(tab, ".tip.shown") == []


@on_each_screen
def test_a_click_in_the_legend_hides_a_curve_and_shows_it_again(tab):
    button = "figure:nth-child(1) .legend button:nth-child(2)"
    assert curves(tab) == ["train", "validation"]
    tab.click(button)
    assert curves(tab) == ["train"] and len(curves(tab, ACCURACY)) == 2
    tab.hover(LOSS)
    assert [t[:5] for t in texts(tab, f"{LOSS} .tip div")] == ["train"]
    tab.click(button)
    assert curves(tab) == ["train", "validation"]
    tab.click(button, modifiers=8)  # Shift: only this one
    assert curves(tab) == ["validation"]


def test_dragging_zooms_all_charts_and_a_double_click_resets_them(tab):
    whole = axis(tab)
    assert min(whole) <= 2 and max(whole) == 10
    tab.drag(LOSS, 0.5, 0.75)
    for plot in (LOSS, ACCURACY):
        assert min(axis(tab, plot)) > 4 and max(axis(tab, plot)) < 9
    tab.click(ACCURACY, count=2)
    assert axis(tab) == whole
    tab.drag(LOSS, 0.5, 0.75)
    tab.click(".toolbar > button")
    assert axis(tab) == whole


def test_charts_have_the_same_x_axis_even_if_a_curve_begins_later(tab):
    ranges = tab.evaluate("Charts.charts.slice(0, 2).map(c => [c.box.x0, c.box.x1])")
    assert ranges == [[0.5, 10], [0.5, 10]]


def test_the_y_axis_fits_what_the_zoom_shows(tab):
    def heights():
        return [float(t) for t in texts(tab, f"{LOSS} .y-tick")]

    assert max(heights()) >= 10
    tab.drag(LOSS, 0.8, 1.0)
    assert max(heights()) < 6


def test_log_scale_can_be_switched_on_and_off(tab):
    def middle_share():
        """Return where the middle value of the loss lies between its first and last."""
        path = tab.evaluate(f"document.querySelector('{LOSS} .curve').getAttribute('d')")
        heights = [float(y) for y in re.findall(r" ([\d.]+)", path)]
        return (heights[5] - heights[0]) / (heights[-1] - heights[0])

    assert middle_share() == pytest.approx(5 / 9, abs=0.01)
    tab.click("figure:nth-child(1) .tool")
    assert middle_share() == pytest.approx(math.log(10 / 5) / math.log(10), abs=0.01)
    tab.click("figure:nth-child(1) .tool")
    assert middle_share() == pytest.approx(5 / 9, abs=0.01)


def test_smoothing_keeps_the_raw_curve_in_the_background(tab):
    assert curves(tab, css_class="raw") == []
    tab.evaluate("document.querySelector('input[type=range]').focus()")
    for _ in range(3):
        tab.press("PageUp")
    weight = tab.evaluate("Charts.view.smoothing")
    assert weight > 0 and curves(tab, css_class="raw") == ["train", "validation"]
    tab.hover(LOSS, 0.98)
    values = [11.0 - epoch for epoch in range(1, 11)]
    weights = [weight ** (9 - n) for n in range(10)]
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert f"train{format_number(mean)}1" in texts(tab, f"{LOSS} .tip div")


def test_the_x_axis_can_be_updates_or_time(tab):
    for button, name, last in ((2, "update", 100), (3, "seconds", 30)):
        tab.click(f".segments button:nth-child({button})")
        assert texts(tab, f"{LOSS} .x-name") == [name]
        assert max(axis(tab)) == last


def test_the_keyboard_moves_the_crosshair_and_zooms(tab):
    tab.evaluate(f"document.querySelector('{LOSS}').focus()")
    tab.press("ArrowRight")
    before = texts(tab, f"{LOSS} .tip.shown p")[0]
    tab.press("ArrowRight")
    assert before != texts(tab, f"{LOSS} .tip.shown p")[0]
    whole = axis(tab)
    tab.press("+")
    assert max(axis(tab)) - min(axis(tab)) < 0.7 * (max(whole) - min(whole))
    tab.press("Escape")
    assert axis(tab) == whole


def test_a_chart_can_take_the_full_width(tab):
    width = f"document.querySelector('{LOSS}').clientWidth"
    narrow = tab.evaluate(width)
    tab.click("figure:nth-child(1) .tool:nth-child(2)")
    assert tab.evaluate(width) > 1.8 * narrow


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_overlaps_or_leaves_a_phone(browser, folder, dark):
    for page in ("a/report.html", "comparison.html"):
        browser.open(f"file://{folder}/{page}", width=380, dark=dark)
        browser.hover(".plot")
        root = "document.documentElement"
        assert browser.evaluate(f"{root}.scrollWidth - {root}.clientWidth") == 0
        boxes = browser.evaluate(
            "[...document.querySelectorAll('.plot')].map(p => ["
            "...p.querySelectorAll('.x-tick')].map(t => t.getBoundingClientRect())"
            ".map(r => [r.left, r.right]))"
        )
        for labels in boxes:
            pairs = itertools.pairwise(sorted(labels))
            assert all(before[1] < after[0] for before, after in pairs)
    assert browser.problems == []


def test_in_a_comparison_a_run_is_hidden_in_all_charts(browser, folder):
    browser.open(f"file://{folder}/comparison.html")
    assert curves(browser) == curves(browser, ACCURACY) == ["a", "b"]
    browser.click(".toolbar .legend button:nth-child(1)")
    assert curves(browser) == curves(browser, ACCURACY) == ["b"]


def test_without_scripts_the_static_charts_stay(browser, folder):
    browser.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.command("Page.navigate", url=f"file://{folder}/a/report.html?static")
        browser.wait_for("document.querySelectorAll('svg.chart polyline').length > 3")
        assert browser.evaluate("document.querySelector('.plot')") is None
    finally:
        browser.command("Emulation.setScriptExecutionDisabled", value=False)


def test_names_and_scripts_from_a_run_do_not_run(browser, tmp_path):
    logged = [e | {HOSTILE: 1.0, "train_" + HOSTILE: 2.0} for e in events()]
    run = make_run(tmp_path / HOSTILE.replace("/", ""), events=logged, error=HOSTILE)
    write_report(run)
    (tmp_path / "x.html").write_text((run / "report.html").read_text() + HOSTILE)
    browser.open(f"file://{tmp_path}/x.html")
    assert browser.evaluate("document.querySelectorAll('figure.interactive').length") > 2
    assert browser.evaluate("document.documentElement.id") == ""
    assert any("Content Security Policy" in text for text in browser.problems)
    browser.problems.clear()


def test_numbers_and_ticks_are_those_of_python(tab):
    draw = random.Random(0)
    ranges = [
        [low, low + 10 ** draw.uniform(-6, 7)] for low in (0.0, -3.2, 1e-4, 711.0)
    ] * 5
    positive = [[10**-a, 10**b] for a, b in ((1, 0), (3, 2), (0.3, 0.5), (6, 4))]
    values = [s * 10 ** draw.uniform(-9, 16) for s in (1, -1) for _ in range(40)] + [0.0]
    for script, expected in (
        (
            f"{ranges}.map(r => Charts.linearTicks(...r))",
            [linear_ticks(*r) for r in ranges],
        ),
        (f"{positive}.map(r => Charts.logTicks(...r))", [log_ticks(*r) for r in positive]),
    ):
        for ours, theirs in zip(expected, tab.evaluate(script), strict=True):
            assert theirs == pytest.approx(ours, rel=1e-12)
    assert tab.evaluate(f"{values}.map(Charts.formatTick)") == [*map(format_tick, values)]
    axes = [
        [0.0, 5e3, 1e4],
        [10.0, 1e3, 1e5],
        [0.0, 5e5, 1e6],
        [-2.5e3, 1.25e4],
        [0.0, 9e3],
    ]
    assert tab.evaluate(f"{axes}.map(Charts.formatTicks)") == [*map(format_ticks, axes)]
    assert tab.evaluate(f"{values}.map(Charts.formatNumber)") == [
        *map(format_number, values)
    ]
    noise = [draw.random() for _ in range(1000)]
    assert tab.evaluate(f"Charts.selectPoints({noise}, 90)") == select_points(noise, 90)


def test_long_curves_keep_their_extremes_in_the_data_of_a_page():
    heights = [math.sin(n) for n in range(100_000)]
    heights[77_777], heights[12_345] = 9.0, -9.0
    heights[5] = math.nan
    steps = [float(n) for n in range(100_000)]
    points = list(zip(steps, heights, strict=True))
    data = curve_data(Series("loss", points, {"update": steps}), "epoch")
    assert len(data["y"]) <= 1001
    assert {-9, 9} <= set(data["y"])
    assert data["x"]["update"][data["y"].index(9)] == 77_777
    assert data["x"]["epoch"][-1] == 99_999
