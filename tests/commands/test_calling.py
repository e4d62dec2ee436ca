"""Applications called from Python: the same options, a summary and a model."""

import dataclasses
import functools
import json
import signal
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from browser import PHONE, look_at

import millrace as mr
from millrace.commands.calling import format_command_line
from millrace.commands.registry import COMMANDS
from millrace.config import ConfigurationError
from millrace.data.mnist import load_digits, read_digits
from millrace.data.source import DatasetError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("called")


@pytest.fixture(scope="module")
def cnn(folder):
    return mr.cnn.train(
        config="digits_demo",
        epochs=3,  # another spelling of num_epochs, as on the command line
        run_dir=folder / "cnn",
        quiet=True,
    )


@pytest.fixture(scope="module")
def autoencoder(folder):
    return mr.autoencoder.train(
        data="generated",
        num_users=200,
        num_items=40,
        epochs=8,
        batch_size=16,
        learning_rate=0.01,
        precision="32.32",
        loss_scaling=1,
        untied_decoder=True,
        no_dropout=True,
        no_dense_refeeding=True,
        run_dir=folder / "autoencoder",
        quiet=True,
    )


@pytest.fixture(scope="module")
def vcd(folder):
    return mr.vcd.train(
        config="smoke",
        testing=False,
        num_hidden=16,
        num_hmc_steps=1,
        num_leapfrog_steps=1,
        checkpoints=True,
        run_dir=folder / "vcd",
        quiet=True,
    )


def test_a_call_writes_the_files_of_the_command(cnn, folder):
    assert cnn.path == folder / "cnn"
    names = {path.name for path in cnn.path.iterdir()}
    assert {"config.yml", "metrics.jsonl", "summary.json", "report.html"} <= names
    kept = json.loads((cnn.path / "summary.json").read_text())
    assert kept["metrics"] == cnn.metrics == cnn.summary["metrics"]
    assert kept["status"] == "completed"
    assert cnn.events[-1]["validation_accuracy"] == cnn.metrics["validation_accuracy"]
    assert kept["command"].startswith("millrace cnn train --config digits_demo --epochs 3")


def test_the_trained_network_classifies_new_digits(cnn):
    images, labels = read_digits()
    images = images[-300:, :, :, None]
    names, probabilities = cnn.model.predict(images)
    truth = [str(label) for label in labels[-300:]]
    assert np.mean([a == b for a, b in zip(names, truth, strict=True)]) > 0.85
    assert ((probabilities > 0.1) & (probabilities <= 1)).all()
    with pytest.raises(ValueError, match=r"shape \(number, 8, 8, 1\), got"):
        cnn.model.predict(images[..., 0])


def test_the_accuracy_of_the_model_is_the_reported_one(cnn):
    _, validation = load_digits()
    held_out = validation[np.arange(len(validation))]
    predicted = cnn.model.logits(held_out["image"]).argmax(1)
    accuracy = (predicted == held_out["label"]).mean()
    assert accuracy == pytest.approx(cnn.metrics["validation_accuracy"], abs=1e-6)


def test_images_that_look_already_scaled_cause_a_warning(cnn):
    shape = (2, *cnn.model.image_shape)
    with pytest.warns(UserWarning, match="Give unscaled images, from 0 to 255"):
        cnn.model.predict(np.full(shape, 0.5, np.float32))
    cnn.model.predict(np.ones(shape, np.uint8))
    cnn.model.predict(np.full(shape, 8.0))


def test_the_confusion_matrix_counts_every_validation_sample_once(cnn):
    part = json.loads((cnn.path / "report" / "1-confusion.json").read_text())
    total = sum(number for _, _, number in part["counts"])
    correct = sum(n for true, predicted, n in part["counts"] if true == predicted)
    assert total == 360
    assert correct / total == pytest.approx(cnn.metrics["validation_accuracy"], abs=1e-6)
    mistakes = json.loads((cnn.path / "report" / "2-mistakes.json").read_text())
    assert len(mistakes["pictures"]) == min(24, total - correct)


def test_a_recommender_predicts_and_recommends(autoencoder):
    model = autoencoder.model
    items = model.item_ids.tolist()
    rated = {items[0]: 5.0, items[1]: 1.0}
    predicted = model.predict(rated)
    assert list(predicted) == items
    best = model.recommend(rated, top=3)
    assert len(best) == 3 and not set(rated) & {item for item, _ in best}
    assert [r for _, r in best] == sorted((r for _, r in best), reverse=True)
    with pytest.raises(ValueError, match="trained without the item 12345"):
        model.predict({12345: 3.0})


