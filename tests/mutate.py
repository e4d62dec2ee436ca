"""Mutation testing: change random lines of the package, and see which tests fail.

``python tests/mutate.py --seed 1 --count 20 loop feeds`` copies the repository to a
temporary folder, picks random lines of ``millrace/loop`` and ``millrace/feeds``, and makes
one small change at a time: another operator, a constant plus one, a statement removed. For
each change it runs the test files closest to the module, best first, until one fails or
``--budget`` seconds have passed, then a broader file. It prints the change and the test
that caught it. A test file that fails without the change is not used.

If a change survives, either it changes nothing (or only speed or wording), or a test is
missing. Repeat it with ``--only``, such as ``--only loop/runner.py:47``, and choose other
test files with ``--tests``.
"""

import argparse
import ast
import copy
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "millrace"
SWAPS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult},
    **{ast.Div: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult},
}
WORDS = re.compile(r"\b(log|logger|console|print|warn|warning|info|debug|help|describe)\b")
# Test files that use most of a folder.
BROADER = {
    "apps/autoencoder": "apps/autoencoder/test_train.py",
    "apps/cnn": "apps/cnn/test_workflow.py",
    "apps/vcd": "apps/vcd/test_train.py",
    "apps": "commands/test_calling.py",
    "data/ratings": "apps/autoencoder/test_convert.py",
    "data": "apps/cnn/test_train.py",
    "feeds": "loop/test_runner.py",
    "loop": "test_cli.py",
    "run": "test_cli.py",
    "checkpoint": "loop/test_runner.py",
    "commands": "test_cli.py",
    "distributed": "distributed/test_processes.py",
    "nn": "apps/cnn/test_models.py",
}


class Mutation(NamedTuple):
    """A change of the source of a module."""

    module: Path
    node: Any
    text: str
    name: str
    """Name of the top-level function or class that is changed."""

    @property
    def location(self) -> str:
        return f"{self.module.relative_to(PACKAGE)}:{self.node.lineno}"

    def __str__(self) -> str:
        was = ast.get_source_segment(self.module.read_text(), self.node) or ""
        return f"{self.location} | {' '.join(was.split())[:60]} -> {self.text[:60]}"

    def source(self) -> str:
        whole = self.module.read_bytes()
        starts = [0, *(found.end() for found in re.finditer(b"\n", whole))]
        begin = starts[self.node.lineno - 1] + self.node.col_offset
        end = starts[self.node.end_lineno - 1] + self.node.end_col_offset
        return (whole[:begin] + self.text.encode() + whole[end:]).decode()


def mutations(module: Path, node: ast.AST, name: str = "") -> Iterator[Mutation]:
    """Yield all changes below a node."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_skipped(child):
                inner = name or getattr(child, "name", "")
                yield from (Mutation(module, child, t, inner) for t in _replacements(child))
                yield from mutations(module, child, inner)


def _is_skipped(node: ast.AST) -> bool:
    """Whether a node is an import or only for people or type checkers."""
    match node:
        case ast.If(test=test):
            return "TYPE_CHECKING" in ast.unparse(test)
        case ast.Call(func=func) | ast.Expr(value=ast.Call(func=func)):
            return bool(WORDS.search(ast.unparse(func)))
    return isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Raise)


def _replacements(node: ast.AST) -> Iterator[str]:
    """Yield the source of each small mistake that could replace a node."""
    match node:
        case ast.Compare(ops=[op, *rest]) if type(op) in SWAPS:
            yield _changed(node, ops=[SWAPS[type(op)](), *rest])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
            yield _changed(node, op=SWAPS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from (f"({value + 1})", f"({value - 1})")
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Break() | ast.Continue():
            yield "pass"
        case ast.Slice(lower=lower, upper=upper) if lower or upper:
            yield _changed(node, lower=upper, upper=lower)[1:-1]
        case ast.IfExp(body=body, orelse=orelse):
            yield _changed(node, body=orelse, orelse=body)


def _changed(node: ast.AST, **fields: object) -> str:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return f"({ast.unparse(other)})"


def choose(folders: list[str], draw: random.Random) -> Mutation:
    """Pick a random line of these folders, and a random change of it."""
    modules = [path for f in folders for path in sorted((PACKAGE / f).rglob("*.py"))]
    lengths = [len(path.read_text().splitlines()) for path in modules]
    while True:
        (module,) = draw.choices(modules, lengths)
        if found := list(mutations(module, ast.parse(module.read_text()))):
            location = draw.choice(list(dict.fromkeys(m.location for m in found)))
            return draw.choice([m for m in found if m.location == location])


def nearest_tests(mutation: Mutation) -> list[str]:
    """Return the five test files closest to a change, best first, and a broader one."""
    module, name = mutation.module, mutation.name
    inside, stem = module.relative_to(PACKAGE), module.stem
    folder = next(f for p in inside.parents if (f := ROOT / "tests" / p).is_dir())
    dotted = ".".join(("millrace", *inside.with_suffix("").parts))
    user = re.compile(rf"\b{stem} import|import {stem}\b")
    users = {p.stem for p in module.parent.glob("*.py") if user.search(p.read_text())}

    def score(path: Path) -> int:
        text, of = path.read_text(), path.stem.removeprefix("test_")
        return (
            8 * (of == stem)
            + 4 * (stem.startswith(of) or of.startswith((stem, module.parent.name)))
            + 4 * bool(name and re.search(rf"\b{name}\b", text))
            + 3 * bool(re.search(rf"\b{dotted}\b", text))
            + 2 * (of in users)
            + bool(re.search(rf"\b{stem}\b", text))
        )

    files = sorted(sorted(folder.glob("test_*.py")), key=score, reverse=True)
    near = [str(path.relative_to(ROOT)) for path in files[:5]]
    broader = next(v for k, v in BROADER.items() if str(inside).startswith(k))
    return [*(n for n in near if n != f"tests/{broader}"), f"tests/{broader}"]


class Tree:
    """A copy of the repository to change."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        hidden = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "site")
        shutil.copytree(ROOT, self.root, ignore=hidden)
        # Most programs are the same for every change: compile them once.
        compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
        self.environment = os.environ | {
            "PYTHONPATH": str(self.root),
            "TMPDIR": str(folder),
            "JAX_COMPILATION_CACHE_DIR": compiled,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.seconds_unbroken = cache(self._seconds_unbroken)

    def write(self, module: Path, source: str) -> None:
        """Replace a module, and delete its bytecode: it may have the same timestamp."""
        path = self.root / module.relative_to(ROOT)
        path.write_text(source)
        for old in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            old.unlink()

    def first_failure(self, file: str, limit: float) -> str | None:
        """Return the first failing test of a file, "timeout", or None."""
        args = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", file]
        options: dict[str, Any] = {"cwd": self.root, "env": self.environment, "text": True}
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(args, start_new_session=True, **options)
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            if process.poll() is None:
                # The group includes processes that the tests have started.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode in (0, 5):  # 5: no tests were selected
            return None
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", output, re.MULTILINE)
        return failed.group(1) if failed else file

    def _seconds_unbroken(self, file: str) -> float | None:
        """Return the seconds of a file without a change; None if it does not pass."""
        begin = time.monotonic()
        if failed := self.first_failure(file, limit=70):
            print(f"skipping {file}, which fails unchanged: {failed}", file=sys.stderr)
        return None if failed else time.monotonic() - begin

    def verdict(self, mutation: Mutation, files: list[str], budget: float) -> str:
        """Return which test catches a change; the last file is always run."""
        spent, tried = 0.0, []
        for file in files:
            if spent > 0.8 * budget and file != files[-1]:
                continue
            needed = self.seconds_unbroken(file)
            if needed is None or (spent and spent + needed > budget and file != files[-1]):
                continue
            spent += needed
            tried.append(file)
            self.write(mutation.module, mutation.source())
            failed = self.first_failure(file, limit=20 + 3 * needed)
            self.write(mutation.module, mutation.module.read_text())
            if failed:
                return (
                    f"timeout in {file}" if failed == "timeout" else f"caught by {failed}"
                )
        return f"survived {', '.join(tried)}"


def main() -> None:
    """Print each change and its result, then the totals."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--budget", type=float, default=30, help="seconds per change")
    parser.add_argument("--only", nargs="+", help="FILE:LINE of changes to repeat")
    parser.add_argument("--tests", nargs="+", help="test files to run")
    parser.add_argument("folders", nargs="+", help="folders of millrace/ to change")
    options = parser.parse_args()
    draw, counts = random.Random(options.seed), Counter()
    chosen = [choose(options.folders, draw) for _ in range(options.count)]
    chosen = [m for m in chosen if options.only is None or m.location in options.only]
    print(f"seed {options.seed}: {len(chosen)} changes in {', '.join(options.folders)}")
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        tree = Tree(Path(folder))
        for mutation in chosen:
            print(mutation, end=" | ", flush=True)
            files = options.tests or nearest_tests(mutation)
            verdict = tree.verdict(mutation, files, options.budget)
            print(verdict, flush=True)
            counts[verdict.split()[0]] += 1
    print(", ".join(f"{count} {what}" for what, count in counts.items()))


if __name__ == "__main__":
    main()
