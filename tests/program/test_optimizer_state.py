"""Optimizer state in 16 bits, and optimizers that need the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from plain_loop import (
    GLOBAL_BATCH,
    largest_difference,
    make_data,
    make_model_state,
    make_params,
    train_with,
)
from plain_loop import loss_fn as plain_loss_fn

from millrace.config import ConfigurationError
from millrace.nn.layers import dense, init_layers, relu
from millrace.nn.losses import LayeredLoss
from millrace.plan import Plan
from millrace.program.optimizer_state import init_optimizer_state
from millrace.program.training import training_program

HALF = {"micro_batch_size": GLOBAL_BATCH, "precision": "16.16"}
STUCK = "never decays"


def dtypes_by_rank(state):
    leaves = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return {(x.ndim > 0, str(x.dtype)) for x in leaves}


@pytest.mark.parametrize("offloading", [False, True])
def test_scalars_in_the_optimizer_state_stay_in_float32(offloading):
    """In bfloat16, Adam's b2 of 0.999 is 1, and the weights become NaN."""
    optimizer = optax.inject_hyperparams(optax.adam)(1e-2)
    plan = Plan(**HALF, optimizer_state_offloading=offloading)
    state, info, _ = train_with(plan, optimizer=optimizer)
    assert np.isfinite(info["loss"]).all()
    assert dtypes_by_rank(state.optimizer_state) == {(True, "bfloat16"), (False, "float32")}
    assert state.optimizer_state.hyperparams["b2"] == np.float32(0.999)
    expected, _, _ = train_with(plan, optimizer=optax.adam(1e-2))
    for one, other in zip(
        *map(jax.tree.leaves, (state.params, expected.params)), strict=True
    ):  # equal up to the last bit
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=2**-7)


def test_a_sum_in_the_optimizer_state_can_exceed_256():
    optimizer = contrib.schedule_free_sgd(1.0, weight_lr_power=1.0)

    def loss(params, model_state, batch, key):
        return 1e-6 * (params["w"] * batch).mean(), (model_state, {})

    program = training_program(loss, optimizer, Plan(precision="16.16"))
    chunk = jax.device_put(np.ones((300, 1), np.float32), program.chunk_sharding)
    state, _ = program.run(program.init({"w": jnp.ones(3)}), chunk)
    assert float(state.optimizer_state.weight_sum) == 300
    assert state.optimizer_state.z["w"].dtype == jnp.bfloat16


@pytest.mark.devices(2)
def test_scalars_stay_in_float32_in_a_pipeline():
    layers = [dense("a", 8), relu("r"), dense("b", 4)]
    loss = LayeredLoss(
        layers, lambda b, key: b, lambda y, b: (jnp.square(y - 1).mean(), {})
    )
    data = np.random.default_rng(0).normal(size=(8, 2, 5)).astype(np.float32)
    found = []
    for splits in ([], ["b"]):
        plan = Plan(
            micro_batch_size=2,
            gradient_accumulation_count=4,
            precision="16.16",
            pipeline_splits=splits,
        )
        optimizer = optax.inject_hyperparams(optax.adam)(1e-2)
        program = training_program(loss, optimizer, plan)
        state = program.init(*init_layers(layers, jax.random.key(0), data[0]))
        state, _ = program.run(state, jax.device_put(data, program.chunk_sharding))
        found.append(program.unpack_state(state))
    kinds = dtypes_by_rank(found[1].optimizer_state)
    assert kinds == {(True, "bfloat16"), (False, "float32")}
    assert largest_difference(found[0].params, found[1].params) < 1e-2


@pytest.mark.parametrize(
    ("half", "expected"), [("bfloat16", "bfloat16"), ("float16", "float32")]
)
def test_state_has_the_dtype_of_a_weight_only_if_it_has_its_shape(half, expected):
    params = {"kernel": jnp.ones((256, 128), half), "bias": jnp.ones(128, half)}
    adam = init_optimizer_state(optax.adam(1.0), params)[0]
    assert {str(x.dtype) for x in jax.tree.leaves((adam.mu, adam.nu))} == {expected}
    factored = init_optimizer_state(optax.scale_by_factored_rms(), params)
    # Sums over rows and columns: as long as the bias, but not its state.
    assert {str(factored.v_row["kernel"].dtype), str(factored.v_col["kernel"].dtype)} == {
        "float32"
    }
    assert str(factored.v["bias"].dtype) == expected
    explicit = init_optimizer_state(optax.adam(1.0, mu_dtype="float32"), params)[0]
    assert (
        explicit.mu["bias"].dtype == jnp.float32
        and str(explicit.nu["bias"].dtype) == expected
    )


def stuck_warnings(caplog, optimizer, **options):
    caplog.clear()
    program = training_program(plain_loss_fn, optimizer, Plan(**options))
    program.init(make_params(), make_model_state())
    return [r.getMessage() for r in caplog.records if STUCK in r.getMessage()]


