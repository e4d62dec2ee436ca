"""The command line end to end: processes, their output and the files they leave."""

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

import millrace
from millrace.apps.cnn.config import CnnConfig
from millrace.cli import main
from millrace.config import ConfigurationError, build, load_yaml
from millrace.data.source import ArraySource
from millrace.data.stream import Stream
from millrace.feeds.infeed import Infeed
from millrace.loop.event_schedule import schedule_events
from millrace.loop.progress import TIMED
from millrace.plan import Plan
from millrace.program.training import training_program
from millrace.run.options import RunOptions
from millrace.run.run import run_command

MILLRACE = [sys.executable, "-c", "from millrace.cli import main; main()"]
TIMEOUT = 120  # seconds; a run takes about 6, but the machine may be busy

# Eight epochs of 44 updates, in executions of 11.
TRAIN = [
    *("cnn", "train", "--micro-batch-size", "32", "--num-epochs", "8"),
    *("--lr-schedule-params", "{initial_learning_rate: 0.003}"),
    *("--logs-per-epoch", "4", "--validations-per-epoch", "0.5"),
]
REPLICAS = [
    *("cnn", "train", "--micro-batch-size", "8", "--num-replicas", "4", "--epochs", "1"),
    *("--virtual-devices", "4", "--tensorboard", "--updates-per-execution", "11"),
]