def test_rated_items_given_as_text_are_not_recommended(autoencoder):
    model = autoencoder.model
    rated = {str(item): 5.0 for item in model.item_ids[:2].tolist()}
    best = model.recommend(rated, top=len(model.item_ids))
    assert len(best) == len(model.item_ids) - 2
    assert not set(rated) & {str(item) for item, _ in best}


@pytest.mark.parametrize("rating", [float("nan"), float("inf"), None])
def test_a_rating_that_is_not_a_number_is_refused(autoencoder, rating):
    model = autoencoder.model
    first = model.item_ids[0].item()
    with pytest.raises(ValueError, match=f"rating of the item {first} is .*, not a number"):
        model.recommend({first: rating})


def test_the_residuals_have_the_reported_rmse(autoencoder):
    part = json.loads((autoencoder.path / "report" / "residuals.json").read_text())
    assert f"RMSE {autoencoder.metrics['test_rmse']:.4f}" in part["note"]
    assert len(part["counts"]) + 1 == len(part["edges"])
    assert {place for place, _ in part["quantiles"]} <= {1, 2, 3, 4, 5}


def test_a_generator_samples_and_reconstructs(vcd):
    drawn = vcd.model.sample(5, seed=1)
    assert drawn.shape == (5, 8, 8)
    assert ((drawn >= 0) & (drawn <= 1)).all()
    assert np.array_equal(drawn, vcd.model.sample(5, seed=1))
    assert not np.array_equal(drawn, vcd.model.sample(5, seed=2))
    assert vcd.model.reconstruct(drawn > 0.5).shape == (5, 8, 8)


@pytest.mark.parametrize("name", ["autoencoder", "vcd"])
def test_load_returns_the_weights_and_the_predictor_of_every_application(name, request):
    run = request.getfixturevalue(name)
    loaded = mr.load(run.path)
    assert loaded.command == f"{name} train" and loaded.update == run.best.update
    assert type(loaded.predictor) is type(run.model)
    for params in (loaded.predictor.params, run.model.params):
        jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    assert mr.load(run.path, which="last").update == run.summary["updates"]


def test_every_plot_of_a_report_is_available_on_its_own(cnn, autoencoder, vcd, tmp_path):
    plots = [
        mr.plots.curve(cnn),
        mr.plots.curve(cnn.path, "accuracy"),
        mr.plots.throughput(cnn),
        mr.plots.confusion(cnn),
        mr.plots.residuals(autoencoder),
        mr.plots.curve(autoencoder, "rmse"),
        mr.plots.curve(vcd, "acceptance"),
        mr.plots.curve(vcd, "step_size"),
    ]
    for number, plot in enumerate(plots):
        assert "<svg" in plot._repr_html_()
        path = plot.save(tmp_path / f"{number}.svg")
        drawing = ElementTree.parse(path).getroot()
        assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    for plot in (mr.plots.mistakes(cnn), mr.plots.images(vcd, "reconstructions")):
        assert "data:image/png;base64," in plot._repr_html_()
        assert "data:image/png" in plot.save(tmp_path / "page.html").read_text()


def test_the_reports_of_real_runs_open_on_a_phone(cnn, autoencoder, vcd, folder, tmp_path):
    pages = [f"{run.path.name}/report.html" for run in (cnn, autoencoder, vcd)]
    looked = look_at(folder, [(page, PHONE) for page in pages], tmp_path)
    assert looked.console == []
    assert [(seen.overflow, seen.missing) for seen in looked.pages] == [(0, [])] * 3
    assert "Most confident mistakes" in looked.pages[0].text
    assert "Rating residuals" in looked.pages[1].text
    assert "Samples from the prior" in looked.pages[2].text


def test_a_missing_plot_is_an_error_that_lists_what_exists(cnn, vcd, tmp_path):
    with pytest.raises(ConfigurationError, match=r"not logged los.*Did you mean loss"):
        mr.plots.curve(cnn, "los")
    with pytest.raises(ConfigurationError, match="has no sweep"):
        mr.plots.sweep(cnn)
    with pytest.raises(ConfigurationError, match="it has chain, prior, recon"):
        mr.plots.images(vcd, "cats")
    with pytest.raises(ConfigurationError, match=r"as \.html or \.svg"):
        mr.plots.curve(cnn).save(tmp_path / "x.bmp")
    with pytest.raises(ConfigurationError, match=r"Save it as \.html"):
        mr.plots.mistakes(cnn).save(tmp_path / "x.svg")


