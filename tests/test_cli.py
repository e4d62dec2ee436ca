"""The command line as a user meets it: mostly whole processes, and what they leave."""

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
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
from millrace.plan import Plan
from millrace.program.training import training_program
from millrace.run.options import RunOptions
from millrace.run.run import run_command

MILLRACE = [sys.executable, "-c", "from millrace.cli import main; main()"]
PATIENCE = 120  # seconds; a run takes about 6, but the machine may be busy

# Eight epochs of 44 updates, in executions of 11.
TRAIN = [
    *("cnn", "train", "--micro-batch-size", "32", "--num-epochs", "8"),
    *("--lr-schedule-params", "{initial_learning_rate: 0.003}"),
    *("--logs-per-epoch", "4", "--validations-per-epoch", "0.5"),
]
REPLICAS = [
    *("cnn", "train", "--micro-batch-size", "8", "--num-replicas", "4"),
    *("--virtual-devices", "4", "--tensorboard", "--updates-per-execution", "11"),
]


def environment() -> dict[str, str]:
    """A user's, with the one device a CPU has, not the suite's eight."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return kept | {"JAX_PLATFORMS": "cpu"}


def start(*words: str, cwd: Path | None = None) -> subprocess.Popen:
    return subprocess.Popen(
        [*MILLRACE, *words],
        env=environment(),
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    return finish(start(*words, cwd=cwd))


def summary_of(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


def events_of(directory: Path) -> list[dict]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def without_times(events: list[dict]) -> list[dict]:
    timed = ("time", "samples_per_second")
    return [{k: v for k, v in event.items() if k not in timed} for event in events]


class RunResult(SimpleNamespace):
    """A run that has ended."""

    path: Path
    status: int
    errors: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> dict[str, RunResult]:
    """The runs that several tests look at, made side by side."""
    folder = tmp_path_factory.mktemp("runs")
    processes = {}

    def begin(name: str, *words: str) -> None:
        processes[name] = start(*words, "--run-dir", str(folder / name))

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
    """Press Ctrl-C as soon as the first metrics are there."""
    metrics = directory / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
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
    """Run a command in this process, which has imported everything already."""
    logger = logging.getLogger("millrace")
    kept = logger.handlers, logger.level, logger.propagate
    monkeypatch.chdir(tmp_path)

    def command(*words: str) -> tuple[int, str]:
        with pytest.raises((SystemExit, KeyboardInterrupt)) as left:
            main(words)
        assert isinstance(left.value, SystemExit), "the interrupt came through"
        return left.value.code, capsys.readouterr().err

    yield command
    logger.handlers, logger.level, logger.propagate = kept


# Asking for help


@pytest.mark.parametrize("words", [["--help"], ["cnn", "train", "--help"]])
def test_help_answers_within_a_second(words):
    """Of a core's time: on a busy machine the clock measures the others."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    ended = run(*words)
    assert used() - before < 1
    assert ended.returncode == 0
    assert ended.stderr == ""


