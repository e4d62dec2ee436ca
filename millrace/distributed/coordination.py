"""Which process of a run this is, and how the processes agree on something.

Values are exchanged as JSON through the key-value store of the JAX coordinator. Unlike a
collective on devices, that works from any thread. A single process needs no store.
"""

import collections
import functools
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from millrace.config import ConfigurationError, as_plain, flat_options, option_value
from millrace.distributed import coordination
from millrace.distributed.addresses import choose_address, find_address_toward
from millrace.distributed.environment import (
    ProcessInfo,
    StartError,
    find_missing,
    record_cause,
    record_port_conflict,
    record_start,
)
from millrace.distributed.hardware import get_port_error, visible_gpus
from millrace.versions import versions

_log = logging.getLogger("millrace")

_MAX_DIFFERENCES = 5
_JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
"""Settings that change the compiled program."""
_NO_TIMEOUT_MS = 7 * 24 * 3600 * 1000
"""A week: waiting ends earlier, when ``heartbeat`` finds that a process is lost."""
_START_SECONDS = 300
"""How long a process waits for the others to start."""
_JAX_START_SECONDS = 330
"""When JAX would abort this process without saying why."""

# A key of the store can be set only once, so calls with the same name are numbered. They
# come from several threads.
_counts: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()


def process_id() -> int:
    """Return the number of this process; process 0 writes the run directory."""
    return _state().process_id or 0


def num_processes() -> int:
    """Return the number of processes of this run."""
    return _state().num_processes or 1


def is_first() -> bool:
    """Whether this is process 0, which writes the run directory and reports progress."""
    return process_id() == 0


def join(info: ProcessInfo | None) -> bool:
    """Connect to the other processes of this run; return whether there are any.

    Must be called before any device is used.
    """
    if info is None or _state().client is not None:
        return num_processes() > 1
    # JAX would install its own handler for SIGTERM, and no checkpoint would be saved.
    jax.config.update("jax_enable_preemption_service", False)
    bind = info.coordinator if info.is_local else None
    if info.process_id == 0 and info.coordinator is not None:
        option = "JAX_COORDINATOR_PORT" if info.cluster == "Slurm" else "--coordinator"
        _check_port(bind or f"0.0.0.0:{info.coordinator.rpartition(':')[2]}", option)
    if info.process_id is not None:
        record_start(info.process_id)
    try:
        has_joined = _call_in_thread(
            jax.distributed.initialize,
            info.coordinator,
            info.num_processes,
            info.process_id,
            coordinator_bind_address=bind,
            local_device_ids=_own_gpus() if info.has_own_gpus else None,
            cluster_detection_method=None if info.cluster else "deactivate",
            initialization_timeout=_JAX_START_SECONDS,
        )
    except ValueError as error:
        advice = " (pip install 'jax[k8s]')" if info.cluster == "Kubernetes" else ""
        raise ConfigurationError(
            f"JAX cannot find the processes started by {info.cluster}{advice}: {error} "
            "Pass --coordinator, --process-id and --num-processes."
        ) from error
    if not has_joined:
        raise _describe_missing(info)
    return num_processes() > 1


def _describe_missing(info: ProcessInfo) -> StartError:
    """Return an error about the processes that have not started; tell the launcher."""
    missing = find_missing(info.num_processes or 1)
    if missing:
        record_cause(missing[0])
        who = "Process {} has" if len(missing) == 1 else "Processes {} have"
        numbers = ", ".join(map(str, missing))
        return StartError(f"{who.format(numbers)} not started within {_START_SECONDS} s.")
    return StartError(
        f"The processes of this run have not found one another within {_START_SECONDS} s. "
        f"Have all been started, and do they reach {info.coordinator or 'process 0'}?"
    )


def _own_gpus() -> list[int] | None:
    """Return the numbers of all GPUs that this process sees; None if there are none."""
    return list(range(len(visible_gpus(os.environ)))) or None