def test_state_that_cannot_decay_in_bfloat16_is_named_in_one_warning(caplog):
    (message,) = stuck_warnings(caplog, optax.adam(1e-2), precision="16.16")
    assert "0/nu/layer0/bias" in message
    assert "stochastic_rounding" in message and "16.32" in message
    assert len(stuck_warnings(caplog, optax.sgd(0.1, 0.999), precision="16.16")) == 1


def test_state_that_is_warned_about_really_does_not_decay():
    """Adam's second moment after one large gradient and many of zero."""

    def loss(params, model_state, batch, key):
        return (params["w"] * batch).mean(), (model_state, {})

    data = np.zeros((1000, 1), np.float32)
    data[0] = 30.0
    moments = {}
    for precision, stochastic in (("16.16", False), ("16.16", True), ("16.32", False)):
        plan = Plan(precision=precision, stochastic_rounding=stochastic)
        program = training_program(loss, optax.adam(1e-3), plan)
        state = program.init({"w": jnp.ones(50)})
        chunk = jax.device_put(data, program.chunk_sharding)
        state, _ = program.run(state, chunk)
        moment = state.optimizer_state[0].nu["w"]
        moments[precision, stochastic] = float(moment.astype(jnp.float32).mean())
    exact = moments["16.32", False]
    assert moments["16.16", False] > 2 * exact
    assert moments["16.16", True] == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (optax.adam(1e-2), {"precision": "16.16", "stochastic_rounding": True}),
        (optax.adam(1e-2), {"precision": "16.16", "half_type": "float16"}),
        (optax.adam(1e-2), {"precision": "16.32"}),
        (optax.adam(1e-2, b2=0.99), {"precision": "16.16"}),
        (optax.sgd(0.1, momentum=0.9), {"precision": "16.16"}),
        (optax.adagrad(0.1), {"precision": "16.16"}),
        (optax.sgd(0.1), {"precision": "16.16"}),
    ],
)
def test_state_that_decays_causes_no_warning(caplog, optimizer, options):
    assert not stuck_warnings(caplog, optimizer, **options)


NEED_THE_LOSS = {
    "plateau": optax.chain(
        optax.sgd(0.1), contrib.reduce_on_plateau(factor=0.5, patience=0, rtol=0.5)
    ),
    "polyak": optax.polyak_sgd(max_learning_rate=0.1),
    "momo": contrib.momo(0.1),
    "momo_adam": contrib.momo_adam(1e-2),
}


def loop_with_value(optimizer, data):
    params, model_state = make_params(), make_model_state()

    @jax.jit
    def step(params, model_state, state, batch):
        function = jax.value_and_grad(plain_loss_fn, has_aux=True)
        (value, (model_state, _)), gradient = function(params, model_state, batch, None)
        updates, state = optimizer.update(gradient, state, params, value=value)
        return optax.apply_updates(params, updates), model_state, state

    state = jax.jit(optimizer.init)(params)
    for update in range(data["x"].shape[0]):
        batch = {name: leaf[update] for name, leaf in data.items()}
        params, model_state, state = step(params, model_state, state, batch)
    return params


@pytest.mark.parametrize("name", NEED_THE_LOSS)
@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_size": 8, "gradient_accumulation_count": 4, "loss_scaling": 8.0},
        {"micro_batch_size": 32, "optimizer_state_offloading": True},
        pytest.param(
            {"micro_batch_size": 8, "num_replicas": 4}, marks=pytest.mark.devices(4)
        ),
    ],
    ids=["accumulated and scaled", "offloaded", "replicated"],
)
def test_optimizers_that_need_the_loss_get_the_mean_over_the_global_batch(name, options):
    optimizer, data = NEED_THE_LOSS[name], make_data()
    state, _, _ = train_with(Plan(**options), optimizer=optimizer)
    assert largest_difference(state.params, loop_with_value(optimizer, data)) < 1e-5
    if name == "plateau":
        assert float(state.optimizer_state[1].scale) < 1  # the loss was used


def test_an_optimizer_that_takes_no_loss_gets_none():
    """Even if it takes other extra arguments, as optax.contrib.sam does."""
    plain = optax.sgd(0.1)

    def update(gradients, state, params=None, *, grad_fn=None):
        assert grad_fn is None
        return plain.update(gradients, state, params)

    narrow = optax.GradientTransformationExtraArgs(plain.init, update)
    states = [train_with(Plan(micro_batch_size=GLOBAL_BATCH), optimizer=o)[0]
              for o in (plain, narrow)]  # fmt: skip
    assert largest_difference(states[0].params, states[1].params) == 0


@pytest.mark.parametrize(
    ("optimizer", "what"),
    [
        (optax.lbfgs(), "'grad' and 'value_fn'"),
        (optax.lookahead(optax.sgd(0.1), 5, 0.5), "no attribute 'fast'"),
    ],
)
def test_optimizers_that_need_more_arguments_fail_before_compiling(optimizer, what):
    program = training_program(plain_loss_fn, optimizer, Plan())
    with pytest.raises(ConfigurationError, match=what) as refused:
        program.init(make_params(), make_model_state())
    assert "Use optax.adamw" in str(refused.value)
