"""Compiler options, and the programs compiled with them."""

import os
import signal
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millrace as mr
from millrace.program import compiling as compiling_module
from millrace.program.compiling import (
    active_options,
    compile_for,
    compiling,
    deterministic,
    jit,
    peak_bytes,
)
from millrace.program.replicas import replica_mesh

X = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def squared(x):
    return x @ x


def test_programs_compiled_in_the_block_are_collected():
    mesh = replica_mesh(1)
    with compiling({}) as programs:
        first = compile_for(mesh, squared, X)
        second = compile_for(mesh, lambda x: (squared(x), x + 1), X)
    compile_for(mesh, squared, X)
    assert programs == [first, second]
    assert peak_bytes(programs) >= 3 * 16 * 16 * 4  # one argument, two results
    assert peak_bytes([]) == 0


def test_options_reach_the_compiler():
    def identity(x):
        return x

    # A known option with an invalid value: the error shows that it was passed on.
    with (
        compiling({jax.default_backend(): {"xla_backend_optimization_level": "high"}}),
        pytest.raises(jax.errors.JaxRuntimeError, match="optimization_level"),
    ):
        compile_for(replica_mesh(1), identity, X)


@pytest.mark.parametrize(
    "compile_",
    [
        lambda: compile_for(replica_mesh(1), lambda x: x, X),
        lambda: jit(lambda x: x)(jnp.ones(3)),
        lambda: mr.repeat(2, lambda carry: (carry, None), 0),
    ],
    ids=["compile_for", "jit", "repeat"],
)
def test_options_of_an_outer_block_apply_in_an_inner_one(compile_):
    platform = jax.default_backend()
    with (
        compiling({platform: {"xla_backend_optimization_level": "high"}}),
        compiling({platform: {"xla_allow_excess_precision": False}}),
        pytest.raises(jax.errors.JaxRuntimeError, match="optimization_level"),
    ):
        compile_()


def test_deterministic_sets_the_gpu_options():
    with deterministic(False):
        assert not active_options("gpu")
    with deterministic(), compiling({"gpu": {"xla_gpu_autotune_level": 0}}):
        options = dict(active_options("gpu"))
        assert options["xla_gpu_deterministic_ops"] is True
        assert options["xla_gpu_per_fusion_autotune_cache_dir"] == ""
        assert options["xla_gpu_autotune_level"] == 0
        assert not active_options("cpu")
    # This jaxlib knows them: an unknown option would be an error here.
    jax.jit(squared).lower(X).compile(compiler_options=options)


def test_an_unknown_option_is_dropped_with_a_warning(caplog):
    platform = jax.default_backend()
    with compiling({platform: {"xla_no_such_thing": True}, "tpu": {"xla_other": True}}):
        program = compile_for(replica_mesh(1), squared, X)
    assert program(jnp.ones((16, 16)))[0, 0] == 16
    (record,) = caplog.records
    assert "xla_no_such_thing" in record.getMessage()


def test_preferred_options_are_used_unless_others_are_requested(caplog):
    name = "xla_backend_optimization_level"
    caplog.set_level("INFO", "millrace")
    platform = jax.default_backend()
    wrong = {platform: {name: "high"}}
    with compiling({platform: {name: 1}}):
        compile_for(replica_mesh(1), squared, X, preferred=wrong)
    unknown = {platform: {"xla_no_such_thing": 1}}
    compile_for(replica_mesh(1), squared, X, preferred=unknown)
    assert not caplog.records  # nobody requested it
    program = compile_for(replica_mesh(1), squared, X, preferred=wrong)
    assert program(jnp.ones((16, 16)))[0, 0] == 16  # compiled without it
    (record,) = caplog.records
    assert (
        "cannot compile with {'xla_backend_optimization_level': 'high'}" in record.message
    )


class Gpu:
    platform = "gpu"


@pytest.fixture
def gpu(monkeypatch):
    """A mesh that claims to be on a GPU, and a JAX without a configured cache."""
    monkeypatch.setattr(compiling_module, "_compile", lambda *_: "compiled")
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield types.SimpleNamespace(devices=np.array([Gpu()]))
    for name, value in before.items():
        jax.config.update(name, value)


def cache_dir() -> str | None:
    return jax.config.values["jax_compilation_cache_dir"]


@pytest.mark.cpu("programs for it are not cached")
def test_programs_for_an_accelerator_are_cached(gpu, tmp_path):
    with compiling({}, cache_dir=tmp_path):
        compile_for(replica_mesh(1), squared, X)
        assert cache_dir() is None
        with compiling({}):  # as in an application
            compile_for(gpu, squared, X)
    assert cache_dir() == str(tmp_path)


def test_the_cache_configured_in_jax_takes_precedence(gpu, tmp_path):
    compile_for(gpu, squared, X)
    assert cache_dir() is None
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    with compiling({}, cache_dir=tmp_path):
        compile_for(gpu, squared, X)
    assert cache_dir() == "elsewhere"
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    with compiling({}, cache_dir=tmp_path):
        compile_for(gpu, squared, X)
    assert cache_dir() is None


_CACHING = """
import os
import jax
import jax.numpy as jnp
from millrace.program.compiling import no_persistent_cache

def compile(number):
    jax.jit(lambda x: jnp.sin(x) * number).lower(1.0).compile()
    return len(os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"]))

first = compile(3.5)
with no_persistent_cache():
    second = compile(4.5)
print(0 < first == second < compile(5.5))
"""


def test_no_persistent_cache_leaves_nothing_on_disk(tmp_path):
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    done = subprocess.run(
        [sys.executable, "-c", _CACHING],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"


def test_an_interrupt_does_not_wait_for_the_compiler():
    compiled = threading.Event()

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            compiling_module._interruptibly(lambda: compiled.wait(20))
        assert compiling_module.is_compiling()
    finally:
        signal.signal(signal.SIGALRM, before)
        compiled.set()
    deadline = time.monotonic() + 10
    while compiling_module.is_compiling() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not compiling_module.is_compiling()
