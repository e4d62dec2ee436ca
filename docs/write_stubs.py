"""Write ``api.pyi`` of every application: ``python docs/write_stubs.py``.

The functions of ``mr.cnn`` and the others take the options of commands as keywords. Editors
and type checkers cannot see them in ``api.py``, so they read these files instead.
``tests/commands/test_signatures.py`` fails if one is out of date.
"""

import ast
import inspect
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from millrace.commands.registry import COMMANDS
from millrace.commands.signatures import option_parameters
from millrace.config import flat_options
from millrace.config.help import SHOWN_ALIASES

APPS = Path(__file__).parents[1] / "millrace" / "apps"
_HEADER = "# Written by docs/write_stubs.py from the options of the commands.\n"
_IMPORTS = """\
from pathlib import Path
from typing import Any, Literal
"""


def write_stub(source: Path) -> str:
    """Return the stub of an ``api.py``."""
    tree = ast.parse(source.read_text())
    parts = [_IMPORTS + "\n" + "\n".join(_imports(tree))]
    for node in tree.body:
        if isinstance(node, ast.Assign):
            parts.append(ast.unparse(node).replace("'", '"'))
        elif isinstance(node, ast.FunctionDef):
            parts.append(_function(node))
    text = "\n\n".join(parts) + "\n"
    imports = "import collections.abc\n" if "collections.abc." in text else ""
    if re.search(r"\bSequence\[", text.replace("abc.Sequence", "")):
        imports += "from collections.abc import Sequence\n"
    return _HEADER + imports + text


def _imports(tree: ast.Module) -> Iterable[str]:
    """Yield the imports of this package, also those for type checkers."""
    found = []
    for node in ast.walk(tree):
        is_ours = isinstance(node, ast.ImportFrom) and str(node.module).startswith("mill")
        if is_ours and node.col_offset <= 4 and not _is_in_function(tree, node):
            found.append(ast.unparse(node))
    names = ("call_command", "call_without_run", "takes_options_of")
    for line in sorted(found):
        module, imported = line.split(" import ")
        kept = [name for name in imported.split(", ") if name not in names]
        if kept:
            yield f"{module} import {', '.join(kept)}"


def _is_in_function(tree: ast.Module, node: ast.AST) -> bool:
    functions = [f for f in tree.body if isinstance(f, ast.FunctionDef)]
    return any(node in ast.walk(function) for function in functions)


def _function(node: ast.FunctionDef) -> str:
    parameters = [
        f"{arg.arg}: {_unquote(arg.annotation)}"
        + (f" = {ast.unparse(default)}" if default is not None else "")
        for arg, default in (*_positional(node), *_keyword_only(node))
    ]
    own = {arg.arg for arg in node.args.kwonlyargs}
    if (command := _command(node)) is not None:
        taken = own | {arg.arg for arg in node.args.args}
        parameters.insert(len(node.args.args), "*")
        parameters += _options(command, taken)
    elif own:
        parameters.insert(len(node.args.args), "*")
    head = f"def {node.name}(\n"
    lines = "".join(f"    {parameter},\n" for parameter in parameters)
    summary = (ast.get_docstring(node) or "").split("\n")[0]
    returns = _unquote(node.returns)
    return f'{head}{lines}) -> {returns}:\n    """{summary}"""\n    ...'


def _positional(node: ast.FunctionDef) -> Iterable[tuple[ast.arg, ast.expr | None]]:
    missing = len(node.args.args) - len(node.args.defaults)
    return zip(node.args.args, [*[None] * missing, *node.args.defaults], strict=True)


def _keyword_only(node: ast.FunctionDef) -> Iterable[tuple[ast.arg, ast.expr | None]]:
    return zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)


def _command(node: ast.FunctionDef) -> str | None:
    """Return the command whose options a function takes."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.args[0], ast.Constant):
            return str(decorator.args[0].value)
    return None


def _options(command: str, own: set[str]) -> Iterable[str]:
    options = flat_options(COMMANDS[command].load_config_type())
    for parameter in option_parameters(command):
        hint = format_hint(parameter.annotation)
        if parameter.name in own:
            continue
        default = ""
        if parameter.default is not inspect.Parameter.empty:
            is_plain = isinstance(parameter.default, bool | int | float | str | None)
            text = repr(parameter.default).replace("'", '"')
            default = f" = {text if is_plain else '...'}"
        yield f"{parameter.name}: {hint}{default}"
        option = options.get(parameter.name)
        for alias in option.metadata.get("aliases", ()) if option else ():
            name = alias.lstrip("-").replace("-", "_")
            if alias in SHOWN_ALIASES and name not in options:
                yield f"{name}: {hint} = ..."


def format_hint(hint: Any) -> str:
    """Return a type as source code; text is accepted for a path."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(format_hint(part) for part in typing.get_args(hint))
    text = str(hint)
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        text = hint.__name__
    text = re.sub(r"\b(?:typing|pathlib)\.", "", text).replace("'", '"')
    return re.sub(r"\bPath\b", "Path | str", text.replace("NoneType", "None"))


def _unquote(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node) if node is not None else "Any"


def main() -> None:
    """Write all stubs."""
    for source in sorted(APPS.glob("*/api.py")):
        source.with_suffix(".pyi").write_text(write_stub(source))


if __name__ == "__main__":
    main()
