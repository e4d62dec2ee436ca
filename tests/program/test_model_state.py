"""How the model state of an update's micro-batches and replicas become one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from millrace.config import ConfigurationError
from millrace.nn.layers import Layer, dense
from millrace.nn.losses import LayeredLoss
from millrace.plan import Plan
from millrace.program.model_state import checked_model_state, model_state_modes
from millrace.program.replicas import _place_one, replica_mesh, replicated
from millrace.program.training import training_program

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
    """Train on samples numbered from 0; `move(model_state, sample, key)` carries on."""

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
    assert (
        model_state["count"] == 1 and model_state["count"].dtype == jnp.uint8
    )  # 257 - 256
    assert model_state["started"] and model_state["started"].dtype == bool
    np.testing.assert_array_equal(model_state["flips"], [False, True])
    assert model_state["typed"].dtype == key.dtype
    np.testing.assert_array_equal(*map(jax.random.key_data, (model_state["typed"], key)))
    np.testing.assert_array_equal(model_state["raw"], raw)
    assert model_state["mean"] == pytest.approx(np.mean([8, 9, 10, 11]))


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
def test_once_takes_the_value_of_replica_0s_first_micro_batch(plan):
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


def test_a_function_chooses_and_may_leave_the_choice():
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
        ("sum", jnp.bool_(0), "bool, which cannot be added up.*once"),
        ("sum", jax.random.key(0), "key<fry>, which cannot be added up.*once"),
        ("last", jnp.float32(0), "must be mean, sum or once, got 'last'"),
        (lambda path, value: "first", jnp.int32(0), "for a must be mean, sum or once"),
    ],
)
def test_what_cannot_be_combined_so_is_refused_with_what_can(reduction, value, message):
    with pytest.raises(ValueError, match=message):
        model_state_modes(reduction, {"a": value})


def test_the_advice_of_the_messages_works():
    for value in (jnp.int32(0), jnp.bool_(0), jax.random.key(0)):
        assert model_state_modes(None, {"a": value}) == {"a": "once"}
        assert model_state_modes("once", {"a": value}) == {"a": "once"}
    assert model_state_modes(None, {"a": jnp.bfloat16(0)}) == {"a": "mean"}


def test_a_key_of_another_kind_is_named():
    old, new = jax.random.key(0), jax.random.key(0, impl="rbg")
    with pytest.raises(TypeError, match="k changed its type from key<fry> to key<rbg"):
        checked_model_state({"k": new}, {"k": old})


@pytest.mark.devices(4)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_pipeline_changes_them_once_per_update_too(replicas):
    def counting(name):
        def apply(params, model_state, x, call):
            new = {
                "count": model_state["count"] + 1,
                "first": x.ravel()[0],
                "started": jnp.bool_(True),
                "raw": jax.random.split(model_state["raw"], 1)[0],
            }
            return x, new

        start = {
            "count": jnp.int32(0),
            "first": jnp.float32(0),
            "started": jnp.bool_(False),
            "raw": jax.random.PRNGKey(0),
        }
        return Layer(name, lambda x: ({}, start), apply), start

    (one, start), (two, _) = counting("one"), counting("two")
    layers = [one, dense("a", 4), two, dense("b", 4)]
    loss = LayeredLoss(layers, lambda b, key: b, lambda y, b: (y.mean(), {}))
    params = {name: {"kernel": jnp.eye(4), "bias": jnp.zeros(4)} for name in "ab"}
    found = []
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
        found.append(jax.device_get(program.unpack_state(state).model_state))
    jax.tree.map(np.testing.assert_array_equal, *found)
    for name in ("one", "two"):
        assert found[1][name]["count"] == 2 and found[1][name]["started"]
        assert found[1][name]["first"] == 16 * replicas  # of the second update


@pytest.mark.devices(2)
def test_a_typed_key_cannot_be_carried_through_a_pipeline_yet_and_words_can():
    layers = [dense("a", 4), dense("b", 4)]
    loss = LayeredLoss(layers, lambda b, key: b, lambda y, b: (y.mean(), {}))
    plan = Plan(gradient_accumulation_count=4, pipeline_splits=["b"])
    program = training_program(loss, optax.sgd(0.0), plan)
    params = {name: {"kernel": jnp.eye(4), "bias": jnp.zeros(4)} for name in "ab"}
    with pytest.raises(ConfigurationError, match="a/k is a random key"):
        program.init(params, {"a": {"k": jax.random.key(0)}})


@pytest.mark.devices(2)
def test_keys_are_placed_where_several_processes_would_place_them():
    key = jax.random.key(5)
    placed = _place_one(key, replicated(replica_mesh(2)))
    assert len(placed.sharding.device_set) == 2 and placed.dtype == key.dtype
    np.testing.assert_array_equal(*map(jax.random.key_data, (placed, key)))
