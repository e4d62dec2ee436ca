"""Draw the import graph of the package: ``python docs/import_graph.py``.

``tests/test_architecture.py`` reads imports with the functions in this file, so the rules
it checks and the drawing cannot disagree. It also fails if the drawing is out of date.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from millrace.drawing.style import COLORS, PAGE_COLORS
from millrace.drawing.svg import Drawing, Label, Line, Point, Rect, Shape, to_svg

PACKAGE = Path(__file__).parents[1] / "millrace"
DRAWING = Path(__file__).with_name("import_graph.svg")

Graph = dict[str, set[str]]
"""Names of modules or rooms, and what each of them imports."""

_NAMED_MODULE = re.compile(r"(millrace(?:\.\w+)+):\w+")


# --- imports ---


def find_modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Return the files of a package by module name, ``config.checks`` for example."""
    return {
        ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in sorted(package.rglob("*.py"))
    }


def read_imports(path: Path) -> set[str]:
    """Return all names that a file imports, in functions and for type checkers too.

    ``from a import b`` gives ``a.b``, whether `b` is a module or not.
    """
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def read_named_modules(path: Path) -> set[str]:
    """Return the modules that a file names as text, as the command registry does."""
    return {f"{name}.*" for name in _NAMED_MODULE.findall(path.read_text())}


def read_graph(package: Path = PACKAGE, *, named: bool = False) -> Graph:
    """Return which modules of a package each of its modules imports.

    Args:
        package: The folder of the package.
        named: Whether to include modules that are named as text.
    """
    modules = find_modules(package)
    graph: Graph = {}
    for module, path in modules.items():
        names = read_imports(path) | (read_named_modules(path) if named else set())
        targets = {_find_module(name, modules) for name in names}
        graph[module] = {t for t in targets if t is not None} - {module}
    return graph


def _find_module(name: str, modules: Mapping[str, Path]) -> str | None:
    """Return the module of the package that an imported name belongs to."""
    first, _, inside = name.partition(".")
    if first != "millrace":
        return None
    parts = inside.split(".")
    longest_first = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((module for module in longest_first if module in modules), "__init__")


def get_room(module: str) -> str:
    """Return the room of a module: its folder, or itself if it is in none."""
    return module.split(".")[0]


def join_rooms(graph: Mapping[str, Iterable[str]]) -> Graph:
    """Return which rooms import which others, from the graph of modules."""
    rooms: Graph = {get_room(module): set() for module in graph}
    for module, targets in graph.items():
        rooms[get_room(module)] |= {get_room(t) for t in targets} - {get_room(module)}
    return rooms


