"""Compile ahead of time, with the XLA options that suit a platform; check the memory."""

import contextlib
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from millrace.numbers import format_bytes

_log = logging.getLogger("millrace")

Options = Mapping[str, str | bool | int]

_DEFAULT_OPTIONS: dict[str, Options] = {
    # Leave convolutions to Eigen and use the library only for products and reductions:
    # filter gradients take 16 ms instead of 56, those of 1x1 convolutions 40 instead of
    # 158 (jax 0.10.2, two cores).
    "cpu": {
        "xla_cpu_experimental_ynn_fusion_type": (
            "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
        )
    },
}

_DETERMINISTIC_OPTIONS: dict[str, Options] = {
    # Without the first, atomic additions happen in any order and XLA picks whichever
    # kernel was fastest in a trial; with it, XLA runs no trials. The second hides the
    # results of trials that an earlier run has stored.
    "gpu": {"xla_gpu_deterministic_ops": True, "xla_gpu_per_fusion_autotune_cache_dir": ""},
}


class _Context(NamedTuple):
    options: Mapping[str, Options]
    programs: list[jax.stages.Compiled]
    cache_dir: Path | None = None


_context: ContextVar[_Context] = ContextVar("compiling")


@contextlib.contextmanager
def compiling(
    options: Mapping[str, Options],
    collected: list[jax.stages.Compiled] | None = None,
    cache_dir: Path | None = None,
) -> Iterator[list[jax.stages.Compiled]]:
    """Add compiler options inside the block, and collect what is compiled there.

    Args:
        options: XLA options by platform ("cpu", "gpu"), added to those of an enclosing
            ``compiling``.
        collected: Receives all compiled programs, including those of nested blocks.
        cache_dir: Where JAX keeps programs compiled for an accelerator, for later
            processes. Trying out kernels takes most of the compile time: on an H200,
            ResNet-50 is ready after 3 s instead of 16, EfficientNet-B0 after 4 instead of
            64. JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE=false take
            precedence.
    """
    programs: list[jax.stages.Compiled] = [] if collected is None else collected
    outer = _context.get(None)
    cache_dir = cache_dir or (outer and outer.cache_dir)
    if outer is not None:
        options = {
            platform: {**outer.options.get(platform, {}), **options.get(platform, {})}
            for platform in {*outer.options, *options}
        }
    token = _context.set(_Context(options, programs, cache_dir))
    try:
        yield programs
    finally:
        _context.reset(token)
        if outer is not None:
            outer.programs.extend(programs)


