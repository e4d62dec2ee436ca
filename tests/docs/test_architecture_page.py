"""The architecture page and the contributing guide name only what exists."""

import ast
import functools
import re
from pathlib import Path

import pytest
from docs_blocks import ROOT
from import_graph import DRAWING, FOUNDATION, PACKAGE, ROOMS, draw, find_modules, get_room

PAGE = ROOT / "docs" / "architecture.md"
GUIDE = ROOT / "CONTRIBUTING.md"

_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"[\w./]+\.(?:py|md|toml|yml|txt|cff)")
_FUNCTION = re.compile(r"(?:(\w+)\.)?(\w+)\(\)")


def find_path(name: str) -> Path | None:
    """Return the file of a path in the package or in the repository."""
    paths = (PACKAGE / name, ROOT / name)
    return next((path for path in paths if path.is_file()), None)


def find_codes(text: str) -> list[str]:
    return _CODE.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def find_paragraphs(page: Path) -> list[str]:
    """Split a page into paragraphs, list items and rows of tables."""
    return re.split(r"\n\n|\n(?=\d+\. |- |\| )", page.read_text())


@functools.cache
def find_definitions(path: Path) -> frozenset[tuple[str, str]]:
    """Return (class or "", name) of the functions, classes and methods in a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(("", node.name))
        if isinstance(node, ast.ClassDef):
            methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
            found |= {(node.name, name) for name in methods}
    return frozenset(found)


@pytest.mark.parametrize("page", [PAGE, GUIDE], ids=lambda page: page.name)
def test_every_file_on_the_page_exists(page):
    names = [code for code in find_codes(page.read_text()) if "/" in code or "." in code]
    files = [name for name in names if _FILE.fullmatch(name)]
    made_by_runs = {"config.yml", "summary.json", "manifest.json"}
    missing = [name for name in files if find_path(name) is None]
    # A name without a folder may be a file that each application has.
    shared = {path.name for path in (PACKAGE / "apps").rglob("*.*")}
    assert set(missing) - made_by_runs - shared == set()
    assert len(files) >= 20


@pytest.mark.parametrize("page", [PAGE, GUIDE], ids=lambda page: page.name)
def test_every_folder_on_the_page_exists(page):
    folders = [c for c in find_codes(page.read_text()) if re.fullmatch(r"[\w/]+/", c)]
    in_apps = {"config/", "models/"}
    for name in set(folders) - in_apps:
        assert (PACKAGE / name).is_dir() or (ROOT / name).is_dir(), name


def test_every_function_is_defined_in_a_file_of_its_paragraph():
    count = 0
    runner = PACKAGE / "loop" / "runner.py"
    for paragraph in find_paragraphs(PAGE):
        codes = find_codes(paragraph)
        files = [find_path(code) for code in codes if code.endswith(".py")]
        files = [path for path in files if path is not None] + [runner]
        defined = frozenset().union(*map(find_definitions, files))
        for code in codes:
            if match := _FUNCTION.fullmatch(code):
                assert (match[1] or "", match[2]) in defined, code
                count += 1
    assert count >= 35


def test_the_page_names_every_class_as_it_is():
    defined = {
        name for path in find_modules().values() for _, name in find_definitions(path)
    }
    classes = [c for c in find_codes(PAGE.read_text()) if re.fullmatch(r"[A-Z]\w*[a-z]", c)]
    assert set(classes) <= defined
    assert len(classes) >= 5


def test_the_page_is_short():
    assert len(PAGE.read_text().splitlines()) <= 150


def test_the_drawing_has_every_room():
    rooms = {get_room(module) for module in find_modules()} - {"__init__", "__main__"}
    assert rooms == ROOMS.keys() | FOUNDATION.keys()


def test_the_drawing_is_up_to_date():
    message = "docs/import_graph.svg is out of date: run python docs/import_graph.py"
    assert DRAWING.read_text() == draw(), message
