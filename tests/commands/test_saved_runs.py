"""A run is enough: for resuming it, for another run, and for later commands."""

import json
import shutil

import numpy as np
import pytest
import yaml

import millrace as mr
from millrace.cli import main
from millrace.commands.registry import COMMANDS
from millrace.config import ConfigurationError, as_plain

TRAIN = (
    "cnn train --config digits_demo --num-epochs 2 --optimizer momentum --seed 3 "
    "--weight-updates-per-epoch 8 --quiet --run-dir"
)


def status(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main([word for each in arguments for word in str(each).split()])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def options_of(run):
    return yaml.safe_load((run / "config.yml").read_text())


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("cnn") / "first"
    assert status(TRAIN, run) == 0
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copy")


@pytest.mark.parametrize(
    "how",
    [
        "cnn train --resume {run} --num-epochs 3",
        "cnn train --run-dir {run} --resume True --num-epochs 3",
        TRAIN.replace("--num-epochs 2", "--num-epochs 3") + " {run} --resume",
    ],
)
def test_a_run_is_resumed_with_its_own_options(run, how):
    before = options_of(run)
    assert status(how.format(run=run)) == 0
    assert options_of(run) == before | {"num_epochs": 3}
    summary = summary_of(run)
    assert summary["updates"] == 24 and summary["best"]["update"] in (8, 16, 24)
    assert (run / summary["best"]["checkpoint"]).is_dir()
    repeat = summary["command"]  # has the options that were not typed again
    assert repeat.startswith("millrace cnn train ") and "--resume" not in repeat
    assert "--seed 3" in repeat and "--num-epochs 3" in repeat


def test_python_resumes_a_run_by_its_directory(run):
    done = mr.cnn.train(resume=str(run))
    assert done.summary["updates"] == 16 and done.path == run
    assert done.best is not None and done.best.metric == "validation_accuracy"
    assert done.best.checkpoint == run / summary_of(run)["best"]["checkpoint"]
    assert done.model.checkpoint == done.best.checkpoint


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("--resume {run} --seed 4", "seed was 3, now 4. Leave out"),
        ("--resume {run} --num-epochs 1", "--num-epochs was 2, now 1"),
        ("--resume {run} --run-dir other", "Give the run once"),
        ("--resume nowhere", "There is no run to resume in nowhere"),
        ("--resume", "--resume needs the run to continue: --resume RUN"),
    ],
)
def test_what_cannot_be_resumed_is_one_line_and_status_2(trained, how, message, capsys):
    before = (trained / "config.yml").read_bytes()
    assert status("cnn train", how.format(run=trained)) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert (trained / "config.yml").read_bytes() == before


def test_a_run_of_another_command_is_not_resumed_nor_its_options_taken(trained, capsys):
    assert status("vcd train --resume", trained) == 2
    assert "holds a run of cnn-train, not of vcd-train" in capsys.readouterr().err
    for path in (trained, trained / "config.yml"):
        assert status("autoencoder train --config", path) == 2
        expected = "has the options of cnn train, not of autoencoder train."
        assert capsys.readouterr().err.endswith(f"{expected}\n")


def test_another_run_starts_from_the_options_of_a_run(trained, tmp_path):
    configure = COMMANDS["cnn train"].configure
    old = options_of(trained)
    for path in (trained, trained / "config.yml"):
        new = as_plain(configure({"config": str(path), "seed": 5}, name="cnn train"))
        same = {n for n in new if new[n] == old[n]}
        # The run was quiet; that is about its own terminal.
        assert new.keys() - same == {"run_dir", "seed", "quiet"}
        assert new["seed"] == 5 and new["run_dir"] is None and not new["resume"]
    copied = tmp_path / "mine.yml"
    copied.write_text((trained / "config.yml").read_text() + "sead: 3\n")
    with pytest.raises(ConfigurationError, match=r"mine\.yml, line \d+: .*sead.* seed\?"):
        configure({"config": str(copied)}, name="cnn train")