def _call_in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Call `function` in another thread, so that the main thread can handle signals.

    JAX waits minutes for the other processes in C++, where Python runs no signal handler.
    Returns whether the call has ended in time.
    """
    errors: list[Exception] = []

    def call() -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="millrace-join", daemon=True)
    thread.start()
    thread.join(_START_SECONDS)
    if errors:
        raise errors[0]
    return not thread.is_alive()


def _check_port(address: str, option: str) -> None:
    """Raise if another program listens on `address`; JAX would crash."""
    host, _, port = address.rpartition(":")
    if (reason := get_port_error(host, int(port))) is not None:
        record_port_conflict()
        raise ConfigurationError(
            f"The coordinator cannot listen on {address}: {reason}. Choose another port "
            f"with {option}."
        )


@functools.cache  # once: the processes exchange their addresses
def bind_gloo() -> None:
    """Make Gloo, which connects CPU devices, listen on an address that the others reach.

    By default it listens on the address of the host name. That is more than a loopback
    needs, and may be a loopback when other machines need more. JAX has no setting for it,
    so this replaces its factory of the CPU backend. All processes must call it.
    """
    address = _find_gloo_address(_state().coordinator_address)
    if address is None:
        return
    try:
        from jax._src import xla_bridge
        from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

        collectives = _jax.make_gloo_tcp_collectives(
            distributed_client=_state().client, hostname=address
        )
        xla_bridge.register_backend_factory(
            "cpu",
            functools.partial(xla_bridge.make_cpu_client, collectives),
            priority=0,
            fail_quietly=False,
        )
    except (ImportError, AttributeError, TypeError):
        _log.warning("Gloo listens on the address of the host name, not on %s.", address)


def _find_gloo_address(coordinator: str) -> str | None:
    if ProcessInfo(coordinator, None, None).is_local:
        return "127.0.0.1"
    own = find_address_toward(coordinator.rpartition(":")[0])
    return choose_address(own, gather("addresses", own))


def gather(name: str, value: Any) -> list[Any]:
    """Return the values of all processes in order; all of them must call it.

    Args:
        name: Matches the calls of the processes, which must make those with one name in
            the same order.
        value: Anything that JSON can hold.
    """
    if num_processes() == 1:
        return [value]
    prefix = f"millrace/gather/{name}/{_next_number(name)}"
    client = _state().client
    client.key_value_set(f"{prefix}/{process_id()}", json.dumps(value))
    texts = [
        client.blocking_key_value_get(f"{prefix}/{rank}", _NO_TIMEOUT_MS)
        for rank in range(num_processes())
    ]
    return [json.loads(text) for text in texts]


def broadcast(name: str, value: Any) -> Any:
    """Return the `value` of process 0 in all processes."""
    if num_processes() == 1:
        return value
    key = f"millrace/first/{name}/{_next_number(name)}"
    if is_first():
        _state().client.key_value_set(key, json.dumps(value))
        return value
    return json.loads(_state().client.blocking_key_value_get(key, _NO_TIMEOUT_MS))


def barrier(name: str) -> None:
    """Wait until all processes have called it."""
    gather(f"barrier-{name}", None)


def _next_number(name: str) -> int:
    with _lock:
        _counts[name] += 1
        return _counts[name]


class CoordinatedStop:
    """Makes all processes stop after the same update once one of them should stop.

    A process is at most two calls ahead of another: with more in flight it waits for the
    oldest, whose collectives wait for all processes. So a process that is asked to stop
    picks the update two executions later, and no other process can be past it.

    Args:
        updates_per_execution: Updates between two calls of ``should_stop``.
    """

    def __init__(self, updates_per_execution: int) -> None:
        self._ahead = 2 * updates_per_execution
        self._key = f"millrace/stop/{_next_number('stop')}"
        self._last_update: int | None = None

    def should_stop(self, update: int, *, requested: bool) -> bool:
        """Whether to stop after `update`; `requested` concerns this process only."""
        if num_processes() == 1:
            return requested
        if self._last_update is None:
            self._last_update = self._agree(update, requested)
        return self._last_update is not None and update >= self._last_update

    def _agree(self, update: int, requested: bool) -> int | None:
        client = _state().client
        if requested:
            try:
                client.key_value_set(self._key, str(update + self._ahead))
            except jax.errors.JaxRuntimeError:
                pass  # another process was first: its update counts
            return int(client.blocking_key_value_get(self._key, _NO_TIMEOUT_MS))
        try:
            return int(client.key_value_try_get(self._key))
        except jax.errors.JaxRuntimeError:  # nobody has asked to stop
            return None


def store() -> Any:
    """Return the client of the key-value store; None for a single process."""
    return _state().client


def _state() -> Any:
    # JAX has no public name for this; orbax uses it too.
    from jax._src import distributed

    return distributed.global_state


def check_same_start(options: Any, command: str) -> None:
    """Raise if the processes were started with different options or software."""
    check_same(
        "start",
        {"command": command, **_get_options(options), **_get_software()},
        "Start all processes with the same options and software.",
    )


def check_same_data(facts: Mapping[str, Any]) -> None:
    """Raise if the processes describe their data differently, such as its size.

    Args:
        facts: Description of the run. Paths in it may differ.
    """
    without_paths = {
        name: re.sub(r"(?<!\S)\(?/[^\s,)]+", "PATH", str(fact))
        for name, fact in facts.items()
    }
    check_same("data", without_paths, "Give all processes the same data.")


def check_same(name: str, own: Mapping[str, Any], advice: str) -> None:
    """Raise the same error in all processes if the values of one differ from process 0.

    Args:
        name: Name of the check, unique within a run.
        own: The values of this process by name, serializable as JSON.
        advice: What to do about a difference.
    """
    if coordination.num_processes() == 1:
        return
    first = coordination.broadcast(f"same-{name}", dict(own))
    differences = [
        f"{key} is {_format(own, key)} instead of {_format(first, key)}"
        for key in dict.fromkeys([*first, *own])
        if _format(own, key) != _format(first, key)
    ]
    # All processes must raise: one that went on would wait for the others forever.
    gathered = coordination.gather(f"same-{name}", differences[:_MAX_DIFFERENCES])
    for number, found in enumerate(gathered):
        if found:
            raise ConfigurationError(
                f"Process {number} differs from process 0: {'; '.join(found)}. {advice}"
            )


def _format(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], sort_keys=True) if key in values else "missing"


def _get_options(options: Any) -> dict[str, Any]:
    """Return the options that must be the same in all processes.

    Paths are only compared as given or not: every machine may keep the data elsewhere.
    """
    plain = as_plain(options)
    return {
        name: "a path" if isinstance(option_value(options, name), Path) else plain[name]
        for name, option in flat_options(type(options)).items()
        if not option.metadata.get("may_differ")
        and not option.metadata.get("without_effect")
    }


def _get_software() -> dict[str, Any]:
    packages = {
        f"the version of {package}": version
        for package, version in versions().items()
        if package != "python"
    }
    settings = {name: str(getattr(jax.config, name, None)) for name in _JAX_SETTINGS}
    return packages | {"the source code of millrace": _source_digest()} | settings


def _source_digest() -> str:
    """Return a short digest of the source code of this package.

    Two checkouts can have the same version number and still compile different programs.
    """
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
