import importlib
import json
import logging
import os
import shutil
import sys
import threading
import time

import pytest
from stored_runs import (
    complete_checkpoints,
    make_run,
    new_url,
    save_checkpoint,
    stored,
)

from millrace.durable import discard
from millrace.storage import upload
from millrace.storage.address import StorageError, to_local, working_copies
from millrace.storage.remote import Remote
from millrace.storage.upload import Uploader, UploadError, publish


@pytest.fixture(autouse=True)
def no_delays(monkeypatch):
    monkeypatch.setattr(upload, "_FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr("millrace.storage.remote._FIRST_DELAY_SECONDS", 0.01)


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def finish(uploader, timeout=20.0):
    lines = []
    uploader.finish(timeout, lines.append)
    return lines


def test_a_run_and_its_checkpoints_are_uploaded():
    url = new_url()
    folder = make_run(url)
    uploader = Uploader(folder)
    assert stored(url).keys() == {".writer", "config.yml"}
    save_checkpoint(folder, 1)
    save_checkpoint(folder, 2)
    (folder / "report").mkdir()
    (folder / "report" / "1.json").write_text("{}")
    finish(uploader)
    assert complete_checkpoints(url) == ["update-000000001", "update-000000002"]
    assert {"metrics.jsonl", "report/1.json"} <= stored(url).keys()
    assert not list(working_copies().glob("uploading-*"))


def test_a_manifest_is_uploaded_last_and_deleted_first(monkeypatch):
    calls = []
    for name in ("upload", "delete"):
        real = getattr(Remote, name)

        def call(self, *args, name=name, real=real):
            calls.append((name, args[-1]))
            real(self, *args)

        monkeypatch.setattr(Remote, name, call)
    url = new_url()
    folder = make_run(url)
    uploader = Uploader(folder)
    path = save_checkpoint(folder, 1)
    uploader.request()
    wait_until(lambda: uploader.is_done)
    discard(path)
    finish(uploader)
    ours = [(what, name.rpartition("/")[2]) for what, name in calls if "update-" in name]
    assert ours[:3] == [("upload", "a"), ("upload", "b"), ("upload", "manifest.json")]
    assert ours[3] == ("delete", "manifest.json")
    assert sorted(ours[4:]) == [("delete", "a"), ("delete", "b")]
    assert complete_checkpoints(url) == []
    assert calls.index(("upload", "metrics.jsonl")) < calls.index(
        ("upload", "checkpoints/update-000000001/manifest.json")
    )


def test_a_checkpoint_that_is_deleted_meanwhile_is_still_uploaded(monkeypatch):
    url = new_url()
    folder = make_run(url)
    uploader = Uploader(folder)
    path = save_checkpoint(folder, 1)
    real, seen = Remote.upload, []

    def send(self, source, name):
        if name.endswith("state/a"):
            discard(path)
        real(self, source, name)
        seen.append(name)

    monkeypatch.setattr(Remote, "upload", send)
    finish(uploader)
    assert "checkpoints/update-000000001/manifest.json" in seen
    assert complete_checkpoints(url) == []  # deleted in storage as well, afterwards


def test_only_what_has_changed_is_uploaded_again(monkeypatch):
    url = new_url()
    folder = make_run(url)
    uploader = Uploader(folder)
    save_checkpoint(folder, 1)
    uploader.request()
    wait_until(lambda: uploader.is_done)
    sent = []
    real = Remote.upload

    def send(self, path, name):
        sent.append(name)
        real(self, path, name)

    monkeypatch.setattr(Remote, "upload", send)
    save_checkpoint(folder, 1, scores={"accuracy": 0.5})  # as add_scores does
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    finish(uploader)
    assert sent == ["metrics.jsonl", "checkpoints/update-000000001/manifest.json"]


def test_another_checkpoint_of_the_same_name_is_never_mixed_with_the_first(monkeypatch):
    url = new_url()
    folder = make_run(url)
    uploader = Uploader(folder)
    save_checkpoint(folder, 1, "first")
    uploader.request()
    wait_until(lambda: uploader.is_done)
    real = Remote.upload

    def send(self, path, name):
        complete_checkpoints(url)  # asserts that what has a manifest is complete
        real(self, path, name)

    monkeypatch.setattr(Remote, "upload", send)
    save_checkpoint(folder, 1, "second")
    finish(uploader)
    assert complete_checkpoints(url) == ["update-000000001"]
    found = stored(url)["checkpoints/update-000000001/state/a"]
    assert found.endswith(b"second")


def test_a_lost_connection_delays_the_upload_but_loses_nothing(monkeypatch, caplog):
    url = new_url()
    folder = make_run(url)
    uploader = Uploader(folder)
    broken = threading.Event()
    broken.set()
    real = Remote.upload

    def send(self, path, name):
        if broken.is_set():
            raise ConnectionError("connection reset")
        real(self, path, name)

    monkeypatch.setattr(Remote, "upload", send)
    save_checkpoint(folder, 1)
    with caplog.at_level(logging.WARNING):
        uploader.request()
        wait_until(lambda: "is late: connection reset" in caplog.text)
        save_checkpoint(folder, 2)
        uploader.request()
        assert complete_checkpoints(url) == []
        broken.clear()
        finish(uploader)
    assert complete_checkpoints(url) == ["update-000000001", "update-000000002"]
    assert caplog.text.count("is late") == 1
    assert "has caught up" in caplog.text


def test_at_the_end_what_could_not_be_uploaded_is_named(monkeypatch):
    url = new_url()
    folder = make_run(url)
    uploader = Uploader(folder)
    save_checkpoint(folder, 1)

    def fail(self, path, name):
        raise ConnectionError("connection reset")

    monkeypatch.setattr(Remote, "upload", fail)
    with pytest.raises(UploadError) as raised:
        finish(uploader, timeout=0.3)
    text = str(raised.value)
    assert f"update-000000001 was not uploaded to {url} (connection reset)" in text
    assert f"All of the run is in {folder}." in text
    assert f"--resume {url} on this machine uploads what is missing" in text


def test_a_wrong_credential_is_not_waited_for_at_the_end(monkeypatch):
    uploader = Uploader(make_run(new_url()))

    def fail(self, path, name):
        raise PermissionError("the token has expired")

    monkeypatch.setattr(Remote, "upload", fail)
    began = time.monotonic()
    with pytest.raises(UploadError, match="the token has expired"):
        finish(uploader, timeout=60.0)
    assert time.monotonic() - began < 10


def test_a_failed_upload_is_completed_by_a_later_run(monkeypatch):
    url = new_url()
    folder = make_run(url)
    uploader = Uploader(folder)
    save_checkpoint(folder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Remote, "upload", lambda *_: (_ for _ in ()).throw(OSError("reset")))
        with pytest.raises(UploadError):
            finish(uploader, timeout=0.1)
    finish(Uploader(folder))
    assert complete_checkpoints(url) == ["update-000000001"]


def test_half_a_checkpoint_of_a_killed_run_is_replaced_or_deleted():
    url = new_url()
    folder = make_run(url)
    remote = Remote(url)
    remote.write("checkpoints/update-000000001/state/old", b"half")
    remote.write("checkpoints/update-000000002/state/old", b"half")
    save_checkpoint(folder, 1)
    finish(Uploader(folder))
    names = [name for name in stored(url) if name.endswith("old")]
    assert names == []
    assert complete_checkpoints(url) == ["update-000000001"]


def test_the_summary_of_an_earlier_part_is_deleted_with_the_local_one():
    url = new_url()
    folder = make_run(url)
    (folder / "summary.json").write_text("{}")
    finish(Uploader(folder))
    (folder / "summary.json").unlink()
    Remote(url).write("notes.txt", b"of the user")
    finish(Uploader(folder))
    assert "summary.json" not in stored(url)
    assert "notes.txt" in stored(url)


def test_a_run_in_a_subfolder_uploads_its_own_files():
    url = new_url()
    folder = make_run(url)
    make_run(f"{url}/repeat-0")
    finish(Uploader(folder))
    assert not any(name.startswith("repeat-0") for name in stored(url))
    finish(Uploader(folder / "repeat-0"))
    assert "repeat-0/config.yml" in stored(url)
    finish(Uploader(folder))
    assert "repeat-0/config.yml" in stored(url)


def test_a_run_that_was_continued_elsewhere_is_left_alone(on_another_machine, caplog):
    url = new_url()
    here = make_run(url)
    first = Uploader(here)
    save_checkpoint(here, 1)
    first.request()
    wait_until(lambda: first.is_done)
    on_another_machine()
    there = make_run(url)
    save_checkpoint(there, 2)
    finish(Uploader(there))
    save_checkpoint(here, 3)
    on_another_machine("cache")
    with pytest.raises(UploadError, match="Another process has continued the run"):
        finish(first)
    assert complete_checkpoints(url) == ["update-000000002"]


def test_a_late_upload_says_that_another_process_has_continued_the_run(monkeypatch, caplog):
    url = new_url()
    uploader = Uploader(make_run(url))
    real = Remote.read

    def read(self, name):
        raise ConnectionError("connection reset")

    monkeypatch.setattr(Remote, "read", read)
    uploader.request()
    wait_until(lambda: "is late: connection reset" in caplog.text)
    Remote(url).write(".writer", b"another")
    monkeypatch.setattr(Remote, "read", real)
    wait_until(lambda: "Nothing more is uploaded" in caplog.text)


def test_a_run_that_was_deleted_in_storage_is_uploaded_again():
    url = new_url()
    folder = make_run(url)
    uploader = Uploader(folder)
    save_checkpoint(folder, 1)
    uploader.request()
    wait_until(lambda: uploader.is_done)
    for name in stored(url):
        Remote(url).delete(name)
    finish(uploader)
    assert complete_checkpoints(url) == ["update-000000001"]
    assert "config.yml" in stored(url)


def test_a_discarded_run_leaves_nothing_in_storage():
    url = new_url()
    uploader = Uploader(make_run(url))
    uploader.discard()
    assert stored(url) == {}


def test_a_storage_that_cannot_be_written_is_an_error_at_once(monkeypatch):
    def fail(self, name, data):
        raise PermissionError("access denied")

    monkeypatch.setattr(Remote, "write", fail)
    with pytest.raises(StorageError, match=r"cannot be written: access denied\. Check the"):
        Uploader(make_run(new_url()))


def test_a_package_that_is_missing_is_named(monkeypatch):
    known = importlib.import_module("fsspec.registry")._registry  # imported already
    monkeypatch.delitem(known, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(StorageError, match="Install s3fs, or millrace with its extra s3"):
        Remote("s3://bucket/run")
    with pytest.raises(StorageError, match="nonsense"):
        Remote("nonsense://bucket/run")


def test_what_killed_processes_were_sending_is_deleted():
    folder = make_run(new_url())
    left = working_copies() / "uploading-1-2.partial"
    left.mkdir()
    os.link(folder / "config.yml", left / "0")
    uploader = upload.open_uploader(folder)
    assert uploader is not None and not left.exists()
    finish(uploader)


def test_another_process_does_not_delete_what_is_about_to_be_sent(monkeypatch):
    def lock(path, real=upload.locked):
        upload.clear_staging()  # another process starts
        return real(path)

    monkeypatch.setattr(upload, "locked", lock)
    url = new_url()
    folder = make_run(url)
    uploader = Uploader(folder)
    save_checkpoint(folder, 1)
    finish(uploader)
    assert complete_checkpoints(url) == ["update-000000001"]
    assert not list(working_copies().glob("uploading-*"))


@pytest.mark.parametrize("lost", ["state/a", "metrics.jsonl"])
def test_what_was_lost_while_it_was_sent_is_sent_again(monkeypatch, lost):
    url = new_url()
    folder = make_run(url)
    uploader = Uploader(folder)
    save_checkpoint(folder, 1)
    losses = [lost]

    def version(path, real=upload._Version.of):
        if losses and path.name == "0":
            shutil.rmtree(path.parent)
            losses.clear()
        return real(path)

    def copy(source, target):
        if losses and source.name == losses[0]:
            losses.clear()
            raise FileNotFoundError(target)
        return real_copy(source, target)

    real_copy = shutil.copyfile
    monkeypatch.setattr(upload.shutil, "copyfile", copy)
    monkeypatch.setattr(upload._Version, "of", version)
    uploader.request()
    wait_until(lambda: uploader.is_done)
    assert not losses
    assert complete_checkpoints(url) == ["update-000000001"]
    assert "metrics.jsonl" in stored(url)
    finish(uploader)


def test_a_file_written_next_to_a_run_is_published(tmp_path):
    url = new_url()
    folder = make_run(url)
    (folder / "export").mkdir()
    (folder / "export" / "model.bin").write_bytes(b"weights")
    assert publish(folder / "export" / "model.bin") == f"{url}/export/model.bin"
    assert stored(url)["export/model.bin"] == b"weights"
    assert publish(tmp_path / "model.bin") == str(tmp_path / "model.bin")


def test_manifests_are_those_of_this_machine(on_another_machine):
    url = new_url()
    folder = make_run(url)
    save_checkpoint(folder, 1)
    finish(Uploader(folder))
    on_another_machine()
    copy = to_local(url)
    assert not copy.exists()
    found = json.loads(stored(url)["checkpoints/update-000000001/manifest.json"])
    assert found["update"] == 1