def environment() -> dict[str, str]:
    """Return the environment of a user, with one device, not the eight of the tests."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return kept | {"JAX_PLATFORMS": "cpu"}


def start(*args: str, cwd: Path | None = None) -> subprocess.Popen:
    return subprocess.Popen(
        [*MILLRACE, *args],
        env=environment(),
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    return finish(start(*args, cwd=cwd))


def load_summary(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


def load_events(directory: Path) -> list[dict]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def without_times(events: list[dict]) -> list[dict]:
    timed = TIMED
    return [{k: v for k, v in event.items() if k not in timed} for event in events]


class RunResult(SimpleNamespace):
    """A finished run."""

    path: Path
    status: int
    errors: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> dict[str, RunResult]:
    """Runs that several tests use, started in parallel."""
    folder = tmp_path_factory.mktemp("runs")
    processes = {}

    def begin(name: str, *args: str) -> None:
        processes[name] = start(*args, "--run-dir", str(folder / name))

    def end(name: str) -> RunResult:
        ended = finish(processes[name])
        return RunResult(path=folder / name, status=ended.returncode, errors=ended.stderr)

    begin("interrupted", *TRAIN)
    begin("first", *TRAIN)
    interrupt_when_logging(processes["interrupted"], folder / "interrupted")
    interrupted = end("interrupted")
    shutil.copytree(interrupted.path, folder / "resumed")
    begin("resumed", *TRAIN, "--resume")
    begin("second", *TRAIN)
    begin("replicas", *REPLICAS)
    begin("refused", "cnn", "train", "--num-replicas", "4")
    names = ("first", "resumed", "second", "replicas", "refused")
    return {"interrupted": interrupted} | {name: end(name) for name in names}


def interrupt_when_logging(process: subprocess.Popen, directory: Path) -> None:
    """Send Ctrl-C as soon as the first metrics are written."""
    metrics = directory / "metrics.jsonl"
    deadline = time.monotonic() + TIMEOUT
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def trained(finished) -> RunResult:
    return finished["first"]


@pytest.fixture
def in_process(tmp_path, monkeypatch, capsys):
    """Run a command in this process, which has already imported everything."""
    logger = logging.getLogger("millrace")
    kept = logger.handlers, logger.level, logger.propagate
    monkeypatch.chdir(tmp_path)

    def command(*args: str) -> tuple[int, str]:
        with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
            main(args)
        assert isinstance(ended.value, SystemExit), "the interrupt was not caught"
        return ended.value.code, capsys.readouterr().err

    yield command
    logger.handlers, logger.level, logger.propagate = kept


# Help


@pytest.mark.parametrize("args", [["--help"], ["cnn", "train", "--help"]])
def test_help_takes_a_fraction_of_a_second(args):
    """Measures CPU time: wall time depends on who else uses the machine."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    ended = run(*args)
    assert used() - before < 0.4  # 0.13 on an idle machine
    assert ended.returncode == 0
    assert ended.stderr == ""


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["cnn", "train", "--help"],
        ["cnn", "train", "--epoches", "3"],
        ["devices", "--help"],
        ["data", "fetch", "--help"],
        ["launch", "--help"],
    ],
)
def test_reading_a_command_imports_nothing_heavy(args):
    script = (
        "import sys\n"
        "from millrace.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print({'jax', 'numpy', 'optax', 'orbax'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script, *args]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "set()"


def test_help_lists_the_commands_and_their_options():
    assert "cnn train" in run("--help").stdout
    options = run("cnn", "train", "--help").stdout
    assert "--num-replicas INT" in options
    assert "--num-epochs, --epochs INT" in options
    assert "Folder for everything the run writes" in " ".join(options.split())


def test_an_application_alone_shows_its_commands_and_examples():
    ended = run("cnn")
    assert ended.returncode == 0
    assert "  train  " in ended.stdout and "schedule" not in ended.stdout
    assert "millrace cnn predict runs/first" in ended.stdout


def test_the_version_is_printed():
    assert run("--version").stdout == f"millrace {millrace.__version__}\n"


# Mistakes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cnn trian", "Unknown command 'cnn trian'. Did you mean 'cnn train'?"),
        ("recommend", "Did you mean 'autoencoder recommend'?"),
        ("frobnicate", "'frobnicate'"),
        ("cnn train --num-epoches 3", "Did you mean --num-epochs?"),
        ("cnn train --micro-batch-size lots", "--micro-batch-size must be an integer"),
        ("cnn train --micro-batch-size 0", "--micro-batch-size must be at least 1, got 0"),
        ("cnn train --precision 8.8", "16.16, 16.32, 32.32"),
        ("cnn train --config nope", "digits_demo"),
        ("cnn train --config digits_demo --config-path none.yml", "none.yml: No such file"),
        ("cnn train stray", "Unexpected argument stray. See millrace cnn train --help."),
        ("cnn train cifar10", "Did you mean --dataset cifar10?"),
        ("cnn train digits_demo", "Did you mean --config digits_demo?"),
        ("cnn train --lr-s 3", "It could be --lr-schedule, --lr-schedule-params"),
        ("cnn train --resume", "--resume RUN"),
        ("cnn predict", "RUN and IMAGES are required."),
    ],
)
def test_a_mistake_is_one_line_and_status_2(line, message, tmp_path):
    ended = run(*line.split(), cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "functools" not in ended.stderr
    assert 1 <= len(ended.stderr.splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []  # nothing was started


def test_without_a_command_the_usage_is_shown_as_an_error():
    ended = run()
    assert ended.returncode == 2
    assert "usage: millrace" in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-epochs 5 --logs-per-epoch 0.5", "2.0 epochs at a time for 5 epochs"),
        ("--micro-batch-size 5000", "1437 samples"),
        ("--global-batch-size 1438", "1437 samples"),
    ],
)
def test_a_mistake_found_only_with_the_data_is_one_line_and_status_2(
    line, message, in_process
):
    status, errors = in_process("cnn", "train", "--run-dir", "run", *line.split())
    assert message in errors
    assert len(errors.splitlines()) <= 2
    assert "ValueError" not in errors
    assert "--debug" not in errors
    assert status == 2


def test_too_few_devices_are_a_mistake_with_advice(finished):
    refused = finished["refused"]
    assert refused.status == 2
    assert "--num-replicas is 4" in refused.errors
    assert "--virtual-devices 4" in refused.errors
    assert "Traceback" not in refused.errors
    assert len(refused.errors.splitlines()) <= 2


def test_a_refused_command_removes_its_run_directory(finished):
    assert not finished["refused"].path.exists()


def test_a_directory_that_contains_a_run_is_refused_and_left_alone(trained):
    before = (trained.path / "summary.json").read_bytes()
    ended = run(*TRAIN, "--run-dir", str(trained.path))
    assert ended.returncode == 2
    assert str(trained.path) in ended.stderr
    assert "--resume" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert (trained.path / "summary.json").read_bytes() == before


