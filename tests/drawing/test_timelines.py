"""Drawings of timelines: every action is shown to scale, in each format."""

import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from millrace.config import ConfigurationError
from millrace.drawing.style import DARK, LIGHT
from millrace.drawing.timelines import draw_timelines
from millrace.schedule.simulate import Costs, simulate
from millrace.schedule.stages import place_stages
from millrace.schedule.table import build_table
from millrace.schedule.timeline import Span

SVG = "{http://www.w3.org/2000/svg}"
COSTS = Costs(forward=(0.01,) * 4, backward=(0.02,) * 4, update=(0.005,) * 4)


@pytest.fixture(scope="module")
def timeline():
    table = build_table("grouped", place_stages([1] * 4, [0, 1, 1, 0]), 8)
    return simulate(table, COSTS).timeline


def boxes(root, color):
    return [box for box in root.iter(f"{SVG}rect") if box.get("fill") == color]


def hinted(root, color):
    return [box for box in boxes(root, color) if box.find(f"{SVG}title") is not None]


def test_every_action_has_a_box_to_scale(timeline, tmp_path):
    draw_timelines([("", timeline)], tmp_path / "p.svg")
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    forwards, backwards = hinted(root, LIGHT["forward"]), hinted(root, LIGHT["backward"])
    assert len(forwards) == len(backwards) == 4 * 8
    assert len(hinted(root, LIGHT["update"])) == 4
    widths = {float(box.get("width", 0)) for box in forwards}
    assert len(widths) == 1
    for box in backwards:
        assert float(box.get("width", 0)) == pytest.approx(2 * max(widths), abs=0.02)
    hints = {box.findtext(f"{SVG}title") for box in forwards}
    assert "stage 0 forward of micro-batch 0, 0 ms to 10 ms" in hints
    assert len(hints) == 32
    numbers = [text.text for text in root.iter(f"{SVG}text")]
    assert all(numbers.count(str(n)) >= 8 for n in range(8))


def test_no_box_is_outside_the_drawing_or_overlaps_another_in_its_lane(timeline, tmp_path):
    draw_timelines([("", timeline)], tmp_path / "p.svg")
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    ends: dict[str, float] = {}
    drawn = hinted(root, LIGHT["forward"]) + hinted(root, LIGHT["backward"])
    for box in sorted(drawn, key=lambda box: float(box.get("x", 0))):
        x, y, wide, high = (float(box.get(n, -1)) for n in ("x", "y", "width", "height"))
        assert 0 <= x <= x + wide <= width
        assert 0 <= y <= y + high <= height
        assert x >= ends.get(str(y), 0) - 0.02
        ends[str(y)] = x + wide


def test_idle_time_is_shown_and_totaled(tmp_path):
    spans = [
        Span(0, 0.0, 1.0, "forward", 0, 0),
        Span(1, 1.0, 2.0, "forward", 1, 0),
    ]
    draw_timelines([("", spans)], tmp_path / "p.svg")
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts.count("50.0% idle") == 2
    assert "50.0% idle in total" in texts
    idle = hinted(root, "url(#idle)")
    assert [box.findtext(f"{SVG}title") for box in idle] == [
        "device 0 idle, 1 s",
        "device 1 idle, 1 s",
    ]


def test_a_measured_timeline_is_below_the_predicted_one_and_has_the_same_scale(
    timeline, tmp_path
):
    start = 1e3  # a clock that did not start at 0
    measured = [
        span._replace(start=start + 2 * span.start, end=start + 2 * span.end)
        for span in timeline
    ]
    draw_timelines([("predicted", timeline), ("measured", measured)], tmp_path / "p.svg")
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts.index("predicted") < texts.index("measured")
    forwards = sorted(
        hinted(root, LIGHT["forward"]), key=lambda box: float(box.get("y", 0))
    )
    above, below = forwards[:32], forwards[32:]
    narrow, wide = (float(half[0].get("width", 0)) for half in (above, below))
    assert wide == pytest.approx(2 * narrow, abs=0.02)
    assert min(float(b.get("x", 0)) for b in above) == min(
        float(b.get("x", 0)) for b in below
    )


def test_a_png_has_the_same_boxes_in_the_same_colors(timeline, tmp_path):
    draw_timelines([("", timeline)], tmp_path / "p.svg")
    draw_timelines([("", timeline)], tmp_path / "p.png")
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    pixels = np.asarray(Image.open(tmp_path / "p.png").convert("RGB"))
    height, width, _ = pixels.shape
    assert abs(width - 2 * float(root.get("width", 0))) <= 1
    assert abs(height - 2 * float(root.get("height", 0))) <= 1
    for kind in ("forward", "backward", "update"):
        expected = [int(LIGHT[kind][n : n + 2], 16) for n in (1, 3, 5)]
        for box in hinted(root, LIGHT[kind]):
            x, y = float(box.get("x", 0)), float(box.get("y", 0))
            corner = pixels[round(2 * y) + 6, round(2 * x) + 6]
            assert corner.tolist() == expected


def test_a_page_needs_no_other_file_and_has_light_and_dark_colors(timeline, tmp_path):
    facts = {"throughput": "12 samples/s <at night>"}
    draw_timelines([("mine & yours", timeline)], tmp_path / "p.html", facts=facts)
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    HTMLParser().feed(text)
    assert "12 samples/s &lt;at night&gt;" in text
    assert "mine &amp; yours" in text
    own = text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "http" not in own
    assert "prefers-color-scheme: dark" in text
    assert LIGHT["surface"] in text
    assert DARK["surface"] in text
    assert text.count("<tr>") == 1 + 1 + 2 + 1  # facts, head, devices, total


def test_the_same_timeline_gives_the_same_bytes(timeline, tmp_path):
    for suffix in ("svg", "png", "html"):
        for name in ("a", "b"):
            draw_timelines([("", timeline)], tmp_path / f"{name}.{suffix}")
        first, second = (tmp_path / f"{name}.{suffix}" for name in ("a", "b"))
        assert first.read_bytes() == second.read_bytes()


def luminance(color):
    values = np.array([int(color[n : n + 2], 16) for n in (1, 3, 5)]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(first, second):
    high, low = sorted([luminance(first), luminance(second)], reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_text_has_enough_contrast(colors):
    """WCAG asks for a contrast of 4.5 for small text."""
    for kind in ("forward", "backward", "weights", "all_reduce", "update"):
        assert contrast(colors[kind], colors[f"on_{kind}"]) >= 4.5
    for text in ("ink", "muted"):
        assert contrast(colors[text], colors["surface"]) >= 4.5


def test_forward_and_backward_differ_in_grayscale_too():
    assert contrast(LIGHT["forward"], LIGHT["backward"]) > 2


@pytest.mark.parametrize("name", ["p.gif", "p", "p.svg.gz"])
def test_another_kind_of_file_is_rejected(timeline, tmp_path, name):
    with pytest.raises(ConfigurationError, match=r"must end in \.svg, \.png, \.html; got"):
        draw_timelines([("", timeline)], tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_rejected(timeline, tmp_path):
    with pytest.raises(ConfigurationError, match="no folder"):
        draw_timelines([("", timeline)], tmp_path / "nowhere" / "p.svg")
