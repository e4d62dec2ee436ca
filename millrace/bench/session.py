"""One call of ``millrace bench``: all that is compiled and measured."""

import concurrent.futures
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from millrace.bench.building import NotHere, build_workload
from millrace.bench.comparing import compare, read_results
from millrace.bench.config import BenchConfig
from millrace.bench.facts import session_facts
from millrace.bench.measuring import measure
from millrace.bench.noise import fastest, is_uncertain, ratio_noise
from millrace.bench.reporting import as_markdown, ratio_of, write_results
from millrace.bench.roofline import measure_limits, parts_of_limits
from millrace.bench.spec import Entry
from millrace.bench.torch_peer import TorchPeer, require_torch
from millrace.bench.workload import Workload
from millrace.config import flat_options, replace_options
from millrace.program import compiling

_MAX_THREADS = 8


class Session:
    """What is measured and what was found; written out whenever there is more.

    Args:
        config: The command.
        entries: What to measure.
        configs: The configuration behind each entry, by its name.
    """

    def __init__(
        self, config: BenchConfig, entries: Sequence[Entry], configs: dict[str, Any]
    ) -> None:
        self._config, self._configs = config, configs
        self._entries = {entry.name: entry for entry in entries}
        self._devices = jax.local_devices()
        self._on_cpu = self._devices[0].platform == "cpu"
        self._torch_device = "cpu" if self._on_cpu else "cuda"
        if config.peer == "torch":
            require_torch(config.torch_python, self._torch_device)
        self._options = config.xla_options
        stamp = time.strftime("bench-%Y-%m-%d_%H-%M-%S")
        self._folder = config.out or Path("runs") / stamp
        self._started = time.perf_counter()
        kept = ("name", "command", "about", "reference")
        unreached = {"status": "failed", "reason": "not reached"}
        self._found: dict[str, dict[str, Any]] = {
            e.name: {name: getattr(e, name) for name in kept} | unreached for e in entries
        }
        self._results: dict[str, Any] = {
            "facts": session_facts(self._devices[0], config.commit),
            "limits": {},
            "entries": list(self._found.values()),
        }

    @property
    def failed(self) -> bool:
        """Whether an entry has failed, or all that PyTorch was asked to do for one."""
        return any(
            found["status"] == "failed" or ("peers" in found and "ratio" not in found)
            for found in self._found.values()
        )

    def run(self) -> None:
        """Measure everything."""
        self._measure_limits()
        if self._on_cpu:
            self._side_by_side()
        else:
            self._one_by_one()
        self._measure_limits()
        self._conclude()

    def _side_by_side(self) -> None:
        # A CPU has other things to do, now more, now less: the two that are compared are
        # measured one right after the other.
        works = dict(self._works())
        with contextlib.closing(self._peer(works)) as peer:
            self._prepare(peer)
            for name, work in works.items():
                self._measure(name, work)
                self._measure_peer(name, work, peer)

    def _one_by_one(self) -> None:
        # Ours come first, so that they are there even if PyTorch's take too long.
        works = {}
        for name, work in self._works():
            self._measure(name, work)
            works[name] = work
        with contextlib.closing(self._peer(works)) as peer:
            self._prepare(peer)
            for name, work in works.items():
                self._measure_peer(name, work, peer)

    def _peer(self, works: dict[str, Workload]) -> TorchPeer:
        """Return PyTorch for what of this it should do, if it should."""
        asked = {
            name: work.peer
            for name, work in works.items()
            if self._config.peer == "torch"
            and isinstance(work.peer, dict)
            and self._entries[name].peer
        }
        return TorchPeer(self._config.torch_python, self._torch_device, asked)

    def _prepare(self, peer: TorchPeer) -> None:
        if peer.works:
            peer.prepare(self._say)
            said = ", ".join(f"{name} {value}" for name, value in peer.facts.items())
            self._results["facts"]["PyTorch"] = said

    def _measure_limits(self) -> None:
        """Time the simplest programs; what they reached at best is the limit."""
        self._say(f"the limits of {self._devices[0].device_kind}")
        before, now = self._results["limits"], measure_limits(self._devices[0])
        limits = {name: max(value, before.get(name, 0.0)) for name, value in now.items()}
        self._results["limits"] = limits
        for found in self._found.values():
            if found["status"] == "measured":
                found |= parts_of_limits(found, limits)
        self._write()

    def _works(self) -> Iterator[tuple[str, Workload]]:
        """Build and compile the entries; note those that cannot be.

        Several at a time are all ready before the first of them is returned, because
        compiling would disturb what is measured.
        """
        if self._threads == 1:
            found = {
                name: functools.partial(self._compiled, name) for name in self._entries
            }
        else:
            with concurrent.futures.ThreadPoolExecutor(self._threads) as pool:
                futures = {n: pool.submit(self._compiled, n) for n in self._entries}
            found = {name: future.result for name, future in futures.items()}
        for name, result in found.items():
            if (work := self._noting(name, result)) is not None:
                yield name, work
        self._write()

    @property
    def _threads(self) -> int:
        # XLA tries kernels out while it compiles, on a device that it takes for its own:
        # eight at a time on a GPU took longer than one after the other.
        cores = (os.cpu_count() or 1) // 2 if self._on_cpu else 1
        return self._config.compile_threads or min(_MAX_THREADS, max(1, cores))

    def _compiled(self, name: str) -> Workload:
        entry, config = self._entries[name], self._configs[name]
        work = build_workload(entry, config, self._devices)
        work.compile(self._options)
        work.work_out_cost()
        self._say(f"{name}: compiled in {work.compile_seconds:.1f} s")

        def needs(batch: int) -> int:
            changed = replace_options(config, **_batch(config, batch))
            smaller = build_workload(entry, changed, self._devices)
            smaller.compile(self._options)
            return smaller.memory_bytes

        limit = compiling.memory_limit(self._devices[0])
        said = compiling.describe_shortage(work.batch, work.memory_bytes, limit, needs)
        if said is not None:
            raise NotHere(said)
        return work

    def _measure(self, name: str, work: Workload) -> None:
        repeat, seconds = self._config.repeat, self._config.seconds
        found = self._noting(name, lambda: measure(work, repeat, seconds))
        if found is not None:
            found |= parts_of_limits(found, self._results["limits"])
            self._found[name].update(found, status="measured", reason=None)
            self._say(f"{name}: {found['samples_per_second']['median']:,.1f} samples/s")
        self._write()

    def _measure_peer(self, name: str, work: Workload, peer: TorchPeer) -> None:
        found = self._found[name]
        if self._config.peer == "torch" and found["status"] == "measured":
            if name in peer.works:
                repeat, seconds = self._config.repeat, self._config.torch_seconds
                found |= compared(found, peer.measure(name, repeat, seconds))
            else:
                asked = self._entries[name].peer
                found["no_ratio"] = work.peer if asked else "the spec has peer: false"
            self._say(f"{name}: {against_torch(found)}")
            self._write()
        peer.finish(name)

    def _conclude(self) -> None:
        print(as_markdown(self._results))
        if self._config.compare is not None:
            print(compare(read_results(self._config.compare), self._results))
        self._say(f"results  {self._folder}")

    def _noting(self, name: str, function: Callable[[], Any]) -> Any:
        """Call; if it cannot be done here, or fails, note why and go on."""
        found = self._found[name]
        try:
            return function()
        except NotHere as error:
            found |= {"status": "skipped", "reason": str(error)}
        except Exception as error:
            if self._config.debug:
                raise
            message = " ".join(str(error).split())[:500]
            found |= {"status": "failed", "reason": f"{type(error).__name__}: {message}"}
        self._say(f"{name}: {found['status']}, {found['reason']}")
        return None

    def _write(self) -> None:
        write_results(self._folder, self._results)

    def _say(self, text: str) -> None:
        elapsed = time.perf_counter() - self._started
        print(f"{elapsed:7.1f} s  {text}", file=sys.stderr, flush=True)


