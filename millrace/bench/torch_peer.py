"""Our side of the comparison with PyTorch: processes that are asked to do the same."""

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
"""Processes that prepare at the same time: each holds the activations of a batch."""
_COMPILE_THREADS = "4"


def _silent(_: str) -> None:
    """Say nothing."""


class PeerFailed(Exception):
    """PyTorch could not do it; the message says why."""


class TorchProcess:
    """A PyTorch process that answers requests."""

    def __init__(self, python: str, device: str) -> None:
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": _COMPILE_THREADS, **os.environ}
        # Whatever decides how warnings are treated here is not meant for it.
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
            raise PeerFailed("PyTorch's process has ended") from error
        for line in process.stdout:
            if line.startswith("{"):  # libraries may print, too
                answer = json.loads(line)
                if "error" in answer:
                    raise PeerFailed(" ".join(answer["error"].split()).rstrip("."))
                return answer
        status = process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:]
        raise PeerFailed(" ".join([f"PyTorch's process ended with {status}", *last]))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # it may have ended before
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def require_torch(python: str, device: str) -> None:
    """Refuse a Python in which PyTorch cannot be imported, or cannot use the device."""
    try:
        TorchProcess(python, device).close()
    except PeerFailed as error:
        raise ConfigurationError(
            f"--peer torch: there is no PyTorch for {device} in {python}: {error}. Install "
            f"it with `{python} -m pip install torch torchvision`, or name a Python that "
            "has it with --torch-python."
        ) from error


class TorchPeer:
    """All of PyTorch's work: prepared together, measured one by one.

    Args:
        python: A Python that has PyTorch.
        device: cpu or cuda.
        works: What to do, by the entry's name; see ``Workload.peer``.
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

    def prepare(self, say: Callable[[str], None]) -> None:
        """Start the processes and let them compile."""
        groups: dict[str, list[str]] = {}
        for name, work in self.works.items():
            alone = work["kind"] != "inference"
            groups.setdefault(name if alone else work["model"], []).append(name)
        with concurrent.futures.ThreadPoolExecutor(self._at_once) as pool:
            for future in [pool.submit(self._group, g, say) for g in groups.values()]:
                future.result()

    def _group(self, names: list[str], say: Callable[[str], None]) -> None:
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
                self._prepare(process, name, variant, compiled, say)

    def _prepare(
        self,
        process: TorchProcess,
        name: str,
        variant: str,
        compiled: bool,
        say: Callable[[str], None],
    ) -> None:
        try:
            answer = process.ask(
                do="prepare", name=name, compiled=compiled, settings=self.works[name]
            )
            self._prepared[name, variant] = answer["prepare_seconds"]
            say(f"PyTorch {variant} {name}: ready in {answer['prepare_seconds']:.1f} s")
        except PeerFailed as error:
            self._failures[name, variant] = str(error)
            say(f"PyTorch {variant} {name}: {error}")

    def measure(self, name: str, repeat: int, seconds: float) -> dict[str, Any]:
        """Return what each variant reached, or why it did not."""
        found: dict[str, Any] = {}
        for variant, compiled in _VARIANTS.items():
            if (name, variant) in self._failures and name in self._processes:
                # Perhaps only for want of memory that others held.
                del self._failures[name, variant]
                self._prepare(self._processes[name], name, variant, compiled, _silent)
            if (name, variant) in self._failures:
                found[variant] = {"error": self._failures[name, variant]}
                continue
            options = {"compiled": compiled, "repeat": repeat, "seconds": seconds}
            try:
                answer = self._processes[name].ask(do="measure", name=name, **options)
            except PeerFailed as error:
                found[variant] = {"error": str(error)}
                continue
            values = answer["samples_per_second"]
            answer["median"] = statistics.median(values)
            answer |= {"lowest": min(values), "highest": max(values)}
            answer["prepare_seconds"] = self._prepared[name, variant]
            found[variant] = answer
        return found

    def finish(self, name: str) -> None:
        """End the process of an entry if it was its last one."""
        process = self._processes.pop(name, None)
        if process is not None and process not in self._processes.values():
            process.close()

    def close(self) -> None:
        """End all processes."""
        for name in list(self._processes):
            self.finish(name)