def test_a_mistake_in_the_options_is_raised_before_anything_is_created(folder):
    before = set(folder.iterdir())
    with pytest.raises(ConfigurationError, match="Did you mean micro_batch_size"):
        mr.cnn.train(micro_batch=3, run_dir=folder / "x")
    with pytest.raises(ConfigurationError, match="must be an integer"):
        mr.cnn.train(num_epochs="many", run_dir=folder / "x")
    assert set(folder.iterdir()) == before


def test_a_failure_in_a_run_is_raised_and_reported(folder, monkeypatch):
    def gone(config):
        raise OSError("the disk is gone")

    monkeypatch.setattr("millrace.apps.cnn.data.load", gone)
    with pytest.raises(OSError, match="the disk is gone"):
        mr.cnn.train(config="digits_demo", run_dir=folder / "failing", quiet=True)
    page = (folder / "failing" / "report.html").read_text()
    assert "ended with an error" in page and "the disk is gone" in page


def test_an_error_that_explains_itself_has_a_short_traceback(folder, monkeypatch):
    def unreadable(config):
        raise DatasetError("None of the images can be read.")

    monkeypatch.setattr("millrace.apps.cnn.data.load", unreadable)
    with pytest.raises(DatasetError, match="None of the images") as caught:
        mr.cnn.train(config="digits_demo", run_dir=folder / "unreadable", quiet=True)
    assert len(caught.traceback) <= 4


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 143), ("SIGINT", None)])
def test_sigterm_ends_a_script_after_the_run_is_closed_and_ctrl_c_does_not(
    number, status, folder, monkeypatch
):
    def interrupted(config):
        signal.raise_signal(getattr(signal, number))

    monkeypatch.setattr("millrace.apps.cnn.data.load", interrupted)
    train = functools.partial(
        mr.cnn.train, config="digits_demo", run_dir=folder / number, quiet=True
    )
    if status is None:
        assert train().summary["status"] == "interrupted"
    else:
        with pytest.raises(SystemExit) as ended:
            train()
        assert ended.value.code == status
    summary = json.loads((folder / number / "summary.json").read_text())
    assert summary["status"] == "interrupted"


def test_a_failure_before_the_run_begins_is_raised(folder, monkeypatch):
    def refuse(*_):
        raise ConfigurationError("no such writer")

    monkeypatch.setattr("millrace.run.run.open_writers", refuse)
    with pytest.raises(ConfigurationError, match="no such writer"):
        mr.cnn.train(config="digits_demo", run_dir=folder / "refused", quiet=True)
    assert not (folder / "refused").exists()


def test_a_notebook_shows_the_metrics(cnn):
    shown = cnn._repr_html_()
    assert "validation accuracy" in shown and "completed" in shown
    best = cnn.best.format()
    assert best == f"validation accuracy {cnn.best.value:.4g} at epoch {cnn.best.epoch:g}"
    assert f"<tr><td>best</td><td>{best}</td></tr>" in shown
    assert f"best={best}" in repr(cnn)


def test_a_result_says_that_the_loss_exploded(cnn):
    summary = cnn.summary | {"diverged": {"loss": 1e9, "update": 3, "first_loss": 2.0}}
    exploded = dataclasses.replace(cnn, summary=summary)
    assert "status=completed, but diverged" in repr(exploded)
    assert "completed, but diverged" in exploded._repr_html_()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_names_existing_modules(name):
    command = COMMANDS[name]
    assert dataclasses.is_dataclass(command.load_config_type())
    assert callable(command.load_function())
    path = command.named_configs_path()
    assert path is None or path.is_file()


@pytest.mark.parametrize("application", ["cnn", "autoencoder", "vcd"])
def test_the_python_functions_of_an_application_are_its_commands(application):
    module = getattr(mr, application)
    verbs = set(module.__all__) - {"load"}
    assert verbs and {f"{application} {verb}" for verb in verbs} <= set(COMMANDS)


def test_a_call_is_recorded_as_the_equivalent_command_line():
    line = format_command_line(
        "cnn train", {"num_epochs": 2, "wandb_tags": ["a b"], "norm_layer": {"name": "x"}}
    )
    assert line == (
        "millrace cnn train --num-epochs 2 --wandb-tags 'a b' "
        """--norm-layer '{"name": "x"}'"""
    )
