"""Compile ahead of time, with the options a platform is known to want."""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

_log = logging.getLogger("millrace")

Options = Mapping[str, str | bool | int]

_OPTIONS: dict[str, Options] = {
    # Filter gradients of convolutions 56 -> 16 ms, 1x1 ones 158 -> 40 (jax 0.10.2, two
    # cores): leave convolutions to Eigen, keep the library for products and sums.
    "cpu": {
        "xla_cpu_experimental_ynn_fusion_type": (
            "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
        )
    },
}


_DETERMINISTIC: dict[str, Options] = {
    # Otherwise atomic additions come in any order, and XLA takes whichever kernel was
    # fastest when it tried them out. With it, XLA tries nothing out: the program, the GPU
    # and the versions decide. Choices that an earlier run has timed must not be found.
    "gpu": {"xla_gpu_deterministic_ops": True, "xla_gpu_per_fusion_autotune_cache_dir": ""},
}


class _Compiling(NamedTuple):
    options: Mapping[str, Options]
    programs: list[jax.stages.Compiled]
    kept_in: Path | None = None


_compiling: ContextVar[_Compiling] = ContextVar("compiling")


@contextlib.contextmanager
def compiling(
    options: Mapping[str, Options],
    collected: list[jax.stages.Compiled] | None = None,
    kept_in: Path | None = None,
) -> Iterator[list[jax.stages.Compiled]]:
    """Compile what is compiled inside with further options, and collect it.

    Args:
        options: For each platform ("cpu", "gpu"), XLA's options by name; they are added to
            those of a ``compiling`` around this one.
        collected: Receives all that is compiled, also inside another ``compiling``.
        kept_in: A folder in which JAX keeps what is compiled for an accelerator, for the
            next process that needs it. Trying out kernels takes most of the time:
            ResNet-50 is ready after 3 s instead of 16 on an H200, EfficientNet-B0 after 4
            instead of 64. What JAX was told itself goes first:
            JAX_COMPILATION_CACHE_DIR, or JAX_ENABLE_COMPILATION_CACHE=false.
    """
    programs: list[jax.stages.Compiled] = [] if collected is None else collected
    around = _compiling.get(None)
    kept_in = kept_in or (around and around.kept_in)
    if around is not None:
        options = {
            platform: {**around.options.get(platform, {}), **options.get(platform, {})}
            for platform in {*around.options, *options}
        }
    token = _compiling.set(_Compiling(options, programs, kept_in))
    try:
        yield programs
    finally:
        _compiling.reset(token)
        if around is not None:
            around.programs.extend(programs)


@contextlib.contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """Compile the programs inside so that they give the same bits in every run.

    On a CPU they always do. On a GPU this costs some speed; the same bits then come from
    the same kind of GPU and the same versions of JAX and CUDA.

    >>> import millrace as mr
    >>> with mr.deterministic():
    ...     count = mr.repeat(10, lambda carry: (carry + 1, None), 0)

    Args:
        wanted: False compiles as usual.
    """
    with compiling(_DETERMINISTIC if wanted else {}):
        yield


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``jax.jit`` with the compiler options that are in force when it is called."""

    @functools.cache
    def compiled_with(asked: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
        return jax.jit(function, compiler_options=dict(asked), **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled_with(tuple(options_in_force(jax.default_backend()).items()))(
            *args, **kwargs
        )

    return call


def options_in_force(platform: str) -> Options:
    """Return the options of XLA that ``compiling`` adds for a platform here."""
    return _compiling.get(_Compiling({}, [])).options.get(platform, {})


def compile_for(
    mesh: Mesh,
    function: Callable[..., Any],
    *arguments: Any,
    donate: tuple[int, ...] = (),
    preferred: Mapping[str, Options] | None = None,
    **options: Any,
) -> jax.stages.Compiled:
    """Compile `function` for these arguments, donating some of them to the result.

    What is `preferred` goes before the platform's usual options of XLA's, and behind those
    of ``compiling``; if XLA cannot compile with it, it is left out. Further `options` are
    those of ``jax.jit``.
    """
    lowered = jax.jit(function, donate_argnums=donate, **options).lower(*arguments)
    platform = mesh.devices.flat[0].platform
    further = _compiling.get(_Compiling({}, []))
    if further.kept_in is not None and platform != "cpu":
        _keep(further.kept_in)
    asked = further.options.get(platform, {})
    usual, wished = _OPTIONS.get(platform, {}), (preferred or {}).get(platform, {})
    try:
        compiled = _compile(lowered, {**usual, **wished, **asked}, asked)
    except jax.errors.JaxRuntimeError as error:
        if not wished:
            raise
        _log.info("XLA cannot compile with %s: %s", dict(wished), error)
        compiled = _compile(lowered, {**usual, **asked}, asked)
    further.programs.append(compiled)
    return compiled


@contextlib.contextmanager
def not_kept() -> Iterator[None]:
    """Compile what is compiled inside without JAX keeping it for the next process."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _keep(folder: Path) -> None:
    """Tell JAX where to keep what is compiled, unless it has been told."""
    told = jax.config.values
    if told["jax_enable_compilation_cache"] and not told["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(folder))


def _compile(
    lowered: jax.stages.Lowered, options: dict[str, Any], asked: Options
) -> jax.stages.Compiled:
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        unknown = next((name for name in options if f"'{name}'" in str(error)), None)
        if unknown is None or "No such compile option" not in str(error):
            raise
        if unknown in asked:  # what we add of our own accord, another jaxlib may lack
            _log.warning("This jaxlib has no option %s; compiling without it.", unknown)
        left = {name: value for name, value in options.items() if name != unknown}
        return _compile(lowered, left, asked)


def peak_bytes(programs: list[jax.stages.Compiled]) -> int:
    """Return the device memory that the largest of these programs needs, per device."""
    return max((_bytes(program) for program in programs), default=0)


def _bytes(program: jax.stages.Compiled) -> int:
    analysis: Any = program.memory_analysis()
    if analysis is None:  # not every platform can tell
        return 0
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )
