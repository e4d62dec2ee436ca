"""``millrace launch``: start the processes of a run, watch and restart them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from millrace.config import ConfigurationError, parse
from millrace.distributed import environment as env
from millrace.distributed.hardware import (
    assign_gpus,
    find_free_port,
    get_port_error,
    numa_cores,
    pin_to_cores,
    uses_gpu,
)
from millrace.distributed.options import LaunchConfig, split_command
from millrace.distributed.signals import INTERRUPTED, STOP_SIGNALS, handle_signals

FAILED, WRONG_COMMAND = 1, 2
_POLL_SECONDS = 0.05
_MAX_PORTS = 3
_REPORT_SECONDS = 4.0
"""Time for a failed process to tell the others itself; it knows the reason."""
_GRACE_SECONDS = 10.0
"""Time for processes to exit before they are killed."""
_NOISE = re.compile(
    r"[EF]\d{4} .*(coordination_service|/client\.h|client\.h:)"
    r"|\*\*\* Check failure stack trace|    @ +0x|Additional GRPC error|:UNKNOWN:Error"
)
"""Lines that JAX and gRPC print when process 0 is gone. The launcher reports it better."""
_GREETING = "[Gloo] Rank "
_GREETING_PIECES = re.compile(
    rf"({re.escape(_GREETING)}|\d+| is connected to | peer ranks\. "
    r"|Expected number of connected peer ranks is : )*"
)
"""Pieces of the lines that Gloo prints at every start. Its threads interleave them."""


class Child(NamedTuple):
    """A process that the launcher has started."""

    number: int
    process: subprocess.Popen[bytes]
    pipe: int
    """The launcher writes the failures of other processes to this descriptor."""
    readers: list[threading.Thread]
    """Threads that copy the output of the process."""


class Failure(NamedTuple):
    """The first process that failed."""

    number: int
    status: int
    """Exit status of the launcher."""
    description: str
    was_killed: bool = False
    """Whether a signal killed it, so that it could not tell the others itself."""


class Launcher:
    """Starts the processes of a run, restarts them after failures, and waits for the end.

    Args:
        config: Number of processes and their resources.
        command: The command that each process runs.
    """

    def __init__(self, config: LaunchConfig, command: Sequence[str]) -> None:
        self._config = config
        self._command = _resolve_command(command)
        own = env.find_num_replicas(command) if config.num_replicas is None else None
        parsed = int(own) if own and own.isdigit() else None
        replicas = config.num_replicas or parsed or config.num_instances
        self._replicas_per_process = config.replicas_per_process(replicas)
        self._num_replicas = None if own else replicas
        """The number of replicas to pass on; None if the command has its own option."""
        self._num_signals = 0
        self._kill_time: float | None = None
        """When to kill processes that have ignored two signals."""
        self._children: list[Child] = []

    def run(self) -> int:
        """Run to the end; return 0, or the exit status of the first failure.

        The status is 1 if a signal killed the process.
        """
        with (
            tempfile.TemporaryDirectory(prefix="millrace-launch-") as folder,
            self._forward_signals(),
        ):
            restarts, max_restarts = 0, self._config.max_restarts
            while (failure := self._run_on_free_port(folder)) is not None:
                is_final = failure.status in (WRONG_COMMAND, INTERRUPTED)
                if self._num_signals or is_final or restarts == max_restarts:
                    return failure.status
                restarts += 1
                _report(f"restarting all processes ({restarts} of {max_restarts} restarts)")
        return 0

    def _run_on_free_port(self, folder: str) -> Failure | None:
        """Run once; retry if another program takes the port before the coordinator."""
        failure = None
        for _ in range(_MAX_PORTS):
            failure = self._run_once(folder)
            conflict = env.find_port_conflict(folder)
            if conflict is None or self._num_signals or self._config.port is not None:
                break
            conflict.unlink()
            _report("another program has taken the port; trying another port")
        return failure

    def _run_once(self, folder: str) -> Failure | None:
        self._children = []
        try:
            self._start_all(folder)
            failure = self._wait_for_failure()
            # Without a coordinator the others cannot shut down in order: kill them.
            kill_now = self._is_kill_time() or env.find_port_conflict(folder) is not None
            if failure is not None and not kill_now:
                self._stop_others(failure)
            return failure
        finally:
            for child in self._children:
                _kill(child)

    def _start_all(self, folder: str) -> None:
        count = self._config.num_instances
        coordinator = f"127.0.0.1:{self._find_port()}"
        nodes = numa_cores() if self._config.numa_aware else []
        if self._config.numa_aware and len(nodes) < 2:
            _report("this machine has one NUMA node; --numa-aware has no effect")
        for number in range(count):
            variables = self._get_variables(number, coordinator, folder)
            cores = nodes[number * len(nodes) // count] if len(nodes) > 1 else None
            with pin_to_cores(cores):
                self._children.append(self._start(number, variables))

    def _find_port(self) -> int:
        port = self._config.port
        if port is None:
            return find_free_port()
        # A single process has no coordinator, so the port does not matter.
        if self._config.num_instances > 1 and (error := get_port_error("127.0.0.1", port)):
            raise ConfigurationError(
                f"The coordinator cannot listen on port {port}: {error}. Choose another "
                "--port, or omit it to use any free port."
            )
        return port

    def _get_variables(self, number: int, coordinator: str, folder: str) -> dict[str, str]:
        """Return the environment variables of a process."""
        config, count = self._config, self._config.num_instances
        variables = {
            **os.environ,
            env.LAUNCH_DIR: folder,
            env.TIMEOUT: f"{config.timeout:g}",
        }
        if self._num_replicas is not None:
            variables[env.NUM_REPLICAS] = str(self._num_replicas)
        if count > 1:
            variables |= {
                env.COORDINATOR: coordinator,
                env.PROCESS_ID: str(number),
                env.NUM_PROCESSES: str(count),
            }
        devices = self._replicas_per_process * config.devices_per_replica
        if uses_gpu(os.environ):
            gpus = assign_gpus(number, count, devices, os.environ)
            variables["CUDA_VISIBLE_DEVICES"] = gpus
            variables.setdefault("NCCL_SOCKET_IFNAME", "lo")
        variables["JAX_NUM_CPU_DEVICES"] = str(devices)
        # A device count in the environment of the launcher is not for its processes.
        flags = os.environ.get("XLA_FLAGS", "").split()
        inherited = "--xla_force_host_platform_device_count"
        variables["XLA_FLAGS"] = " ".join(f for f in flags if not f.startswith(inherited))
        return variables

    def _start(self, number: int, variables: dict[str, str]) -> Child:
        # Process 0 writes to the terminal itself, for its progress bar.
        owns_terminal = number == 0 and sys.stderr.isatty()
        read_end, write_end = os.pipe()
        try:
            process = subprocess.Popen(
                self._command,
                env={**variables, env.LAUNCHER_PIPE: str(read_end)},
                stdin=subprocess.DEVNULL,
                stdout=None if owns_terminal else subprocess.PIPE,
                stderr=None if owns_terminal else subprocess.PIPE,
                pass_fds=(read_end,),
                # Otherwise Ctrl-C would arrive twice: from the terminal and from us.
                start_new_session=True,
            )
        except OSError as error:
            os.close(write_end)
            raise ConfigurationError(
                f"Cannot start {self._command[0]}: {error.strerror}."
            ) from error
        finally:
            os.close(read_end)
        streams = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)]
        readers = [
            threading.Thread(target=_copy_lines, args=(number, source, target), daemon=True)
            for source, target in streams
            if source is not None
        ]
        for reader in readers:
            reader.start()
        return Child(number, process, write_end, readers)

    def _wait_for_failure(self) -> Failure | None:
        """Wait until a process fails or all have succeeded."""
        running = list(self._children)
        while running:
            for child in list(running):
                status = child.process.poll()
                if status is None:
                    continue
                running.remove(child)
                if status:
                    return _get_failure(child, status, was_asked=bool(self._num_signals))
            if self._is_kill_time():
                number = running[0].number
                _report(
                    f"process {number} did not stop within {_GRACE_SECONDS:g} s; killing it"
                )
                return Failure(number, INTERRUPTED, "did not stop", was_killed=True)
            time.sleep(_POLL_SECONDS)
        return None

    def _is_kill_time(self) -> bool:
        return self._kill_time is not None and time.monotonic() > self._kill_time

    def _stop_others(self, failure: Failure) -> None:
        """Report the failure, tell the other processes, and wait for them to exit."""
        others = [child for child in self._children if child.process.poll() is None]
        if failure.status not in (WRONG_COMMAND, INTERRUPTED):
            stopping = "; stopping the others" if others else ""
            _report(f"process {failure.number} {failure.description}{stopping}")
        if failure.status == INTERRUPTED:
            # They were all asked to stop, and are saving a checkpoint together.
            return _wait_for_exit(others, self._config.timeout)
        if not failure.was_killed:
            _wait_for_exit(others, _REPORT_SECONDS)
        for child in others:
            with contextlib.suppress(OSError):
                line = f"Process {failure.number} {failure.description}.\n"
                os.write(child.pipe, line.encode())
        _wait_for_exit(others, _GRACE_SECONDS)

    def _forward_signals(self) -> contextlib.AbstractContextManager[None]:
        def forward(number: int, _: Any) -> None:
            self._num_signals += 1
            if self._num_signals == 2:
                self._kill_time = time.monotonic() + _GRACE_SECONDS
            for child in self._children:
                if child.process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        child.process.send_signal(number)

        return handle_signals(forward)


def _get_failure(child: Child, status: int, *, was_asked: bool) -> Failure:
    """Describe a failed process; `was_asked` tells whether a signal was forwarded to it."""
    pid = f"(pid {child.process.pid}) "
    if status >= 0:
        return Failure(child.number, status, f"{pid}failed with status {status}")
    try:
        name = signal.Signals(-status).name
    except ValueError:  # real-time signals have no names
        name = f"signal {-status}"
    # A command without signal handlers is killed by the signal that we forwarded.
    status = INTERRUPTED if was_asked and -status in STOP_SIGNALS else FAILED
    return Failure(child.number, status, f"{pid}was killed by {name}", was_killed=True)


def _wait_for_exit(children: Sequence[Child], seconds: float) -> None:
    """Wait until these processes have exited, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(child.process.poll() is not None for child in children):
            return
        time.sleep(_POLL_SECONDS)


