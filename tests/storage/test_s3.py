"""Runs in S3, with a local server: killed, interrupted, and without a connection."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from killable import assert_same_run, finish, start
from s3_server import BUCKET, Server, serving

from millrace.storage import remote
from millrace.storage.address import StorageError, to_local
from millrace.storage.download import refresh
from millrace.storage.remote import Remote

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytest.importorskip("flask_cors")

URL = f"s3://{BUCKET}/runs/first"
MANIFEST = re.compile(r"(.*/update-\d+)/manifest\.json")


@pytest.fixture
def server(monkeypatch):
    with serving() as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()  # of another server
        yield running


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted") / "run"
    finish(start(directory))
    return directory


def copy_in(cache: Path) -> Path:
    return cache / "millrace" / "remote" / "s3" / BUCKET / "runs" / "first"


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def incomplete_checkpoints(server: Server) -> set[str]:
    names = server.list("runs/first/checkpoints/")
    started = {name.partition("/state/")[0] for name in names if "/state/" in name}
    return started - {match[1] for name in names if (match := MANIFEST.fullmatch(name))}


def test_files_are_written_listed_read_and_deleted(server, tmp_path):
    folder = Remote(URL)
    folder.write("a/b", b"text")
    (tmp_path / "file").write_bytes(bytes(6 << 20))  # sent in several parts
    sent = []
    folder.on_progress = lambda: sent.append(1)
    folder.upload(tmp_path / "file", "large")
    listed = folder.list()
    sizes = {name: info.size for name, info in listed.items()}
    assert sizes == {"a/b": 4, "large": 6 << 20}
    assert sent
    folder.write("a/b", b"TEXT")
    assert folder.list()["a/b"].version != listed["a/b"].version
    folder.download("a/b", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == folder.read("a/b") == b"TEXT"
    folder.delete("a/b")
    folder.delete("a/b")
    assert folder.read("a/b") is None
    assert folder.list().keys() == {"large"}


@pytest.mark.slow
def test_a_wrong_bucket_and_wrong_credentials_are_lasting_errors(server, monkeypatch):
    with pytest.raises(FileNotFoundError) as raised:
        Remote("s3://nonsense/run").write("a", b"")
    assert remote.is_permanent(raised.value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nonexistent")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(Exception, match="Unable to locate credentials") as error:
        Remote("s3://other/run").write("a", b"")
    assert remote.is_permanent(error.value)


@pytest.mark.slow
def test_a_server_that_is_gone_is_a_temporary_error(server, monkeypatch):
    monkeypatch.setattr(remote, "_FIRST_DELAY_SECONDS", 0.01)
    server.end()
    with pytest.raises(StorageError, match="Check the connection, and try again"):
        refresh(to_local(URL))


@pytest.mark.slow
def test_a_run_killed_during_an_upload_resumes_on_another_machine(uninterrupted, tmp_path):
    caches = [tmp_path / name for name in ("first", "second", "third")]
    with serving(delay=0.03) as server:
        first, second, third = (
            {**server.environment, "XDG_CACHE_HOME": str(cache)} for cache in caches
        )
        process = start(URL, "--delay=0.05", **first)
        wait_for(
            lambda: (
                any(map(MANIFEST.fullmatch, server.list("runs/")))
                and incomplete_checkpoints(server)
            ),
            process,
        )
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert incomplete_checkpoints(server)
        finish(start(URL, "--resume", **second))
        assert incomplete_checkpoints(server) == set()
        assert_same_run(copy_in(caches[1]), uninterrupted)
        # Everything is in storage as well: nothing is left to do on a third machine.
        finish(start(URL, "--resume", **third))
    events = (copy_in(caches[2]) / "metrics.jsonl").read_text().splitlines()
    assert len(events) == 112
    assert_same_run(copy_in(caches[2]), uninterrupted)


@pytest.mark.slow
def test_a_server_that_fails_every_third_request_changes_nothing(uninterrupted, tmp_path):
    with serving(failures=3) as server:
        environment = {**server.environment, "XDG_CACHE_HOME": str(tmp_path)}
        finish(start(URL, **environment))
        names = server.list("runs/first/")
    assert_same_run(copy_in(tmp_path), uninterrupted)
    local = {
        f"runs/first/{path.relative_to(copy_in(tmp_path)).as_posix()}"
        for path in copy_in(tmp_path).rglob("*")
        if path.is_file() and path.name != ".remote.json"
    }
    assert names - {"runs/first/.writer"} == local


@pytest.mark.slow
def test_a_server_that_is_gone_at_the_end_is_reported(uninterrupted, tmp_path):
    folder = copy_in(tmp_path)
    with serving() as server:
        environment = {**server.environment, "XDG_CACHE_HOME": str(tmp_path)}
        process = start(URL, "--delay=0.02", "--upload-timeout=5", **environment)
        wait_for(lambda: any(map(MANIFEST.fullmatch, server.list("runs/"))), process)
        server.end()
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"The upload to {URL} is late" in errors
    assert f"was not uploaded to {URL}" in errors
    assert f"All of the run is in {folder}. --resume {URL} on this machine" in errors
    assert_same_run(folder, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, True])
def test_after_ctrl_c_the_last_checkpoint_is_uploaded(twice, uninterrupted, tmp_path):
    folder = copy_in(tmp_path)
    with serving(delay=0.3 if twice else 0.0) as server:
        environment = {**server.environment, "XDG_CACHE_HOME": str(tmp_path)}
        process = start(URL, "--delay=0.05", **environment)
        wait_for(lambda: (folder / "metrics.jsonl").exists(), process)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        if twice:
            wait_for(lambda: (folder / "report.html").exists(), process)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        summary = json.loads((folder / "summary.json").read_text())
        newest = f"update-{summary['updates']:09d}"
        complete = f"runs/first/checkpoints/{newest}/manifest.json"
        if twice:
            assert f"The checkpoint {newest} was not uploaded to {URL}" in errors
        else:
            assert complete in server.list("runs/")
        finish(start(URL, "--resume", **environment))
    assert_same_run(folder, uninterrupted)