def test_resuming_with_a_changed_option_is_refused_by_name(trained, in_process):
    before = (trained.path / "summary.json").read_bytes()
    args = [*TRAIN, "--run-dir", str(trained.path), "--resume", "--bn-momentum", "0.5"]
    status, errors = in_process(*args)
    assert status == 2
    assert "--bn-momentum was 0.97, now 0.5" in errors
    assert (trained.path / "summary.json").read_bytes() == before


# A run and its files


def test_a_run_prints_its_plan_and_where_its_results_are(trained):
    assert trained.status == 0
    for text in (
        "1 x cpu",
        "24,058 parameters",
        "global batch   32 = micro batch 32 x accumulation 1 x replicas 1",
        "352 = 44 per epoch x 8 epochs",
        "32.32",
        "completed",
        str(trained.path / "report.html"),
    ):
        assert text in trained.errors
    assert "Warning" not in trained.errors


def test_a_run_records_its_configuration(trained):
    record = yaml.safe_load((trained.path / "config.yml").read_text())
    assert record.pop("command") == "cnn-train"
    config = build(CnnConfig, record)
    given = {
        "micro_batch_size": 32,
        "num_epochs": 8,
        "lr_schedule_params": {"initial_learning_rate": 0.003},
        "logs_per_epoch": 4,
        "validations_per_epoch": 0.5,
        "run_dir": trained.path,
    }
    assert config == build(CnnConfig, given)


def test_every_log_event_has_its_update_epoch_and_time(trained):
    events = load_events(trained.path)
    logs = [event for event in events if "train_loss" in event]
    assert [event["update"] for event in logs] == list(range(11, 353, 11))
    validations = [event for event in events if "validation_accuracy" in event]
    assert [event["update"] for event in validations] == [88, 176, 264, 352]
    assert [event["epoch"] for event in validations] == [2, 4, 6, 8]
    times = [event["time"] for event in events]
    assert times == sorted(times)
    assert times[0] > 0
    assert logs[-1]["train_loss"] < logs[0]["train_loss"] / 4
    assert validations[-1]["validation_accuracy"] > 0.9


def test_the_summary_has_all_documented_fields(trained):
    summary = load_summary(trained.path)
    assert summary["status"] == "completed"
    assert summary["error"] is None
    assert summary["command"].startswith("millrace cnn train --micro-batch-size 32")
    assert summary["device"] == {"platform": "cpu", "kind": "cpu", "count": 1}
    assert summary["updates"] == 352
    assert summary["samples"] == 352 * 32
    assert summary["samples_per_second"] > 0
    assert summary["compile_seconds"] > 0
    assert {"python", "millrace", "jax"} <= set(summary["versions"])
    last = {}
    for event in load_events(trained.path):
        last |= event
    for name in ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy"):
        assert summary["metrics"][name] == last[name]


def test_a_run_leaves_checkpoints_and_a_report(trained):
    names = sorted(path.name for path in (trained.path / "checkpoints").iterdir())
    assert names[-3:] == ["update-000000264", "update-000000308", "update-000000352"]
    assert len(names) <= 4  # the newest three, and the best
    text = (trained.path / "report.html").read_text()
    HTMLParser().feed(text)
    assert "completed" in text
    assert "validation accuracy" in text
    assert {path.name for path in trained.path.iterdir()} == {
        "config.yml",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
        "report",
        "report.html",
    }


def test_a_second_run_of_the_same_command_gives_the_same_numbers(finished):
    first, second = finished["first"].path, finished["second"].path
    assert load_summary(second)["metrics"] == load_summary(first)["metrics"]
    assert without_times(load_events(second)) == without_times(load_events(first))


def test_virtual_devices_run_replicas_on_any_machine(finished):
    replicas = finished["replicas"]
    assert replicas.status == 0, replicas.errors
    summary = load_summary(replicas.path)
    assert summary["device"]["count"] == 4
    assert summary["samples"] == 44 * 32
    assert list((replicas.path / "tensorboard").iterdir())


def test_updates_per_execution_can_be_set(finished):
    assert "44 per epoch x 1 epochs" in finished["replicas"].errors


# Stopping and resuming


