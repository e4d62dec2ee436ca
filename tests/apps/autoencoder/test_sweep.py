"""Models trained together in a sweep are the same as if trained one by one."""

import itertools
import json
import math
from xml.etree import ElementTree

import jax
import numpy as np
import optax
import pytest
import yaml
from autoencoder_runs import SMALL, command, summary_of, write_ratings

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.commands import SweepConfig
from millrace.apps.autoencoder.config.training import Hyperparameters
from millrace.apps.autoencoder.joint_training import (
    build_trials_program,
    get_settings,
    init_trials,
    mean_with_sum_gradient,
    skip_nonfinite_trials,
)
from millrace.apps.autoencoder.loss import build_loss
from millrace.apps.autoencoder.model import Model, init_params
from millrace.apps.autoencoder.program import (
    build_model,
    build_program,
    init_weights,
    plan_steps,
)
from millrace.apps.autoencoder.sweep import Trial, build_plot, format_table
from millrace.config import as_plain, build, parse
from millrace.drawing.charts import points_chart
from millrace.report.plots import Plot

OPTIONS = f"{SMALL} --epochs 2 --batches-per-step 3 --no-dense-refeeding "


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    args = f"sweep {OPTIONS}{write_ratings(folder)}--steps-per-log 1 "
    # The first rate is far too large and diverges; the others are unaffected.
    args += f"--base-learning-rates 1,11,13 --run-dir {folder}/run "
    ended = command(None, args)
    assert ended.status == 0
    return folder / "run"


def test_a_sweep_reports_the_best_learning_rate(swept):
    summary = summary_of(swept)
    assert "diverged" not in summary
    assert [t["base_learning_rate"] for t in summary["trials"]] == [-1, -11, -13]
    assert [t["learning_rate"] for t in summary["trials"]] == [4, 2.0**-8, 2.0**-10]
    errors = [float(t["validation_rmse"]) for t in summary["trials"]]
    assert not math.isfinite(errors[0]) and errors[1] < errors[2]
    result = {"metric": "validation_rmse", "mode": "min", "value": errors[1]}
    assert summary["best"] == summary["trials"][1] | result
    each = summary["trials"][0]["rows_per_second"]
    assert summary["samples_per_second"] == pytest.approx(3 * each)
    assert summary["samples"] == 3 * 12 * 8


def test_the_loss_of_a_sweep_is_the_mean_over_models_that_have_not_diverged(swept):
    lines = (swept / "metrics.jsonl").read_text().splitlines()
    last = [event for event in map(json.loads, lines) if "train_loss" in event][-1]
    losses = [float(trial["loss"]) for trial in summary_of(swept)["trials"]]
    assert not math.isfinite(losses[0])
    assert float(last["train_loss"]) == pytest.approx(sum(losses[1:]) / 2, rel=1e-5)
    assert last["train_finite_models"] == 2


def test_the_mean_loss_has_the_gradient_of_the_sum():
    value, gradient = jax.value_and_grad(mean_with_sum_gradient)(
        np.array([1.0, np.inf, 5.0])
    )
    assert value == 3.0
    np.testing.assert_array_equal(gradient, [1, 1, 1])
    assert np.isnan(mean_with_sum_gradient(np.array([np.nan, np.inf])))


def test_a_sweep_prints_how_to_train_the_best(swept, tmp_path, capsys):
    args = f"sweep {OPTIONS}--training-data-file {swept.parent}/train.txt "
    args += f"--base-learning-rates 11 --run-dir {tmp_path}/run"
    ended = command(capsys, args.replace("--quiet", ""))
    assert ended.status == 0, ended.err
    output = " ".join(ended.err.split())
    assert "models 1 of size 128" in output and "learning rates 2^-11" in output
    assert "2^-11: millrace autoencoder train --config best --config-path" in output


