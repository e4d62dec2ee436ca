"""``millrace launch``: several processes of one command, watched as one run."""

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

from millrace.config import ConfigurationError
from millrace.distributed import environment as env
from millrace.distributed.affinity import bound_to, cores_of_nodes
from millrace.distributed.hardware import gpus_for, uses_gpu
from millrace.distributed.options import LaunchConfig
from millrace.distributed.ports import free_port, why_not_free
from millrace.distributed.signals import ASKED_TO_STOP, handling

FAILED, WRONG_COMMAND, INTERRUPTED = 1, 2, 130
_POLL_SECONDS = 0.05
_MOST_PORTS = 3
_TELLING_SECONDS = 4.0
"""For processes to hear from the failed one itself what has happened."""
_GRACE_SECONDS = 10.0
"""For processes that have been told to go, before they are killed."""
_NOISE = re.compile(
    r"[EF]\d{4} .*(coordination_service|/client\.h|client\.h:)"
    r"|\*\*\* Check failure stack trace|    @ +0x|Additional GRPC error|:UNKNOWN:Error"
)
"""What libraries below print when the first process is gone: that one is named by us."""
_GREETING = "[Gloo] Rank "
_GREETING_PIECES = re.compile(
    rf"({re.escape(_GREETING)}|\d+| is connected to | peer ranks\. "
    r"|Expected number of connected peer ranks is : )*"
)
"""What Gloo prints at every start, piece by piece: its threads cut in on each other."""


class Instance(NamedTuple):
    """A process, the pipe on which it is told of others, and who copies its output."""

    number: int
    process: subprocess.Popen[bytes]
    pipe: int
    readers: list[threading.Thread]


class Failure(NamedTuple):
    """The first instance that did not end well, and how it ended."""

    number: int
    status: int
    """With which the launcher is to exit."""
    how: str
    killed: bool = False
    """By a signal, so that it could not tell the others itself."""