@contextlib.contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Compile the programs in the block so that every run gives the same bits.

    A CPU always does. On a GPU this costs some speed, and the bits are the same only for
    the same kind of GPU and the same versions of JAX and CUDA.

    >>> import millrace as mr
    >>> with mr.deterministic():
    ...     count = mr.repeat(10, lambda carry: (carry + 1, None), 0)

    Args:
        enabled: False compiles as usual.
    """
    with compiling(_DETERMINISTIC_OPTIONS if enabled else {}):
        yield


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return ``jax.jit`` of a function, with the options that are active at a call."""

    @functools.cache
    def compile_with(active: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
        return jax.jit(function, compiler_options=dict(active), **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        active = active_options(jax.default_backend())
        return compile_with(tuple(active.items()))(*args, **kwargs)

    return call


def active_options(platform: str) -> Options:
    """Return the XLA options that the enclosing ``compiling`` blocks add."""
    return _context.get(_Context({}, [])).options.get(platform, {})


def compile_for(
    mesh: Mesh,
    function: Callable[..., Any],
    *arguments: Any,
    donate: tuple[int, ...] = (),
    preferred: Mapping[str, Options] | None = None,
    **options: Any,
) -> jax.stages.Compiled:
    """Compile a function for the given arguments.

    Args:
        mesh: The devices to compile for.
        function: The function.
        *arguments: Arrays or shapes.
        donate: Positions of arguments whose memory the results may reuse.
        preferred: XLA options by platform that override our defaults and yield to those
            of ``compiling``. They are dropped if XLA cannot compile with them.
        **options: Further arguments of ``jax.jit``.
    """
    lowered = jax.jit(function, donate_argnums=donate, **options).lower(*arguments)
    platform = mesh.devices.flat[0].platform
    context = _context.get(_Context({}, []))
    if context.cache_dir is not None and platform != "cpu":
        _enable_persistent_cache(context.cache_dir)
    active = context.options.get(platform, {})
    default = _DEFAULT_OPTIONS.get(platform, {})
    wanted = (preferred or {}).get(platform, {})
    try:
        compiled = _compile(lowered, {**default, **wanted, **active}, active)
    except jax.errors.JaxRuntimeError as error:
        if not wanted:
            raise
        _log.info("XLA cannot compile with %s: %s", dict(wanted), error)
        compiled = _compile(lowered, {**default, **active}, active)
    context.programs.append(compiled)
    return compiled


def _interruptibly(compile: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
    """Compile on another thread: Python handles signals only when the main thread is not
    in C++.

    After an interrupt, the thread continues until XLA returns; see ``is_compiling``.
    """
    if threading.current_thread() is not threading.main_thread():
        return _counted(compile)
    result: Future[jax.stages.Compiled] = Future()

    def run() -> None:
        try:
            result.set_result(_counted(compile))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="millrace-compile", daemon=True).start()
    return result.result()


class _Compiling:
    """How many compilations are under way, on any thread."""

    count = 0
    lock = threading.Lock()

    @classmethod
    def add(cls, number: int) -> None:
        with cls.lock:
            cls.count += number


def _counted(compile: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
    _Compiling.add(1)
    try:
        return compile()
    finally:
        _Compiling.add(-1)


def is_compiling() -> bool:
    """Whether something is being compiled, perhaps after an interrupt."""
    return _Compiling.count > 0


def _compile(
    lowered: jax.stages.Lowered, options: dict[str, Any], requested: Options
) -> jax.stages.Compiled:
    try:
        return _interruptibly(lambda: lowered.compile(compiler_options=options))
    except jax.errors.JaxRuntimeError as error:
        unknown = next((name for name in options if f"'{name}'" in str(error)), None)
        if unknown is None or "No such compile option" not in str(error):
            raise
        # Another jaxlib may lack our own defaults: no user needs to know.
        if unknown in requested:
            _log.warning("This jaxlib has no option %s; compiling without it.", unknown)
        rest = {name: value for name, value in options.items() if name != unknown}
        return _compile(lowered, rest, requested)


@contextlib.contextmanager
def no_persistent_cache() -> Iterator[None]:
    """Keep JAX from storing what is compiled in the block for later processes."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def chosen_persistent_cache() -> str:
    """Return where JAX stores compiled programs because the user wants it, or ""."""
    return jax.config.values["jax_compilation_cache_dir"] or ""


def refuse_persistent_cache() -> None:
    """Make JAX neither read nor write compiled programs where the user has chosen."""
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # it keeps what it has opened


def _enable_persistent_cache(folder: Path) -> None:
    """Make JAX store compiled programs in a folder, unless the user has configured it."""
    config = jax.config.values
    if config["jax_enable_compilation_cache"] and not config["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(folder))


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all leaves, which may be arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def peak_bytes(programs: Sequence[jax.stages.Compiled]) -> int:
    """Return the memory per device that the largest of some programs needs."""
    return max((_program_bytes(program) for program in programs), default=0)


def _program_bytes(program: jax.stages.Compiled) -> int:
    analysis: Any = program.memory_analysis()
    if analysis is None:  # not every platform has one
        return 0
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def memory_limit(device: Any) -> int:
    """Return the bytes available to programs on a device; on CPU, the machine's memory."""
    statistics = device.memory_stats() if device.platform != "cpu" else None
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe_shortage(
    batch: int, needed: int, limit: int, measure: Callable[[int], int]
) -> str | None:
    """Return how much memory a batch lacks and which batch would fit; None if it fits.

    Args:
        batch: Samples.
        needed: Bytes that they need.
        limit: Bytes available.
        measure: Returns the bytes that another batch needs, by compiling for it.
    """
    if needed <= limit:
        return None
    shortage = f"batch {batch} needs {format_bytes(needed)} of {format_bytes(limit)}"
    smaller = 1 << max(0, (batch - 1).bit_length() - 1)  # the next power of two below
    while smaller < batch:
        if measure(smaller) <= limit:
            return f"{shortage}; the largest power of two that fits is {smaller}"
        if smaller == 1:
            break
        smaller //= 2
    return f"{shortage}; not even a batch of 1 fits"
