"""Who may import whom: the rooms of the package and the doors between them."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "millrace"

PLAIN = {
    *("config", "durable", "numbers", "output", "versions"),
    *("batching", "precision", "plan"),
}
RUNTIME = {
    *("data", "feeds", "nn", "program", "schedule"),
    *("distributed", "checkpoint", "loop"),
}
MAY_IMPORT = {
    "config": set(),
    "durable": set(),
    "numbers": set(),
    "output": set(),
    "versions": set(),
    "batching": {"config"},
    "precision": {"config"},
    "plan": {"config", "batching", "precision"},
    "schedule": PLAIN,
    "drawing": PLAIN | {"schedule"},
    "report": PLAIN | {"drawing", "schedule"},
    "data": PLAIN,
    "feeds": PLAIN,
    "nn": PLAIN,
    "program": PLAIN | {"nn", "schedule"},
    "distributed": PLAIN,
    "checkpoint": PLAIN | {"program", "distributed"},
    "loop": PLAIN | RUNTIME,
    "run": PLAIN | RUNTIME | {"drawing", "report"},
    "commands": PLAIN | RUNTIME | {"drawing", "report", "run"},
    "apps": PLAIN | RUNTIME | {"drawing", "report", "run", "commands"},
    "bench": PLAIN | RUNTIME | {"drawing", "report", "run", "commands", "apps"},
    "cli": PLAIN | {"commands", "run", "distributed", "__init__"},
    "__main__": {"cli"},
    "__init__": PLAIN | RUNTIME | {"drawing", "report", "run", "commands", "apps"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def forbidden(path: Path) -> set[str]:
    room = room_of(path)
    wrong = set()
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "millrace":
            continue
        target = parts[1] if len(parts) > 1 else "__init__"
        if not (PACKAGE / target).exists() and not (PACKAGE / f"{target}.py").exists():
            continue  # a name, not a module
        if target != room and target not in MAY_IMPORT[room]:
            wrong.add(name)
    return wrong


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_what_it_may(path):
    assert not forbidden(path) - {"millrace"}


def test_rooms_that_never_import_jax():
    for path in MODULES:
        if room_of(path) in ("data", "schedule", "drawing", "report"):
            assert not {n for n in imports_of(path) if n.split(".")[0] == "jax"}, path


def test_no_application_imports_another():
    for path in MODULES:
        if room_of(path) == "apps" and len(path.relative_to(PACKAGE).parts) > 2:
            own = path.relative_to(PACKAGE).parts[1]
            others = {
                name
                for name in imports_of(path)
                if name.startswith("millrace.apps.") and name.split(".")[2] != own
            }
            assert not others, path


def test_nothing_in_the_package_imports_tests_examples_or_benchmarks():
    for path in MODULES:
        roots = {name.split(".")[0] for name in imports_of(path)}
        assert not roots & {"tests", "examples", "benchmarks"}, path


def test_a_wrong_import_would_be_seen(tmp_path, monkeypatch):
    """The rule is worth nothing if it cannot fail."""
    import test_architecture as module

    for name in ("program", "loop"):
        (tmp_path / name).mkdir()
    bad = tmp_path / "program" / "bad.py"
    bad.write_text("from millrace.loop.runner import Runner\n")
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    assert module.forbidden(bad)


def test_every_public_name_can_be_reached():
    import millrace

    for name in millrace.__all__:
        assert getattr(millrace, name) is not None
    assert set(millrace.__all__) == set(millrace._HOME)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = millrace.nonsense
