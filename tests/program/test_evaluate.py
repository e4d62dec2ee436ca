import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millrace as mr
from millrace.data.source import ArraySource
from millrace.program.training import training_program


def trained_state(plan):
    import optax

    def loss(params, carried, batch, key):
        return params["w"].sum(), (carried, {})

    return training_program(loss, optax.sgd(0.1), plan).init({"w": jnp.array([2.0])})


def source(count):
    return ArraySource({"x": np.arange(count, dtype=np.float32)})


def metric(params, carried, batch):
    return {"scaled": batch["x"] * params["w"][0], "odd": batch["x"] % 2}


@pytest.mark.devices(lambda replicas: replicas)
@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize(("count", "micro_batch"), [(37, 3), (24, 2), (5, 8), (1, 1)])
def test_every_sample_counts_once_and_padding_never(count, micro_batch, replicas):
    plan = mr.Plan(num_replicas=replicas)
    program = mr.EvaluationProgram(metric, plan)
    got = mr.evaluate(program, trained_state(plan), source(count), micro_batch * replicas)
    x = np.arange(count)
    assert got["scaled"] == pytest.approx(2 * x.mean(), rel=1e-6)
    assert got["odd"] == pytest.approx((x % 2).mean(), rel=1e-6)


def test_padding_that_gives_nan_does_not_count():
    def inverse(params, carried, batch):
        return {"inverse": 1 / batch["x"]}

    plan = mr.Plan()
    data = ArraySource({"x": np.array([1, 2, 4], np.float32)})
    got = mr.evaluate(mr.EvaluationProgram(inverse, plan), trained_state(plan), data, 2)
    assert got["inverse"] == pytest.approx(1.75 / 3)


def test_the_state_stays_usable_and_metrics_are_traced_once():
    traces = 0

    def counted(params, carried, batch):
        nonlocal traces
        traces += 1
        return metric(params, carried, batch)

    plan = mr.Plan()
    program, state = mr.EvaluationProgram(counted, plan), trained_state(plan)
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
def test_a_metric_that_is_not_per_sample_is_refused(wrong, message):
    plan = mr.Plan()
    with pytest.raises(ValueError, match=message):
        mr.evaluate(mr.EvaluationProgram(wrong, plan), trained_state(plan), source(4), 2)