class Launcher:
    """Starts the processes, again if need be, and waits for them.

    Args:
        config: How many, and what they get.
        command: What each of them runs.
    """

    def __init__(self, config: LaunchConfig, command: Sequence[str]) -> None:
        self._config = config
        self._command = _executable(command)
        asked = env.given_replicas(command) if config.num_replicas is None else None
        given = int(asked) if asked and asked.isdigit() else None
        replicas = config.num_replicas or given or config.num_instances
        self._per_instance = config.replicas_per_instance(replicas)
        self._tell_replicas = None if asked else replicas
        self._signals = 0
        self._last_chance: float | None = None
        """When processes that have been told twice to stop are killed."""
        self._instances: list[Instance] = []

    def run(self) -> int:
        """Run to the end; return the exit status of the first failure, 0 without one.

        An instance that is killed by a signal has failed: 1.
        """
        with tempfile.TemporaryDirectory(prefix="millrace-launch-") as folder:
            with self._passing_signals_on():
                most = self._config.max_restarts
                restarts = 0
                while (failure := self._once_on_a_free_port(folder)) is not None:
                    for_good = failure.status in (WRONG_COMMAND, INTERRUPTED)
                    if self._signals or for_good or restarts == most:
                        return failure.status
                    restarts += 1
                    _say(f"starting again ({restarts} of {most} restarts)")
        return 0

    def _once_on_a_free_port(self, folder: str) -> Failure | None:
        """Run once; with another port if someone takes ours before the coordinator does."""
        failure = None
        for _ in range(_MOST_PORTS):
            failure = self._once(folder)
            note = env.noted_taken_port(folder)
            if note is None or self._signals or self._config.port is not None:
                break
            note.unlink()
            _say("another program has taken the port; trying another one")
        return failure

    def _once(self, folder: str) -> Failure | None:
        self._instances = []
        try:
            self._start_all(folder)
            failure = self._first_failure()
            # Without a coordinator, the others have nothing to end in order.
            hopeless = self._is_overdue() or env.noted_taken_port(folder) is not None
            if failure is not None and not hopeless:
                self._end_the_others(failure)
            return failure
        finally:
            for instance in self._instances:
                _kill(instance)

    def _start_all(self, folder: str) -> None:
        count = self._config.num_instances
        coordinator = f"127.0.0.1:{self._port()}"
        nodes = cores_of_nodes() if self._config.numa_aware else []
        if self._config.numa_aware and len(nodes) < 2:
            _say("there is one NUMA node: numa-aware changes nothing here")
        for number in range(count):
            variables = self._variables(number, coordinator, folder)
            cores = nodes[number * len(nodes) // count] if len(nodes) > 1 else None
            with bound_to(cores):
                self._instances.append(self._start(number, variables))

    def _port(self) -> int:
        """Return the coordinator's port, which must be free if there is a coordinator."""
        port = self._config.port
        if port is None:
            return free_port()
        if self._config.num_instances > 1 and (reason := why_not_free("127.0.0.1", port)):
            raise ConfigurationError(
                f"The coordinator cannot listen on port {port}: {reason}. Choose another "
                "--port, or leave it out: a free one is taken."
            )
        return port

    def _variables(self, number: int, coordinator: str, folder: str) -> dict[str, str]:
        """Return the environment of an instance."""
        config, count = self._config, self._config.num_instances
        variables = {
            **os.environ,
            env.LAUNCH_DIR: folder,
            env.PATIENCE: f"{config.patience:g}",
        }
        if self._tell_replicas is not None:
            variables[env.NUM_REPLICAS] = str(self._tell_replicas)
        if count > 1:
            variables |= {
                env.COORDINATOR: coordinator,
                env.PROCESS_ID: str(number),
                env.NUM_PROCESSES: str(count),
            }
        devices = self._per_instance * config.devices_per_replica
        if uses_gpu(os.environ):
            variables["CUDA_VISIBLE_DEVICES"] = gpus_for(number, count, devices, os.environ)
            variables.setdefault("NCCL_SOCKET_IFNAME", "lo")
        variables["JAX_NUM_CPU_DEVICES"] = str(devices)
        variables["XLA_FLAGS"] = _without_device_count(os.environ.get("XLA_FLAGS", ""))
        return variables

    def _start(self, number: int, variables: dict[str, str]) -> Instance:
        # The first instance has the terminal to itself, for its progress bar.
        owns_terminal = number == 0 and sys.stderr.isatty()
        told, tell = os.pipe()
        try:
            process = subprocess.Popen(
                self._command,
                env={**variables, env.LAUNCHER_PIPE: str(told)},
                stdin=subprocess.DEVNULL,
                stdout=None if owns_terminal else subprocess.PIPE,
                stderr=None if owns_terminal else subprocess.PIPE,
                pass_fds=(told,),
                # Ctrl-C in the terminal is ours to pass on, once.
                start_new_session=True,
            )
        except OSError as error:
            os.close(tell)
            raise ConfigurationError(
                f"Cannot start {self._command[0]}: {error.strerror}."
            ) from error
        finally:
            os.close(told)
        pairs = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)]
        readers = [
            threading.Thread(target=_copy_lines, args=(number, source, target), daemon=True)
            for source, target in pairs
            if source is not None
        ]
        for reader in readers:
            reader.start()
        return Instance(number, process, tell, readers)

    def _first_failure(self) -> Failure | None:
        """Wait until all have ended well, or one has not."""
        running = list(self._instances)
        while running:
            for instance in list(running):
                status = instance.process.poll()
                if status is None:
                    continue
                running.remove(instance)
                if status:
                    return _failure(instance, status, passed_on=bool(self._signals))
            if self._is_overdue():
                number = running[0].number
                _say(f"instance {number} has not stopped in {_GRACE_SECONDS:g} s: killing")
                return Failure(number, INTERRUPTED, "did not stop", killed=True)
            time.sleep(_POLL_SECONDS)
        return None

    def _is_overdue(self) -> bool:
        return self._last_chance is not None and time.monotonic() > self._last_chance

    def _end_the_others(self, failure: Failure) -> None:
        """Say which instance failed, tell the others, and see to it that they go."""
        others = [i for i in self._instances if i.process.poll() is None]
        if failure.status not in (WRONG_COMMAND, INTERRUPTED):
            _say(
                f"instance {failure.number} {failure.how}"
                f"{'; stopping the others' if others else ''}"
            )
        if failure.status == INTERRUPTED:
            # They are saving a checkpoint together.
            return _wait(others, self._config.patience)
        if not failure.killed:
            _wait(others, _TELLING_SECONDS)  # it can tell them itself, and knows why
        for instance in others:
            _tell(instance, f"Instance {failure.number} {failure.how}.")
        _wait(others, _GRACE_SECONDS)

    def _passing_signals_on(self) -> contextlib.AbstractContextManager[None]:
        def pass_on(number: int, _: Any) -> None:
            self._signals += 1
            if self._signals == 2:
                self._last_chance = time.monotonic() + _GRACE_SECONDS
            for instance in self._instances:
                if instance.process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        instance.process.send_signal(number)

        return handling(pass_on)


