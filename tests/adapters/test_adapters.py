"""Adapted models with other features of a plan, in pipelines, and back in their library."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from adapters_matrix import (
    CASES,
    FEATURES,
    HIDDEN,
    check_same,
    make_case,
    make_data,
    mean_error,
    run_program,
)
from flax import linen, nnx

import millrace as mr
from millrace.checkpoint.store import Checkpoints

eqx = pytest.importorskip("equinox")
hk = pytest.importorskip("haiku")

SGD = optax.sgd(0.05, momentum=0.9)
X = np.random.default_rng(1).standard_normal((5, FEATURES)).astype(np.float32)


def call_trained(library, case, state):
    """Return what a trained network predicts, called in the way of its own library."""
    merged = case.model.merge(state)
    if library == "nnx":
        merged.eval()
        return merged(X)
    if library == "equinox":
        net, averages = merged
        net = eqx.nn.inference_mode(net)
        return jax.vmap(lambda x: net(x, averages, None)[0])(X)
    net = case.network
    if library == "linen":
        return net.apply(merged, X, train=False)
    return net.apply(*merged, None, X, train=False)[0]


def call_adapted(library, model, x):
    """Return what a model in a metrics function predicts."""
    if library == "nnx":
        return model(x)
    if library == "equinox":
        net, averages = model
        return jax.vmap(lambda x: net(x, averages, None)[0])(x)
    return model(x, train=False)


@pytest.mark.parametrize("library", CASES)
def test_a_trained_model_returns_to_its_library_and_is_evaluated_there_and_here(
    library, tmp_path
):
    case = make_case(library, "batch norm")
    state, _ = run_program(case, make_data(1), SGD)
    own = np.asarray(call_trained(library, case, state))
    first = np.asarray(call_trained(library, case, initial_state(case)))
    assert np.abs(own - first).max() > 0.01
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(state, 3, epoch=1.0, metrics={}, scores={}, time=0.0)
    checkpoints.close()
    loaded = call_trained(library, case, mr.load(tmp_path))
    np.testing.assert_array_equal(loaded, own)
    metrics = case.model.metrics_fn(
        lambda model, batch: {"y": call_adapted(library, model, batch["x"])[:, 0]}
    )
    program = mr.EvaluationProgram(metrics, mr.Plan())
    source = mr.ArraySource({"x": X})
    mean = mr.evaluate(program, state, source, batch_size=2)["y"]
    assert mean == pytest.approx(own.mean(), rel=1e-5)


def initial_state(case):
    program = mr.training_program(case.model.loss_fn, SGD, mr.Plan(micro_batch_size=8))
    return program.init(case.model.params, case.model.model_state)


@pytest.mark.parametrize("library", CASES)
def test_offloading_gives_the_same_weights(library):
    case, data = make_case(library, "batch norm"), make_data(2)
    options = {"gradient_accumulation_count": 2}
    plain, _ = run_program(case, data, SGD, **options)
    offloaded, _ = run_program(case, data, SGD, optimizer_state_offloading=True, **options)
    check_same(offloaded.params, plain.params)
    check_same(offloaded.model_state, plain.model_state)


@pytest.mark.parametrize("library", CASES)
def test_with_16_bits_weights_and_averages_keep_their_types_and_stay_near(library):
    case, data = make_case(library, "batch norm"), make_data(1)
    wide, _ = run_program(case, data, SGD)
    narrow, _ = run_program(case, data, SGD, precision="16.32", half_type="bfloat16")
    types = [jax.tree.map(lambda x: x.dtype, s.model_state) for s in (narrow, wide)]
    assert types[0] == types[1]
    for a, b in zip(jax.tree.leaves(narrow[1]), jax.tree.leaves(wide[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=0.03)


@pytest.mark.parametrize("library", CASES)
def test_a_saved_state_is_plain_and_continues_exactly(library, tmp_path):
    case, data = make_case(library, "dropout"), make_data(1)
    whole, _ = run_program(case, data, SGD)
    plan = mr.Plan(micro_batch_size=8)
    program = mr.training_program(case.model.loss_fn, SGD, plan)
    state = program.init(case.model.params, case.model.model_state)
    for start in range(3):
        # Only what a checkpoint has: NumPy arrays in plain containers.
        state = jax.tree.map(np.asarray, jax.device_get(state))
        assert is_plain(state.params) and is_plain(state.model_state)
        chunk = {name: values[start] for name, values in data.items()}
        chunk = jax.device_put(chunk, program.chunk_sharding)
        state, _ = program.run(state, chunk)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(a, b)


def is_plain(tree):
    if isinstance(tree, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in tree.items())
    return tree is None or isinstance(tree, np.ndarray | np.generic)


@pytest.mark.devices(2)
def test_batch_norm_over_the_replica_axis_pools_the_statistics_of_all_replicas():
    class Net(nnx.Module):
        def __init__(self, axis_name):
            rngs = nnx.Rngs(0)
            self.norm = nnx.BatchNorm(FEATURES, axis_name=axis_name, rngs=rngs)
            self.last = nnx.Linear(FEATURES, 1, rngs=rngs)

        def __call__(self, x):
            return self.last(self.norm(x))

    def train(axis_name, **options):
        def loss(model, batch, key):
            return mean_error(model(batch["x"]), batch)

        model = mr.from_nnx(Net(axis_name), loss)
        program = mr.training_program(model.loss_fn, SGD, mr.Plan(**options))
        state = program.init(model.params, model.model_state)
        data = make_data(2)
        chunk = {n: v.reshape(-1, 16, v.shape[-1]) for n, v in data.items()}
        return program.run(state, jax.device_put(chunk, program.chunk_sharding))[0]

    pooled = train("replica", micro_batch_size=8, num_replicas=2)
    together = train(None, micro_batch_size=16)
    apart = train(None, micro_batch_size=8, num_replicas=2)
    check_same(pooled.params, together.params)
    check_same(pooled.model_state, together.model_state)
    with pytest.raises(AssertionError):
        check_same(apart.params, together.params)


def test_two_streams_of_an_nnx_model_draw_different_numbers_in_every_micro_batch():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.weight = nnx.Param(jnp.ones(()))
            self.one, self.two = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    masks = []

    def loss(model, batch, key):
        masks.append([model.one(batch), model.two(batch)])
        return model.weight[...] * 1.0

    model = mr.from_nnx(Net(nnx.Rngs(0)), loss)
    for seed in (1, 2, 1):
        model.loss_fn(model.params, model.model_state, jnp.ones(64), jax.random.key(seed))
    (a, b), (c, d), (e, f) = masks
    assert len({tuple(np.asarray(mask)) for mask in (a, b, c, d)}) == 4
    np.testing.assert_array_equal([a, b], [e, f])


def test_calls_of_one_loss_draw_different_numbers_and_chain_their_state():
    def run(x):
        count = hk.get_state("count", (), jnp.int32, init=jnp.zeros)
        hk.set_state("count", count + 1)
        return jax.random.uniform(hk.next_rng_key()) + x * hk.get_parameter(
            "w", (), init=jnp.ones
        )

    net = hk.transform_with_state(run)
    drawn = []

    def loss(model, batch, key):
        drawn.extend([model(0.0), model(0.0)])
        return drawn[0], {"first": drawn[0]}

    params, state = net.init(jax.random.key(0), 0.0)
    model = mr.from_haiku(net, loss, params, state)
    _, (state, info) = model.loss_fn(params, state, None, jax.random.key(1))
    assert drawn[0] != drawn[1]
    assert int(state["~"]["count"]) == 2
    assert info == {"first": drawn[0]}


def test_haiku_without_state_has_none():
    net = hk.transform(lambda x: hk.Linear(1)(x))
    params = net.init(jax.random.key(0), X)
    model = mr.from_haiku(net, lambda model, batch, key: model(batch).mean(), params)
    assert model.model_state is None
    state = initial_state(dataclasses.make_dataclass("C", ["model"])(model))
    assert jax.tree.structure(model.merge(state)) == jax.tree.structure(params)


def test_state_that_a_loss_adds_to_an_nnx_model_is_an_error_with_its_name():
    def loss(model, batch, key):
        model.seen = nnx.BatchStat(batch)
        return model(batch).mean()

    model = mr.from_nnx(nnx.Linear(FEATURES, 1, rngs=nnx.Rngs(0)), loss)
    with pytest.raises(ValueError, match=r"added state to the model: seen\."):
        model.loss_fn(model.params, model.model_state, X, jax.random.key(0))


def test_a_part_of_an_equinox_state_takes_constants_too():
    class Flag(eqx.Module):
        index: eqx.nn.StateIndex
        weight: jax.Array

        def __init__(self):
            self.index = eqx.nn.StateIndex(jnp.zeros(2))
            self.weight = jnp.ones(())

    flag, state = eqx.nn.make_with_state(Flag)()

    def loss(flag, state, batch, key):
        part = state.substate(flag).set(flag.index, np.ones(2, np.float32))
        return flag.weight * batch["x"].mean(), state.update(part)

    model = mr.from_equinox(flag, loss, state)
    program = mr.training_program(model.loss_fn, SGD, mr.Plan(micro_batch_size=8))
    trained = program.init(model.params, model.model_state)
    chunk = {name: v.reshape(-1, 8, v.shape[-1]) for name, v in make_data(1).items()}
    trained, _ = program.run(trained, jax.device_put(chunk, program.chunk_sharding))
    _, state = model.merge(trained)
    assert type(state) is eqx.nn.State
    np.testing.assert_array_equal(state.get(flag.index), [1, 1])


# --- sequences in a pipeline ---


def nnx_layers():
    rngs = nnx.Rngs(0)
    return [
        nnx.Linear(FEATURES, HIDDEN, rngs=rngs),
        nnx.BatchNorm(HIDDEN, rngs=rngs),
        jax.nn.relu,
        nnx.Dropout(0.3, rngs=rngs),
        nnx.Linear(HIDDEN, 1, rngs=rngs),
    ]


def equinox_layers(mode="batch"):
    keys = jax.random.split(jax.random.key(0))
    return {
        "first": eqx.nn.Linear(FEATURES, HIDDEN, key=keys[0]),
        "norm": eqx.nn.BatchNorm(HIDDEN, "batch", mode=mode),
        "relu": jax.nn.relu,
        "drop": eqx.nn.Dropout(0.3),
        "last": eqx.nn.Linear(HIDDEN, 1, key=keys[1]),
    }


@pytest.mark.devices(2)
@pytest.mark.parametrize(
    ("make_layers", "split"),
    [
        (nnx_layers, "relu_2"),
        (equinox_layers, "relu"),
        (functools.partial(equinox_layers, "ema"), "relu"),
    ],
)
def test_a_sequence_of_modules_trains_in_a_pipeline(make_layers, split):
    example = {"x": X, "y": X[:, :1]}
    model = mr.sequential(make_layers(), mean_error, example=example)
    data = make_data(4)

    def train(**options):
        plan = mr.Plan(micro_batch_size=8, gradient_accumulation_count=4, **options)
        program = mr.training_program(model.loss_fn, SGD, plan)
        state = program.init(model.params, model.model_state)
        chunk = {n: v.reshape(-1, 8, v.shape[-1]) for n, v in data.items()}
        state, _ = program.run(state, jax.device_put(chunk, program.chunk_sharding))
        return program.unpack_state(state)

    plain, piped = train(), train(pipeline_splits=[split])
    check_same(piped.params, plain.params)
    check_same(piped.model_state, plain.model_state)
    with pytest.raises(AssertionError):
        check_same(plain.params, model.params)
    # The modules, called one after the other, give what a metrics function sees.
    y = X
    for module in model.merge(piped):
        y = call_module(module, y)
    metrics = model.metrics_fn(lambda apply, batch: {"y": apply(batch["x"])[:, 0]})
    seen = metrics(piped.params, piped.model_state, {"x": X})["y"]
    np.testing.assert_allclose(np.asarray(y)[:, 0], seen, rtol=1e-5)


def call_module(module, x):
    if isinstance(module, nnx.Module):
        module.eval()
        return module(x)
    if isinstance(module, tuple):
        layer, state = module
        layer = eqx.nn.inference_mode(layer)
        return jax.vmap(lambda x: layer(x, state)[0], axis_name="batch")(x)
    if isinstance(module, eqx.Module):
        return jax.vmap(eqx.nn.inference_mode(module))(x)
    return module(x)


def test_a_sequence_refuses_what_it_cannot_apply():
    with pytest.raises(TypeError, match=r"dense_0 is a flax\.linen\.linear\.Dense"):
        mr.sequential([linen.Dense(3)], mean_error)
    with pytest.raises(TypeError, match=r"int_0 is a builtins\.int"):
        mr.sequential([3], mean_error)
    with pytest.raises(ValueError, match="at least one module"):
        mr.sequential([], mean_error)
    shared = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="linear_0 and sequential_2 have some in common"):
        mr.sequential([shared, jax.nn.relu, nnx.Sequential(shared)], mean_error)
    noise = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    mr.sequential([noise, shared, noise], mean_error)
