"""Checks before a run starts."""

import resource
import types

import jax
import pytest

from millrace.apps.cnn.config import CnnConfig
from millrace.commands.registry import COMMANDS
from millrace.config import ConfigurationError, build
from millrace.distributed import coordination
from millrace.run.options import RunOptions
from millrace.run.process import check_address_space, prepare_process


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 2 * 10**9])
def test_enough_address_space_is_accepted(limit, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    check_address_space()


def test_too_little_address_space_is_an_error_instead_of_a_crash(monkeypatch):
    queried = []
    monkeypatch.setattr(
        resource, "getrlimit", lambda what: queried.append(what) or (1_536_000_000, -1)
    )
    with pytest.raises(ConfigurationError, match=r"limited to 1\.5 GB.*ulimit -v"):
        check_address_space()
    assert queried == [resource.RLIMIT_AS]


@pytest.mark.cpu("virtual devices are CPU devices")
def test_virtual_devices_that_the_process_has_already_may_be_asked_for_again():
    count = jax.local_device_count()  # a resumed run takes the option from the first one
    config = types.SimpleNamespace(run=RunOptions(virtual_devices=count))
    assert prepare_process(config) is config
    config = types.SimpleNamespace(run=RunOptions(virtual_devices=count + 1))
    with pytest.raises(ConfigurationError, match="before any device is used"):
        prepare_process(config)


def test_auto_resume_starts_a_run_and_continues_it_once_it_has_begun(tmp_path):
    path = tmp_path / "run"
    config = build(CnnConfig, {"run_dir": path, "auto_resume": True, "seed": 3})
    assert prepare_process(config) is config  # the folder does not exist
    path.mkdir()
    (path / "config.yml").write_text("command: cnn-train")
    assert prepare_process(config) is config  # it ended before it had results
    (path / "metrics.jsonl").touch()
    continued = prepare_process(config)
    assert continued.run.resume is True and continued.run.run_dir == path
    assert not continued.run.auto_resume and continued.run.seed == 3


def test_auto_resume_is_what_process_0_sees(tmp_path, monkeypatch):
    """A file system may show the others an older state of the folder."""
    config = build(CnnConfig, {"run_dir": tmp_path / "run", "auto_resume": True})
    seen = {"has_begun": True}
    monkeypatch.setattr(coordination, "broadcast", lambda name, own: seen)
    assert prepare_process(config).run.resume is True


def test_process_0_tells_the_others_that_auto_resume_cannot_look(monkeypatch):
    """They would wait for its answer until its heartbeats are missed."""
    config = build(CnnConfig, {"run_dir": "nosuch://bucket/run", "auto_resume": True})
    told = []
    monkeypatch.setattr(
        coordination, "broadcast", lambda name, own: told.append(own) or own
    )
    with pytest.raises(ConfigurationError, match="Protocol not known") as caught:
        prepare_process(config)
    assert told == [{"error": str(caught.value)}]


def test_a_timeout_of_training_is_refused_where_nothing_is_trained():
    with pytest.raises(ConfigurationError, match="leave out --stuck-timeout"):
        COMMANDS["cnn validate"].configure({"stuck_timeout": 5.0}, name="cnn validate")


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("cnn train", {}, "auto-resume needs a --run-dir"),
        ("cnn train", {"run_dir": "x", "checkpoints": False}, "checkpoints is off"),
        ("cnn validate", {"run_dir": "x"}, "leave out --auto-resume"),
        ("vcd train", {"run_dir": "x", "checkpoints": False}, "checkpoints is off"),
    ],
)
def test_auto_resume_is_refused_where_nothing_can_be_continued(command, options, message):
    with pytest.raises(ConfigurationError, match=message):
        COMMANDS[command].configure({**options, "auto_resume": True}, name=command)
