"""Options of ``millrace bench``. Imports nothing heavy."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Run named benchmarks and compare them with the roofline of the device.

    NAMES are entries or groups of the spec, or patterns such as 'resnet50*'; without
    names, all entries run. Entries that cannot run on this machine are skipped with a
    reason.
    """

    names: list[str] = field(default_factory=list, metadata={"positional": True})
    """Entries, groups or patterns."""
    spec: Path | None = None
    """YAML file of benchmarks (default: the spec that comes with millrace)."""
    benchmark: list[str] = field(default_factory=list)
    """Same as NAMES, as in the reference benchmarks."""
    out: Path | None = field(default=None, metadata={"aliases": ("--log-dir", "--logdir")})
    """Folder for results.json, results.csv and results.md (default: runs/bench-TIME)."""
    repeat: int = 5
    """Least number of measurements per entry, after a first one that is dropped."""
    seconds: float = 2.0
    """Least time of the measurements of an entry, without the first. They go on until the
    mean is known to 1 %. Latency takes half of this time, or up to three times as long if
    that gives enough calls for p99 or p99.9."""
    max_seconds: float = 30.0
    """Time after which an entry is done even if its figure is not stable."""
    compare: Path | None = None
    """results.json of an earlier session: report what became slower or faster."""
    peer: Literal["torch"] | None = None
    """Also run the same work in PyTorch, eager and compiled. Report the ratio, with a ~
    if it is within the noise, or why there is none."""
    torch_python: str = sys.executable
    """A Python with PyTorch (default: the one that runs millrace)."""
    torch_seconds: float = 1.0
    """Total time of the measurements of each PyTorch variant, after a warm-up of at most
    that time. A measurement takes at least five calls."""
    compile_threads: int | None = None
    """Entries to compile at the same time, before the first one is measured (default: half
    the cores, at most 8; on a GPU or TPU 1, and each is measured right away)."""
    xla: list[str] = field(default_factory=list)
    """Options of the XLA compiler, each NAME=VALUE."""
    virtual_devices: int | None = None
    """Split the CPU into this many devices."""
    skip_measured: list[Path] = field(default_factory=list)
    """Results of earlier sessions: results.json files, or folders of them. Entries that
    they have for the same command and device are left out, so that several sessions can
    share a spec."""
    commit: str | None = None
    """Commit to report if the folder is not a git repository."""
    page: list[Path] = field(default_factory=list)
    """Only write a page from these results.json files, or from all in these folders, to
    --out FILE.md or standard output."""
    debug: bool = False
    """Show the full traceback of an error."""
    list: bool = False  # last, because it hides the built-in type
    """List the entries and exit."""

    def __post_init__(self) -> None:
        for name in ("repeat", "compile_threads", "virtual_devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        for name in ("seconds", "max_seconds", "torch_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}.")
        for option in self.xla:
            if "=" not in option:
                raise ValueError(f"xla takes NAME=VALUE, got {option}.")
        if self.compare is not None and not self.compare.is_file():
            raise ValueError(f"compare: there is no file {self.compare}.")
        if self.out is not None:
            replaced = (self.out / "results.json").resolve()
            places = [place.resolve() for place in self.skip_measured]
            if replaced.exists() and any(replaced.is_relative_to(p) for p in places):
                raise ValueError(
                    f"The folder {self.out} has results that skip_measured reads, and they "
                    "would be replaced. Choose another one."
                )

    @property
    def xla_options(self) -> dict[str, str | bool]:
        """XLA options by name; XLA wants true and false as booleans, not as text."""
        given = (option.split("=", 1) for option in self.xla)
        booleans: dict[str, bool] = {"true": True, "false": False}
        return {name: booleans.get(value.lower(), value) for name, value in given}
