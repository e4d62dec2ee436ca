"""Which room of the package may import which, and the order inside each application.

All rules include imports in functions and for type checkers. ``docs/import_graph.py`` reads
the imports, and draws them for ``docs/architecture.md``.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from import_graph import (
    FOUNDATION,
    PACKAGE,
    find_cycle,
    find_modules,
    get_room,
    join_rooms,
    read_graph,
    read_imports,
)

import millrace
from millrace.commands.registry import COMMANDS

MODULES = find_modules()
GRAPH = read_graph()

MAY_IMPORT = {
    # Foundation: importable from everywhere, so it imports almost nothing.
    "config": {"storage"},
    "durable": set(),
    "numbers": set(),
    "output": set(),
    "card": set(),
    "storage": {"durable", "trust"},
    "trust": set(),
    "user_code": set(),
    "versions": set(),
    "plan": {"card", "config"},
    # Runtime.
    "data": set(),
    "distributed": set(),
    "feeds": set(),
    "nn": set(),
    "schedule": set(),
    "adapters": {"nn"},
    "program": {"nn", "schedule"},
    "checkpoint": {"distributed", "program"},
    "exports": {"data", "nn"},
    "loop": {"checkpoint", "data", "distributed", "feeds", "program"},
    # Runs and what they leave.
    "drawing": {"schedule"},
    "report": {"drawing"},
    "run": {
        *("checkpoint", "distributed", "feeds", "loop", "program"),
        *("drawing", "report", "schedule"),
    },
    "commands": {
        *("data", "distributed", "drawing", "loop", "program", "report", "run"),
        "schedule",
    },
    # Applications and entry points.
    "apps": {
        *("checkpoint", "data", "distributed", "exports", "feeds", "loop", "nn"),
        *("commands", "program", "report", "run"),
    },
    "bench": {
        *("apps", "commands", "data", "distributed", "feeds", "loop", "nn", "program"),
        "run",
    },
    "cli": {"__init__", "commands", "distributed", "run"},
    "__main__": {"cli"},
    "__init__": {
        *("adapters", "data", "exports", "feeds", "loop", "nn", "plan", "program"),
        *("apps", "commands", "report", "run"),
    },
}
"""The rooms that a room may import, next to the foundation."""

LIBRARIES = {
    "equinox": {"adapters"},
    "flax": {"adapters"},
    "onnx": {"exports"},
    "orbax": {"checkpoint"},
    "pyarrow": {"data"},
    "rich": {"commands", "drawing", "run"},
    "google_crc32c": {"data"},
    "tensorboard": {"run"},
    "tensorstore": {"checkpoint"},
    "torch": {"bench", "data"},
    "wandb": {"run"},
}
"""The only rooms that import a library."""

WITHOUT_JAX = {*FOUNDATION, "cli", "data", "drawing", "report", "schedule"}
"""Rooms that never import JAX themselves, so that they work without devices."""

HEAVY = {"jax", "jaxlib", "numpy", "optax", "orbax", "PIL", "rich"}
"""What ``--help`` must not import."""

APPLICATIONS = ("autoencoder", "cnn", "vcd")

LAYERS = (
    # Options. models.spec has the names of the CNNs, which options are checked against.
    {"config", "models.spec"},
    {"diagnostics", "kernels", "loss", "model", "models", "objective", "sampler"},
    {
        *("arrays", "augment", "auto_augment", "data", "image_ops", "resident"),
        "run_ratings",
    },
    {
        *("baselines", "bulk", "item_rows", "joint_training", "metrics"),
        *("multi_device", "program", "ranking"),
    },
    {
        "classify",
        "comparison",
        "evaluate",
        "halving",
        "images",
        "learning",
        "likelihood",
        "mistakes",
        "monitoring",
        "new_users",
        "predictor",
        "preview",
        "residuals",
    },
    # Functions of commands.
    {
        *("convert", "datasets", "export", "inference", "model_card", "predict"),
        *("recommend", "search", "sweep", "train"),
    },
    {"api"},
)
"""The modules of all applications: none imports one of a later layer."""

CONFIG_MAY_IMPORT = {
    *("config", "data.layouts", "data.ratings.counts", "distributed.hardware", "plan"),
    *("run.options", "run.saved", "storage.address"),
}
MODELS_MAY_IMPORT = {"config", "data", "nn", "plan", "program"}

SAME_FILES = (
    *("README.md", "__init__.py", "api.py", "config/__init__.py", "data.py"),
    *("evaluate.py", "predictor.py", "program.py", "runs.yml", "train.py"),
)
SAME_FUNCTIONS = {
    "api": {"load", "train"},
    "program": {"build_program"},
    "train": {"train"},
}


def find_forbidden(module: str, imported: set[str]) -> set[str]:
    room = get_room(module)
    allowed = MAY_IMPORT[room] | {room}
    if room not in FOUNDATION:
        allowed |= FOUNDATION.keys()
    return {name for name in imported if get_room(name) not in allowed}


def split_application(module: str) -> tuple[str, str]:
    """Return the application of a module, and the module inside it; empty if none."""
    parts = module.split(".")
    is_inside = parts[0] == "apps" and len(parts) > 2
    return (parts[1], ".".join(parts[2:])) if is_inside else ("", "")


def find_layer(inside: str) -> int:
    """Return the layer of a module, by its own name or that of its folder."""
    names = [inside, inside.split(".")[0]]
    found = [n for name in names for n, layer in enumerate(LAYERS) if name in layer]
    assert found, f"{inside}.py is in no layer: add it to LAYERS"
    return found[0]


def find_libraries(module: str) -> set[str]:
    return {name.split(".")[0] for name in read_imports(MODULES[module])}


def in_applications(*folders: str) -> list[tuple[str, str, str]]:
    """Return (module, application, module inside it) of all, or of some folders."""
    found = [(module, *split_application(module)) for module in MODULES]
    return [
        (module, app, inside)
        for module, app, inside in found
        if app and (not folders or inside.split(".")[0] in folders)
    ]


# Rooms


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_only_what_it_may(module):
    assert find_forbidden(module, GRAPH[module]) == set()


def test_the_rules_name_every_room_and_no_other():
    assert MAY_IMPORT.keys() == {get_room(module) for module in MODULES}


def test_no_permission_is_unused():
    rooms = join_rooms(GRAPH)
    for room, allowed in MAY_IMPORT.items():
        if room != "bench":  # what it measures changes
            assert allowed - rooms[room] == set(), room


def test_a_forbidden_import_is_found():
    assert find_forbidden("program.step", {"loop.runner"}) == {"loop.runner"}
    assert find_forbidden("plan", {"durable"}) == {"durable"}
    assert find_forbidden("loop.runner", {"program.step", "loop.train"}) == set()


def test_no_module_is_in_an_import_cycle():
    assert find_cycle(GRAPH) == []


def test_no_module_is_in_a_cycle_through_the_command_registry():
    named = read_graph(named=True)
    assert "apps.cnn.train" in named["commands.registry"]
    assert find_cycle(named) == []


def test_no_room_is_in_an_import_cycle():
    assert find_cycle(join_rooms(GRAPH)) == []


def test_a_cycle_is_found(tmp_path):
    for name, text in {
        "a": "def f():\n    import millrace.b\n",
        "b": "if TYPE_CHECKING:\n    from millrace import c\n",
        "c": "from millrace.a import f\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert find_cycle(read_graph(tmp_path)) == ["a", "b", "c"]


# Libraries


def test_only_some_rooms_import_a_library():
    for module in MODULES:
        for library in find_libraries(module) & LIBRARIES.keys():
            assert get_room(module) in LIBRARIES[library], (module, library)


def test_rooms_that_never_import_jax():
    for module in MODULES:
        if get_room(module) in WITHOUT_JAX:
            assert not find_libraries(module) & {"jax", "jaxlib", "optax", "orbax"}, module


def test_nothing_in_the_package_imports_tests_examples_or_benchmarks():
    for module in MODULES:
        assert not find_libraries(module) & {"tests", "examples", "benchmarks"}, module


def test_help_of_every_command_imports_nothing_heavy():
    script = (
        "import contextlib, io, sys\n"
        "from millrace.cli import main\n"
        "from millrace.commands.registry import COMMANDS\n"
        "for name in ('', *COMMANDS):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as text:\n"
        "        with contextlib.suppress(SystemExit):\n"
        "            main([*name.split(), '--help'])\n"
        "    assert 'usage' in text.getvalue(), name\n"
        f"    assert not {HEAVY} & set(sys.modules), (name, {HEAVY} & set(sys.modules))\n"
    )
    command = [sys.executable, "-c", script]
    ended = subprocess.run(
        command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


# Applications


def test_no_application_imports_another():
    for module, app, _ in in_applications():
        others = {split_application(name)[0] for name in GRAPH[module]} - {app, ""}
        assert others == set(), module


def test_only_benchmarks_and_the_public_names_import_applications():
    importers = {
        get_room(module)
        for module, targets in GRAPH.items()
        if any(get_room(target) == "apps" for target in targets)
    }
    assert importers - {"apps"} == {"__init__", "bench"}
    for target in GRAPH["__init__"]:
        if get_room(target) == "apps":
            assert target.endswith(".api")


def test_only_the_registry_names_applications_as_text():
    named = read_graph(named=True)
    for module in MODULES:
        added = {get_room(name) for name in named[module] - GRAPH[module]}
        assert module == "commands.registry" or "apps" not in added, module


def test_no_module_of_an_application_imports_a_later_layer():
    for module, _, inside in in_applications():
        if inside:
            own = {split_application(name)[1] for name in GRAPH[module]} - {""}
            later = {name for name in own if find_layer(name) > find_layer(inside)}
            assert later == set(), module


def test_layers_name_no_module_that_is_gone():
    names = {inside for _, _, inside in in_applications()}
    folders = {name.split(".")[0] for name in names}
    assert set().union(*LAYERS) <= names | folders


def test_options_of_applications_import_nothing_but_options():
    modules = [*in_applications("config"), ("apps.cnn.models.spec", "cnn", "models.spec")]
    for module, _, _ in modules:
        outside = {name for name in GRAPH[module] if not split_application(name)[0]}
        assert {n for n in outside if get_room(n) != "config"} <= CONFIG_MAY_IMPORT, module
        inside = {split_application(name)[1] for name in GRAPH[module]} - {""}
        assert all(find_layer(name) == 0 for name in inside), module
        assert not find_libraries(module) & HEAVY, module


def test_models_do_not_know_how_they_are_trained():
    for module, _, _ in in_applications(*LAYERS[1]):
        rooms = {get_room(name) for name in GRAPH[module]} - {"apps"}
        assert rooms <= MODELS_MAY_IMPORT, module


def test_kernels_know_only_the_model():
    for module, _, _ in in_applications("kernels"):
        inside = {split_application(name)[1] for name in GRAPH[module]} - {""}
        assert {name.split(".")[0] for name in inside} <= {"kernels", "model"}, module


@pytest.mark.parametrize("app", APPLICATIONS)
def test_applications_have_the_same_files(app):
    folder = PACKAGE / "apps" / app
    assert [name for name in SAME_FILES if not (folder / name).is_file()] == []
    assert (folder / "model.py").is_file() != (folder / "models").is_dir()


@pytest.mark.parametrize("app", APPLICATIONS)
def test_applications_have_the_same_entry_points(app):
    for module, names in SAME_FUNCTIONS.items():
        assert names <= find_functions(PACKAGE / "apps" / app / f"{module}.py"), module
    command = COMMANDS[f"{app} train"]
    assert command.function == f"millrace.apps.{app}.train:train"
    assert command.config.startswith(f"millrace.apps.{app}.config:")


def find_functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_there_is_no_other_application():
    assert {app for _, app, _ in in_applications()} == set(APPLICATIONS)


# Public names


def test_every_public_name_can_be_reached():
    for name in millrace.__all__:
        assert getattr(millrace, name) is not None
    assert set(millrace.__all__) == set(millrace._HOME)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = millrace.nonsense
