"""Find operations in the text of a compiled program, by depth of loops."""

import re
from collections import Counter
from typing import Any


def operations_by_loop_depth(compiled: Any, pattern: str) -> Counter[int]:
    """Count the operations matching `pattern` by the number of enclosing loops."""
    computations, entry = _computations(compiled.as_text())
    found: Counter[int] = Counter()

    def walk(name: str, depth: int) -> None:
        for line in computations.get(name, ()):
            if re.search(rf"= .*\b({pattern})\(", line):
                found[depth] += 1
            body = re.search(r" while\(.*body=%?([\w.\-]+)", line)
            if body:
                walk(body.group(1), depth + 1)
            for called in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", line):
                if "all-reduce" not in line:
                    walk(called, depth)

    walk(entry, 0)
    return found


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    computations: dict[str, list[str]] = {}
    current, entry = "", ""
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith(" "):
            current = head.group(2)
            computations[current] = []
            entry = current if head.group(1) else entry
        elif line.startswith("  "):
            computations[current].append(line)
    return computations, entry
