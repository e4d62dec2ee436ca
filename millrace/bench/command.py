"""``millrace bench``: what is asked for, checked before anything heavy is imported."""

import os

from millrace.bench.building import configuration
from millrace.bench.comparing import read_results
from millrace.bench.config import BenchConfig
from millrace.bench.spec import load_spec, select


def bench(config: BenchConfig) -> int:
    """Do what is asked for; the status is 1 if an entry has failed."""
    if config.page:
        from millrace.bench.page import write_page

        return write_page(config.page, config.out)
    entries = select(load_spec(config.spec), [*config.names, *config.benchmark])
    if config.list:
        print("\n".join(f"{e.name:<34} {e.about or e.command}" for e in entries))
        return 0
    configs = {entry.name: configuration(entry) for entry in entries}
    if config.compare is not None:
        read_results(config.compare)  # a wrong file should not be found out at the end
    _prepare_process(config)
    from millrace.bench.session import Session

    session = Session(config, entries, configs)
    session.run()
    return 1 if session.failed else 0


def _prepare_process(config: BenchConfig) -> None:
    """Settings that must be made before a device is first used."""
    # Memory is taken as it is needed: the rest is PyTorch's.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from millrace.run.process import tune_memory_allocation, use_virtual_devices

    tune_memory_allocation()
    if config.virtual_devices is not None:
        use_virtual_devices(config.virtual_devices)
