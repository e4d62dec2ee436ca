"""Steps, learning rates and the optimizer, by the reference's rules."""

import jax.numpy as jnp
import numpy as np
import pytest

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.program import learning_rate_of, model_of, optimizer_of
from millrace.apps.autoencoder.reference_steps import schedule_of, steps_of
from millrace.config import ConfigurationError, build


def config_of(**options):
    return build(AutoencoderConfig, {"precision": "32.32"} | options)


@pytest.mark.parametrize(
    ("options", "users", "steps"),
    [
        ({"training_data_file": "3m_train.txt"}, 311_315, 3113),
        ({"training_data_file": "full_train.txt"}, 477_412, 38_192),
        ({}, 480_000, 60),
    ],
)
def test_runs_are_as_long_as_the_references(options, users, steps):
    found = steps_of(config_of(**options), users)
    assert (found.total, found.batches_per_step) == (steps, 250)


def test_a_small_data_set_makes_shorter_steps():
    """The reference divides by zero here."""
    steps = steps_of(config_of(epochs=3), 200)
    assert (steps.batches_per_step, steps.total, steps.per_validation) == (3, 3, 1)
    schedule = schedule_of(steps, steps_per_log=100)
    assert schedule.total_updates == 9
    assert [u for u in range(1, 10) if schedule.due("validate", u)] == [3, 6, 9]
    assert [u for u in range(1, 10) if schedule.due("log", u)] == [9]


def test_a_detached_reconstruction_is_an_update_of_its_own():
    steps = steps_of(config_of(epochs=3, detached_refeeding=True), 200)
    schedule = schedule_of(steps, 1)
    assert (schedule.updates_per_execution, schedule.total_updates) == (6, 18)
    assert schedule.updates_per_epoch == 6


def test_fewer_users_than_a_batch_are_refused():
    with pytest.raises(ConfigurationError, match=r"5 users .* Lower --batch-size"):
        steps_of(config_of(), 5)


def test_the_learning_rate_falls_after_the_references_steps():
    """At the first step whose number is more than int(share of the steps)."""
    config = config_of(training_data_file="3m_train.txt")
    assert config.initial_learning_rate == 2**-10
    steps = steps_of(config, 311_315)
    rate = learning_rate_of(config, config.initial_learning_rate, steps)
    first, second = int(0.5 * 3113) + 1, int(0.75 * 3113) + 1
    for step, factor in ((0, 1), (first - 1, 1), (first, 0.1), (second - 1, 0.1),
                         (second, 0.01), (3112, 0.01)):  # fmt: skip
        for update in (250 * step, 250 * step + 249):
            assert float(rate(update)) == pytest.approx(factor * 2**-10, rel=1e-6)


def test_decay_and_clipping_come_before_the_momentum():
    config = config_of(gradient_clipping=True, weight_decay=0.5)
    optimizer = optimizer_of(config, lambda _: jnp.float32(0.1))
    weights = {"w": jnp.array([2.0, 2.0, -8.0])}
    state = optimizer.init(weights)
    slopes = {"w": jnp.array([-0.7, 3.0, 0.0])}
    moved, state = optimizer.update(slopes, state, weights)
    np.testing.assert_allclose(moved["w"], [-0.03, -0.1, 0.1], rtol=1e-6)
    moved, _ = optimizer.update(slopes, state, weights)
    np.testing.assert_allclose(moved["w"], [-0.057, -0.19, 0.19], rtol=1e-6)


def test_stacked_models_have_a_learning_rate_each():
    config = config_of(optimizer="SGD", weight_decay=0.0)
    rates = np.array([0.5, 0.25])
    optimizer = optimizer_of(config, learning_rate_of(config, rates, steps_of(config, 999)))
    weights = {"kernel": jnp.zeros((2, 3, 4)), "bias": jnp.zeros((2, 4))}
    slopes = {"kernel": jnp.ones((2, 3, 4)), "bias": jnp.ones((2, 4))}
    moved, _ = optimizer.update(slopes, optimizer.init(weights), weights)
    for name in weights:
        assert (moved[name][0] == -0.5).all() and (moved[name][1] == -0.25).all()


def test_dropout_goes_with_the_size():
    assert model_of(config_of(size=128), 9).dropout_rate == 0.65
    assert model_of(config_of(size=512), 9).dropout_rate == 0.8
    assert model_of(config_of(size=512, dropout_rate=0.1), 9).dropout_rate == 0.1
    assert model_of(config_of(no_dropout=True), 9).dropout_rate == 0
