"""One session of ``millrace bench``: compile and measure entries, and write the results."""

import concurrent.futures
import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from millrace.bench.applications import build_workload
from millrace.bench.config import BenchConfig
from millrace.bench.measuring import (
    collect_facts,
    fastest_peer,
    is_uncertain,
    ratio_noise,
)
from millrace.bench.reporting import (
    compare_results,
    format_markdown,
    format_ratio,
    read_results,
    write_results,
)
from millrace.bench.roofline import measure_roofline, roofline_shares
from millrace.bench.spec import Entry
from millrace.bench.torch_peer import TorchPeer, require_torch
from millrace.bench.workload import CannotRun, Workload, measure
from millrace.config import flat_options, option_value, replace_options
from millrace.loop.activity import listening, report_progress
from millrace.program import compiling
from millrace.run.console import Console

_MAX_COMPILE_THREADS = 8


class Session:
    """Entries with their results, which are written after every measurement.

    Args:
        config: Options of the command.
        entries: Entries to measure.
        configs: Configuration of each entry, by name.
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
        stamp = time.strftime("bench-%Y-%m-%d_%H-%M-%S")
        self._folder = config.out or Path("runs") / stamp
        self._started = time.perf_counter()
        self._console = Console()
        kept = ("name", "command", "about", "reference")
        unreached = {"status": "failed", "reason": "not reached"}
        self._figures: dict[str, dict[str, Any]] = {
            e.name: {name: getattr(e, name) for name in kept}
            | _describe_lines(e, configs[e.name])
            | unreached
            for e in entries
        }
        self._results: dict[str, Any] = {
            "facts": collect_facts(self._devices[0], config.commit),
            "limits": {},
            "entries": list(self._figures.values()),
        }

    @property
    def failed(self) -> bool:
        """Whether an entry failed, or every PyTorch variant of an entry."""
        return any(
            figures["status"] == "failed" or ("peers" in figures and "ratio" not in figures)
            for figures in self._figures.values()
        )

    def run(self) -> None:
        """Measure all entries and print the results."""
        try:
            with listening(show=self._console.progress):
                self._measure_roofline()
                if self._on_cpu:
                    self._run_side_by_side()
                else:
                    self._run_ours_first()
                self._measure_roofline()
        finally:
            self._console.stop()
        print(format_markdown(self._results))
        if self._config.compare is not None:
            print(compare_results(read_results(self._config.compare), self._results))
        self._log(f"results  {self._folder}")

    def _run_side_by_side(self) -> None:
        # The load of a CPU changes over time, so what is compared is measured in sequence.
        works = dict(self._compile_entries())
        with contextlib.closing(self._create_peer(works)) as peer:
            self._prepare_peer(peer)
            for name, work in works.items():
                self._measure(name, work)
                self._measure_peer(name, work, peer)

    def _run_ours_first(self) -> None:
        # Our figures are there even if PyTorch takes too long.
        works = {}
        for name, work in self._compile_entries():
            self._measure(name, work)
            works[name] = work
        with contextlib.closing(self._create_peer(works)) as peer:
            self._prepare_peer(peer)
            for name, work in works.items():
                self._measure_peer(name, work, peer)

    def _measure_roofline(self) -> None:
        """Measure the limits of the device; the best of several measurements counts."""
        self._log(f"roofline of {self._devices[0].device_kind}")
        self._show("measuring the roofline")
        before, now = self._results["limits"], measure_roofline(self._devices[0])
        limits = {name: max(value, before.get(name, 0.0)) for name, value in now.items()}
        self._results["limits"] = limits
        for figures in self._figures.values():
            if figures["status"] == "measured":
                figures |= roofline_shares(figures, limits)
        self._write()

    def _compile_entries(self) -> Iterator[tuple[str, Workload]]:
        """Yield the workloads that can run, compiled; record why the others cannot.

        With several threads, all are compiled before the first is yielded, because
        compilation would disturb the measurements.
        """
        if self._num_threads == 1:
            pending = {
                name: functools.partial(self._compile, name) for name in self._entries
            }
        else:
            self._show("compiling")
            with concurrent.futures.ThreadPoolExecutor(self._num_threads) as pool:
                futures = {name: pool.submit(self._compile, name) for name in self._entries}
                ended = concurrent.futures.as_completed(futures.values())
                for count, _ in enumerate(ended, 1):
                    report_progress(count, len(futures))
            pending = {name: future.result for name, future in futures.items()}
        for name, compile_entry in pending.items():
            if (work := self._try(name, compile_entry)) is not None:
                yield name, work
        self._write()

    @property
    def _num_threads(self) -> int:
        # On a GPU, XLA times kernels while it compiles and assumes that nothing else runs:
        # eight compilations at once took longer than one after the other.
        cores = (os.cpu_count() or 1) // 2 if self._on_cpu else 1
        return self._config.compile_threads or min(_MAX_COMPILE_THREADS, max(1, cores))

    def _compile(self, name: str) -> Workload:
        entry, config, options = (
            self._entries[name],
            self._configs[name],
            self._config.xla_options,
        )
        if self._num_threads == 1:
            self._show("compiling", name)
        work = build_workload(entry, config, self._devices)
        work.compile(options)
        work.estimate_cost()
        self._log(f"{name}: compiled in {work.compile_seconds:.1f} s")

        def memory_needed(batch: int) -> int:
            smaller_config = replace_options(config, **_batch_option(config, batch))
            smaller = build_workload(entry, smaller_config, self._devices)
            smaller.compile(options)
            return smaller.memory_bytes

        limit = compiling.memory_limit(self._devices[0])
        shortage = compiling.describe_shortage(
            work.batch, work.memory_bytes, limit, memory_needed
        )
        if shortage is not None:
            raise CannotRun(shortage)
        return work

    def _measure(self, name: str, work: Workload) -> None:
        repeat, seconds = self._config.repeat, self._config.seconds
        most = max(self._config.max_seconds, seconds)
        self._show("measuring", name)
        figures = self._try(name, lambda: measure(work, repeat, seconds, most))
        if figures is not None:
            figures |= roofline_shares(figures, self._results["limits"])
            self._figures[name].update(figures, status="measured", reason=None)
            speed = figures["samples_per_second"]["median"]
            how = figures["measured"]["how"]
            self._log(f"{name}: {speed:,.1f} samples/s, {how}")
        self._write()

    def _create_peer(self, works: dict[str, Workload]) -> TorchPeer:
        """Return the PyTorch side of the workloads that have one, if it is wanted."""
        settings = {
            name: work.peer
            for name, work in works.items()
            if self._config.peer == "torch"
            and isinstance(work.peer, dict)
            and self._entries[name].peer
        }
        return TorchPeer(self._config.torch_python, self._torch_device, settings)

    def _prepare_peer(self, peer: TorchPeer) -> None:
        if peer.works:
            peer.prepare(self._log)
            facts = ", ".join(f"{name} {value}" for name, value in peer.facts.items())
            self._results["facts"]["PyTorch"] = facts

    def _measure_peer(self, name: str, work: Workload, peer: TorchPeer) -> None:
        figures = self._figures[name]
        if self._config.peer == "torch" and figures["status"] == "measured":
            if name in peer.works:
                self._show("measuring in PyTorch:", name)
                repeat, seconds = self._config.repeat, self._config.torch_seconds
                figures |= compare_with_torch(figures, peer.measure(name, repeat, seconds))
            else:
                wanted = self._entries[name].peer
                figures["no_ratio"] = work.peer if wanted else "the spec has peer: false"
            self._log(f"{name}: {format_torch_ratio(figures)}")
            self._write()
        peer.finish(name)

    def _try(self, name: str, function: Callable[[], Any]) -> Any:
        """Call `function`; if it fails, record why for the entry and return None."""
        figures = self._figures[name]
        try:
            return function()
        except CannotRun as error:
            figures |= {"status": "skipped", "reason": str(error)}
        except Exception as error:
            if self._config.debug:
                raise
            message = " ".join(str(error).split())[:500]
            figures |= {"status": "failed", "reason": f"{type(error).__name__}: {message}"}
        self._log(f"{name}: {figures['status']}, {figures['reason']}")
        return None

    def _write(self) -> None:
        write_results(self._folder, self._results)

    def _log(self, text: str) -> None:
        elapsed = time.perf_counter() - self._started
        self._console.line(f"{elapsed:7.1f} s  {text}")

    def _show(self, activity: str, name: str = "") -> None:
        """Show what is being done in a bar, where there is a terminal.

        Args:
            activity: What is done.
            name: The entry that it is done with, if it is one.
        """
        if name:
            activity = _describe_activity(activity, name, list(self._entries))
        if self._console.live:
            self._console.status(activity)


def _describe_activity(activity: str, name: str, names: Sequence[str]) -> str:
    """Return an activity with its entry, and which of several entries it is.

    >>> _describe_activity("measuring", "b", ["a", "b"])
    'measuring b, 2 of 2 entries'
    """
    if len(names) == 1:
        return f"{activity} {name}"
    return f"{activity} {name}, {names.index(name) + 1} of {len(names)} entries"


def find_unmeasured(
    entries: Sequence[Entry], earlier: Sequence[Mapping[str, Any]]
) -> list[Entry]:
    """Return the entries whose command no earlier session measured on such a device."""
    if not earlier:
        return list(entries)
    device = jax.local_devices()[0].device_kind
    measured = {
        (figures["name"], figures["command"])
        for results in earlier
        for figures in results["entries"]
        if figures["status"] == "measured" and results["facts"]["device"] == device
    }
    return [entry for entry in entries if (entry.name, entry.command) not in measured]


def _describe_lines(entry: Entry, config: Any) -> dict[str, Any]:
    """Return what the page about Graphcore's lines needs; nothing for other entries."""
    if not entry.lines:
        return {}
    return {"lines": entry.lines, "precision": option_value(config, "precision")}


