"""Our side of the comparison with PyTorch: start its processes and ask them to measure."""

import concurrent.futures
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from millrace.config import ConfigurationError

_SCRIPT = Path(__file__).with_name("torch_process.py")
_VARIANTS = {"eager": False, "compiled": True}
_AT_ONCE = 6
"""Processes that prepare at once on a GPU; each holds the activations of a batch."""
_COMPILE_THREADS = "4"


class PeerFailed(Exception):
    """PyTorch failed; the message says why."""


class TorchProcess:
    """A PyTorch process that answers requests."""

    def __init__(self, python: str, device: str) -> None:
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": _COMPILE_THREADS, **os.environ}
        # Warning filters of this process, such as those of pytest, are not for PyTorch.
        environment.pop("PYTHONWARNINGS", None)
        self._errors = tempfile.TemporaryFile("w+")
        try:
            self._process = subprocess.Popen(
                [python, str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=environment,
            )
        except OSError as error:
            self._errors.close()
            raise PeerFailed(f"{python} cannot be run: {error.strerror}") from error
        try:
            self.facts = self.ask(do="facts", device=device)
        except PeerFailed:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except OSError as error:
            raise PeerFailed("the PyTorch process has ended") from error
        for line in process.stdout:
            if line.startswith("{"):  # libraries may print other lines
                answer = json.loads(line)
                if "error" in answer:
                    raise PeerFailed(" ".join(answer["error"].split()).rstrip("."))
                return answer
        status = process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:]
        raise PeerFailed(" ".join([f"the PyTorch process ended with {status}", *last]))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # it may have ended already
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def require_torch(python: str, device: str) -> None:
    """Raise an error if a Python has no PyTorch, or none that can use the device."""
    try:
        TorchProcess(python, device).close()
    except PeerFailed as error:
        raise ConfigurationError(
            f"--peer torch: there is no PyTorch for {device} in {python}: {error}. Install "
            f"it with `{python} -m pip install torch torchvision`, or pass a Python that "
            "has it as --torch-python."
        ) from error


class TorchPeer:
    """The PyTorch side of all entries: prepared together, measured one by one.

    Args:
        python: A Python with PyTorch.
        device: cpu or cuda.
        works: Settings of each entry by name; see ``Workload.peer``.
    """

    def __init__(
        self, python: str, device: str, works: Mapping[str, dict[str, Any]]
    ) -> None:
        self.works = {n: {**w, "device": device} for n, w in works.items()}
        self._python, self._device = python, device
        self._at_once = 1 if device == "cpu" else _AT_ONCE
        self._processes: dict[str, TorchProcess] = {}
        self._failures: dict[tuple[str, str], str] = {}
        self._prepared: dict[tuple[str, str], float] = {}
        self.facts: dict[str, str] = {}

    def prepare(self, log: Callable[[str], None]) -> None:
        """Start the processes and let them compile.

        Batch sizes of one inference model share a process.
        """
        groups: dict[str, list[str]] = {}
        for name, work in self.works.items():
            alone = work["kind"] != "inference"
            groups.setdefault(name if alone else work["model"], []).append(name)
        with concurrent.futures.ThreadPoolExecutor(self._at_once) as pool:
            for future in [
                pool.submit(self._prepare_group, g, log) for g in groups.values()
            ]:
                future.result()

    def _prepare_group(self, names: list[str], log: Callable[[str], None]) -> None:
        try:
            process = TorchProcess(self._python, self._device)
        except PeerFailed as error:
            for name in names:
                for variant in _VARIANTS:
                    self._failures[name, variant] = str(error)
            return
        self.facts |= process.facts
        for name in names:
            self._processes[name] = process
            for variant, compiled in _VARIANTS.items():
                self._prepare(process, name, variant, compiled, log)

    def _prepare(
        self,
        process: TorchProcess,
        name: str,
        variant: str,
        compiled: bool,
        log: Callable[[str], None],
    ) -> None:
        try:
            answer = process.ask(
                do="prepare", name=name, compiled=compiled, settings=self.works[name]
            )
            self._prepared[name, variant] = answer["prepare_seconds"]
            log(f"PyTorch {variant} {name}: ready in {answer['prepare_seconds']:.1f} s")
        except PeerFailed as error:
            self._failures[name, variant] = str(error)
            log(f"PyTorch {variant} {name}: {error}")

    def measure(self, name: str, repeat: int, seconds: float) -> dict[str, Any]:
        """Return the figures of each variant, or its error."""
        figures: dict[str, Any] = {}
        for variant, compiled in _VARIANTS.items():
            if (name, variant) in self._failures and name in self._processes:
                # Try again: perhaps other processes had taken the memory.
                del self._failures[name, variant]
                self._prepare(
                    self._processes[name], name, variant, compiled, lambda _: None
                )
            if (name, variant) in self._failures:
                figures[variant] = {"error": self._failures[name, variant]}
                continue
            options = {"compiled": compiled, "repeat": repeat, "seconds": seconds}
            try:
                answer = self._processes[name].ask(do="measure", name=name, **options)
            except PeerFailed as error:
                figures[variant] = {"error": str(error)}
                continue
            values = answer["samples_per_second"]
            answer["median"] = statistics.median(values)
            answer |= {"lowest": min(values), "highest": max(values)}
            answer["prepare_seconds"] = self._prepared[name, variant]
            figures[variant] = answer
        return figures

    def finish(self, name: str) -> None:
        """End the process of an entry unless another entry still needs it."""
        process = self._processes.pop(name, None)
        if process is not None and process not in self._processes.values():
            process.close()

    def close(self) -> None:
        """End all processes."""
        for name in list(self._processes):
            self.finish(name)
