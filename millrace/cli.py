"""The command line: ``millrace <application> <verb> [options]``, and small tools.

Only what is needed to read a command is imported here; the work is imported when the
command is known to be right.
"""

import importlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import millrace
from millrace.config import ConfigurationError, parse
from millrace.distributed.environment import is_follower, with_replicas
from millrace.distributed.interrupts import INTERRUPTED, interruptible, leave_on_signals
from millrace.output import drop_lost_output


class Command(NamedTuple):
    """A command: where its configuration, its function and its named runs are."""

    config: str
    function: str
    named_configs: str | None
    summary: str
    is_run: bool = True
    """Whether it works in a run directory, or just answers."""


_COMMANDS = {
    ("cnn", "train"): Command(
        "millrace.apps.cnn.config:CnnConfig",
        "millrace.apps.cnn.train:train",
        "millrace.apps.cnn:runs.yml",
        "train an image classifier",
    ),
    ("cnn", "validate"): Command(
        "millrace.apps.cnn.config.inference:ValidateConfig",
        "millrace.apps.cnn.inference.command:validate",
        None,
        "measure inference: throughput, latency and accuracy",
    ),
    ("cnn", "verify-dataset"): Command(
        "millrace.apps.cnn.config.datasets:VerifyDatasetConfig",
        "millrace.apps.cnn.verify_dataset:verify_dataset",
        None,
        "check that a data set on disk is what it should be",
        is_run=False,
    ),
    ("cnn", "benchmark-dataset"): Command(
        "millrace.apps.cnn.config.datasets:BenchmarkDatasetConfig",
        "millrace.apps.cnn.datasets:benchmark_dataset",
        None,
        "measure how fast the host can read and prepare a data set",
        is_run=False,
    ),
    ("vcd", "train"): Command(
        "millrace.apps.vcd.config:VcdConfig",
        "millrace.apps.vcd.train:train",
        "millrace.apps.vcd:runs.yml",
        "train a VAE whose posterior is refined by Markov chains",
    ),
    ("vcd", "evaluate"): Command(
        "millrace.apps.vcd.config.commands:EvaluateConfig",
        "millrace.apps.vcd.evaluate:evaluate",
        None,
        "estimate the log-likelihood of a trained model",
    ),
    ("vcd", "sample"): Command(
        "millrace.apps.vcd.config.commands:SampleConfig",
        "millrace.apps.vcd.sample:sample",
        None,
        "draw pictures from a trained model",
    ),
    ("autoencoder", "train"): Command(
        "millrace.apps.autoencoder.config:AutoencoderConfig",
        "millrace.apps.autoencoder.train:train",
        "millrace.apps.autoencoder:runs.yml",
        "train a recommender on ratings",
    ),
    ("autoencoder", "validate"): Command(
        "millrace.apps.autoencoder.config.evaluate:ValidateConfig",
        "millrace.apps.autoencoder.evaluate:validate",
        None,
        "measure how well a trained recommender foretells and ranks",
    ),
    ("autoencoder", "recommend"): Command(
        "millrace.apps.autoencoder.config.recommend:RecommendConfig",
        "millrace.apps.autoencoder.recommend:recommend",
        None,
        "list the items that users are likely to rate best",
        is_run=False,
    ),
    ("autoencoder", "sweep"): Command(
        "millrace.apps.autoencoder.config.sweep:SweepConfig",
        "millrace.apps.autoencoder.sweep:sweep",
        "millrace.apps.autoencoder:runs.yml",
        "train one recommender per learning rate, all together",
    ),
    ("autoencoder", "convert"): Command(
        "millrace.apps.autoencoder.config.convert:ConvertConfig",
        "millrace.apps.autoencoder.convert:convert",
        None,
        "split ratings by time into training, validation and test files",
        is_run=False,
    ),
    ("data", "fetch"): Command(
        "millrace.commands.fetch_options:FetchConfig",
        "millrace.commands.fetch:fetch_dataset",
        None,
        "download a data set",
        is_run=False,
    ),
    ("devices", ""): Command(
        "millrace.commands.devices_options:DevicesConfig",
        "millrace.commands.devices:show_devices",
        None,
        "say what devices are here, how fast they are, and how to train on them",
        is_run=False,
    ),
    ("report", ""): Command(
        "millrace.commands.report_options:ReportConfig",
        "millrace.commands.report:report",
        None,
        "make the report of a run again, or compare several runs on one page",
        is_run=False,
    ),
    ("bench", ""): Command(
        "millrace.bench.config:BenchConfig",
        "millrace.bench.command:bench",
        None,
        "measure named benchmarks against this device's limits and PyTorch",
        is_run=False,
    ),
    ("launch", ""): Command(
        "millrace.distributed.options:LaunchConfig",
        "millrace.commands.launch:launch",
        None,
        "start several processes of a command as one run",
        is_run=False,
    ),
    ("schedule", ""): Command(
        "millrace.commands.schedule_options:ScheduleConfig",
        "millrace.commands.schedule:show_schedule",
        None,
        "show what a pipeline does when, how long it takes and what it holds",
        is_run=False,
    ),
}


