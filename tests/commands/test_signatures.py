"""Signatures, docs and stubs of the Python functions, and how objects show themselves."""

import inspect
import typing

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from write_stubs import APPS, write_stub

import millrace as mr
from millrace.commands.calling import RunResult
from millrace.commands.registry import COMMANDS
from millrace.config import ConfigurationError, flat_options

FUNCTIONS = [
    (app, name)
    for app in ("autoencoder", "cnn", "vcd")
    for name in getattr(mr, app).__all__
    if name != "load"
]


@pytest.mark.parametrize(("app", "name"), FUNCTIONS)
def test_a_function_has_the_options_of_its_command(app, name):
    function = getattr(getattr(mr, app), name)
    options = flat_options(COMMANDS[f"{app} {name}"].load_config_type())
    parameters = inspect.signature(function).parameters
    assert "options" not in parameters
    for option, entry in options.items():
        if entry.metadata.get("hidden"):
            assert option not in parameters
            continue
        is_own = option in ("data", "run", "tracker")  # a parameter of the function itself
        assert f"\n    {option}: " in function.__doc__ or is_own
        if not is_own:
            assert parameters[option].annotation == entry.hint
    text = function.__doc__
    assert "Args:" in text and f"``millrace {app} {name}``" in text


def test_defaults_and_types_are_real():
    parameters = inspect.signature(mr.cnn.train).parameters
    assert parameters["num_epochs"].annotation is int
    assert parameters["seed"].default == 0
    assert "cifar10" in str(parameters["dataset"].annotation)
    own = ["data", "validation_data", "callbacks", "tracker"]
    assert list(parameters)[:5] == [*own, "config"]
    assert parameters["config"].annotation == typing.Optional[str]  # noqa: UP045


@pytest.mark.parametrize("app", ["autoencoder", "cnn", "vcd"])
def test_stubs_are_up_to_date(app):
    source = APPS / app / "api.py"
    assert source.with_suffix(".pyi").read_text() == write_stub(source), (
        "Run python docs/write_stubs.py."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_epoks": 3}, r"Unknown option num_epoks. Did you mean num_epochs\?"),
        ({"dataset": "cifar11"}, r"Did you mean cifar10\?"),
        ({"data": np.zeros(3)}, r"data must be \(images, labels\) or an ArraySource"),
    ],
)
def test_a_mistake_is_one_exception_with_a_short_traceback(options, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        mr.cnn.train(**options)
    assert len(caught.traceback) <= 5
    assert caught.value.__cause__ is None and caught.value.__suppress_context__ is False
    assert caught.value.__context__ is None


def loss_fn(params, model_state, batch, key):
    return ((params * batch["x"]) ** 2).mean(), (model_state, {})


def test_objects_have_a_short_description(tmp_path):
    source = mr.ArraySource({"x": np.ones((1000, 3), np.float32)})
    stream = mr.Stream(source, 10)
    program = mr.training_program(loss_fn, optax.adam(0.1), mr.Plan(micro_batch_size=10))
    summary = {"status": "completed", "metrics": {"train_loss": 0.25}}
    expected = {
        "ArraySource(samples=1,000, x=float32[3])": source,
        "Stream(source=ArraySource(samples=1,000, x=float32[3]), batch_size=10, "
        "batches_per_epoch=100)": stream,
        "Plan(micro_batch_size=10)": program.plan,
        "Plan()": mr.Plan(),
        "TrainState(update=0, parameters=3, model_state=0, optimizer_state=7)": (
            program.init(jnp.zeros(3), {}, seed=0)
        ),
        f"RunResult(status=completed, train_loss=0.25, path={tmp_path})": RunResult(
            tmp_path, summary, lambda _: None
        ),
    }
    for text, shown in expected.items():
        assert repr(shown) == text
        assert "<table>" in shown._repr_html_()
    for shown in (mr.Infeed(stream), program):
        assert len(repr(shown)) < 300 and "\n" not in repr(shown)
        assert "<table>" in shown._repr_html_()


def test_a_donated_or_traced_state_can_be_shown():
    program = mr.training_program(loss_fn, optax.sgd(0.1), mr.Plan(micro_batch_size=10))
    state = program.init(jnp.zeros(3), {}, seed=0)
    state.update.delete()
    assert repr(state).startswith("TrainState(update=?, parameters=3")


def test_values_in_a_card_are_escaped(tmp_path):
    best = {"metric": "<i>", "value": 0.5, "epoch": 3.0}
    summary = {"status": "<b>", "metrics": {}, "best": best}
    shown = RunResult(tmp_path, summary, lambda _: None)._repr_html_()
    assert "&lt;b&gt;" in shown and "&lt;i&gt; 0.5 at epoch 3" in shown