@pytest.mark.parametrize("name", ["cnn train", "autoencoder train", "vcd train"])
def test_named_configurations_survive_their_config_file(name, tmp_path):
    command = COMMANDS[name]
    path = command.named_configs_path()
    assert path is not None
    for entry in list(yaml.safe_load(path.read_text()))[::3]:
        config = as_plain(command.configure({"config": entry}, name=name))
        saved = {"command": name.replace(" ", "-")} | config
        (tmp_path / "config.yml").write_text(yaml.safe_dump(saved))
        again = command.configure({"config": str(tmp_path)}, name=name)
        assert as_plain(again) == config, entry
        if config.get("checkpoints", True):
            resumed = command.configure({"resume": tmp_path}, name=name)
            place = {"run_dir": str(tmp_path), "resume": True}
            assert as_plain(resumed) == config | place, entry


def test_a_recipe_that_follows_from_shorthands_survives_its_config_file(tmp_path):
    shorthands = {"model_name": "resnet", "dataset": "cifar10", "base_learning_rate": -6}
    shorthands |= {"momentum": 0.9, "pipeline": True, "shards": 2, "batch_norm": False}
    configure = COMMANDS["cnn train"].configure
    config = as_plain(configure(shorthands, name="cnn train"))
    saved = {"command": "cnn-train"} | config
    (tmp_path / "config.yml").write_text(yaml.safe_dump(saved))
    for given in ({}, shorthands, {"momentum": 0.9}):
        resumed = configure({"resume": tmp_path} | given, name="cnn train")
        assert as_plain(resumed) == config | {"run_dir": str(tmp_path), "resume": True}
    recipe = ("optimizer_params", "lr_schedule_params", "norm_layer", "pipeline_splits")
    again = as_plain(configure({"config": str(tmp_path)}, name="cnn train"))
    assert {n: again[n] for n in recipe} == {n: config[n] for n in recipe}


@pytest.mark.usefixtures("measured_once")
def test_cnn_validate_takes_a_run_and_its_best_checkpoint(trained, tmp_path, capsys):
    arguments = f"--batch-size 8 --latency-calls 0 --run-dir {tmp_path}/v"
    assert status("cnn validate", trained, arguments) == 0
    best = summary_of(trained)["best"]
    found = summary_of(tmp_path / "v")["metrics"]["validation_accuracy"]
    assert found == pytest.approx(best["value"])
    line = f"using the best checkpoint: update {best['update']}, epoch {best['epoch']:g}, "
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("cnn validate {run} --checkpoint-dir {run}", "Give RUN or --checkpoint-dir, not"),
        ("cnn validate {run} --which 5", "has no checkpoint after update 5, only after 8"),
        ("cnn validate {run} --which second", "--which must be one of best, last"),
        ("autoencoder validate", "RUN is required."),
        ("autoencoder recommend {run} --all", "is not a run of"),
        ("vcd sample {run}", "is a run of cnn-train, not of vcd-train"),
        ("vcd evaluate", "RUN is required."),
    ],
)
def test_a_mistake_about_a_run_is_one_line(trained, command, message, tmp_path, capsys):
    where = "" if "recommend" in command else f" --run-dir {tmp_path}/x"
    assert status(command.format(run=trained) + where) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


def test_load_returns_weights_options_and_a_predictor(trained, capsys):
    best = summary_of(trained)["best"]
    loaded = mr.load(trained)
    assert loaded.update == best["update"] and loaded.epoch == best["epoch"]
    assert loaded.path == trained / best["checkpoint"]
    assert loaded.metrics["validation_accuracy"] == best["value"]
    assert loaded.config["seed"] == loaded.typed_config.run.seed == 3
    line = capsys.readouterr().err
    assert line.startswith(f"using the best checkpoint: update {best['update']},")
    predictor = loaded.predictor
    assert predictor.checkpoint == loaded.path and capsys.readouterr().err == ""
    image = np.zeros((1, *predictor.image_shape), np.float32)
    image[0, 2] = 9
    assert predictor.logits(image).shape == (1, 10)
    np.testing.assert_array_equal(predictor.params["conv1"]["kernel"],
                                  loaded.params["conv1"]["kernel"])  # fmt: skip
    last = mr.load(trained, which="last")
    assert last.update == 16 and mr.load(trained / "checkpoints", 8).update == 8
    assert "24,058 parameters" in repr(last) and len(repr(last)) < 250