@pytest.mark.parametrize(
    "words", [["--help"], ["cnn", "train", "--help"], ["cnn", "train", "--epoches", "3"]]
)
def test_reading_a_command_imports_nothing_heavy(words):
    script = (
        "import sys\n"
        "from millrace.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print({'jax', 'numpy', 'optax', 'orbax', 'sklearn'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script, *words]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "set()"


def test_help_lists_the_commands_and_their_options():
    assert "cnn train" in run("--help").stdout
    options = run("cnn", "train", "--help").stdout
    assert "--num-replicas INT" in options
    assert "Folder for everything the run writes" in " ".join(options.split())


def test_help_of_an_application_lists_its_verbs():
    ended = run("cnn", "--help")
    assert ended.returncode == 0
    assert "train" in ended.stdout


def test_the_version_is_told():
    assert run("--version").stdout == f"millrace {millrace.__version__}\n"


# Mistakes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("cnn trian", "'cnn trian'"),
        ("cnn", "cnn train"),
        ("frobnicate", "'frobnicate'"),
        ("cnn train --num-epoches 3", "Did you mean --num-epochs?"),
        ("cnn train --micro-batch-size lots", "--micro-batch-size takes a whole number"),
        ("cnn train --micro-batch-size 0", "micro_batch_size must be at least 1, got 0"),
        ("cnn train --precision 8.8", "16.16, 16.32, 32.32"),
        ("cnn train --config nope", "digits_demo"),
        ("cnn train --config digits_demo --config-path none.yml", "none.yml: No such file"),
        ("cnn train stray", "stray"),
        ("cnn train --resume", "run_dir"),
    ],
)
def test_a_mistake_is_a_plain_line_and_status_2(words, said, tmp_path):
    ended = run(*words.split(), cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "functools" not in ended.stderr
    assert 1 <= len(ended.stderr.splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_a_command_without_words_shows_the_usage_as_an_error():
    ended = run()
    assert ended.returncode == 2
    assert "usage: millrace" in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-epochs 5 --logs-per-epoch 0.5", "2.0 epochs at a time for 5 epochs"),
        ("--micro-batch-size 5000", "1437 samples"),
        ("--global-batch-size 1438", "1437 samples"),
    ],
)
def test_a_mistake_found_only_with_the_data_is_a_plain_line_and_status_2(
    words, said, in_process
):
    status, errors = in_process("cnn", "train", "--run-dir", "run", *words.split())
    assert said in errors
    assert len(errors.splitlines()) <= 2
    assert "ValueError" not in errors
    assert "--debug" not in errors
    assert status == 2


def test_too_few_devices_are_a_mistake_with_advice(finished):
    refused = finished["refused"]
    assert refused.status == 2
    assert "num_replicas is 4" in refused.errors
    assert "--virtual-devices 4" in refused.errors
    assert "Traceback" not in refused.errors
    assert len(refused.errors.splitlines()) <= 2


def test_a_refused_command_leaves_the_name_of_its_directory_free(finished):
    assert not finished["refused"].path.exists()


def test_a_directory_with_a_run_in_it_is_refused_and_left_alone(trained):
    before = (trained.path / "summary.json").read_bytes()
    ended = run(*TRAIN, "--run-dir", str(trained.path))
    assert ended.returncode == 2
    assert str(trained.path) in ended.stderr
    assert "--resume" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert (trained.path / "summary.json").read_bytes() == before


def test_resuming_with_another_option_is_refused_by_its_name(trained, in_process):
    before = (trained.path / "summary.json").read_bytes()
    words = [*TRAIN, "--run-dir", str(trained.path), "--resume", "--bn-momentum", "0.5"]
    status, errors = in_process(*words)
    assert status == 2
    assert "bn_momentum was 0.97, now 0.5" in errors
    assert (trained.path / "summary.json").read_bytes() == before


# A run and what it leaves


def test_a_run_says_what_it_will_do_and_where_its_results_are(trained):
    assert trained.status == 0
    for words in (
        "1 x cpu",
        "24,058 parameters",
        "global batch   32 = micro batch 32 x accumulation 1 x replicas 1",
        "352 = 44 per epoch x 8 epochs, 11 per execution",
        "32.32",
        "completed",
        str(trained.path / "report.html"),
    ):
        assert words in trained.errors
    assert "Warning" not in trained.errors


def test_a_run_records_the_configuration_it_was_given(trained):
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
    events = events_of(trained.path)
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


def test_the_summary_has_every_field_of_the_contract(trained):
    summary = summary_of(trained.path)
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
    for event in events_of(trained.path):
        last |= event
    for name in ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy"):
        assert summary["metrics"][name] == last[name]


def test_checkpoints_and_a_report_are_left(trained):
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
    assert summary_of(second)["metrics"] == summary_of(first)["metrics"]
    assert without_times(events_of(second)) == without_times(events_of(first))


def test_virtual_devices_carry_replicas_on_any_machine(finished):
    replicas = finished["replicas"]
    assert replicas.status == 0, replicas.errors
    summary = summary_of(replicas.path)
    assert summary["device"]["count"] == 4
    assert summary["samples"] == 44 * 32
    assert list((replicas.path / "tensorboard").iterdir())


