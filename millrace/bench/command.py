"""The command ``millrace bench``.

``--list`` and wrong options need no JAX, so heavy modules are imported in functions.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.bench.config import BenchConfig
from millrace.bench.reference import NOTICE, REFERENCE
from millrace.bench.spec import Entry, load_spec, parse_command, select_entries
from millrace.config import ConfigurationError


def bench(config: BenchConfig) -> int:
    """Run the command; return 1 if an entry failed."""
    if config.page:
        from millrace.bench.page import write_page

        write_page(config.page, config.out)
        return 0
    entries = select_entries(load_spec(config.spec), [*config.names, *config.benchmark])
    if config.list:
        print("\n".join(f"{e.name:<34} {e.about or e.command}" for e in entries))
        return 0
    configs = {entry.name: parse_command(entry) for entry in entries}
    _set_environment(entries)
    if any(entry.reference == REFERENCE for entry in entries):
        print(f"millrace: {NOTICE}", file=sys.stderr)
    if config.compare is not None:
        from millrace.bench.reporting import read_results

        read_results(config.compare)  # refuse a wrong file before measuring, not after
    earlier = _read_earlier(config.skip_measured)
    _prepare_process(config)
    from millrace.bench.session import Session, find_unmeasured

    if not (entries := find_unmeasured(entries, earlier)):
        print("millrace: all of these entries are measured already.", file=sys.stderr)
        return 0
    session = Session(config, entries, configs)
    session.run()
    return 1 if session.failed else 0


def _read_earlier(places: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the results in these files and folders."""
    if not places:
        return []
    from millrace.bench.page import find_results
    from millrace.bench.reporting import read_results

    return [read_results(path) for path in find_results(places)]


def _set_environment(entries: Sequence[Entry]) -> None:
    """Set the variables of all entries; two that differ cannot be in one session."""
    variables: dict[str, str] = {}
    for entry in entries:
        for name, value in entry.env.items():
            if variables.setdefault(name, str(value)) != str(value):
                raise ConfigurationError(
                    f"{entry.file}: {name} is {variables[name]!r} for one benchmark and "
                    f"{value!r} for {entry.name}. Measure them one at a time."
                )
    os.environ.update(variables)


def _prepare_process(config: BenchConfig) -> None:
    """Make the settings that are needed before the first use of a device."""
    # Allocate memory on demand: PyTorch needs the rest.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from millrace.run.process import tune_memory_allocation, use_virtual_devices

    tune_memory_allocation()
    if config.virtual_devices is not None:
        use_virtual_devices(config.virtual_devices)
