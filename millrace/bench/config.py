"""What ``millrace bench`` can be told. Imports nothing heavy."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Measure named benchmarks and say how far each is from the device's limits.

    NAMES are entries or groups of the spec, or patterns such as 'resnet50*'; without
    any, all entries are run. What cannot run here is reported as skipped.
    """

    names: list[str] = field(default_factory=list, metadata={"positional": True})
    """Entries, groups or patterns."""
    spec: Path | None = None
    """YAML file of benchmarks (default: the one that comes with millrace)."""
    benchmark: list[str] = field(default_factory=list)
    """The same as NAMES, as the references have it."""
    out: Path | None = None
    """Folder for the results: results.json, results.csv and results.md (default:
    runs/bench-TIME)."""
    repeat: int = 5
    """Values that are measured of each entry, after a first one that is dropped."""
    seconds: float = 2.0
    """Time that the values of an entry take together, without the first. Latency takes
    half of it, or up to three times it where that is enough calls for p99 or p99.9."""
    compare: Path | None = None
    """results.json of an earlier time: say what has become slower or faster."""
    peer: Literal["torch"] | None = None
    """Run the same work in PyTorch, eager and compiled, and give the ratio, with a ~ where
    noise could have made it, or say why there is none."""
    torch_python: str = sys.executable
    """A Python that has PyTorch (default: the one that runs this)."""
    torch_seconds: float = 1.0
    """Time that the values of each of PyTorch's variants take together, after a warm-up
    that takes no longer; a value is of five calls or more."""
    compile_threads: int | None = None
    """Programs compiled at the same time, before the first one is measured (default: half
    as many as there are cores, at most 8; for a GPU or TPU one, measured right away)."""
    xla: list[str] = field(default_factory=list)
    """Options of XLA's compiler to measure with, each NAME=VALUE."""
    virtual_devices: int | None = None
    """Divide the CPU into this many devices."""
    commit: str | None = None
    """What is measured, where the folder is no git repository."""
    page: list[Path] = field(default_factory=list)
    """Measure nothing: write a page from these results.json files, or from all in these
    folders, to --out FILE.md or standard output."""
    debug: bool = False
    """Show the full traceback of an error."""
    list: bool = False  # last, because it hides Python's own
    """Only list the entries."""

    def __post_init__(self) -> None:
        for name in ("repeat", "compile_threads", "virtual_devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        for name in ("seconds", "torch_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}.")
        for word in self.xla:
            if "=" not in word:
                raise ValueError(f"xla takes NAME=VALUE, got {word}.")
        if self.compare is not None and not self.compare.is_file():
            raise ValueError(f"compare: there is no file {self.compare}.")

    @property
    def xla_options(self) -> dict[str, str | bool]:
        """XLA's options by name; what is true or false there must not be a word."""
        given = (word.split("=", 1) for word in self.xla)
        words: dict[str, bool] = {"true": True, "false": False}
        return {name: words.get(value.lower(), value) for name, value in given}
