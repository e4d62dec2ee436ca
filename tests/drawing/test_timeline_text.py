"""Timelines in a terminal, with and without color."""

import io

import pytest
from rich.console import Console

from millrace.drawing.timeline_text import print_timeline
from millrace.schedule.simulate import Costs, simulate
from millrace.schedule.stages import place_stages
from millrace.schedule.table import build_table
from millrace.schedule.timeline import Span


def printed(timeline, *, width=80, **options):
    out = io.StringIO()
    console = Console(file=out, highlight=False, soft_wrap=True, **options)
    print_timeline(timeline, console, width=width)
    return out.getvalue()


@pytest.fixture
def timeline():
    table = build_table("interleaved", place_stages([1, 1], None), 2)
    costs = Costs(forward=(1.0, 1.0), backward=(2.0, 2.0), update=(1.0, 1.0))
    return simulate(table, costs, execution="free").timeline


def test_each_device_has_a_line_to_scale(timeline):
    assert printed(timeline).splitlines() == [
        "device                        idle",
        "     0 0>1>····0<<<··1<<<**  30.0%",
        "     1 ··0>0<<<1>1<<<**····  30.0%",
        "       > forward   < backward   * weight update   · idle",
    ]


def test_numbers_are_left_out_if_there_is_no_room(timeline):
    narrow = printed(timeline, width=24).splitlines()
    assert narrow[1].startswith("     0 >>·")
    assert all(len(line) <= 24 for line in narrow[1:3])


def test_colors_replace_signs(timeline):
    colored = printed(timeline, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in colored
    assert ">" not in colored
    assert "\x1b[38;2;255;255;255;48;2;11;98;196m0 " in colored


def test_no_color_is_respected(timeline, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    plain = printed(timeline, force_terminal=True, color_system="truecolor")
    assert "38;2" not in plain
    assert "0>1>" in plain


def test_actions_shorter_than_a_column_do_not_become_idle_time():
    spans = [Span(0, n, n + 1, "forward", 0, n) for n in range(600)]
    spans += [Span(0, n, n + 1, "backward", 0, n - 600) for n in range(600, 800)]
    line = printed(spans, width=54).splitlines()[1]
    assert line == f"     0 {'>' * 30}{'<' * 10}   0.0%"