def find_cycle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the names along a cycle of a graph; empty if there is none."""
    finished: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in finished:
            return []
        path.append(name)
        for target in sorted(graph.get(name, ())):
            if cycle := visit(target):
                return cycle
        finished.add(path.pop())
        return []

    return next((cycle for name in sorted(graph) if (cycle := visit(name))), [])


# --- drawing ---

FOUNDATION = {
    "plan": "replicas, batches, precision, pipeline",
    "config": "options from flags and YAML",
    "durable": "files that survive a power cut",
    "numbers": "formatting of numbers",
    "output": "output to lost terminals",
    "card": "how objects show themselves",
    "storage": "runs in object storage",
    "trust": "who else could change a file",
    "user_code": "the user's line in a traceback",
    "versions": "versions of libraries",
}
"""Rooms that every other room may import; drawn as one box."""


class Room(NamedTuple):
    """How a room is drawn. Its row and its arrows come from the imports."""

    column: float
    text: str


ROOMS = {
    "bench": Room(3.25, "benchmarks, PyTorch peers"),
    "cli": Room(1.25, "the command line"),
    "apps": Room(3.25, "cnn, autoencoder, vcd"),
    "commands": Room(2.25, "registry, small commands"),
    "run": Room(2.25, "run directory, console"),
    "loop": Room(1.75, "training, events, validation"),
    "report": Room(3.75, "pages and plots of runs"),
    "exports": Room(0, "files for other programs"),
    "data": Room(0.75, "datasets on the host"),
    "feeds": Room(1.75, "infeed and outfeed"),
    "checkpoint": Room(2.75, "snapshot, write, restore"),
    "drawing": Room(3.75, "SVG, PNG and HTML"),
    "adapters": Room(0.75, "models of other libraries"),
    "distributed": Room(1.75, "launch, heartbeats, signals"),
    "program": Room(2.75, "all that is compiled"),
    "nn": Room(2.25, "layers, norms, losses"),
    "schedule": Room(3.25, "pipeline schedules"),
}
_UNDRAWN = {"__init__", "__main__"}
"""The public names, which import most rooms on first use, and ``python -m millrace``."""

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 184, 52, 20, 44, 20
_STRIPE, _HEAD = 5, 6


def reduce_transitively(graph: Graph) -> Graph:
    """Drop the edges that follow from others: a → c if a → b → c."""
    reachable: Graph = {}

    def reach(name: str) -> set[str]:
        if name not in reachable:
            reachable[name] = set().union(*({t} | reach(t) for t in graph[name]))
        return reachable[name]

    return {
        name: {t for t in targets if not any(t in reach(o) for o in targets - {t})}
        for name, targets in graph.items()
    }


def _find_rows(graph: Graph) -> dict[str, int]:
    """Return the row of each room: below all rooms that import it, or next to them."""
    rows: dict[str, int] = {}

    def visit(name: str, row: int) -> None:
        rows[name] = max(row, rows.get(name, 0))
        for target in graph[name]:
            visit(target, rows[name] + 1)

    for name in graph:
        visit(name, 0)
    imported = set().union(*graph.values())
    for name in graph.keys() - imported:  # right above what it imports
        rows[name] = min(rows[target] for target in graph[name]) - 1
    return rows


def draw() -> str:
    """Return the drawing of the current import graph as SVG."""
    modules, graph = find_modules(), read_graph()
    rooms = join_rooms(graph)
    upper = rooms.keys() - FOUNDATION.keys() - _UNDRAWN
    edges = reduce_transitively({room: rooms[room] & upper for room in sorted(upper)})
    named = {
        (get_room(module), get_room(target))
        for module, targets in read_graph(named=True).items()
        for target in targets - graph[module]
    }
    uses_jax = {
        get_room(module)
        for module, path in modules.items()
        if any(name.split(".")[0] == "jax" for name in read_imports(path))
    }
    rows = _find_rows(edges)
    boxes = {room: _place(room, row) for room, row in rows.items()}
    shapes: list[Shape] = []
    for room in sorted(edges):
        for target in sorted(edges[room]):
            shapes += _draw_arrow(_route(room, target, edges, boxes))
    for room, target in sorted(named):
        # Downwards, an import by name adds nothing to the arrows.
        if rows[target] < rows[room]:
            shapes += _draw_arrow(_route_up(boxes[room], boxes[target]), dashed=True)
    for room, (x, y) in sorted(boxes.items()):
        shapes += _draw_box(x, y, room, ROOMS[room].text, uses_jax=room in uses_jax)
    return _finish(shapes, 1 + max(rows.values()))


def _place(room: str, row: int) -> Point:
    column = ROOMS[room].column
    return _MARGIN + column * (_WIDTH + _GAP_X), _MARGIN + row * (_HEIGHT + _GAP_Y)


def _port(
    room: str, others: Iterable[str], other: str, boxes: Mapping[str, Point]
) -> float:
    """Return where on the side of a box the arrow to another box starts or ends."""
    ordered = sorted(others, key=lambda name: boxes[name][0])
    share = (1 + ordered.index(other)) / (1 + len(ordered))
    return boxes[room][0] + _WIDTH * share


def _route(room: str, target: str, edges: Graph, boxes: Mapping[str, Point]) -> list[Point]:
    """Return the points of an arrow: down, across between two rows, and down."""
    importers = {name for name in edges if target in edges[name]}
    start = _port(room, edges[room], target, boxes), boxes[room][1] + _HEIGHT
    end = _port(target, importers, room, boxes), boxes[target][1]
    turn = end[1] - _GAP_Y / 2
    if abs(start[0] - end[0]) < 1:
        return [start, end]
    return [start, (start[0], turn), (end[0], turn), end]


def _route_up(source: Point, target: Point) -> list[Point]:
    """Return the points of an arrow from the right side of a box up to another one."""
    start = source[0] + _WIDTH, source[1] + _HEIGHT / 2
    end = target[0] + _WIDTH, target[1] + _HEIGHT / 2
    right = end[0] + _GAP_X
    return [start, (right, start[1]), (right, end[1]), end]


def _draw_arrow(points: list[Point], *, dashed: bool = False) -> list[Shape]:
    (x0, _), (x, y) = points[-2:]
    if x0 == x:
        head = [(x - _HEAD, y - _HEAD), (x, y), (x + _HEAD, y - _HEAD)]
    else:
        side = _HEAD if x0 > x else -_HEAD
        head = [(x + side, y - _HEAD), (x, y), (x + side, y + _HEAD)]
    return [Line(points, "muted", 1.5, dashed=dashed), Line(head, "muted", 1.5)]


def _draw_box(x: float, y: float, name: str, text: str, *, uses_jax: bool) -> list[Shape]:
    stripe = "c0" if uses_jax else "c7"
    return [
        Rect(x, y, _WIDTH, _HEIGHT, "raised", outline="grid"),
        Rect(x, y, _STRIPE, _HEIGHT, stripe),
        Label(x + 14, y + 17, name, color="ink", size=15, bold=True),
        Label(x + 14, y + 36, text),
    ]


def _finish(shapes: list[Shape], num_rows: int) -> str:
    """Add the foundation and the legend; return SVG that follows light or dark."""
    y = _MARGIN + num_rows * (_HEIGHT + _GAP_Y) - 6
    last = max(room.column for room in ROOMS.values())
    full = last * (_WIDTH + _GAP_X) + _WIDTH
    height = 96
    shapes.append(Label(_MARGIN, y - 14, "any room may import:"))
    shapes.append(Rect(_MARGIN, y, full, height, "raised", outline="grid"))
    shapes.append(Rect(_MARGIN, y, _STRIPE, height, "c7"))
    for index, (name, text) in enumerate(FOUNDATION.items()):
        left = _MARGIN + 14 + (index % 3) * (full / 3)
        top = y + 18 + (index // 3) * 43
        shapes.append(Label(left, top, name, color="ink", size=14, bold=True))
        shapes.append(Label(left, top + 18, text))
    y += height + 26
    shapes += [
        Rect(_MARGIN, y - 7, _STRIPE, 14, "c0"),
        Label(_MARGIN + 12, y, "uses JAX"),
        Rect(_MARGIN + 90, y - 7, _STRIPE, 14, "c7"),
        Label(_MARGIN + 102, y, "imports no JAX"),
        *_draw_arrow([(_MARGIN + 230, y), (_MARGIN + 266, y)]),
        Label(_MARGIN + 274, y, "imports (what follows from other arrows is left out)"),
        *_draw_arrow([(_MARGIN + 616, y), (_MARGIN + 652, y)], dashed=True),
        Label(_MARGIN + 660, y, "named as text"),
    ]
    title = "Which rooms of millrace import which"
    drawing = Drawing(title, full + 2 * _MARGIN + 12, y + 22, shapes)
    # A file of its own with the variables of a page: light or dark, as the reader has it.
    svg = to_svg(drawing, PAGE_COLORS)
    head, body = svg.split("\n", 1)
    return f"{head}\n<style>{COLORS}</style>\n{body}\n"


if __name__ == "__main__":
    DRAWING.write_text(draw())
