"""Settings of this process, applied before a device is used. Imports nothing heavy."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from millrace.config import (
    ConfigurationError,
    flat_options,
    option_value,
    replace_options,
)
from millrace.run.options import ShortRunOptions

_MIN_ADDRESS_SPACE = 2 * 10**9
"""With less, the smallest run crashes: on 2 cores it did with 1.84 GB, not with 2.05."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""Parameters of mallopt, from malloc.h."""

_begun: list[bool] = []
"""Not empty once a run has begun in this process. Later ones are parts of it, such as the
repeats of ``vcd train``, and have directories of their own."""


def prepare_process(config: Any) -> Any:
    """Choose the devices and join the other processes of the run, if there are any.

    Returns:
        The configuration; if the launcher has restarted a run, or ``auto_resume`` finds
        one, it resumes that run.
    """
    from millrace.distributed.environment import get_recorded_run_directory
    from millrace.distributed.heartbeat import watch_launcher

    options = config.run
    if options.virtual_devices is not None:
        try:
            use_virtual_devices(options.virtual_devices)
        except RuntimeError as error:
            if not _has_cpu_devices(options.virtual_devices):
                raise ConfigurationError(
                    "--virtual-devices must be set before any device is used."
                ) from error
    if not _join(options.coordinator, options.process_id, options.num_processes):
        watch_launcher()
    config = _fit_to_processes(config)
    interrupted_run = None if _begun else get_recorded_run_directory()
    _begun.append(True)
    if interrupted_run is not None:
        # What cannot be resumed starts again, as long as it has no results.
        is_resumable = not isinstance(options, ShortRunOptions)
        resume = is_resumable and (interrupted_run / "config.yml").exists()
        return _resume_config(config, interrupted_run, resume=resume)
    if options.auto_resume and not options.resume and _has_begun(options.run_dir):
        return _resume_config(config, options.run_dir, resume=True)
    return config


def _has_begun(path: Path) -> bool:
    """Whether a folder has a run to continue, as process 0 sees it."""
    from millrace.distributed import coordination
    from millrace.run.directory import has_begun

    # A file system may show the others an older state of the folder.
    found: dict[str, Any] = {}
    if coordination.is_first():
        try:
            found = {"has_begun": has_begun(path)}
        except ConfigurationError as error:  # the others would wait for an answer
            found = {"error": str(error)}
    found = coordination.broadcast("has-begun", found)
    if "error" in found:
        raise ConfigurationError(found["error"])
    return found["has_begun"]


def _fit_to_processes(config: Any) -> Any:
    """Return a configuration with the same global batch for fewer processes.

    An elastic run may continue with fewer replicas; each then accumulates the gradients of
    more micro-batches.
    """
    from millrace.distributed.environment import get_present_share, record_indivisible

    present, all_processes = get_present_share()
    batching = getattr(getattr(config, "plan", None), "batching", None)
    if present == all_processes or batching is None:
        return config
    known = flat_options(type(config))
    changes = {}
    replicas = option_value(config, "num_replicas")
    changes["num_replicas"] = replicas * present // all_processes
    if "gradient_accumulation_count" in known:
        count = batching.gradient_accumulation_count * all_processes
        if option_value(config, "global_batch_size") is None and count % present == 0:
            changes["gradient_accumulation_count"] = count // present
    try:
        changed = replace_options(config, **changes)
        size = changed.plan.batching.global_batch_size
        if size == batching.global_batch_size:
            return changed
        reason = f"its updates would have {size} samples"
    except ConfigurationError as error:
        reason = str(error)
    record_indivisible()
    raise ConfigurationError(
        f"{present} of {all_processes} processes cannot share the global batch of "
        f"{batching.global_batch_size} samples: {reason}"
    )


def _resume_config(config: Any, path: Path, *, resume: bool) -> Any:
    """Return the configuration that continues an interrupted run."""
    known = flat_options(type(config))
    # An application may derive the run directory from these.
    changes: dict[str, Any] = {n: None for n in ("logdir", "results_dir") if n in known}
    # What auto_resume means is decided, also for the parts of the run.
    changes |= {"run_dir": path, "resume": resume, "auto_resume": False}
    try:
        return replace_options(config, **changes)
    except ConfigurationError as error:
        raise ConfigurationError(f"Cannot continue the run in {path}: {error}") from error


def join_processes() -> bool:
    """Join the other processes that this one was started with, as one program.

    Call it before a device is used, in your own script under ``millrace launch``, Open MPI,
    Slurm or Kubernetes. It does nothing in a process that was started alone.

    Returns:
        Whether there are several processes.
    """
    return _join()


def _join(*process_info: Any) -> bool:
    from millrace.distributed import coordination
    from millrace.distributed.environment import find_process_info, get_timeout
    from millrace.distributed.heartbeat import start_heartbeat

    get_timeout()  # a wrong one is an error before the others wait for this process
    several = coordination.join(find_process_info(*process_info))
    start_heartbeat()  # does nothing in a single process
    if several:
        coordination.bind_gloo()
    return several


def tune_memory_allocation() -> bool:
    """Keep freed memory for the next temporary instead of returning it to the kernel.

    glibc maps new pages for every large array, and each page faults once: convolutions with
    large temporaries ran 2 to 4 times faster with these settings. Call it before JAX is
    used. Returns whether the C library is glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = [
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_TOP_PAD, 64 << 20),
    ]
    return all([mallopt(name, value) for name, value in settings])


def use_virtual_devices(count: int) -> None:
    """Run on the CPU, divided into `count` devices; call it before a device is used."""
    import jax

    jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_platforms", "cpu")


def _has_cpu_devices(count: int) -> bool:
    """Whether an earlier run in this process has chosen this many virtual devices."""
    import jax

    return [device.platform for device in jax.local_devices()] == ["cpu"] * count


def check_address_space() -> None:
    """Refuse an address space limit (``ulimit -v``) with which JAX would crash."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _MIN_ADDRESS_SPACE:
        raise ConfigurationError(
            f"The address space of this process is limited to {limit / 1e9:.1f} GB, and "
            f"JAX crashes below {_MIN_ADDRESS_SPACE / 1e9:g} GB. Raise `ulimit -v`."
        )


def compile_cache_folder() -> Path:
    """Return the folder in the user's cache for programs compiled for an accelerator."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "millrace" / "compiled"