def test_updates_per_execution_are_as_asked_for(finished):
    assert "44 per epoch x 1 epochs, 11 per execution" in finished["replicas"].errors


# Stopping and going on


def test_ctrl_c_ends_a_run_in_good_order(finished):
    interrupted = finished["interrupted"]
    assert interrupted.status == 130
    assert "SIGINT" in interrupted.errors
    assert "Traceback" not in interrupted.errors
    summary = summary_of(interrupted.path)
    assert summary["status"] == "interrupted"
    assert 0 < summary["updates"] < 352
    assert summary["updates"] % 11 == 0
    checkpoints = sorted(path.name for path in (interrupted.path / "checkpoints").iterdir())
    assert checkpoints[-1] == f"update-{summary['updates']:09d}"
    assert "interrupted" in (interrupted.path / "report.html").read_text()


def test_a_resumed_run_reaches_the_numbers_of_one_that_was_never_stopped(finished, trained):
    resumed, directory = finished["resumed"], finished["resumed"].path
    assert resumed.status == 0, resumed.errors
    stopped_after = summary_of(finished["interrupted"].path)["updates"]
    assert f"Resuming after update {stopped_after}" in resumed.errors
    summary = summary_of(directory)
    assert summary["status"] == "completed"
    assert summary["error"] is None
    assert summary["updates"] == 352
    assert summary["metrics"] == summary_of(trained.path)["metrics"]
    assert without_times(events_of(directory)) == without_times(events_of(trained.path))
    times = [event["time"] for event in events_of(directory)]
    assert times == sorted(times)


