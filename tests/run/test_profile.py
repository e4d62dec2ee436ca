"""``--profile`` writes a trace of training, and the report says where the time went."""

import json
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runner import batches, make_runner

import millrace as mr
from millrace.loop.trace import Trace
from millrace.report.sections import read_sections
from millrace.run.profile import _find_all, _find_scope, read_operations, report_profile


def test_a_product_takes_most_of_the_time_of_a_program_of_products(tmp_path):
    @jax.jit
    def multiply(x):
        return jax.lax.fori_loop(0, 20, lambda _, x: jnp.tanh(x @ x), x)

    x = jnp.ones((300, 300)) / 300
    jax.block_until_ready(multiply(x))
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(multiply(x))
    operations = read_operations(tmp_path)
    assert operations[0].times == 20
    # On a GPU, the launch of such a small product takes longer than the product.
    assert operations[0].share > (0.5 if jax.default_backend() == "cpu" else 0.2)
    assert sum(operation.share for operation in operations) == pytest.approx(1)
    assert "while" not in {operation.name for operation in operations}


def test_types_that_a_trace_creates_with_a_warning_do_not_abort_where_it_is_an_error(
    tmp_path, monkeypatch
):
    class Event(SimpleNamespace):
        @property
        def stats(self):  # what nanobind does
            warnings.warn("no __module__ attribute", DeprecationWarning, stacklevel=2)
            return [("hlo_op", "dot.3")]

    line = SimpleNamespace(name="tf_XLA", events=[Event(name="dot.3", duration_ns=1e3)])
    data = SimpleNamespace(planes=[SimpleNamespace(name="/host:CPU", lines=[line])])
    reader = SimpleNamespace(from_file=lambda path: data)
    monkeypatch.setattr(jax.profiler, "ProfileData", reader)
    (tmp_path / "host.xplane.pb").touch()
    assert [operation.name for operation in read_operations(tmp_path)] == ["dot"]


def test_a_command_with_profile_reports_where_the_time_went(tmp_path):
    result = mr.vcd.train(
        data=np.random.default_rng(0).random((72, 28, 28)),
        run_dir=tmp_path / "run",
        profile=True,
        z_dim=2,
        num_hidden=8,
        num_burn_in_steps=2,
        num_leapfrog_steps=2,
        num_validation=8,
        micro_batch_size=8,
        num_epochs=8,
        quiet=True,
    )
    assert 0 < result.summary["profile"]["updates"] < 64
    assert result.summary["profile"]["operations"]
    assert list((result.path / "profile").rglob("*.xplane.pb"))
    assert "Where the time went" in (result.path / "report.html").read_text()


def test_a_trace_of_a_gpu_has_kernels_and_no_events_of_the_host():
    class Unreadable(SimpleNamespace):
        @property
        def stats(self):
            raise AssertionError("reading these aborts the process")

    def plane(name, line, *events):
        read = [Unreadable(name=name, duration_ns=ns) for name, ns in events]
        return SimpleNamespace(name=name, lines=[SimpleNamespace(name=line, events=read)])

    planes = [
        plane("/host:CPU", "python", ("train", 900.0)),
        plane("/device:GPU:0", "Steps", ("1", 800.0)),
        plane("/device:GPU:0", "Stream #7", ("loop_add_fusion_12", 2e3), ("gemm", 5e3)),
    ]
    found = dict(_find_all(planes))
    assert found == pytest.approx({"loop_add_fusion": 2e-6, "gemm": 5e-6})


def run_traced(path, updates):
    trace = Trace(path / "profile", compiled_once=True)
    runner, state, _, checkpoints = make_runner(
        path,
        batches([1.0] * updates),
        updates=updates,
        logs=1,
        trace=trace,
    )
    runner.run(state)
    checkpoints.close()
    return trace


@pytest.mark.parametrize(("compiled_once", "first"), [(True, 2), (False, 6)])
def test_three_calls_after_warm_up_are_traced(compiled_once, first, tmp_path, monkeypatch):
    noted = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: noted.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: noted.append("stop"))
    trace = Trace(tmp_path, compiled_once=compiled_once)
    for call in range(12):
        trace.advance(10 * call, lambda: noted.append("wait"))
        noted.append(call)
    traced = [first, first + 1, first + 2]
    expected = [*range(first), "wait", "start", *traced, "wait", "stop"]
    assert noted == [*expected, *range(first + 3, 12)]
    assert trace.updates == 30


def test_a_run_traces_a_part_of_its_updates(tmp_path):
    trace = run_traced(tmp_path, 320)  # ten calls on a GPU
    assert 0 < trace.updates < 320
    facts, note = report_profile(tmp_path, trace)
    assert facts["profile"]["updates"] == trace.updates
    shown = facts["profile"]["operations"]
    assert note.startswith(shown[0]["name"])
    (section,) = read_sections(tmp_path).values()
    assert section.rows[0][0] == shown[0]["name"]
    json.dumps(facts)


def test_a_run_that_is_too_short_says_so(tmp_path):
    facts, note = report_profile(tmp_path, run_traced(tmp_path, 2))
    assert facts == {}
    assert "too short" in note


def test_a_scope_is_the_end_of_a_path_without_what_jax_adds():
    path = "jit(run)/while/body/closed_call/jvp(shard_map)/my_layer/dot_general:"
    assert _find_scope(path) == "my_layer/dot_general"
    assert _find_scope("") == ""
