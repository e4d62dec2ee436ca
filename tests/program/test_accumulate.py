"""How gradients and model state of the micro-batches of an update are combined."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_loop import run_scalar

from millrace.config import ConfigurationError
from millrace.nn.layers import Layer, dense
from millrace.nn.losses import LayeredLoss
from millrace.plan import Plan
from millrace.program.accumulate import (
    accumulator_dtypes,
    check_model_state,
    reduction_modes,
)
from millrace.program.replicas import _put_leaf, replica_mesh, replicated
from millrace.program.training import training_program

# --- gradients ---


@pytest.mark.parametrize("setting", [None, "float32", "bfloat16", jnp.float32, np.float16])
def test_accumulators_have_the_requested_dtype(setting):
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.float32)}
    dtypes = accumulator_dtypes(params, setting)
    if setting is None:
        assert dtypes == {"a": jnp.dtype("bfloat16"), "b": jnp.dtype("float32")}
    else:
        assert set(dtypes.values()) == {jnp.dtype(setting)}


def test_a_function_chooses_the_dtype_by_path_and_value():
    params = {"block": {"kernel": jnp.ones((2, 2), jnp.bfloat16), "bias": jnp.ones(2)}}
    dtypes = accumulator_dtypes(
        params, lambda path, value: "float32" if path == "block/kernel" else value.dtype
    )
    assert dtypes["block"] == {"kernel": jnp.dtype("float32"), "bias": jnp.dtype("float32")}
    with pytest.raises(ValueError, match="block/bias must be a floating type, got int32"):
        accumulator_dtypes(params, lambda path, value: "int32")


@pytest.mark.parametrize("function", [lambda var: var.dtype, lambda var, /: var.dtype])
def test_a_function_of_the_variable_alone_equals_none(function):
    """As TensorFlow's documentation has it."""
    params = {"half": jnp.ones(2, jnp.bfloat16), "full": jnp.ones(2)}
    assert accumulator_dtypes(params, function) == accumulator_dtypes(params, None)
    plan = Plan(gradient_accumulation_dtype=function, gradient_accumulation_count=2)
    state, _ = run_scalar(1.0, 0.5, plan)
    assert float(state.params["w"][0]) == 0.5


@pytest.mark.parametrize("reduction", ["sum", "mean", "running_mean"])
def test_a_float32_accumulator_is_exact_where_bfloat16_is_not(reduction):
    """Sum 1/3 a hundred times: each addition in bfloat16 loses the last bits."""
    errors = {}
    once, _ = run_scalar(0.0, 1 / 3, Plan(precision="16.32"))
    exact = -float(once.params["w"][0]) * (100 if reduction == "sum" else 1)
    for dtype in ("bfloat16", "float32"):
        plan = Plan(
            gradient_accumulation_count=100,
            gradient_accumulation_dtype=dtype,
            gradient_accumulation_reduction=reduction,
            precision="16.32",
        )
        state, _ = run_scalar(0.0, 1 / 3, plan)
        gradient = -float(state.params["w"][0])
        errors[dtype] = abs(gradient - exact) / exact
    assert errors["float32"] < 1e-6
    if reduction != "running_mean":  # equal terms: exact in any dtype
        assert errors["bfloat16"] > 1e-4


def test_a_float16_gradient_is_cast_before_it_is_divided():
    """1e-7 / 64 underflows in float16."""
    plan = Plan(
        gradient_accumulation_count=64,
        precision="16.16",
        half_type="float16",
    )
    state, _ = run_scalar(1.0, 1e-7, plan, learning_rate=1e6)
    assert float(state.params["w"][0]) == pytest.approx(0.9, abs=0.03)


def test_a_bfloat16_running_mean_is_not_biased():
    """Rounded factors would not add up to one, and the error would grow."""
    rng = np.random.default_rng(0)
    values = (0.3 + 0.1 * rng.standard_normal((250, 400))).astype(np.float32)

    def loss(params, model_state, batch, key):
        return (params["w"] * batch[0]).sum(), (model_state, {})

    plan = Plan(
        gradient_accumulation_count=250,
        gradient_accumulation_dtype="bfloat16",
        gradient_accumulation_reduction="running_mean",
    )
    program = training_program(loss, optax.sgd(1.0), plan)
    state = program.init({"w": jnp.zeros(400)})
    chunk = jax.device_put(values[:, None], program.chunk_sharding)
    state, _ = program.run(state, chunk)
    error = -np.asarray(state.params["w"]) - values.mean(0)
    assert abs(error.mean()) < 4 * error.std() / 20 + 1e-4
    assert np.abs(error).max() < 0.02