def test_ctrl_c_stops_a_run_with_a_checkpoint_and_a_report(finished):
    interrupted = finished["interrupted"]
    assert interrupted.status == 130
    assert "SIGINT" in interrupted.errors
    assert "Traceback" not in interrupted.errors
    summary = load_summary(interrupted.path)
    assert summary["status"] == "interrupted"
    assert 0 < summary["updates"] < 352
    checkpoints = sorted(path.name for path in (interrupted.path / "checkpoints").iterdir())
    assert checkpoints[-1] == f"update-{summary['updates']:09d}"
    assert "interrupted" in (interrupted.path / "report.html").read_text()


def test_a_resumed_run_gives_the_numbers_of_an_uninterrupted_one(finished, trained):
    resumed, directory = finished["resumed"], finished["resumed"].path
    assert resumed.status == 0, resumed.errors
    stopped_after = load_summary(finished["interrupted"].path)["updates"]
    assert f"Resuming after update {stopped_after}" in resumed.errors
    summary = load_summary(directory)
    assert summary["status"] == "completed"
    assert summary["error"] is None
    assert summary["updates"] == 352
    assert summary["metrics"] == load_summary(trained.path)["metrics"]
    assert without_times(load_events(directory)) == without_times(load_events(trained.path))
    times = [event["time"] for event in load_events(directory)]
    assert times == sorted(times)


