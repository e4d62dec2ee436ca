"""The processes of a run: which of them this is, and how all come to agree.

What they tell one another goes through the coordinator's key-value store, as JSON; it
may be said from any thread, unlike what goes through the devices. A process alone agrees
with itself, at no cost.
"""

import collections
import functools
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import jax

from millrace.config import ConfigurationError
from millrace.distributed.environment import ProcessInfo, note_taken_port
from millrace.distributed.ports import why_not_free

_log = logging.getLogger("millrace")

_FOREVER_MS = 7 * 24 * 3600 * 1000
"""A process that is gone is noticed by ``peers``, which ends the waiting."""

_counts: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()


def process_id() -> int:
    """Return this process's number; 0 is the one that owns what is written."""
    return _state().process_id or 0


def num_processes() -> int:
    """Count the processes."""
    return _state().num_processes or 1


def is_first() -> bool:
    """Whether this process writes the run directory and talks to the user."""
    return process_id() == 0


def join(place: ProcessInfo | None) -> bool:
    """Take part in the processes of this run; return whether there are several.

    Must come before any device is used.
    """
    if place is None or _state().client is not None:
        return num_processes() > 1
    # JAX would take SIGTERM for itself, and nobody would save a checkpoint.
    jax.config.update("jax_enable_preemption_service", False)
    bind = place.coordinator if place.is_local else None
    if place.process_id == 0 and place.coordinator is not None:
        _check_free(bind or f"0.0.0.0:{place.coordinator.rpartition(':')[2]}")
    try:
        _interruptibly(
            jax.distributed.initialize,
            place.coordinator,
            place.num_processes,
            place.process_id,
            coordinator_bind_address=bind,
            cluster_detection_method=None if place.cluster else "deactivate",
        )
    except ValueError as error:
        raise ConfigurationError(_not_found(place, error)) from error
    if place.is_local:
        _keep_on_loopback()
    return num_processes() > 1


def _interruptibly(function: Callable[..., Any], *args: Any, **named: Any) -> None:
    """Call `function` on a thread of its own, so that this one hears signals meanwhile.

    JAX waits for the other processes for minutes, in C++, where no handler is called.
    """
    errors: list[Exception] = []

    def call() -> None:
        try:
            function(*args, **named)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="millrace-join", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _check_free(address: str) -> None:
    """Refuse an address that another program listens on; JAX would crash."""
    host, _, port = address.rpartition(":")
    if (reason := why_not_free(host, int(port))) is not None:
        note_taken_port()
        raise ConfigurationError(
            f"The coordinator cannot listen on {address}: {reason}. Choose another port in "
            "--coordinator."
        )


def _not_found(place: ProcessInfo, error: ValueError) -> str:
    advice = " (pip install 'jax[k8s]')" if place.cluster == "Kubernetes" else ""
    return (
        f"JAX does not find the processes that {place.cluster} started{advice}: {error} "
        "Say where they are with --coordinator, --process-id and --num-processes."
    )


def _keep_on_loopback() -> None:
    """Let Gloo listen on the loopback only; by default it takes what the host's name is."""
    try:
        from jax._src import xla_bridge
        from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

        collectives = _jax.make_gloo_tcp_collectives(
            distributed_client=_state().client, hostname="127.0.0.1"
        )
        xla_bridge.register_backend_factory(
            "cpu",
            functools.partial(xla_bridge.make_cpu_client, collectives),
            priority=0,
            fail_quietly=False,
        )
    except (ImportError, AttributeError, TypeError):
        _log.warning("Gloo listens on the address of this host's name, not the loopback.")


def gather(name: str, value: Any) -> list[Any]:
    """Return what every process says, in their order; all must ask for it.

    Args:
        name: What it is about; calls with one name follow one another in every process.
        value: Anything JSON can hold.
    """
    if num_processes() == 1:
        return [value]
    prefix = f"millrace/gather/{name}/{_number(name)}"
    client = _state().client
    client.key_value_set(f"{prefix}/{process_id()}", json.dumps(value))
    texts = [
        client.blocking_key_value_get(f"{prefix}/{rank}", _FOREVER_MS)
        for rank in range(num_processes())
    ]
    return [json.loads(text) for text in texts]


def broadcast(name: str, value: Any) -> Any:
    """Return what process 0 says; the others' `value` does not matter."""
    if num_processes() == 1:
        return value
    key = f"millrace/first/{name}/{_number(name)}"
    if is_first():
        _state().client.key_value_set(key, json.dumps(value))
        return value
    return json.loads(_state().client.blocking_key_value_get(key, _FOREVER_MS))


def barrier(name: str) -> None:
    """Wait until every process has come here."""
    gather(f"barrier-{name}", None)


def _number(name: str) -> int:
    with _lock:
        _counts[name] += 1
        return _counts[name]


class StopPoint:
    """The update after which all processes stop, once one of them is asked to.

    Processes run ahead of one another by two calls at most: one that has more under way
    waits for them, and they for all processes. So whoever is asked to stop names an
    update two executions on, and every process comes to know it before it gets there.

    Args:
        updates_per_execution: Processes look at the stop point between executions.
    """

    def __init__(self, updates_per_execution: int) -> None:
        self._ahead = 2 * updates_per_execution
        self._key = f"millrace/stop/{_number('stop')}"
        self._agreed: int | None = None

    def reached(self, done: int, *, asked: bool) -> bool:
        """Tell whether to stop after `done` updates; `asked` is of this process alone."""
        if num_processes() == 1:
            return asked
        if self._agreed is None:
            self._agreed = self._look(done, asked)
        return self._agreed is not None and done >= self._agreed

    def _look(self, done: int, asked: bool) -> int | None:
        client = _state().client
        if asked:
            try:
                client.key_value_set(self._key, str(done + self._ahead))
            except jax.errors.JaxRuntimeError:
                pass  # another process was asked as well, and came first
            return int(client.blocking_key_value_get(self._key, _FOREVER_MS))
        try:
            return int(client.key_value_try_get(self._key))
        except jax.errors.JaxRuntimeError:
            return None


def store() -> Any:
    """Return the key-value store's client; None for a process alone."""
    return _state().client


def _state() -> Any:
    # JAX has no public name for its client; orbax takes it from here as well.
    from jax._src import distributed

    return distributed.global_state