def test_ctrl_c_before_a_run_has_begun_is_no_traceback(in_process, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(CnnConfig, "__post_init__", interrupt)
    status, errors = in_process("cnn", "train")
    assert status == 130
    assert "Traceback" not in errors


# Failing, and other ends, with a function in place of an application


@pytest.fixture
def outcome(in_process, tmp_path, capsys):
    """Run any function as a command; return the status and what was said."""
    del in_process  # for the logger, which it puts back

    def call(function, **options) -> tuple[int, str]:
        status = run_command(
            function,
            RunOptions(run_dir=tmp_path / "run", **options),
            command="cnn-train",
            command_line="millrace cnn train",
        )
        return status, capsys.readouterr().err

    return call


def tiny_training(*, learning_rate=0.1, validate=None, fp_exceptions=False):
    """An application that fits a line in 2 epochs of 4 updates, validated after each."""

    def loss_fn(weight, model_state, batch, key):
        return ((weight * batch["x"] - 1) ** 2).mean(), (model_state, {})

    def train(options, run):
        plan = Plan(micro_batch_size=2, fp_exceptions=fp_exceptions)
        schedule = schedule_events(
            updates_per_epoch=4,
            num_epochs=2,
            events_per_epoch={"log": 2, "checkpoint": 0, "validate": 1},
        )
        program = training_program(loss_fn, optax.sgd(learning_rate), plan)
        data = ArraySource({"x": np.linspace(1, 2, 8, dtype=np.float32)})
        with run.checkpoints(best="validation_accuracy", keep=3) as checkpoints:
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
def test_a_finished_run_can_be_resumed_without_harm(outcome, tmp_path, learning_rate):
    function = tiny_training(learning_rate=learning_rate)
    status, errors = outcome(function)
    assert status == 0, errors
    before, events = summary_of(tmp_path / "run"), events_of(tmp_path / "run")
    assert (before["metrics"]["train_loss"] == "nan") == (learning_rate > 1)
    status, errors = outcome(function, resume=True)
    assert status == 0, errors
    after = summary_of(tmp_path / "run")
    for name in ("status", "error", "updates", "samples", "metrics"):
        assert after[name] == before[name]
    assert events_of(tmp_path / "run") == events


def test_ctrl_c_during_validation_still_saves_what_was_learnt(outcome, tmp_path):
    def validate(state):
        os.kill(os.getpid(), signal.SIGINT)
        return {"accuracy": 0.5}

    status, errors = outcome(tiny_training(validate=validate))
    assert status == 130, errors
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "interrupted"
    assert summary["updates"] == 4
    assert summary["metrics"]["validation_accuracy"] == 0.5
    assert (tmp_path / "run/checkpoints/update-000000004/manifest.json").exists()


def test_a_loss_that_is_not_finite_can_end_the_run_with_status_1(outcome, tmp_path):
    function = tiny_training(learning_rate=1e38, fp_exceptions=True)
    status, errors = outcome(function, quiet=True)
    assert status == 1
    (line,) = errors.splitlines()
    assert line.startswith("millrace: The loss is")
    assert "at update" in line
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "failed"
    assert "at update" in summary["error"]
    assert "The loss is" in (tmp_path / "run" / "report.html").read_text()


def fail(options, run):
    raise OSError("the mill\nstands still")


def test_an_unforeseen_error_is_one_line_and_all_is_written(outcome, tmp_path):
    status, errors = outcome(fail)
    assert status == 1
    assert "millrace: OSError: the mill stands still" in errors
    assert "Traceback" not in errors
    assert summary_of(tmp_path / "run")["error"] == "OSError: the mill stands still"
    assert "stands still" in (tmp_path / "run" / "report.html").read_text()


def test_debug_shows_where_an_error_came_from(outcome):
    status, errors = outcome(fail, debug=True)
    assert status == 1
    assert "Traceback" in errors
    assert "in fail" in errors


def test_an_interrupt_at_once_is_recorded_as_one(outcome, tmp_path):
    def interrupt(options, run):
        raise KeyboardInterrupt

    status, errors = outcome(interrupt)
    assert status == 130
    assert "Traceback" not in errors
    assert summary_of(tmp_path / "run")["status"] == "interrupted"


def refuse(options, run):
    raise ConfigurationError("the sluice is shut")


def test_a_mistake_removes_only_the_directory_the_command_made(outcome, tmp_path):
    (tmp_path / "run").mkdir()  # by the user, perhaps a mounted disk
    status, errors = outcome(refuse)
    assert status == 2
    assert errors == "millrace: the sluice is shut\n"
    assert (tmp_path / "run").is_dir()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_mistake_noticed_late_deletes_no_results(outcome, tmp_path):
    def work_then_refuse(options, run):
        run.directory.append_metrics({"update": 1, "epoch": 0.1, "time": 3600.0})
        raise ConfigurationError("the sluice is shut")

    status, _ = outcome(work_then_refuse)
    assert status == 2
    assert events_of(tmp_path / "run")[0]["time"] == 3600
    assert summary_of(tmp_path / "run")["status"] == "failed"


def test_a_run_directory_that_vanishes_is_a_plain_failure(outcome, tmp_path):
    def vanish(options, run):
        shutil.rmtree(run.directory.path)
        run.directory.append_metrics({"update": 1})

    status, errors = outcome(vanish)
    assert status == 1
    assert str(tmp_path / "run") in errors
    assert "Traceback" not in errors


def test_a_writer_that_fails_to_close_does_not_cost_the_summary(
    outcome, tmp_path, monkeypatch
):
    def no_network():
        raise ConnectionError("no network")

    session = SimpleNamespace(log=lambda *_, **__: None, finish=no_network)
    wandb = SimpleNamespace(init=lambda **_: session)
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    def work(options, run):
        run.summary["status"] = "completed"

    _, errors = outcome(work, wandb=True)
    assert "no network" in errors
    assert summary_of(tmp_path / "run")["status"] == "completed"
    assert (tmp_path / "run" / "report.html").exists()


def test_wandb_without_its_package_is_a_mistake(outcome, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    status, errors = outcome(fail, wandb=True)
    assert status == 2
    assert "pip install wandb" in errors


def test_every_key_of_the_contract_is_there_even_after_a_failure(outcome, tmp_path):
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
    } <= set(summary_of(tmp_path / "run"))
    assert load_yaml(tmp_path / "run" / "config.yml")["command"] == "cnn-train"
