"""Hostile settings: eight virtual devices, and every warning an error."""

import os
import shutil
import tempfile

import hypothesis
from strict_reads import strict_reads as strict_reads

# Before JAX is imported: the device count cannot be changed afterwards.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        # Compiling takes most of the time here, and what is compiled is small.
        "--xla_backend_optimization_level=0",
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Many commands compile the same programs: once in a session is enough, for all of its
# processes. The first to come here, of which the others inherit the setting, cleans up.
_CACHE = "JAX_COMPILATION_CACHE_DIR"
_made = None if _CACHE in os.environ else tempfile.mkdtemp(prefix="millrace-tests-")
if _made is not None:
    os.environ[_CACHE] = _made
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# How long an example takes depends on who else uses the machine.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


_LONGEST = {
    *("test_readme.py", "test_cli.py", "test_examples.py", "test_code_blocks.py"),
    *("test_faults.py", "test_processes.py", "test_kill_and_resume.py"),
}


def pytest_collection_modifyitems(items: list) -> None:
    """Begin with the longest files: at the end, one process would wait for another."""
    items.sort(key=lambda item: item.path.name not in _LONGEST)


def pytest_unconfigure() -> None:
    """Leave nothing behind."""
    if _made is not None:
        shutil.rmtree(_made, ignore_errors=True)