def test_a_sweep_in_which_every_model_diverges_fails(swept, tmp_path, capsys):
    args = f"sweep {OPTIONS}--training-data-file {swept.parent}/train.txt "
    args += f"--base-learning-rates 1,1.5 --run-dir {tmp_path}/run"
    ended = command(capsys, args.replace("--quiet", ""))
    assert ended.status == 1
    assert "millrace: Every model diverged, so there is no best" in ended.err
    assert len([line for line in ended.err.splitlines() if line.endswith("diverged")]) == 2
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "failed" and len(summary["trials"]) == 2
    assert (tmp_path / "run" / "sweep.svg").exists()


def test_the_best_configuration_reaches_the_same_error_alone(swept, tmp_path, capsys):
    best = yaml.safe_load((swept / "best.yml").read_text())["best"]
    assert best["base_learning_rate"] == -11
    args = f"train --config best --config-path {swept}/best.yml --quiet --no-validation"
    ended = command(capsys, f"{args} --run-dir {tmp_path}/run")
    assert ended.status == 0, ended.err
    found = summary_of(tmp_path / "run")["metrics"]
    trial = summary_of(swept)["best"]
    assert found["train_loss"] == pytest.approx(trial["loss"], rel=1e-4)
    assert found["train_rmse"] == pytest.approx(trial["rmse"], rel=1e-4)


def test_a_sweep_can_start_from_the_best_configuration(swept):
    args = "--config best --base-learning-rates 10.5,11.5".split()
    config, _ = parse(SweepConfig, args, program="", named_configs=swept / "best.yml")
    assert config.exponents == [-10.5, -11.5]
    first = yaml.safe_load((swept / "config.yml").read_text())
    changed = {n for n, value in as_plain(config).items() if first[n] != value}
    of_one_start = {"run_dir", "quiet", "steps_per_log", "recipe_reason"}
    assert changed <= {"base_learning_rates"} | of_one_start


def test_without_ratings_a_sweep_learns_from_a_small_example():
    config, _ = parse(SweepConfig, [], program="autoencoder sweep")
    assert (config.data.kind, config.data.num_users) == ("generated", 2000)
    assert config.learning_rates == [0.003, 0.01, 0.02, 0.03]
    config, _ = parse(SweepConfig, ["--no-dropout"], program="autoencoder sweep")
    assert config.model.dropout_rate is None
    args = ["--data", "random"]
    config, _ = parse(SweepConfig, args, program="autoencoder sweep")
    assert (config.data.kind, config.learning_rates) == ("random", [])


def test_only_models_whose_gradients_overflow_skip_an_update():
    plain = optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda count: -1.0))
    params = {"a": np.ones((3, 2)), "b": np.ones(3)}
    good = {"a": np.full((3, 2), 0.5), "b": np.arange(3.0)}
    bad = {
        "a": np.where([[False] * 2, [True, False], [False] * 2], np.inf, 0.5),
        "b": good["b"],
    }
    wrapped = skip_nonfinite_trials(plain)
    _, before = wrapped.update(good, wrapped.init(params), params)
    updates, after = wrapped.update(bad, before, params)
    expected, moved = plain.update(good, before, params)
    assert not np.any(updates["a"][1]) and updates["b"][1] == 0
    for name in params:
        np.testing.assert_array_equal(after[0].trace[name][1], before[0].trace[name][1])
        for model in (0, 2):
            np.testing.assert_array_equal(updates[name][model], expected[name][model])
            np.testing.assert_array_equal(
                after[0].trace[name][model], moved[0].trace[name][model]
            )
    assert after[1].count == 2


# Each differs from the first in one setting, and the last in all; 0 is in some.
SETTINGS = [
    Hyperparameters(0.02, 1e-3, 0.5, 0.4),
    Hyperparameters(0.04, 1e-3, 0.5, 0.4),
    Hyperparameters(0.02, 0.1, 0.5, 0.4),
    Hyperparameters(0.02, 1e-3, 0.2, 0.4),
    Hyperparameters(0.02, 1e-3, 0.5, 0.8),
    Hyperparameters(0.03, 0.0, 0.0, 0.0),
]


