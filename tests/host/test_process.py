"""Settings of the process."""

import jax
import pytest

from millrace.host.process import keep_compiled_programs


@pytest.fixture(autouse=True)
def jax_told_nothing():
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_programs_for_an_accelerator_are_kept_in_the_users_cache(gpu):
    assert keep_compiled_programs() == gpu / "millrace" / "compiled"
    kept = jax.config.values["jax_compilation_cache_dir"]
    assert kept == str(gpu / "millrace" / "compiled")


def test_what_jax_was_told_goes_first(gpu):
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    assert keep_compiled_programs() is None
    assert jax.config.values["jax_compilation_cache_dir"] == "elsewhere"
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    assert keep_compiled_programs() is None
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_programs_for_a_cpu_are_not_kept():
    assert keep_compiled_programs() is None
    assert jax.config.values["jax_compilation_cache_dir"] is None
