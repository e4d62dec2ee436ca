"""Evaluation counts every sample once, on any number of replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import millrace as mr
from millrace.data.source import ArraySource
from millrace.nn.layers import apply_layers, dense, init_layers
from millrace.program.training import training_program


def init_state(plan):
    def loss(params, model_state, batch, key):
        return params["w"].sum(), (model_state, {})

    return training_program(loss, optax.sgd(0.1), plan).init({"w": jnp.array([2.0])})


def source(count):
    return ArraySource({"x": np.arange(count, dtype=np.float32)})


def metric(params, model_state, batch):
    return {"scaled": batch["x"] * params["w"][0], "odd": batch["x"] % 2}


@pytest.mark.devices(lambda replicas: replicas)
@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize(("count", "micro_batch"), [(37, 3), (24, 2), (5, 8), (1, 1)])
def test_every_sample_counts_once_and_padding_never(count, micro_batch, replicas):
    plan = mr.Plan(num_replicas=replicas)
    program = mr.EvaluationProgram(metric, plan)
    got = mr.evaluate(program, init_state(plan), source(count), micro_batch * replicas)
    x = np.arange(count)
    assert got["scaled"] == pytest.approx(2 * x.mean(), rel=1e-6)
    assert got["odd"] == pytest.approx((x % 2).mean(), rel=1e-6)


def test_padding_does_not_count_even_if_its_metric_is_nan():
    def inverse(params, model_state, batch):
        return {"inverse": 1 / batch["x"]}

    plan = mr.Plan()
    data = ArraySource({"x": np.array([1, 2, 4], np.float32)})
    got = mr.evaluate(mr.EvaluationProgram(inverse, plan), init_state(plan), data, 2)
    assert got["inverse"] == pytest.approx(1.75 / 3)


def test_the_state_stays_usable_and_metrics_are_traced_once():
    traces = 0

    def counted(params, model_state, batch):
        nonlocal traces
        traces += 1
        return metric(params, model_state, batch)

    plan = mr.Plan()
    program, state = mr.EvaluationProgram(counted, plan), init_state(plan)
    first = mr.evaluate(program, state, source(9), 2)
    assert mr.evaluate(program, state, source(9), 2) == first
    assert traces == 1
    assert not jax.tree.leaves(state.params)[0].is_deleted()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda p, c, b: {"mean": b["x"].mean()}, "one value per sample"),
        (lambda p, c, b: {"count": b["x"]}, "cannot be called count"),
    ],
)
def test_a_metric_that_is_not_per_sample_is_an_error(wrong, message):
    plan = mr.Plan()
    with pytest.raises(ValueError, match=message):
        mr.evaluate(mr.EvaluationProgram(wrong, plan), init_state(plan), source(4), 2)


@pytest.mark.devices(4)
@pytest.mark.parametrize("trained_on", [1, 2, 4])
@pytest.mark.parametrize("evaluated_on", [1, 4])
def test_a_state_of_any_number_of_replicas_can_be_evaluated(trained_on, evaluated_on):
    state = init_state(mr.Plan(num_replicas=trained_on))
    program = mr.EvaluationProgram(metric, mr.Plan(num_replicas=evaluated_on))
    for given in (state, jax.device_get(state)):
        got = mr.evaluate(program, given, source(9), 4)
        assert got == pytest.approx({"scaled": 8.0, "odd": 4 / 9})
    assert not jax.tree.leaves(state.params)[0].is_deleted()


def test_weights_that_are_already_there_are_not_copied():
    plan = mr.Plan()
    state = init_state(plan)
    assert mr.EvaluationProgram(metric, plan).validate_state(state) is state


def test_sources_with_equal_shapes_but_different_names_get_separate_programs():
    def either(params, model_state, batch):
        return {"value": batch["x"] if "x" in batch else 10 * batch["y"]}

    plan = mr.Plan()
    program, state = mr.EvaluationProgram(either, plan), init_state(plan)
    x = np.arange(4, dtype=np.float32)
    for _ in range(2):
        assert mr.evaluate(program, state, ArraySource({"x": x}), 2) == {"value": 1.5}
        assert mr.evaluate(program, state, ArraySource({"y": x}), 2) == {"value": 15.0}


def test_weights_of_another_shape_get_another_program():
    def total(params, model_state, batch):
        return {"total": batch["x"] * 0 + params["w"].sum()}

    plan = mr.Plan()
    program, state = mr.EvaluationProgram(total, plan), init_state(plan)
    assert mr.evaluate(program, state, source(4), 2) == {"total": 2.0}
    larger = state._replace(params={"w": np.ones(5, np.float32)})
    assert mr.evaluate(program, larger, source(4), 2) == {"total": 5.0}


def test_a_donated_state_is_a_clear_error():
    plan = mr.Plan()
    state = init_state(plan)
    state.params["w"].delete()
    with pytest.raises(ValueError, match="used up by an earlier call"):
        mr.evaluate(mr.EvaluationProgram(metric, plan), state, source(4), 2)


@pytest.mark.devices(2)
def test_a_packed_state_is_an_error_and_the_unpacked_one_is_not():
    layers = [dense("a", 1), dense("b", 1)]
    loss = mr.LayeredLoss(layers, lambda b, key: b["x"], lambda y, b: (y.mean(), {}))
    plan = mr.Plan(gradient_accumulation_count=4, pipeline_splits=["b"])
    training = training_program(loss, optax.sgd(0.1), plan)
    state = training.init(*init_layers(layers, jax.random.key(0), np.ones((1, 1))))

    def predict(params, model_state, batch):
        y, _ = apply_layers(
            layers, params, model_state, batch["x"][:, None], training=False
        )
        return {"y": y[:, 0]}

    program = mr.EvaluationProgram(predict, mr.Plan())
    with pytest.raises(ValueError, match=r"Evaluate program.unpack_state\(state\)"):
        mr.evaluate(program, state, source(4), 2)
    whole = training.unpack_state(state)
    slope = whole.params["a"]["kernel"] * whole.params["b"]["kernel"]
    got = mr.evaluate(program, whole, source(4), 2)
    assert got["y"] == pytest.approx(1.5 * slope.item(), rel=1e-5)


@pytest.mark.devices(2)
def test_a_batch_that_replicas_cannot_share_is_an_error():
    plan = mr.Plan(num_replicas=2)
    program = mr.EvaluationProgram(metric, plan)
    with pytest.raises(ValueError, match=r"batch_size \(7\) must be a multiple of .* 2"):
        mr.evaluate(program, init_state(plan), source(14), 7)