def train_weights(refeeding, settings, *, alone=False):
    """Return the weights after three updates of models together, or of one alone."""
    first = settings[0]
    options = {"data": "generated", "size": 128, "batch_size": 4, "untied_decoder": True}
    options |= {"precision": "32.32", "subtract_biases": True, "loss_scaling": 1.0}
    options |= {"no_dense_refeeding": True} if refeeding == "none" else {}
    config = build(AutoencoderConfig, options | (first._asdict() if alone else {}))
    model, device = build_model(config, 7), jax.devices()[0]
    steps = plan_steps(config, 8)._replace(batches_per_step=3)
    start = init_weights(config, model)
    if alone:
        program = build_program(config, model, steps, device)
    else:
        program = build_trials_program(config, model, steps, settings, device)
        start = init_trials(start, len(settings))
    random = np.random.default_rng(0)
    chunk = {
        "user": np.tile(np.arange(4), (3, 1)),
        "row": np.tile(np.repeat(np.arange(5), 3)[:12].reshape(4, 3), (3, 1, 1)),
        "item": np.stack([random.permutation(7)[:3] for _ in range(12)]).reshape(3, 4, 3),
        "value": random.standard_normal((3, 4, 3)).astype(np.float32),
    }
    state, _ = program.run(program.init(*start), jax.device_put(chunk))
    return jax.device_get(state.params)


@pytest.mark.parametrize("refeeding", ["none", "joint"])
def test_a_model_trained_with_others_is_the_one_trained_alone(refeeding):
    together = train_weights(refeeding, SETTINGS)
    compared = SETTINGS[2:] if refeeding == "none" else SETTINGS[-1:]
    models = []
    for settings in compared:
        number = SETTINGS.index(settings)
        models.append(train_weights(refeeding, [settings], alone=True))
        for found, expected in zip(
            *map(jax.tree.leaves, (together, models[-1])), strict=True
        ):
            np.testing.assert_allclose(found[number], expected, rtol=2e-5, atol=1e-6)
    # The settings matter: no two of the models are the same, by a wide margin.
    first_kernels = [model["encoder"]["fc_2"]["kernel"] for model in models]
    for one, other in itertools.combinations(first_kernels, 2):
        assert np.abs(one - other).max() > 1e-4


def test_a_dense_known_loss_has_the_value_and_gradient_of_the_sparse_one():
    model = Model(7, 128, 0.5, linear_output=True, tied=False, input_dropout_rate=0.3)
    batch = {
        "user": np.arange(2),
        "row": np.array([[0, 0], [1, 2]]),  # 2 is padding
        "item": np.array([[3, 5], [0, 0]]),
        "value": np.array([[1.0, -0.5], [0.0, 9.0]], np.float32),
    }
    params, key = init_params(model, jax.random.key(1)), jax.random.key(2)
    found = []
    for platform in ("cpu", "gpu"):
        loss_fn = build_loss(model, "none", platform=platform, num_models=2)
        loss = jax.jit(jax.value_and_grad(lambda p, f=loss_fn: f(p, None, batch, key)[0]))
        found.append(jax.tree.leaves(loss(params)))
    assert found[0][0] > 0
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_sweep_over_more_than_the_rate_trains_every_combination(swept, tmp_path, capsys):
    args = f"sweep {OPTIONS.replace('--epochs 2', '--epochs 1')}"
    args += f"--training-data-file {swept.parent}/train.txt "
    args += f"--validation-data-file {swept.parent}/valid.txt --learning-rates 0.004 "
    args += f"--dropout-rates 0 0.6 --weight-decays 0 0.01 --run-dir {tmp_path}/run"
    ended = command(capsys, args.replace("--quiet", ""))
    assert ended.status == 0, ended.err
    summary = summary_of(tmp_path / "run")
    varied = [(t["weight_decay"], t["dropout_rate"]) for t in summary["trials"]]
    assert varied == [(0, 0), (0, 0.6), (0.01, 0), (0.01, 0.6)]
    assert len({t["loss"] for t in summary["trials"]}) == 4
    assert "weight decay" in ended.err and "diverged" not in ended.err
    best = yaml.safe_load((tmp_path / "run" / "best.yml").read_text())["best"]
    for name in ("learning_rate", "weight_decay", "dropout_rate"):
        assert best[name] == summary["best"][name]
    events = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "validation_rmse_trial_4" in events
    report = (tmp_path / "run" / "report.html").read_text()
    assert "trial 4" in report and "Error over weight decay" in report