def _kill(child: Child) -> None:
    """Kill a process if it still runs, and print the rest of its output."""
    # SIGKILL also ends a suspended process. The group includes what the process started.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait()
    for reader in child.readers:
        reader.join(timeout=2)
    os.close(child.pipe)


def _copy_lines(number: int, source: Any, target: Any) -> None:
    """Copy the output of a process, each line prefixed with its number.

    Reads to the end even if `target` is closed: once a pipe is full, the process that
    writes to it blocks.
    """
    with source:
        for line in _drop_noise(source):
            _print(f"[{number}] {line}", target)


def _drop_noise(source: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines that the process itself has printed, without those of libraries."""
    open_greetings = 0  # greetings whose end has not been read yet
    for raw in source:
        text = raw.decode(errors="replace").rstrip("\n")
        open_greetings += text.count(_GREETING)
        if open_greetings:
            pieces = _GREETING_PIECES.match(text)
            text = text[pieces.end() :] if pieces else text
            if not text:
                open_greetings -= 1
                continue
        if not _NOISE.match(text):
            yield text


def _report(text: str) -> None:
    _print(f"millrace launch: {text}", sys.stderr)


def _print(line: str, target: Any) -> None:
    """Print a line in one write; drop it if the terminal, pipe or log is gone."""
    with contextlib.suppress(OSError, ValueError):
        target.write(f"{line}\n")
        target.flush()


def _resolve_command(command: Sequence[str]) -> list[str]:
    """Run ``millrace`` with the Python of the launcher; leave other commands alone."""
    if command[0] == "millrace":
        return [sys.executable, "-m", "millrace", *command[1:]]
    return list(command)


def launch(args: Sequence[str]) -> int:
    """Start the processes that `args` describe; return the exit status."""
    own, command = split_command(args)
    config, _ = parse(LaunchConfig, own, program="millrace launch")
    if not command:
        raise ConfigurationError(
            "launch needs a command to start: millrace launch --num-instances 2 -- "
            "millrace cnn train ..."
        )
    return Launcher(config, command).run()
