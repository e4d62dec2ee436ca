"""``millrace launch``: start the processes of a run, watch and restart them."""

import contextlib
import functools
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
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
from millrace.distributed.membership import Membership
from millrace.distributed.options import LaunchConfig, split_command
from millrace.distributed.progress import try_briefly
from millrace.distributed.relay import copy_lines, print_line
from millrace.distributed.signals import INTERRUPTED, STOP_SIGNALS, handle_signals
from millrace.numbers import pluralize

FAILED, WRONG_COMMAND = 1, 2
_POLL_SECONDS = 0.05
_CHECK_SECONDS = 1.0
_MAX_PORTS = 3
_REPORT_SECONDS = 4.0
"""Time for a failed process to tell the others itself; it knows the reason."""
_GRACE_SECONDS = 10.0
"""Time for processes to exit before they are killed."""


class Child(NamedTuple):
    """A process that the launcher has started."""

    number: int
    slot: int
    """Its devices and cores; its number, unless processes of an elastic run are absent."""
    process: subprocess.Popen[bytes]
    pipe: int
    """The launcher writes the failures of other processes to this descriptor."""
    readers: list[threading.Thread]
    """Threads that copy the output of the process."""


class Failure(NamedTuple):
    """The first process that failed."""

    number: int
    slot: int
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
        least, most = config.process_range
        replicas = config.num_replicas or parsed or most
        self._replicas_per_process = config.replicas_per_process(replicas)
        self._num_replicas = None if own else replicas
        """The number of replicas to pass on; None if the command has its own option."""
        self._membership = Membership(least, most, config.return_after or math.inf)
        self._is_returning = False
        """Whether all processes were asked to stop, so that absent ones can return."""
        self._num_restarts = 0
        """Restarts after failures."""
        self._num_signals = 0
        self._unsent: list[int] = []
        """Signals that arrived before all processes were there to get them."""
        self._are_started = False
        self._kill_time: float | None = None
        """When to kill processes that have ignored two signals."""
        self._children: list[Child] = []
        self._suspended: dict[int, float] = {}
        """When processes were first seen suspended, by pid."""
        self._checked_at = 0.0
        self._folder = ""

    def run(self) -> int:
        """Run to the end; return 0, or the exit status of the first failure.

        The status is 1 if a signal killed the process.
        """
        with (
            tempfile.TemporaryDirectory(prefix="millrace-launch-") as folder,
            self._forward_signals(),
        ):
            self._folder = folder
            while True:
                progress = env.read_progress(folder)
                failure = self._run_on_free_port(folder)
                if failure is None:
                    return 0
                made_progress = env.read_progress(folder) != progress
                if not self._may_restart(failure, made_progress):
                    return failure.status

    def _may_restart(self, failure: Failure, made_progress: bool) -> bool:
        """Decide with which processes to start again, if at all."""
        is_stopped = self._is_returning and failure.status == INTERRUPTED
        if is_stopped and not self._num_signals:
            returned = self._membership.return_absent()
            self._report(f"trying again with {_list_processes(returned)}")
            self._is_returning = False
            return True
        self._is_returning = False
        is_indivisible = env.pop_indivisible(self._folder)
        is_final = failure.status in (WRONG_COMMAND, INTERRUPTED) and not is_indivisible
        if self._num_signals or is_final:
            return False
        if self._config.elastic is None or self._config.max_restarts:
            at_most = self._config.max_restarts
            if self._num_restarts >= at_most:
                return False
            self._num_restarts += 1
            self._report(
                f"restarting all processes ({self._num_restarts} of {at_most} restarts)"
            )
        if self._config.elastic is None:
            return True
        return self._choose_members(failure, is_indivisible, made_progress)

    def _choose_members(
        self, failure: Failure, is_indivisible: bool, made_progress: bool
    ) -> bool:
        """Leave out processes that cannot come back; return whether enough are left."""
        members, now = self._membership, time.monotonic()
        if is_indivisible:
            members.rest(now)
            event = "they cannot share the global batch"
        elif members.record_failure(failure.slot, made_progress=made_progress, now=now):
            event = f"continuing without {_list_processes(members.absent)}"
        else:
            event = "starting all of them again"
        count = pluralize(len(members.slots), "process")
        if not members.has_enough:
            self._report(f"{event}; {count} left, fewer than {members.least}")
            return False
        self._report(f"{event}: {count}, from the last checkpoint")
        return True

    def _run_on_free_port(self, folder: str) -> Failure | None:
        """Run once; retry if another program takes the port before the coordinator."""
        failure = None
        for _ in range(_MAX_PORTS):
            failure = self._run_once(folder)
            conflict = env.find_port_conflict(folder)
            if conflict is None or self._num_signals or self._config.port is not None:
                break
            conflict.unlink()
            self._report("another program has taken the port; trying another port")
        return failure

    def _run_once(self, folder: str) -> Failure | None:
        self._children = []
        env.pop_cause(folder)  # of an earlier start
        env.forget_starts(folder)
        try:
            self._start_all(folder)
            self._are_started = True
            self._send_signals()
            failure = self._find_cause(self._wait_for_failure(), folder)
            # Without a coordinator the others cannot shut down in order: kill them.
            kill_now = self._is_kill_time() or env.find_port_conflict(folder) is not None
            if failure is not None and not kill_now:
                self._stop_others(failure)
            return failure
        finally:
            self._are_started = False
            for child in self._children:
                _kill(child)

    def _start_all(self, folder: str) -> None:
        most = self._membership.most
        coordinator = f"127.0.0.1:{self._find_port()}"
        nodes = numa_cores() if self._config.numa_aware else []
        if self._config.numa_aware and len(nodes) < 2:
            self._report("this machine has one NUMA node; --numa-aware has no effect")
        for number, slot in enumerate(self._membership.slots):
            variables = self._get_variables(number, coordinator, folder)
            cores = nodes[slot * len(nodes) // most] if len(nodes) > 1 else None
            with pin_to_cores(cores):
                self._children.append(self._start(number, slot, variables))

    def _find_port(self) -> int:
        port = self._config.port
        if port is None:
            return find_free_port()
        # A single process has no coordinator, so the port does not matter.
        if self._membership.most > 1 and (error := get_port_error("127.0.0.1", port)):
            raise ConfigurationError(
                f"The coordinator cannot listen on port {port}: {error}. Choose another "
                "--port, or omit it to use any free port."
            )
        return port

    def _get_variables(self, number: int, coordinator: str, folder: str) -> dict[str, str]:
        """Return the environment variables of a process."""
        config, members = self._config, self._membership
        count, slot = len(members.slots), members.slots[number]
        variables = {
            **os.environ,
            env.LAUNCH_DIR: folder,
            env.SLOT: str(slot),
            env.TIMEOUT: f"{config.timeout:g}",
        }
        if config.elastic is not None:
            variables[env.ELASTIC] = f"{count}/{members.most}"
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
            gpus = assign_gpus(slot, members.most, devices, os.environ)
            variables["CUDA_VISIBLE_DEVICES"] = gpus
            variables.setdefault("NCCL_SOCKET_IFNAME", "lo")
        variables["JAX_NUM_CPU_DEVICES"] = str(devices)
        # A device count in the environment of the launcher is not for its processes.
        flags = os.environ.get("XLA_FLAGS", "").split()
        inherited = "--xla_force_host_platform_device_count"
        variables["XLA_FLAGS"] = " ".join(f for f in flags if not f.startswith(inherited))
        return variables

    def _start(self, number: int, slot: int, variables: dict[str, str]) -> Child:
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
            threading.Thread(target=copy_lines, args=(number, source, target), daemon=True)
            for source, target in streams
            if source is not None
        ]
        for reader in readers:
            reader.start()
        return Child(number, slot, process, write_end, readers)

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
                    return _get_failure(child, status, was_asked=self._were_asked)
            if self._is_kill_time():
                first = running[0]
                self._report(
                    f"process {first.number} did not stop within {_GRACE_SECONDS:g} s; "
                    "killing it"
                )
                own = first.number, first.slot
                return Failure(*own, INTERRUPTED, "did not stop", was_killed=True)
            if (failure := self._find_suspended(running)) is not None:
                return failure
            self._make_room_for_returning()
            time.sleep(_POLL_SECONDS)
        return None

    def _find_suspended(self, running: Sequence[Child]) -> Failure | None:
        """Kill a process that is suspended while no other one is left to notice."""
        now = time.monotonic()
        if now < self._checked_at + _CHECK_SECONDS:
            return None
        if now > self._checked_at + self._config.timeout / 2:
            self._suspended.clear()  # the launcher was suspended itself
        self._checked_at = now
        pids = [child.process.pid for child in running]
        since = {pid: self._suspended.get(pid, now) for pid in pids if _is_suspended(pid)}
        self._suspended = since
        limit = self._config.timeout + _REPORT_SECONDS  # others would have ended by then
        for child in running:
            if now - since.get(child.process.pid, now) > limit:
                _signal_group(child, signal.SIGKILL)
                text = f"(pid {child.process.pid}) was suspended for {limit:.0f} s"
                return Failure(child.number, child.slot, FAILED, text, was_killed=True)
        return None

    def _find_cause(self, failure: Failure | None, folder: str) -> Failure | None:
        """Return the failure of the process for which the first one has ended, if any."""
        cause = env.pop_cause(folder)
        if failure is None or cause in (None, failure.number):
            return failure
        child = self._children[cause]
        _wait_for_exit([child], _REPORT_SECONDS)
        if status := child.process.poll():
            return _get_failure(child, status, was_asked=self._were_asked)
        # It is suspended, and would not read that it should stop.
        _signal_group(child, signal.SIGKILL)
        text = f"(pid {child.process.pid}) did not answer"
        return Failure(child.number, child.slot, FAILED, text, was_killed=True)

    def _make_room_for_returning(self) -> None:
        """Ask all processes to save a checkpoint and stop, when absent ones may return."""
        due = self._membership.is_return_due(time.monotonic())
        if due and not self._is_returning and not self._num_signals:
            absent = _list_processes(self._membership.absent)
            self._report(f"saving a checkpoint, to try again with {absent}")
            self._is_returning = True
            self._unsent.append(signal.SIGTERM)
            self._send_signals()

    @property
    def _were_asked(self) -> bool:
        """Whether a signal was sent to the processes."""
        return bool(self._num_signals) or self._is_returning

    def _is_kill_time(self) -> bool:
        return self._kill_time is not None and time.monotonic() > self._kill_time

    def _stop_others(self, failure: Failure) -> None:
        """Report the failure, tell the other processes, and wait for them to exit."""
        others = [child for child in self._children if child.process.poll() is None]
        if failure.status not in (WRONG_COMMAND, INTERRUPTED):
            stopping = "; stopping the others" if others else ""
            self._report(f"process {failure.number} {failure.description}{stopping}")
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
            if self._is_returning and self._num_signals == 1:
                return  # they have been asked to stop, and a second signal is for killing
            self._unsent.append(number)
            if self._are_started:
                self._send_signals()

        return handle_signals(forward)

    def _send_signals(self) -> None:
        while self._unsent:
            number = self._unsent.pop(0)
            for child in self._children:
                if child.process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        child.process.send_signal(number)

    def _report(self, text: str) -> None:
        """Print a line, and keep it with the time in the run directory."""
        print_line(f"millrace launch: {text}", sys.stderr)
        if (directory := env.find_run_directory(self._folder)) is not None:
            # A file server that hangs must not keep the launcher from ending processes.
            try_briefly(functools.partial(_append_line, directory / "launch.log", text))