def test_a_sweep_does_not_use_dynamic_loss_scaling():
    config = build(AutoencoderConfig, {"size": 128, "batch_size": 4})
    steps, model = plan_steps(config, 8), Model(6, 128, 0.0)
    trials = [get_settings(config, model)._replace(learning_rate=r) for r in (0.1, 0.2)]
    made = build_trials_program(config, model, steps, trials, jax.devices()[0])
    assert made.plan.loss_scaling == 1000


@pytest.mark.slow  # compiles two large programs; test_multi_device.py has small ones
def test_models_distributed_over_devices_are_the_same(swept, tmp_path, capsys):
    args = f"sweep {OPTIONS}--training-data-file {swept.parent}/train.txt "
    args += "--steps-per-log 1 --base-learning-rates 11,13,15 "
    ended = command(capsys, args + f"--num-devices 2 --run-dir {tmp_path}/run")
    assert ended.status == 0, ended.err
    several, one = summary_of(tmp_path / "run"), summary_of(swept)
    assert several["device"]["count"] == 2
    for there, here in zip(several["trials"], one["trials"][1:], strict=False):
        for name in ("loss", "rmse"):
            assert there[name] == pytest.approx(here[name], rel=1e-4)


def test_more_devices_than_available_are_rejected(tmp_path, capsys):
    count = len(jax.devices()) + 1
    args = f"sweep --data random --num-devices {count} --run-dir {tmp_path}/run"
    ended = command(capsys, args)
    assert ended.status == 2
    assert f"--num-devices is {count}, but there are only {count - 1}" in ended.err
    assert not (tmp_path / "run").exists()


def test_learning_rates_that_differ_slightly_have_different_labels():
    args = "--training-data-file 3m_train.txt --base-learning-rates 10,10.000001"
    config, _ = parse(SweepConfig, args.split(), program="")
    assert [config.label(exponent) for exponent in config.exponents] == ["10", "10.000001"]
    trials = [TRIALS[1]._replace(base_learning_rate=value) for value in config.exponents]
    assert [line.split()[0] for line in format_table(trials)[1:]] == ["-10", "-10.000001"]
    assert config.exponents is config.exponents


TRIALS = [
    Trial(-12.0, 0.015, 1234.5, math.nan, math.nan, math.nan),
    Trial(-16.0, 0.001, 1234.5, 0.9, 0.95, 0.97),
    Trial(-18.0, 0.0002, 1234.5, 1.0, 1.1, 1.2),
]


def test_the_table_has_one_line_per_learning_rate():
    lines = format_table(TRIALS)
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    assert lines[2].split() == ["-16", "0.001", "1,234", "0.9000", "0.9500", "0.9700"]
    assert lines[1].split()[3:] == ["nan", "nan", "diverged"]
    assert "items/s" in format_table(TRIALS, "items")[0]
    without = [trial._replace(validation_rmse=None) for trial in TRIALS]
    assert "validation" not in format_table(without)[0]
    assert without[1].error == 0.95 and TRIALS[1].error == 0.97


def test_the_plot_marks_the_best_and_the_diverged(tmp_path):
    part = build_plot(TRIALS)
    path = Plot("sweep", part.render()).save(tmp_path / "sweep.svg")
    drawn = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    circles = drawn.findall(f"{space}circle")
    assert [c.get("r") for c in circles] == ["3.5", "6"]  # by exponent: -18, then -16
    assert float(circles[0].get("cy")) < float(circles[1].get("cy"))  # worse is higher
    titles = [t.text for t in drawn.iter(f"{space}title")]
    assert titles == ["-18: 1.2000", "-16: 0.9700", "-12: diverged"]


@pytest.mark.parametrize("points", [[(1, 2.0)], [(1, math.inf)], [(1, 0.0), (2, 0.0)]])
def test_any_points_can_be_drawn(points):
    ElementTree.fromstring(points_chart("a & b", points, x_name="<x>"))