@pytest.mark.parametrize("reduction", ["mean", "running_mean"])
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.devices(2))])
def test_float64_gradients_are_accumulated_in_float64(replicas, reduction):
    def loss(params, model_state, batch, key):
        return (params["w"] * batch).mean(), (model_state, {})

    with jax.enable_x64(True):
        plan = Plan(
            gradient_accumulation_count=6,
            num_replicas=replicas,
            gradient_accumulation_reduction=reduction,
        )
        program = training_program(loss, optax.sgd(1.0), plan)
        state = program.init({"w": jnp.zeros((), jnp.float64)})
        data = np.random.default_rng(0).standard_normal((12, replicas))
        state, _ = program.run(state, jax.device_put(data, program.chunk_sharding))
        assert state.params["w"].dtype == jnp.float64
        assert abs(float(state.params["w"]) + 2 * data.mean()) < 1e-15
        params = {"w": jnp.zeros(2, jnp.float64)}
        assert accumulator_dtypes(params, lambda *_: "float32")["w"] == jnp.float32


# --- model state ---

PLANS = [
    Plan(gradient_accumulation_count=4),
    Plan(gradient_accumulation_count=4, optimizer_state_offloading=True),
    pytest.param(Plan(num_replicas=4), marks=pytest.mark.devices(4)),
    pytest.param(
        Plan(num_replicas=2, gradient_accumulation_count=2), marks=pytest.mark.devices(2)
    ),
]
NAMES = ["accumulated", "offloaded", "replicated", "both"]


def run(move, model_state, plan, updates=3, **options):
    """Train on samples 0, 1, …; `move(model_state, sample, key)` returns the new state."""

    def loss(params, model_state, batch, key):
        return (params["w"] * batch).mean(), (move(model_state, batch[0], key), {})

    program = training_program(loss, optax.sgd(0.1), plan, **options)
    state = program.init({"w": jnp.ones(())}, model_state)
    step = plan.batching.samples_per_step
    samples = np.arange(4.0 * updates, dtype=np.float32).reshape(-1, step)
    return program.run(state, jax.device_put(samples, program.chunk_sharding))[
        0
    ].model_state


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
def test_integers_booleans_and_keys_change_once_per_update(plan):
    key = jax.random.key(7, impl="rbg")

    def move(model_state, sample, _):
        return {
            "count": model_state["count"] + 1,
            "started": jnp.bool_(True),
            "flips": ~model_state["flips"],
            "typed": jax.random.split(model_state["typed"])[0],
            "raw": jax.random.split(model_state["raw"], 1)[0],
            "mean": sample,
        }

    model_state = run(
        move,
        {
            "count": jnp.uint8(254),
            "started": jnp.bool_(False),
            "flips": jnp.array([True, False]),
            "typed": key,
            "raw": jax.random.PRNGKey(3),
            "mean": jnp.float32(0),
        },
        plan,
    )
    raw = jax.random.PRNGKey(3)
    for _ in range(3):
        key, raw = jax.random.split(key)[0], jax.random.split(raw, 1)[0]
    assert model_state["count"] == 1  # 257 - 256
    assert model_state["count"].dtype == jnp.uint8
    assert model_state["started"] and model_state["started"].dtype == bool
    np.testing.assert_array_equal(model_state["flips"], [False, True])
    assert model_state["typed"].dtype == key.dtype
    np.testing.assert_array_equal(*map(jax.random.key_data, (model_state["typed"], key)))
    np.testing.assert_array_equal(model_state["raw"], raw)
    assert model_state["mean"] == pytest.approx(np.mean([8, 9, 10, 11]))


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
def test_once_takes_the_value_of_the_first_micro_batch_of_replica_0(plan):
    model_state = run(
        lambda model_state, sample, key: {"last": sample, "noise": jax.random.normal(key)},
        {"last": jnp.float32(-1), "noise": jnp.float32(0)},
        plan,
        model_state_reduction="once",
    )
    assert model_state["last"] == 8  # of 8, 9, 10 and 11
    alone = run(
        lambda model_state, sample, key: {"noise": jax.random.normal(key)},
        {"noise": jnp.float32(0)},
        Plan(gradient_accumulation_count=4),
        model_state_reduction="once",
    )
    assert float(model_state["noise"]) == float(alone["noise"])


@pytest.mark.parametrize(
    "plan", [*PLANS, Plan(gradient_accumulation_count=3)], ids=[*NAMES, "three"]
)
def test_large_values_that_do_not_change_are_averaged_to_themselves(plan):
    start = {"mask": jnp.finfo(jnp.float32).min, "count": 7.0, "none": -jnp.inf}
    start = jax.tree.map(jnp.float32, start)
    assert run(lambda model_state, sample, key: model_state, start, plan) == start


def test_a_function_chooses_the_mode_or_returns_none_for_the_default():
    def choose(path, value):
        return {"rows": "sum", "first": "once"}.get(path)

    model_state = run(
        lambda model_state, sample, key: {
            "rows": model_state["rows"] + 1,
            "first": sample,
            "mean": sample,
            "count": model_state["count"] + 1,
        },
        {"rows": 0, "first": 0.0, "mean": 0.0, "count": 0},
        Plan(gradient_accumulation_count=4),
        model_state_reduction=choose,
    )
    assert jax.tree.map(float, model_state) == {
        "rows": 12,
        "first": 8,
        "mean": 9.5,
        "count": 3,
    }


