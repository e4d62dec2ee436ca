"""Hostile settings: eight virtual devices, and every warning an error."""

import inspect
import os
import shutil
import tempfile

import hypothesis
import pytest
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
# The one precision in which tests compare products: a GPU would otherwise multiply float32
# in tensorfloat32, to three digits. A CPU has no other. Subprocesses inherit it.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
# Several processes share a GPU: each takes memory as it needs it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

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
    """Begin with the longest files: at the end, one process would wait for another.

    Before them the tests of device memory, whose peak only ever rises in a process.
    """

    def rank(item: pytest.Item) -> int:
        if item.path.parent.name == "gpu":
            return 0
        return 1 if item.path.name in _LONGEST else 2

    items.sort(key=rank)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine's devices cannot do, and say why."""
    marks = [mark for mark in item.iter_markers() if mark.name in ("devices", "cpu")]
    if not marks:
        return
    import jax

    there, platform = jax.device_count(), jax.default_backend()
    for mark in marks:
        if mark.name == "cpu" and platform != "cpu":
            pytest.skip(f"about the CPU, not the {platform}: {mark.args[0]}")
        if mark.name == "devices" and there < (needed := _devices_needed(item, mark)):
            pytest.skip(f"needs {needed} devices; there are only {there} ({platform})")


def _devices_needed(item: pytest.Item, mark: pytest.Mark) -> int:
    """Return the count of a ``devices`` marker, or what its function says of a case."""
    (count,) = mark.args
    if not callable(count):
        return count
    parameters = item.callspec.params  # type: ignore[attr-defined]  # pytest's own
    return count(**{name: parameters[name] for name in inspect.signature(count).parameters})


def pytest_unconfigure() -> None:
    """Leave nothing behind."""
    if _made is not None:
        shutil.rmtree(_made, ignore_errors=True)