def _failure(instance: Instance, status: int, *, passed_on: bool) -> Failure:
    """Describe how an instance ended; `passed_on` tells whether it was asked to stop."""
    pid = f"(pid {instance.process.pid}) "
    if status >= 0:
        return Failure(instance.number, status, f"{pid}failed with status {status}")
    how = f"{pid}was killed by {_signal_name(-status)}"
    asked = passed_on and -status in ASKED_TO_STOP
    return Failure(instance.number, INTERRUPTED if asked else FAILED, how, killed=True)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


def _wait(instances: Sequence[Instance], seconds: float) -> None:
    """Wait until these processes have gone, so long at most."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(instance.process.poll() is not None for instance in instances):
            return
        time.sleep(_POLL_SECONDS)


def _tell(instance: Instance, line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(instance.pipe, f"{line}\n".encode())


def _kill(instance: Instance) -> None:
    """Make sure that a process is gone, one that was stopped too, and its output read."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(instance.process.pid, signal.SIGKILL)  # with all that it has started
    instance.process.wait()
    for reader in instance.readers:
        reader.join(timeout=2)
    os.close(instance.pipe)


def _copy_lines(number: int, source: Any, target: Any) -> None:
    """Copy a process's output line by line, saying whose it is.

    To the end, whatever becomes of `target`: a process whose output nobody takes stands
    still as soon as the pipe is full.
    """
    with source:
        for line in _without_noise(source):
            _print(f"[{number}] {line}", target)


def _without_noise(source: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines that come from the process itself, not from libraries below."""
    greetings = 0  # begun, and not yet ended
    for raw in source:
        text = raw.decode(errors="replace").rstrip("\n")
        greetings += text.count(_GREETING)
        if greetings:
            pieces = _GREETING_PIECES.match(text)
            text = text[pieces.end() :] if pieces else text
            if not text:
                greetings -= 1
                continue
        if not _NOISE.match(text):
            yield text


def _say(text: str) -> None:
    _print(f"millrace launch: {text}", sys.stderr)


def _print(line: str, target: Any) -> None:
    """Print a line, in one piece; drop it if the terminal, pipe or log is gone."""
    with contextlib.suppress(OSError, ValueError):
        target.write(f"{line}\n")
        target.flush()


def _executable(command: Sequence[str]) -> list[str]:
    """Return the words to start: our own commands with the Python that runs now."""
    if command[0] == "millrace":
        return [sys.executable, "-m", "millrace", *command[1:]]
    return list(command)


def _without_device_count(flags: str) -> str:
    name = "--xla_force_host_platform_device_count"
    return " ".join(flag for flag in flags.split() if not flag.startswith(name))
