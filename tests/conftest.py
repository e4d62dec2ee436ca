"""Settings of all tests: eight virtual devices, one precision, a shared cache."""

import importlib.metadata
import inspect
import os
import shutil
import signal
import tempfile

import hypothesis
import pytest
from strict_reads import strict_reads as strict_reads

_JAXLIB = importlib.metadata.version("jaxlib")

# Before JAX is imported: the device count cannot be changed afterwards.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        # Compilation takes most of the time, and the programs are small: a third of it with
        # XLA's older emitters of fused operations, and in one part.
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
        # Later versions have no older emitters, and abort at a flag that they do not know.
        *(["--xla_cpu_use_fusion_emitters=false"] if _JAXLIB.startswith("0.10.") else []),
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# By default a GPU multiplies float32 matrices in TensorFloat-32, with three digits. A CPU
# has no such mode. Subprocesses inherit this.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
# Tests must not depend on a network; those of downloads have a server of their own.
os.environ["MILLRACE_NO_FETCH"] = "1"
# Several processes share a GPU, so none may reserve its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Many commands compile the same programs: all processes of a session share a cache. The
# first process creates it, the others inherit the setting, and the first one deletes it.
_CACHE = "JAX_COMPILATION_CACHE_DIR"
_created = None if _CACHE in os.environ else tempfile.mkdtemp(prefix="millrace-tests-")
if _created is not None:
    os.environ[_CACHE] = _created
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# nohup and background jobs of a shell ignore these, and so would every process of a test.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# The time of an example depends on who else uses the machine.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


_LONGEST = {
    *("test_readme.py", "test_cli.py", "test_examples.py", "test_code_blocks.py"),
    *("test_faults.py", "test_processes.py", "test_kill_and_resume.py"),
}


def pytest_collection_modifyitems(items: list) -> None:
    """Run the longest files first, so that no worker waits for another at the end.

    Tests of device memory run even before them: its peak only rises within a process.
    """

    def rank(item: pytest.Item) -> int:
        if item.path.parent.name == "gpu":
            return 0
        return 1 if item.path.name in _LONGEST else 2

    items.sort(key=rank)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that the devices of this machine cannot run, with a reason."""
    marks = [mark for mark in item.iter_markers() if mark.name in ("devices", "cpu")]
    if not marks:
        return
    import jax

    available, platform = jax.device_count(), jax.default_backend()
    for mark in marks:
        if mark.name == "cpu" and platform != "cpu":
            pytest.skip(f"for the CPU, not the {platform}: {mark.args[0]}")
        if mark.name == "devices" and available < (needed := _devices_needed(item, mark)):
            pytest.skip(f"needs {needed} devices, but there are {available} ({platform})")


def _devices_needed(item: pytest.Item, mark: pytest.Mark) -> int:
    """Return the number of devices of a marker, which may be a function of parameters."""
    (count,) = mark.args
    if not callable(count):
        return count
    parameters = item.callspec.params  # type: ignore[attr-defined]  # of pytest
    return count(**{name: parameters[name] for name in inspect.signature(count).parameters})


def pytest_unconfigure() -> None:
    """Delete the cache."""
    if _created is not None:
        shutil.rmtree(_created, ignore_errors=True)


@pytest.fixture
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``cnn validate`` make one pass: a stable figure can take 30 seconds."""
    for name in ("_MAX_SECONDS", "_MIN_SECONDS"):
        monkeypatch.setattr(f"millrace.apps.cnn.inference.feed.{name}", 0.0)