@pytest.mark.parametrize(
    ("reduction", "value", "message"),
    [
        ("mean", jnp.int32(0), r"int32, which cannot be averaged.*once.* or sum"),
        ("mean", jnp.bool_(0), "bool, which cannot be averaged.*once"),
        ("sum", jnp.bool_(0), "bool, which cannot be summed.*once"),
        ("sum", jax.random.key(0), "key<fry>, which cannot be summed.*once"),
        ("last", jnp.float32(0), "must be mean, sum or once, got 'last'"),
        (lambda path, value: "first", jnp.int32(0), "for a must be mean, sum or once"),
    ],
)
def test_an_impossible_mode_is_an_error_that_names_possible_ones(reduction, value, message):
    with pytest.raises(ValueError, match=message):
        reduction_modes(reduction, {"a": value})


def test_the_modes_that_the_messages_suggest_work():
    for value in (jnp.int32(0), jnp.bool_(0), jax.random.key(0)):
        assert reduction_modes(None, {"a": value}) == {"a": "once"}
        assert reduction_modes("once", {"a": value}) == {"a": "once"}
    assert reduction_modes(None, {"a": jnp.bfloat16(0)}) == {"a": "mean"}


def test_a_key_of_another_implementation_is_an_error():
    old, new = jax.random.key(0), jax.random.key(0, impl="rbg")
    with pytest.raises(TypeError, match="k changed its type from key<fry> to key<rbg"):
        check_model_state({"k": new}, {"k": old})


@pytest.mark.devices(4)
@pytest.mark.parametrize("replicas", [1, 2])
def test_integers_and_keys_change_once_per_update_in_a_pipeline_too(replicas):
    def counting(name):
        def apply(params, model_state, x, call):
            new = {
                "count": model_state["count"] + 1,
                "first": x.ravel()[0],
                "started": jnp.bool_(True),
                "raw": jax.random.split(model_state["raw"], 1)[0],
                "mask": model_state["mask"],
            }
            return x, new

        start = {
            "count": jnp.int32(0),
            "first": jnp.float32(0),
            "started": jnp.bool_(False),
            "raw": jax.random.PRNGKey(0),
            "mask": jnp.finfo(jnp.float32).min,
        }
        return Layer(name, lambda x: ({}, start), apply), start

    (one, start), (two, _) = counting("one"), counting("two")
    layers = [one, dense("a", 4), two, dense("b", 4)]
    loss = LayeredLoss(layers, lambda b, key: b, lambda y, b: (y.mean(), {}))
    params = {name: {"kernel": jnp.eye(4), "bias": jnp.zeros(4)} for name in "ab"}
    states = []
    for splits in ([], ["two"]):
        plan = Plan(
            gradient_accumulation_count=4, num_replicas=replicas, pipeline_splits=splits
        )
        program = training_program(
            loss,
            optax.sgd(0.0),
            plan,
            model_state_reduction=lambda path, _: (
                "once" if path.endswith("first") else None
            ),
        )
        state = program.init(params, {"one": start, "two": start})
        batches = np.arange(32.0 * replicas, dtype=np.float32).reshape(-1, replicas, 4)
        state, _ = program.run(state, jax.device_put(batches, program.chunk_sharding))
        states.append(jax.device_get(program.unpack_state(state).model_state))
    jax.tree.map(np.testing.assert_array_equal, *states)
    for name in ("one", "two"):
        assert states[1][name]["count"] == 2 and states[1][name]["started"]
        assert states[1][name]["first"] == 16 * replicas  # of the second update
        assert states[1][name]["mask"] == jnp.finfo(jnp.float32).min


@pytest.mark.devices(2)
def test_a_typed_key_in_the_state_of_a_pipeline_is_an_error():
    layers = [dense("a", 4), dense("b", 4)]
    loss = LayeredLoss(layers, lambda b, key: b, lambda y, b: (y.mean(), {}))
    plan = Plan(gradient_accumulation_count=4, pipeline_splits=["b"])
    program = training_program(loss, optax.sgd(0.0), plan)
    params = {name: {"kernel": jnp.eye(4), "bias": jnp.zeros(4)} for name in "ab"}
    with pytest.raises(ConfigurationError, match="a/k is a random key"):
        program.init(params, {"a": {"k": jax.random.key(0)}})


@pytest.mark.devices(2)
def test_keys_can_be_put_on_several_devices():
    key = jax.random.key(5)
    placed = _put_leaf(key, replicated(replica_mesh(2)))
    assert len(placed.sharding.device_set) == 2 and placed.dtype == key.dtype
    np.testing.assert_array_equal(*map(jax.random.key_data, (placed, key)))
