"""Options for the compiler, and what was compiled with them."""

import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millrace as mr
from millrace.program import compiling as compiling_module
from millrace.program.compiling import (
    compile_for,
    compiling,
    deterministic,
    jit,
    options_in_force,
    peak_bytes,
)
from millrace.program.replicas import replica_mesh

X = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def doubled(x):
    return x @ x


def test_what_is_compiled_inside_is_collected_with_its_memory():
    mesh = replica_mesh(1)
    with compiling({}) as programs:
        first = compile_for(mesh, doubled, X)
        second = compile_for(mesh, lambda x: (doubled(x), x + 1), X)
    compile_for(mesh, doubled, X)
    assert programs == [first, second]
    assert peak_bytes(programs) >= 3 * 16 * 16 * 4  # one argument, two results
    assert peak_bytes([]) == 0


def test_options_reach_the_compiler():
    def always_broken(x):
        return x

    # An option the compiler knows, with a value it refuses, shows that it was passed on.
    with (
        compiling({jax.default_backend(): {"xla_backend_optimization_level": "high"}}),
        pytest.raises(jax.errors.JaxRuntimeError, match="optimization_level"),
    ):
        compile_for(replica_mesh(1), always_broken, X)


@pytest.mark.parametrize(
    "compile_",
    [
        lambda: compile_for(replica_mesh(1), lambda x: x, X),
        lambda: jit(lambda x: x)(jnp.ones(3)),
        lambda: mr.repeat(2, lambda carry: (carry, None), 0),
    ],
    ids=["compile_for", "jit", "repeat"],
)
def test_options_of_an_outer_block_hold_in_an_inner_one(compile_):
    platform = jax.default_backend()
    with (
        compiling({platform: {"xla_backend_optimization_level": "high"}}),
        compiling({platform: {"xla_allow_excess_precision": False}}),
        pytest.raises(jax.errors.JaxRuntimeError, match="optimization_level"),
    ):
        compile_()


def test_deterministic_programs_exclude_kernels_that_vary_on_a_gpu():
    with deterministic(False):
        assert not options_in_force("gpu")
    with deterministic(), compiling({"gpu": {"xla_gpu_autotune_level": 0}}):
        options = dict(options_in_force("gpu"))
        assert options["xla_gpu_deterministic_ops"] is True
        assert options["xla_gpu_per_fusion_autotune_cache_dir"] == ""
        assert options["xla_gpu_autotune_level"] == 0
        assert not options_in_force("cpu")
    # Known to this jaxlib: an unknown one would be left out with a warning.
    jax.jit(doubled).lower(X).compile(compiler_options=options)


def test_an_option_that_this_jaxlib_lacks_is_left_out_with_a_warning(caplog):
    platform = jax.default_backend()
    with compiling({platform: {"xla_no_such_thing": True}, "tpu": {"xla_other": True}}):
        program = compile_for(replica_mesh(1), doubled, X)
    assert program(jnp.ones((16, 16)))[0, 0] == 16
    (record,) = caplog.records
    assert "xla_no_such_thing" in record.getMessage()


def test_what_a_program_prefers_reaches_the_compiler_and_gives_way_to_what_is_asked(caplog):
    name = "xla_backend_optimization_level"
    caplog.set_level("INFO", "millrace")
    platform = jax.default_backend()
    wrong = {platform: {name: "high"}}
    with compiling({platform: {name: 1}}):
        compile_for(replica_mesh(1), doubled, X, preferred=wrong)
    unknown = {platform: {"xla_no_such_thing": 1}}
    compile_for(replica_mesh(1), doubled, X, preferred=unknown)
    assert not caplog.records  # nobody has asked for it
    program = compile_for(replica_mesh(1), doubled, X, preferred=wrong)
    assert program(jnp.ones((16, 16)))[0, 0] == 16  # without
    (record,) = caplog.records
    assert (
        "cannot compile with {'xla_backend_optimization_level': 'high'}" in record.message
    )


class Gpu:
    platform = "gpu"


@pytest.fixture
def gpu(monkeypatch):
    """A mesh that says it is of a GPU, and a JAX that has been told nothing."""
    monkeypatch.setattr(compiling_module, "_compile", lambda *_: "compiled")
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield types.SimpleNamespace(devices=np.array([Gpu()]))
    for name, value in before.items():
        jax.config.update(name, value)


def kept() -> str | None:
    return jax.config.values["jax_compilation_cache_dir"]


@pytest.mark.cpu("what is compiled for it is not kept")
def test_what_is_compiled_for_an_accelerator_is_kept(gpu, tmp_path):
    with compiling({}, kept_in=tmp_path):
        compile_for(replica_mesh(1), doubled, X)
        assert kept() is None
        with compiling({}):  # as an application's own
            compile_for(gpu, doubled, X)
    assert kept() == str(tmp_path)


def test_what_jax_was_told_goes_before_where_to_keep_programs(gpu, tmp_path):
    compile_for(gpu, doubled, X)
    assert kept() is None
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    with compiling({}, kept_in=tmp_path):
        compile_for(gpu, doubled, X)
    assert kept() == "elsewhere"
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    with compiling({}, kept_in=tmp_path):
        compile_for(gpu, doubled, X)
    assert kept() is None


_KEEPING = """
import os
import jax
import jax.numpy as jnp
from millrace.program.compiling import not_kept

def compile(number):
    jax.jit(lambda x: jnp.sin(x) * number).lower(1.0).compile()
    return len(os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"]))

first = compile(3.5)
with not_kept():
    second = compile(4.5)
print(0 < first == second < compile(5.5))
"""


def test_what_is_not_to_be_kept_leaves_nothing_on_disk(tmp_path):
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    done = subprocess.run(
        [sys.executable, "-c", _KEEPING],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"
