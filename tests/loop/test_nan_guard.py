"""Losses and gradients that are not finite are reported with their update."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runner import batches, loss_fn, make_runner

import millrace as mr
from millrace.loop.nan_guard import NonFiniteCheck, NonFiniteError


def test_a_nan_in_the_data_is_reported_with_its_update_and_training_continues(
    tmp_path, capsys
):
    values = [1.0, 1.0, 1.0, 1.0, np.nan, *[1.0] * 7]
    runner, state, _, checkpoints = make_runner(tmp_path / "r", batches(values))
    result = runner.run(state)
    checkpoints.close()
    assert result.updates == 12
    message = capsys.readouterr().err
    assert "The loss is nan at update 5 (epoch 0.42)" in " ".join(message.split())
    assert message.count("The loss is nan") == 1


def test_fp_exceptions_stop_at_the_first_nan_and_save_nothing_after_it(tmp_path):
    values = [1.0, 1.0, 1.0, 1.0, np.nan, *[1.0] * 7]
    plan = mr.Plan(micro_batch_size=2, fp_exceptions=True)
    runner, state, directory, checkpoints = make_runner(
        tmp_path / "r", batches(values), plan=plan, checkpoint=4
    )
    with pytest.raises(NonFiniteError, match="The loss is nan at update 5"):
        runner.run(state)
    checkpoints.close()
    assert [path.name for path in checkpoints.saved()] == ["update-000000003"]
    assert [event["update"] for event in directory.read_metrics()] == [3]


def test_a_loss_that_stays_non_finite_stops_the_run_on_request():
    plan = mr.Plan(micro_batch_size=2)
    guard = NonFiniteCheck(plan, 10, 100, stop_on_divergence=True)
    guard.check({"loss": np.array([1.0, np.nan, 1.0])})  # only one bad batch
    with pytest.raises(
        NonFiniteError, match=r"inf at update 15 \(epoch 0.15\): .* diverged"
    ):
        guard.check({"loss": np.array([1.0, np.inf, np.nan])})


def test_divergence_in_float16_suggests_dynamic_loss_scaling():
    plan = mr.Plan(precision="16.32", half_type="float16", loss_scaling=1000.0)
    guard = NonFiniteCheck(plan, 0, stop_on_divergence=True)
    with pytest.raises(NonFiniteError, match="or with loss_scaling dynamic"):
        guard.check({"loss": np.array([np.nan, np.nan])})


def test_dynamic_loss_scaling_may_skip_some_updates_before_a_run_has_diverged():
    plan = mr.Plan(precision="16.32", half_type="float16", loss_scaling="dynamic")
    guard = NonFiniteCheck(plan, 0, stop_on_divergence=True)
    bad = np.full(12, np.nan)
    guard.check({"loss": bad})
    guard.check({"loss": bad})
    with pytest.raises(NonFiniteError, match=r"has diverged\. .* learning rate\.$"):
        guard.check({"loss": np.array([np.nan])})
    guard.check({"loss": np.append(bad, 1.0)})
    guard.check({"loss": bad})


def test_fp_exceptions_detect_a_gradient_that_the_loss_does_not_show(tmp_path):
    def hidden(params, model_state, batch, key):
        # sqrt(0) is 0, and its derivative is infinite
        return jnp.sqrt(params["w"] * 0.0).sum(), (model_state, {})

    plan = mr.Plan(micro_batch_size=2, fp_exceptions=True)
    runner, _, _, checkpoints = make_runner(tmp_path / "r", batches([1.0] * 12), plan=plan)
    program = mr.training_program(hidden, optax.sgd(0.1), plan)
    runner._program = program
    with pytest.raises(NonFiniteError, match="A gradient is not finite at update 1"):
        runner.run(program.init({"w": jnp.ones(1)}))
    checkpoints.close()


def test_a_nan_is_reported_under_dynamic_loss_scaling_too(tmp_path, capsys):
    plan = mr.Plan(
        micro_batch_size=2, precision="16.32", half_type="float16", loss_scaling="dynamic"
    )
    runner, state, _, checkpoints = make_runner(
        tmp_path / "r", batches([np.nan] * 12), plan=plan
    )
    runner.run(state)
    checkpoints.close()
    assert "The loss is nan at update 1" in " ".join(capsys.readouterr().err.split())


def test_train_stops_at_the_first_nan_with_fp_exceptions():
    plan = mr.Plan(micro_batch_size=2, fp_exceptions=True)
    program = mr.training_program(loss_fn, optax.sgd(0.01), plan)
    values = [1.0, 1.0, np.nan, *[1.0] * 9]
    with (
        mr.Infeed(batches(values)) as infeed,
        pytest.raises(NonFiniteError, match="The loss is nan at update 3;"),
    ):
        mr.train(program, program.init({"w": jnp.ones(1)}), infeed=infeed, updates=12)


# Losses that explode


def feed(losses, *, per_call=7, **options):
    guard = NonFiniteCheck(mr.Plan(), 0, 100, **options)
    for start in range(0, len(losses), per_call):
        guard.check({"loss": np.array(losses[start : start + per_call], np.float32)})
    return guard


@pytest.mark.parametrize("per_call", [1, 7, 1000])
def test_a_loss_far_above_its_start_for_long_stops_the_run_on_request(per_call):
    losses = [2.3] * 40 + [1e6] * 40
    with pytest.raises(NonFiniteError, match=r"1e\+06 at update 60 .* smaller learning"):
        feed(losses, per_call=per_call, stop_on_divergence=True, total_updates=400)


def test_a_loss_that_explodes_at_the_second_update_is_noticed():
    guard = feed([0.5] + [4e9] * 100, total_updates=100)
    assert guard.divergence == {"update": 6, "loss": 4e9, "first_loss": 0.5}


def test_without_that_request_it_is_one_warning_and_a_fact_of_the_run(caplog):
    guard = feed([2.3] * 40 + [1e6] * 400, total_updates=400)
    assert guard.divergence == {
        "update": 60,
        "loss": 1e6,
        "first_loss": pytest.approx(2.3),
    }


@pytest.mark.parametrize(
    "losses",
    [
        [2.3] * 40 + [1e6] * 19 + [2.0] * 400,  # a spike
        [1e-6] * 40 + [50.0] * 400,  # starts close to 0
        [-3.0] * 40 + [-250.0] * 400,  # a likelihood
        [1e5, *[1e3] * 400],
    ],
)
def test_other_losses_are_no_alarm(losses):
    feed(losses, stop_on_divergence=True, total_updates=400)


# Losses that end above their start


@pytest.mark.parametrize("per_call", [1, 7, 1000])
def test_a_loss_that_ends_far_above_its_start_is_found(per_call):
    losses = [2.3, *[40.0] * 20, *np.linspace(9, 10, 60)]  # explodes at once, then settles
    rise = feed(losses, per_call=per_call, total_updates=81).find_rise()
    expected = pytest.approx(np.mean(losses[-40:]), rel=1e-6)
    assert rise == {"loss": expected, "updates": 40, "first_loss": pytest.approx(2.3)}


NOISE = np.random.default_rng(0).gamma(0.5, 4.0, 400)


@pytest.mark.parametrize(
    "losses",
    [
        np.linspace(2.3, 0.1, 200),
        [0.02] * 40 + [0.9] * 100,  # starts close to 0
        [2.3] * 100 + [3.0] * 100,
        [2.3] * 5 + [9.0] * 14,  # too few
        [-5.0] * 40 + [8.0] * 100,  # a likelihood
        [-1.0, *[1.0] * 40, *[90.0] * 100],
        [0.01, *NOISE],  # the first batch was easy
        [1.0] * 40 + [50.0] * 30 + [0.5] * 10,
    ],
)
def test_a_loss_that_has_not_clearly_risen_is_none(losses):
    assert feed(losses, total_updates=400).find_rise() is None


def test_a_resumed_run_is_compared_with_its_first_losses():
    first = feed([2.3] * 10)
    later = NonFiniteCheck(mr.Plan(), 200, first_losses=first.first_losses)
    later.check({"loss": np.full(15, 9.0)})
    assert later.find_rise() == {
        "loss": 9.0,
        "updates": 15,
        "first_loss": pytest.approx(2.3),
    }