def _append_line(path: Path, text: str) -> None:
    with contextlib.suppress(OSError), path.open("a") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")


def _get_failure(child: Child, status: int, *, was_asked: bool) -> Failure:
    """Describe a failed process; `was_asked` tells whether a signal was forwarded to it."""
    pid = f"(pid {child.process.pid}) "
    own = child.number, child.slot
    if status >= 0:
        return Failure(*own, status, f"{pid}failed with status {status}")
    try:
        name = signal.Signals(-status).name
    except ValueError:  # real-time signals have no names
        name = f"signal {-status}"
    # A command without signal handlers is killed by the signal that we forwarded.
    status = INTERRUPTED if was_asked and -status in STOP_SIGNALS else FAILED
    return Failure(*own, status, f"{pid}was killed by {name}", was_killed=True)


def _list_processes(slots: Sequence[int]) -> str:
    """Return the names of processes, by the numbers that they were started with."""
    plural = "es" if len(slots) > 1 else ""
    return f"process{plural} {', '.join(map(str, slots))}"


def _wait_for_exit(children: Sequence[Child], seconds: float) -> None:
    """Wait until these processes have exited, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(child.process.poll() is not None for child in children):
            return
        time.sleep(_POLL_SECONDS)


def _kill(child: Child) -> None:
    """Kill a process if it still runs, and print the rest of its output."""
    # SIGKILL also ends a suspended process.
    _signal_group(child, signal.SIGKILL)
    child.process.wait()
    for reader in child.readers:
        reader.join(timeout=2)
    os.close(child.pipe)


def _is_suspended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended, or this is not Linux
        return False
    return state == "T"


def _signal_group(child: Child, number: int) -> None:
    """Send a signal to a process and to what it has started, if they still run."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)


def _resolve_command(command: Sequence[str]) -> list[str]:
    """Run ``millrace`` with the Python of the launcher; leave other commands alone."""
    if command[0] == "millrace":
        return [sys.executable, "-m", "millrace", *command[1:]]
    return list(command)


def launch(
    args: Sequence[str], resolve: Callable[[Sequence[str]], list[str]] = list
) -> int:
    """Start the processes that `args` describe; return the exit status.

    Args:
        args: Options of the launcher, and the command to start.
        resolve: Returns the command line that a command stands for.
    """
    own, command = split_command(args)
    config, _ = parse(LaunchConfig, own, program="millrace launch")
    if not command:
        raise ConfigurationError(
            "launch needs a command to start: millrace launch --num-instances 2 -- "
            "cnn train ..."
        )
    return Launcher(config, resolve(command)).run()
