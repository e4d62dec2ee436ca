"""Steps, learning rates and the optimizer follow the rules of the reference."""

import jax.numpy as jnp
import numpy as np
import pytest

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.program import (
    build_learning_rate,
    build_model,
    build_optimizer,
    build_schedule,
    plan_steps,
)
from millrace.config import ConfigurationError, build


def build_config(**options):
    # No ratings are read; without a source, there would be a small example.
    source = {} if "training_data_file" in options else {"data": "random"}
    return build(AutoencoderConfig, {"precision": "32.32"} | source | options)


@pytest.mark.parametrize(
    ("options", "users", "steps"),
    [
        ({"training_data_file": "3m_train.txt"}, 311_315, 3113),
        ({"training_data_file": "full_train.txt"}, 477_412, 38_192),
        ({}, 480_000, 60),
    ],
)
def test_runs_are_as_long_as_in_the_reference(options, users, steps):
    planned = plan_steps(build_config(**options), users)
    assert (planned.total, planned.batches_per_step) == (steps, 250)


def test_a_small_dataset_has_shorter_steps():
    """The reference divides by zero here."""
    steps = plan_steps(build_config(epochs=3), 200)
    assert (steps.batches_per_step, steps.total, steps.per_validation) == (3, 3, 1)
    schedule = build_schedule(steps, steps_per_log=100)
    assert schedule.total_updates == 9
    assert [u for u in range(1, 10) if schedule.due("validate", u)] == [3, 6, 9]
    assert [u for u in range(1, 10) if schedule.due("log", u)] == [9]


def test_detached_refeeding_doubles_the_updates():
    steps = plan_steps(build_config(epochs=3, detached_refeeding=True), 200)
    schedule = build_schedule(steps, 1)
    assert (schedule.updates_per_execution, schedule.total_updates) == (6, 18)
    assert schedule.updates_per_epoch == 6


def test_fewer_users_than_a_batch_are_rejected():
    with pytest.raises(ConfigurationError, match=r"5 users .* Lower --batch-size"):
        plan_steps(build_config(), 5)


def test_the_learning_rate_drops_at_the_steps_of_the_reference():
    """It drops at the first step after int(fraction * steps)."""
    config = build_config(training_data_file="3m_train.txt")
    assert config.initial_learning_rate == 2**-10
    steps = plan_steps(config, 311_315)
    rate = build_learning_rate(config, config.initial_learning_rate, steps)
    first, second = int(0.5 * 3113) + 1, int(0.75 * 3113) + 1
    for step, factor in ((0, 1), (first - 1, 1), (first, 0.1), (second - 1, 0.1),
                         (second, 0.01), (3112, 0.01)):  # fmt: skip
        for update in (250 * step, 250 * step + 249):
            assert float(rate(update)) == pytest.approx(factor * 2**-10, rel=1e-6)


def test_decay_and_clipping_come_before_momentum():
    config = build_config(gradient_clipping=True, weight_decay=0.5)
    optimizer = build_optimizer(config, lambda _: jnp.float32(0.1))
    weights = {"w": jnp.array([2.0, 2.0, -8.0])}
    state = optimizer.init(weights)
    gradients = {"w": jnp.array([-0.7, 3.0, 0.0])}
    moved, state = optimizer.update(gradients, state, weights)
    np.testing.assert_allclose(moved["w"], [-0.03, -0.1, 0.1], rtol=1e-6)
    moved, _ = optimizer.update(gradients, state, weights)
    np.testing.assert_allclose(moved["w"], [-0.057, -0.19, 0.19], rtol=1e-6)


def test_each_stacked_model_has_its_own_learning_rate():
    config = build_config(optimizer="SGD", weight_decay=0.0)
    rates = np.array([0.5, 0.25])
    optimizer = build_optimizer(
        config, build_learning_rate(config, rates, plan_steps(config, 999))
    )
    weights = {"kernel": jnp.zeros((2, 3, 4)), "bias": jnp.zeros((2, 4))}
    gradients = {"kernel": jnp.ones((2, 3, 4)), "bias": jnp.ones((2, 4))}
    moved, _ = optimizer.update(gradients, optimizer.init(weights), weights)
    for name in weights:
        assert (moved[name][0] == -0.5).all() and (moved[name][1] == -0.25).all()


def test_the_default_dropout_rate_depends_on_the_size():
    assert build_model(build_config(size=128), 9).dropout_rate == 0.65
    assert build_model(build_config(size=512), 9).dropout_rate == 0.8
    assert build_model(build_config(size=512, dropout_rate=0.1), 9).dropout_rate == 0.1
    assert build_model(build_config(no_dropout=True), 9).dropout_rate == 0