def compare_with_torch(ours: dict[str, Any], peers: dict[str, Any]) -> dict[str, Any]:
    """Return the ratios to the fastest PyTorch variant; above 1, millrace is faster."""
    figures: dict[str, Any] = {"peers": peers}
    if best := fastest_peer(peers):
        figures["ratio"] = ours["samples_per_second"]["median"] / best["median"]
        figures["ratio_noise"] = ratio_noise(ours | figures)
        figures["ratio_uncertain"] = is_uncertain(ours | figures)
    else:
        errors = [f"{name}: {peer['error']}" for name, peer in peers.items()]
        figures["no_ratio"] = "; ".join(errors)
    times = [peer["latency_ms"]["p50"] for peer in peers.values() if "latency_ms" in peer]
    if times and ours["latency_ms"]:
        figures["torch_latency_p50_ms"] = min(times)
        figures["latency_ratio"] = min(times) / ours["latency_ms"]["p50"]
    return figures


def format_torch_ratio(figures: dict[str, Any]) -> str:
    """Return the ratio to PyTorch with its speeds, or why there is none."""
    if "ratio" not in figures:
        return f"not compared with PyTorch: {figures['no_ratio']}"
    speeds = {n: p.get("median", p.get("error")) for n, p in figures["peers"].items()}
    shown = ", ".join(
        f"{name} {value:,.1f}" if isinstance(value, float) else f"{name} failed: {value}"
        for name, value in speeds.items()
    )
    return f"{format_ratio(figures)} times PyTorch: {shown}"


def _batch_option(config: Any, batch: int) -> dict[str, Any]:
    """Return the option of a configuration that sets its batch size."""
    if isinstance(getattr(config, "batch_size", None), list):
        return {"batch_size": [batch]}
    known = flat_options(type(config))
    name = "micro_batch_size" if "micro_batch_size" in known else "batch_size"
    return {name: batch}