def script() -> None:
    """Be the command: leave in order at whatever moment a signal comes."""
    leave_on_signals()
    drop_lost_output()
    try:
        main()
    except SystemExit as ended:
        if ended.code == INTERRUPTED and not _is_one_of_several():
            # Threads may still compile what is no longer wanted: Python would wait for
            # them, or crash on them.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise


def _is_one_of_several() -> bool:
    """Whether other processes wait for this one to take its leave."""
    group = sys.modules.get("millrace.distributed.coordination")
    return group is not None and group.num_processes() > 1


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status: 0 done, 1 failed, 2 a wrong command."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(words)
    except ConfigurationError as error:
        if not is_follower():  # of several processes, one says it
            print(f"millrace: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)


def _run(words: list[str]) -> int:
    applications = {application for application, verb in _COMMANDS if verb}
    asked = words[1:2] if words[:1] and words[0] in applications else words[:1]
    if not words or asked in (["-h"], ["--help"]):
        print(_usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"millrace {millrace.__version__}")
        return 0
    key = (words[0], words[1] if len(words) > 1 else "")
    if (words[0], "") in _COMMANDS:
        key = (words[0], "")
    if key not in _COMMANDS:
        known = ", ".join(" ".join(command).strip() for command in _COMMANDS)
        raise ConfigurationError(
            f"There is no command {' '.join(key).strip()!r}. There is: {known}. "
            "See millrace --help."
        )
    command = _COMMANDS[key]
    if words[0] == "launch":  # most of its words are another command's
        return _load(command.function)(words[1:])
    config_type = _load(command.config)
    config, _ = parse(
        config_type,
        with_replicas(config_type, words[2:] if key[1] else words[1:]),
        program=" ".join(["millrace", *key]).strip(),
        named_configs=_resource(command.named_configs),
    )
    if not command.is_run:
        return _answer(_load(command.function), config)
    from millrace.run.process import tune_memory_allocation

    tune_memory_allocation()
    from millrace.run.run import run_command

    return run_command(
        _load(command.function),
        config,
        command="-".join(key),
        command_line=shlex.join(["millrace", *words]),
    )


def _answer(function: Callable[[Any], int | None], config: Any) -> int:
    """Call a command that needs no run directory; it may return a status."""
    try:
        with interruptible():
            return function(config) or 0
    except ConfigurationError:
        raise
    except Exception as error:
        ours = type(error).__module__.startswith("millrace") or isinstance(error, OSError)
        if getattr(config, "debug", not ours):
            raise
        message = " ".join(str(error).split())
        if not ours:
            message = f"{type(error).__name__}: {message} (--debug shows where)"
        print(f"millrace: {message}", file=sys.stderr)
        return 1


def _load(place: str):
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def _resource(place: str | None) -> Path | None:
    if place is None:
        return None
    package, name = place.split(":")
    return Path(str(resources.files(package) / name))


def _usage() -> str:
    lines = [
        "millrace: whole training loops on the device.",
        "",
        "usage: millrace <application> <verb> [options]",
        "       millrace <application> <verb> --help",
        "",
    ]
    lines += [
        f"  {' '.join(key):<22} {command.summary}" for key, command in _COMMANDS.items()
    ]
    return "\n".join(lines)
