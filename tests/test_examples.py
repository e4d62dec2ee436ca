"""Every example runs as a script and prints what it should."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import millrace as mr

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAXIMUM_LINES = 72

# The examples check their own results; this is a part of what they print.
EXPECTED = {
    "01_loop": r"repeat ran 10 steps\n  d1: shape \(10, 800\), every value 2\n",
    "02_feeds": r"read at step [\d,]+\n(.*\n)*infeed_benchmark: [\d,]+ batches",
    "03_replicas": r"4 replicas of 4 x 4 samples: the same weights within \de[-+]",
    "04_accumulation": r"float32 .* kernel \de-0[5-9]\nNone .* kernel \de-0[12]\n",
    "05_offloading": r"hidden first moment +65,536 bytes in pinned_host memory",
    "06_pipeline": r"four stages, zero-bubble: loss 0\.\d+, weights within \de[-+]",
    "07_application": r"curve: validation error 0\.0",
    "08_optuna": r"'learning_rate': 0.0001}: PRUNED after 1 val(.*\n)*best accuracy 0\.9",
    "09_ray": r"2 workers of Ray: the weights of one process within \de-0[7-9]\n",
}

LONG = (
    {"06_pipeline", "08_optuna", "09_ray"}
    if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu"
    else set()
)
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
each_run = pytest.mark.parametrize(
    "example",
    [
        # On a GPU all of them run, because an example may work only on virtual devices.
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem in LONG))
        for path in EXAMPLES
    ],
    ids=lambda path: path.stem,
)


@each_run
def test_example_runs_and_prints_its_result(example: Path, tmp_path: Path) -> None:
    if example.stem == "08_optuna":
        pytest.importorskip("optuna")
    if example.stem == "09_ray":
        pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    # Without the eight devices of the test suite: an example creates its own.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, example],
        cwd=tmp_path,  # the last one writes a run directory
        env=environment | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(EXPECTED[example.stem], done.stdout), done.stdout


@each_example
def test_example_fits_on_a_page(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= MAXIMUM_LINES


@each_example
def test_example_uses_only_public_names(example: Path) -> None:
    tree = ast.parse(example.read_text())
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    ours = [line for line in map(ast.unparse, imports) if "millrace" in line]
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "mr"
    }
    assert ours == ["import millrace as mr"]
    assert used <= set(mr.__all__)


def test_every_example_has_an_expected_output() -> None:
    assert [example.stem for example in EXAMPLES] == list(EXPECTED)