def compared(ours: dict[str, Any], peers: dict[str, Any]) -> dict[str, Any]:
    """Return the ratios to the fastest of the peers; above 1, ours is faster."""
    found: dict[str, Any] = {"peers": peers}
    if best := fastest(peers):
        found["ratio"] = ours["samples_per_second"]["median"] / best["median"]
        found["ratio_noise"] = ratio_noise(ours | found)
        found["ratio_uncertain"] = is_uncertain(ours | found)
    else:
        found["no_ratio"] = "; ".join(f"{n}: {peer['error']}" for n, peer in peers.items())
    times = [peer["latency_ms"]["p50"] for peer in peers.values() if "latency_ms" in peer]
    if times and ours["latency_ms"]:
        found["torch_latency_p50_ms"] = min(times)
        found["latency_ratio"] = min(times) / ours["latency_ms"]["p50"]
    return found


def against_torch(found: dict[str, Any]) -> str:
    """Say how an entry compares with PyTorch, or why it does not."""
    if "ratio" not in found:
        return f"not compared with PyTorch: {found['no_ratio']}"
    speeds = {n: p.get("median", p.get("error")) for n, p in found["peers"].items()}
    said = ", ".join(
        f"{name} {value:,.1f}" if isinstance(value, float) else f"{name} failed: {value}"
        for name, value in speeds.items()
    )
    return f"{ratio_of(found)} of PyTorch, {said}"


def _batch(config: Any, batch: int) -> dict[str, Any]:
    """Say which option of a configuration is the batch, and what it should be."""
    if isinstance(getattr(config, "batch_size", None), list):
        return {"batch_size": [batch]}
    known = flat_options(type(config))
    name = "micro_batch_size" if "micro_batch_size" in known else "batch_size"
    return {name: batch}
