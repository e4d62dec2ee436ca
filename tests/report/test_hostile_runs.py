"""Run directories that somebody has tampered with: nothing in them becomes HTML."""

import copy
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_runs import add_sections, make_run

from millrace.drawing.interactive import CHART_DATA, chart_script
from millrace.report import plots
from millrace.report.comparison import comparison_page
from millrace.report.record import read_run
from millrace.report.run_page import run_page, write_report
from millrace.report.sections import SvgFigure

HTML = "\"'></style></title></h1><script>alert(1)</script><img src=x onerror=alert(2)>"
OTHERS: list[Any] = [[], {}, "text", None, True, -1, 0, 1.5, 10**400, [[["x"]]], {"a": []}]


class Watch(HTMLParser):
    """Reject what a page must never have."""

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "iframe", "form", "object", "embed", "base", "a")
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in ("href", "action", "srcdoc")
            assert name != "src" or (value or "").startswith("data:image/png;base64,")

    handle_startendtag = handle_starttag


def without_scripts(page: str) -> str:
    """Return a page without its own script and the data of its charts."""
    page = page.replace(f"<script>{chart_script()}</script>", "", 1)
    data = re.compile(re.escape(CHART_DATA) + "([^<]*)</script>")
    for found in data.findall(page):
        assert isinstance(json.loads(found), dict)
    return data.sub("", page)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield every path in a tree of plain values, including inner ones."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def changed(tree: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    tree = copy.deepcopy(tree)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return tree


def renamed(tree: Any, path: tuple[Any, ...]) -> Any:
    """Return the tree with the last key of the path replaced by HTML."""
    tree = copy.deepcopy(tree)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    if isinstance(inner, dict):
        inner[HTML] = inner.pop(path[-1])
    return tree


def tampered(tree: Any) -> Iterator[Any]:
    for path in places(tree):
        yield changed(tree, path, HTML)
        if path:
            yield renamed(tree, path)
        for other in OTHERS:
            yield changed(tree, path, other)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    best = {"metric": "validation_accuracy", "value": 0.97, "update": 44, "epoch": 1.0}
    result = {"batch_size": 8, "samples_per_second": [9.0], "latency_ms": {"mean": 1.0}}
    more = {"best": best, "results": [result | {"latency_calls": 7, "memory_bytes": 9}]}
    run = make_run(tmp_path / "run", commit="abc", wall_seconds=9.0, **more)
    add_sections(run)
    return run


def check(run: Path, other: Path) -> None:
    record = read_run(run)
    for page in (run_page(record), comparison_page([record, read_run(other)])):
        rest = without_scripts(page)
        assert "<script" not in rest and "<img src=x" not in rest
        Watch().feed(rest)


FILES = [
    *("summary.json", "report/phases.json", "report/1-confusion.json"),
    *("report/2-mistakes.json", "report/residuals.json", "report/sweep.json"),
    "report/0-pipeline.json",
]


@pytest.mark.parametrize("name", FILES)
def test_no_field_of_a_run_becomes_html_or_breaks_its_report(name, run, tmp_path):
    other = make_run(tmp_path / "other")
    tree = json.loads((run / name).read_text())
    for new in tampered(tree):
        (run / name).write_text(json.dumps(new))
        check(run, other)


def test_no_logged_value_becomes_html_or_breaks_the_report(run, tmp_path):
    other = make_run(tmp_path / "other")
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    for new in tampered(json.loads(lines[0])):
        path.write_text("\n".join([json.dumps(new), *lines[1:]]))
        check(run, other)
    path.write_bytes(b"\xff\xfe\x00\n" + b"[" * 100_000 + b"\n" + lines[0].encode())
    check(run, other)


def test_a_name_that_is_not_text_is_escaped(run):
    tree = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(tree | {"command": "\udcff"}))
    assert "\\udcff" in write_report(run).read_text()


def test_no_option_or_name_becomes_html(run, tmp_path):
    other = make_run(tmp_path / "other")
    config = yaml.safe_load((run / "config.yml").read_text())
    for new in tampered(config):
        if isinstance(new, dict) and 10**400 not in new.values():
            (run / "config.yml").write_text(yaml.safe_dump(new))
            check(run, other)
    name = HTML.replace("/", "")
    (run / "pictures" / f"{name}-1.png").write_bytes(b"x")
    (run / "pictures" / f"prior-{name}.png").write_bytes(b"x")
    check(run.rename(tmp_path / name), other)


@pytest.mark.parametrize(
    "inside",
    [
        "<script>alert(1)</script>",
        "<foreignObject><p>x</p></foreignObject>",
        '<rect onclick="alert(1)"/>',
        '<rect fill="url(http://example.org/x)"/>',
        '<image href="http://example.org/x.png"/>',
        "<style>* {{ display: none }}</style>",
        "<title><![CDATA[<img src=x onerror=alert(1)>]]></title>",
        "<text>not closed",
    ],
)
def test_a_drawing_that_is_more_than_shapes_is_rejected(inside):
    with pytest.raises(ValueError, match="drawing"):
        SvgFigure(title="Pipeline", svg=f'<svg width="9" height="9">{inside}</svg>')


def test_a_drawing_may_have_a_style_but_no_tags_in_it():
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><rect fill="url(#idle)"/></svg>'
    styled = SvgFigure(title="Pipeline", svg=svg, style=".pipeline { color: red }")
    assert "<style>.pipeline { color: red }</style>" in styled.render()
    with pytest.raises(ValueError, match="style"):
        SvgFigure(title="Pipeline", svg=svg, style="</style><b>")


def test_a_single_plot_escapes_its_title_too(run, tmp_path):
    path = run / "report" / "sweep.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"title": HTML}))
    Watch().feed(plots.sweep(run).save(tmp_path / "sweep.html").read_text())


def test_a_page_cannot_send_a_form(run):
    assert "form-action 'none'" in run_page(read_run(run))
