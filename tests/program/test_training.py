"""What a training program promises besides the right weights."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled_text import operations_by_loop_depth
from jax.ad_checkpoint import checkpoint_name
from plain_loop import (
    GLOBAL_BATCH,
    loss_fn,
    make_data,
    make_model_state,
    make_optimizer,
    make_params,
    stage,
    train_with,
)

from millrace.config import ConfigurationError
from millrace.nn.layers import KEPT
from millrace.plan import Plan
from millrace.program.step import save_products
from millrace.program.training import training_program


def the_only_program(program):
    (compiled,) = program._compiled.values()
    return compiled


@pytest.mark.devices(4)
def test_gradients_are_exchanged_once_per_update_and_never_per_micro_batch():
    plan = Plan(micro_batch_size=2, num_replicas=4, gradient_accumulation_count=4)
    _, _, program = train_with(plan)
    depths = operations_by_loop_depth(
        the_only_program(program), "all-reduce|all-reduce-start"
    )
    # Depth 1 is the loop over updates, depth 2 that over micro-batches.
    assert depths == {1: 1}


@pytest.mark.devices(2)
def test_an_exchange_inside_the_inner_loop_would_be_found():
    """Otherwise, the test above could not fail."""
    mesh = jax.make_mesh((2,), ("r",), axis_types=(jax.sharding.AxisType.Auto,))

    def inner(x):
        body = lambda c, _: (jax.lax.psum(c, "r") * 0.5, None)  # noqa: E731
        outer = lambda c, _: (jax.lax.scan(body, c, None, length=3)[0], None)  # noqa: E731
        return jax.lax.scan(outer, x, None, length=2)[0]

    spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(inner, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(mapped).lower(jnp.ones(1000)).compile()
    assert operations_by_loop_depth(compiled, "all-reduce")[2] == 1


@pytest.mark.devices(lambda options: options.get("num_replicas", 1))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_replicas": 4, "micro_batch_size": 8},
        {"micro_batch_size": 8, "gradient_accumulation_count": 4},
        {"optimizer_state_offloading": True},
        {"recomputation": True},
    ],
    ids=str,
)
def test_the_loss_is_traced_once_for_any_number_of_calls_and_lengths(options):
    traces = 0

    def counted(*arguments):
        nonlocal traces
        traces += 1
        return loss_fn(*arguments)

    plan = Plan(**({"micro_batch_size": GLOBAL_BATCH} | options))
    state, _, program = train_with(plan, loss=counted)
    data = make_data()
    state, _ = program.run(state, stage(program, data))
    shorter = {name: leaf[:1] for name, leaf in data.items()}
    program.run(state, stage(program, shorter))
    assert traces == 1


def test_the_state_is_donated_but_the_weights_passed_to_init_are_not():
    params = make_params()
    program = training_program(
        loss_fn, make_optimizer(), Plan(micro_batch_size=GLOBAL_BATCH)
    )
    state = program.init(params, make_model_state())
    program.run(state, stage(program, make_data()))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_a_chunk_that_is_not_on_the_devices_is_an_error():
    program = training_program(
        loss_fn, make_optimizer(), Plan(micro_batch_size=GLOBAL_BATCH)
    )
    state = program.init(make_params(), make_model_state())
    program.compile(state, stage(program, make_data()))
    with pytest.raises(Exception, match=r"[Dd]isallowed host-to-device transfer"):
        program.run(state, make_data())


def test_recomputation_keeps_only_products():
    def deep(w, h):
        for _ in range(12):
            h = jnp.tanh(h @ w) * jnp.exp(-h * h) + jnp.sin(h)
        return (h * h).mean()

    def kept(function):
        _, backward = jax.vjp(function, jnp.ones((40, 40)), jnp.ones((512, 40)))
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    recomputed = jax.checkpoint(deep, policy=save_products)
    assert kept(deep) > 40 * 512 * 40
    assert kept(recomputed) <= 14 * 512 * 40  # twelve products, the input, the weights


@pytest.mark.parametrize(("name", "num_kept"), [(KEPT, 1), ("other", 0)])
def test_recomputation_keeps_values_that_our_layers_name(name, num_kept):
    def function(x):
        return jnp.sin(checkpoint_name(jnp.exp(x), name)).sum()

    recomputed = jax.checkpoint(function, policy=save_products)
    _, backward = jax.vjp(recomputed, x := jnp.ones(7))
    kept = [leaf for leaf in jax.tree.leaves(backward) if leaf.shape == x.shape]
    assert len(kept) == 1 + num_kept  # the input is always kept


@pytest.mark.cpu("recomputation does save memory on a GPU")
def test_recomputation_on_cpu_warns_that_it_saves_nothing(caplog):
    train_with(Plan(micro_batch_size=GLOBAL_BATCH, recomputation=True))
    assert "recomputation saves no memory on CPU" in caplog.text


def test_more_replicas_than_devices_is_a_configuration_error():
    only = f"num_replicas is 9.*only {jax.device_count()} {jax.default_backend()}"
    with pytest.raises(ConfigurationError, match=only):
        training_program(loss_fn, make_optimizer(), Plan(num_replicas=9))


@pytest.mark.devices(2)
def test_an_element_of_the_wrong_size_is_an_error_with_both_sizes():
    program = training_program(
        loss_fn, make_optimizer(), Plan(micro_batch_size=4, num_replicas=2)
    )
    state = program.init(make_params(), make_model_state())
    chunk = {"x": np.zeros((1, 6, 12), np.float32), "y": np.zeros((1, 6), np.int32)}
    with pytest.raises(ValueError, match="has 6 samples; this plan needs 8"):
        program.run(state, jax.device_put(chunk, program.chunk_sharding))


@pytest.mark.parametrize(
    ("bad_loss", "message"),
    [
        (
            lambda p, c, b, k: (b["x"].mean(), (c, {"v": b["x"]})),
            "must be a scalar",
        ),
        (lambda p, c, b, k: (b["x"].mean(), (c, [1.0])), "info a flat dict"),
        (
            lambda p, c, b, k: b["x"].mean(),
            "loss_fn must return (loss, (model_state, info))",
        ),
        (lambda p, c, b, k: (b["x"].mean(), {}), "must return (loss, (model_state, info))"),
        (lambda p, c, b, k: (3, (c, {})), "must return a float loss, got int"),
        (lambda p, c, b, k: (b["x"].mean(1), (c, {})), "got shape (32,). Take the mean"),
        (lambda p, c, b, k: (b["x"].mean(), ({}, {})), "model state of the structure"),
        (
            lambda p, c, b, k: (b["x"].mean(), ({"mean": b["x"]}, {})),
            "model state mean changed its shape",
        ),
    ],
)
def test_a_loss_that_returns_something_else_is_an_error_that_says_what(bad_loss, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        train_with(Plan(micro_batch_size=GLOBAL_BATCH), loss=bad_loss)


@pytest.mark.parametrize(
    ("optimizer", "plan", "message"),
    [
        ("adam", Plan(), "optimizer must be one of optax, .* got 'adam'"),
        (optax.sgd(0.1), {"micro_batch_size": 2}, r"plan must be an mr.Plan, got \{'micro"),
    ],
)
def test_arguments_of_other_kinds_are_named(optimizer: Any, plan: Any, message):
    with pytest.raises(ConfigurationError, match=message):
        training_program(loss_fn, optimizer, plan)


def test_extra_info_is_reported_for_every_update():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    _, info, _ = train_with(
        Plan(micro_batch_size=GLOBAL_BATCH), extra_info={"learning_rate": schedule}
    )
    np.testing.assert_allclose(info["learning_rate"], [1.0, 0.75, 0.5])


@pytest.mark.devices(4)
def test_changes_of_model_state_can_be_summed_over_micro_batches():
    """In a table with a row per sample, no change may be averaged away."""

    def loss(params, model_state, batch, key):
        del key
        table = model_state["table"].at[batch["y"]].add(1)
        return (params["w"] * 0.0).sum(), ({"table": table}, {})

    plan = Plan(micro_batch_size=4, num_replicas=4, gradient_accumulation_count=2)
    program = training_program(loss, optax.sgd(0.1), plan, model_state_reduction="sum")
    state = program.init({"w": jnp.ones(3)}, {"table": jnp.zeros(5, jnp.int32)})
    data = {"y": make_data()["y"]}
    state, _ = program.run(state, stage(program, data))
    np.testing.assert_array_equal(
        state.model_state["table"], np.bincount(data["y"].ravel())
    )


@pytest.mark.devices(lambda split: split[2])
@pytest.mark.parametrize("accumulation_dtype", ["float16", None])
@pytest.mark.parametrize("split", [(24, 1, 1), (3, 8, 1), (3, 1, 8), (1, 3, 8)])
def test_gradients_that_just_fit_into_float16_survive_any_split(split, accumulation_dtype):
    def loss(params, model_state, batch, key):
        return (params["w"] * batch["x"]).mean(), (model_state, {})

    micro, count, replicas = split
    plan = Plan(
        micro_batch_size=micro,
        gradient_accumulation_count=count,
        num_replicas=replicas,
        gradient_accumulation_dtype=accumulation_dtype,
        precision="16.16",
        half_type="float16",
    )
    program = training_program(loss, optax.sgd(1e-6), plan)
    state = program.init({"w": jnp.ones(())})
    data = {"x": np.full((count, micro * replicas), 20_000, np.float32)}
    state, _ = program.run(state, jax.device_put(data, program.chunk_sharding))
    assert float(state.params["w"]) == pytest.approx(0.98, abs=1e-3)


@pytest.mark.devices(2)
@pytest.mark.parametrize(("dtype", "value"), [("bfloat16", 1.297), ("float16", 5000)])
def test_unchanged_16_bit_model_state_stays_exactly_the_same(dtype, value):
    def loss(params, model_state, batch, key):
        return (params["w"] * batch["x"]).mean(), (model_state, {})

    plan = Plan(micro_batch_size=1, gradient_accumulation_count=300, num_replicas=2)
    program = training_program(loss, optax.sgd(0.1), plan)
    first = jnp.asarray(value, dtype)
    state = program.init({"w": jnp.ones(())}, {"kept": first})
    data = {"x": np.ones((300, 2), np.float32)}
    state, _ = program.run(state, jax.device_put(data, program.chunk_sharding))
    assert state.model_state["kept"] == first and state.model_state["kept"].dtype == dtype


@pytest.mark.devices(8)
def test_random_keys_depend_on_the_micro_batch_and_not_on_the_replica():
    def noisy(params, model_state, batch, key):
        noise = jax.random.normal(key, ())
        return (params["layer0"]["bias"] * 0.0).sum(), (model_state, {"noise": noise})

    def noise(**options):
        return train_with(Plan(micro_batch_size=4, **options), loss=noisy)[1]["noise"]

    replicated = noise(num_replicas=8)
    accumulated = noise(gradient_accumulation_count=8)
    np.testing.assert_allclose(replicated, accumulated, rtol=1e-5)
    assert len(set(np.round(replicated, 6))) == 3  # every update has its own key


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_count": 4},
        pytest.param({"num_replicas": 4}, marks=pytest.mark.devices(4)),
        pytest.param(
            {"num_replicas": 4, "gradient_accumulation_count": 3},
            marks=pytest.mark.devices(4),
        ),
        pytest.param(
            {"num_replicas": 2, "gradient_accumulation_count": 6},
            marks=pytest.mark.devices(2),
        ),
    ],
    ids=str,
)
def test_all_random_keys_of_a_run_differ(options):
    """Over updates, micro-batches and replicas: equal keys would drop the same values."""

    def record_key(params, model_state, batch, key):
        words = jax.random.key_data(key)
        seen = model_state.at[batch["number"][0]].add(words)
        return params["w"].sum(), (seen, {})

    plan = Plan(**options)
    program = training_program(
        record_key, optax.sgd(0.1), plan, model_state_reduction="sum"
    )
    updates, step = 3, plan.batching.samples_per_step
    count = updates * plan.batching.global_batch_size
    state = program.init({"w": jnp.ones(1)}, jnp.zeros((count, 2), jnp.uint32))
    chunk = {"number": np.arange(count, dtype=np.int32).reshape(-1, step)}
    state, _ = program.run(state, jax.device_put(chunk, program.chunk_sharding))
    keys = {tuple(words) for words in np.asarray(state.model_state).tolist()}
    assert len(keys) == count


def test_updates_per_call_divides_the_execution_or_reaches_the_limit():
    program = training_program(loss_fn, make_optimizer(), Plan(micro_batch_size=32))
    assert program.updates_per_call(100, 1) == 100
    assert program.updates_per_call(100, 16 << 20) == 4
    assert program.updates_per_call(781, 1 << 20) == 64  # 11 x 71: divisors are sparse
    assert program.updates_per_call(5, 1 << 40) == 1


@pytest.mark.devices(4)
def test_a_run_raises_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_with(Plan(micro_batch_size=8, num_replicas=4))


@pytest.mark.parametrize("offloading", [False, True])
def test_using_a_donated_state_is_a_clear_error(offloading):
    plan = Plan(micro_batch_size=32, optimizer_state_offloading=offloading)
    program = training_program(loss_fn, make_optimizer(), plan)
    state = program.init(make_params(), make_model_state())
    chunk = stage(program, make_data())
    program.run(state, chunk)
    with pytest.raises(ValueError, match="used up by an earlier call"):
        program.run(state, chunk)


@pytest.mark.parametrize("offloading", [False, True])
def test_a_state_of_numpy_arrays_continues_exactly(offloading):
    plan = Plan(micro_batch_size=32, optimizer_state_offloading=offloading)
    program = training_program(loss_fn, make_optimizer(), plan)
    chunk = stage(program, make_data())
    first, _ = program.run(program.init(make_params(), make_model_state()), chunk)
    saved = jax.device_get(first)
    one, _ = program.run(first, chunk)
    other, _ = program.run(saved, chunk)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("name", ["loss", "learning_rate"])
def test_info_with_a_reserved_name_is_an_error(name):
    def loss(params, model_state, batch, key):
        return params["layer0"]["bias"].sum(), (model_state, {name: 7.0})

    with pytest.raises(ValueError, match=f"cannot be called {name}"):
        train_with(
            Plan(micro_batch_size=GLOBAL_BATCH),
            loss=loss,
            extra_info={"learning_rate": jnp.sin},
        )


def test_integer_parameters_are_an_error():
    program = training_program(loss_fn, make_optimizer(), Plan())
    with pytest.raises(ValueError, match="parameter table is int32, which has no gradient"):
        program.init({"table": jnp.arange(3)})


@pytest.mark.parametrize("precision", ["16.16", "16.32", "32.32"])
@pytest.mark.parametrize("given", ["bfloat16", "float16", "float32"])
def test_weights_are_cast_to_the_dtype_of_the_plan(precision, given):
    plan = Plan(precision=precision, half_type="float16")
    program = training_program(loss_fn, make_optimizer(), plan)
    state = program.init({"w": jnp.ones(3, given)})
    assert str(state.params["w"].dtype) == plan.types.weights