def test_ctrl_c_before_a_run_has_begun_shows_no_traceback(in_process, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(CnnConfig, "__post_init__", interrupt)
    status, errors = in_process("cnn", "train")
    assert status == 130
    assert "Traceback" not in errors


# Failures, with a function in place of an application


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of a function that runs as a command."""

    run: RunOptions = RunOptions()


@pytest.fixture
def outcome(in_process, tmp_path, capsys):
    """Run any function as a command; return the status and the errors."""
    del in_process  # it restores the logger

    def call(function, **options) -> tuple[int, str]:
        status = run_command(
            function,
            Config(run=RunOptions(run_dir=tmp_path / "run", **options)),
            command="cnn-train",
            command_line="millrace cnn train",
        )
        return status, capsys.readouterr().err

    return call


def tiny_training(*, learning_rate=0.1, validate=None, fp_exceptions=False):
    """Return an application that fits a line in 2 epochs of 4 updates."""

    def loss_fn(weight, model_state, batch, key):
        return ((weight * batch["x"] - 1) ** 2).mean(), (model_state, {})

    def train(config, run):
        plan = Plan(micro_batch_size=2, fp_exceptions=fp_exceptions)
        schedule = schedule_events(
            updates_per_epoch=4,
            num_epochs=2,
            events_per_epoch={"log": 2, "checkpoint": 0, "validate": 1},
        )
        program = training_program(loss_fn, optax.sgd(learning_rate), plan)
        data = ArraySource({"x": np.linspace(1, 2, 8, dtype=np.float32)})
        with run.checkpoints(keep=3) as checkpoints:
            state = program.init(jnp.float32(0), {}, seed=0)
            run.train(
                program,
                state,
                Infeed(Stream(data, 2)),
                schedule,
                checkpoints=checkpoints,
                validate=validate or (lambda state: {"weight": float(state.params)}),
            )

    return train


@pytest.mark.parametrize("learning_rate", [0.1, 1e38])
def test_resuming_a_finished_run_changes_nothing(outcome, tmp_path, learning_rate):
    function = tiny_training(learning_rate=learning_rate)
    status, errors = outcome(function)
    assert status == 0, errors
    before, events = load_summary(tmp_path / "run"), load_events(tmp_path / "run")
    assert (before["metrics"]["train_loss"] == "nan") == (learning_rate > 1)
    status, errors = outcome(function, resume=True)
    assert status == 0, errors
    after = load_summary(tmp_path / "run")
    for name in ("status", "error", "updates", "samples", "metrics"):
        assert after[name] == before[name]
    assert load_events(tmp_path / "run") == events


def test_ctrl_c_during_validation_saves_a_checkpoint(outcome, tmp_path):
    def validate(state):
        os.kill(os.getpid(), signal.SIGINT)
        return {"accuracy": 0.5}

    status, errors = outcome(tiny_training(validate=validate))
    assert status == 130, errors
    summary = load_summary(tmp_path / "run")
    assert summary["status"] == "interrupted"
    assert summary["updates"] == 4
    assert summary["metrics"]["validation_accuracy"] == 0.5
    assert (tmp_path / "run/checkpoints/update-000000004/manifest.json").exists()


def test_a_non_finite_loss_can_end_the_run_with_status_1(outcome, tmp_path):
    function = tiny_training(learning_rate=1e38, fp_exceptions=True)
    status, errors = outcome(function, quiet=True)
    assert status == 1
    (line,) = errors.splitlines()
    assert line.startswith("millrace: The loss is")
    assert "at update" in line
    summary = load_summary(tmp_path / "run")
    assert summary["status"] == "failed"
    assert "at update" in summary["error"]
    assert "The loss is" in (tmp_path / "run" / "report.html").read_text()


def fail(config, run):
    raise OSError("the disk\nis broken")


def test_an_unexpected_error_is_one_line_and_everything_is_written(outcome, tmp_path):
    status, errors = outcome(fail)
    assert status == 1
    assert "millrace: OSError: the disk is broken" in errors
    assert "Traceback" not in errors
    assert load_summary(tmp_path / "run")["error"] == "OSError: the disk is broken"
    assert "is broken" in (tmp_path / "run" / "report.html").read_text()


def test_debug_shows_where_an_error_came_from(outcome):
    status, errors = outcome(fail, debug=True)
    assert status == 1
    assert "Traceback" in errors
    assert "in fail" in errors


def test_an_immediate_interrupt_is_recorded(outcome, tmp_path):
    def interrupt(config, run):
        raise KeyboardInterrupt

    status, errors = outcome(interrupt)
    assert status == 130
    assert "Traceback" not in errors
    assert load_summary(tmp_path / "run")["status"] == "interrupted"


def refuse(config, run):
    raise ConfigurationError("the data is missing")


def test_a_mistake_removes_only_the_directory_the_command_made(outcome, tmp_path):
    (tmp_path / "run").mkdir()  # by the user; it may be a mount point
    status, errors = outcome(refuse)
    assert status == 2
    assert errors == "millrace: the data is missing\n"
    assert (tmp_path / "run").is_dir()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_mistake_found_late_deletes_no_results(outcome, tmp_path):
    def work_then_refuse(config, run):
        run.directory.append_metrics({"update": 1, "epoch": 0.1, "time": 3600.0})
        raise ConfigurationError("the data is missing")

    status, _ = outcome(work_then_refuse)
    assert status == 2
    assert load_events(tmp_path / "run")[0]["time"] == 3600
    assert load_summary(tmp_path / "run")["status"] == "failed"


def test_a_run_directory_that_disappears_is_reported_in_one_line(outcome, tmp_path):
    def vanish(config, run):
        shutil.rmtree(run.directory.path)
        run.directory.append_metrics({"update": 1})

    status, errors = outcome(vanish)
    assert status == 1
    assert str(tmp_path / "run") in errors
    assert "Traceback" not in errors


def test_the_summary_is_written_even_if_a_writer_fails_to_close(
    outcome, tmp_path, monkeypatch
):
    def no_network(**_):
        raise ConnectionError("no network")

    session = SimpleNamespace(
        log=lambda *_: None, finish=no_network, define_metric=lambda *_, **__: None
    )
    wandb = SimpleNamespace(init=lambda **_: session)
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    def work(config, run):
        run.summary["status"] = "completed"

    _, errors = outcome(work, wandb=True)
    assert "no network" in errors
    assert load_summary(tmp_path / "run")["status"] == "completed"
    assert (tmp_path / "run" / "report.html").exists()


def test_wandb_without_its_package_is_a_mistake(outcome, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    status, errors = outcome(fail, wandb=True)
    assert status == 2
    assert "pip install wandb" in errors


def test_the_summary_has_all_documented_keys_even_after_a_failure(outcome, tmp_path):
    outcome(fail)
    assert {
        "status",
        "error",
        "command",
        "device",
        "updates",
        "samples",
        "samples_per_second",
        "compile_seconds",
        "metrics",
        "versions",
    } <= set(load_summary(tmp_path / "run"))
    assert load_yaml(tmp_path / "run" / "config.yml")["command"] == "cnn-train"


INTERRUPTED_IMPORT = """
import runpy, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "millrace.commands.registry":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
runpy.run_module("millrace", run_name="__main__")
"""


def test_an_interrupt_of_the_first_imports_shows_no_traceback():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout + done.stderr) == (130, "")
