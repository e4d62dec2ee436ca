"""Runs in object storage, as commands and functions meet them."""

import json
import logging
import sys
from pathlib import Path

import jax
import killable_run
import numpy as np
import pytest
from stored_runs import (
    complete_checkpoints,
    make_run,
    new_url,
    save_checkpoint,
    stored,
)

import millrace as mr
from millrace.checkpoint.store import CheckpointError
from millrace.cli import main
from millrace.config import ConfigurationError
from millrace.report.record import read_run
from millrace.report.run_page import run_page
from millrace.run.directory import has_begun
from millrace.run.options import RunOptions
from millrace.run.run import run_command
from millrace.run.saved import find_run
from millrace.storage.address import to_local, working_copies
from millrace.storage.remote import Remote


@pytest.fixture(autouse=True)
def caches(monkeypatch, tmp_path):
    """Return a function that changes the cache: this machine is then another one."""

    def move(name):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    move("first")
    monkeypatch.setattr(sys, "argv", ["killable_run.py", "--delay=0"])
    monkeypatch.setattr(killable_run, "EPOCHS", 1)
    monkeypatch.setattr("millrace.storage.remote._FIRST_DELAY_SECONDS", 0.01)
    return move


def train(url, **options):
    run = RunOptions(run_dir=url, quiet=True, seed=5, **options)
    config = killable_run.Config(run=run)
    return run_command(
        killable_run.work, config, command="killable", command_line="python killable.py"
    )


def test_a_run_is_in_storage_and_is_loaded_on_another_machine(
    caches, monkeypatch, tmp_path
):
    url = new_url()
    assert train(url) == 0
    assert complete_checkpoints(url) == ["update-000000024", "update-000000028"]
    files = stored(url)
    assert json.loads(files["summary.json"])["status"] == "completed"
    assert len(files["metrics.jsonl"].splitlines()) == 28
    assert {"report.html", "final.npz"} <= files.keys()
    assert train(tmp_path / "plain") == 0
    caches("second")
    loaded = mr.load(url)
    assert loaded.update == 28
    jax.tree.map(
        np.testing.assert_array_equal, loaded.params, mr.load(tmp_path / "plain").params
    )
    assert repr(loaded).startswith(f"LoadedRun('{url}'")
    assert mr.load(Path(url), 24).update == 24
    found = find_run(f"{url}/checkpoints/update-000000024")
    assert found.choose().update == 24

    caches("third")
    assert has_begun(to_local(url)) and not has_begun(to_local(new_url()))

    # The run is complete, so that resuming it changes nothing.
    assert train(url, resume=True) == 0
    assert stored(url)["metrics.jsonl"] == files["metrics.jsonl"]
    caches("first")
    monkeypatch.setattr(killable_run, "EPOCHS", 2)
    assert train(url, resume=True) == 0  # written elsewhere since: downloaded first
    assert len(stored(url)["metrics.jsonl"].splitlines()) == 56


def test_arrays_that_are_gone_are_a_damaged_checkpoint(caches):
    url = new_url()
    assert train(url) == 0
    for name in stored(url):
        if "update-000000028/state" in name:
            Remote(url).delete(name)
    caches("second")
    with pytest.raises(CheckpointError, match="is missing"):
        mr.load(url)
    # A resumed run takes the older one, and writes the newest again.
    assert train(url, resume=True) == 0
    assert complete_checkpoints(url) == ["update-000000024", "update-000000028"]


def test_a_run_in_storage_is_not_overwritten(caches):
    url = new_url()
    assert train(url) == 0
    for cache in ("first", "second"):
        caches(cache)
        with pytest.raises(ConfigurationError, match=f"{url} exists and is not empty"):
            train(url)


def test_a_storage_that_cannot_be_written_ends_the_command_before_anything(monkeypatch):
    def fail(self, name, data):
        raise PermissionError("access denied")

    monkeypatch.setattr(Remote, "write", fail)
    url = new_url()
    with pytest.raises(ConfigurationError, match=f"{url} cannot be written: access denied"):
        train(url)
    assert not to_local(url).exists()
    with pytest.raises(ConfigurationError, match="There is no run to resume in memory"):
        train(new_url(), resume=True)


def test_an_upload_that_fails_is_an_error_at_the_end(monkeypatch, capsys, caplog):
    real = Remote.upload

    def fail(self, path, name):
        if "update-" in name:
            raise PermissionError("the token has expired")
        real(self, path, name)

    url = new_url()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Remote, "upload", fail)
        assert train(url) == 1
    message = f"update-000000028 was not uploaded to {url} (the token has expired)"
    assert message in capsys.readouterr().err
    assert complete_checkpoints(url) == []
    # On this machine, the run is complete.
    assert json.loads((to_local(url) / "summary.json").read_text())["status"] == "completed"
    assert train(url, resume=True) == 0
    assert complete_checkpoints(url) == ["update-000000024", "update-000000028"]


def test_the_report_of_an_unfinished_run_names_its_address():
    url = new_url()
    folder = make_run(url)
    save_checkpoint(folder, 1)
    assert f"<code>--resume {url}</code>" in run_page(read_run(folder))


def test_a_run_that_never_began_leaves_nothing():
    def work(config, run):
        raise ConfigurationError("a mistake")

    url = new_url()
    config = killable_run.Config(run=RunOptions(run_dir=url, quiet=True))
    assert run_command(work, config, command="killable", command_line="test") == 2
    assert stored(url) == {}
    assert not to_local(url).exists()


@pytest.mark.slow
def test_commands_read_and_write_runs_in_storage(caches, capsys, tmp_path):
    url = new_url()
    train_digits = ["cnn", "train", "--config", "digits_demo", "--quiet"]

    def run(*words, status=0):
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        output = capsys.readouterr()
        assert ended.value.code == status, output.err
        return output.out + output.err

    run(*train_digits, "--num-epochs", "1", "--run-dir", url)
    assert f"run_dir: {url}" in stored(url)["config.yml"].decode()
    caches("second")
    run("cnn", "train", "--resume", url, "--num-epochs", "2", "--quiet")
    assert b"num_epochs: 2" in stored(url)["config.yml"]
    caches("third")
    assert f"{url}/export/model.safetensors" in run("cnn", "export", url)
    assert "export/model.safetensors" in stored(url)
    assert run("report", url) == f"{url}/report.html\n"
    options = ["--run-dir", str(tmp_path / "validation"), "--quiet", "--latency-calls", "1"]
    run("cnn", "validate", url, *options)
    run(*train_digits, "--config", url, "--compile-only", "--run-dir", str(tmp_path / "c"))
    text = run("autoencoder", "recommend", url, "--all", status=2)
    assert f"{url} is not a run of `millrace autoencoder train`" in text
    text = run(*train_digits, "--dataset-path", "s3://bucket/data", status=2)
    assert "--dataset-path must be a path of this machine, got s3://bucket/data" in text
    text = run("report", url, "--serve", status=2)
    assert "--serve shows runs of this machine" in text
    text = run("cnn", "train", "--resume", url, "--run-dir", "memory://x", status=2)
    assert f"--resume names the run {url}, but --run-dir is memory://x" in text
    assert not (working_copies() / "s3").exists()
