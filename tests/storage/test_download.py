import json
import os
import threading

import pytest
from stored_runs import (
    checksum,
    complete_checkpoints,
    make_run,
    new_url,
    save_checkpoint,
    stored,
)

from millrace.durable import locked
from millrace.storage import download
from millrace.storage.address import StorageError, to_local, working_copies
from millrace.storage.download import download_arrays, refresh
from millrace.storage.remote import Remote
from millrace.storage.upload import Uploader

NEWEST = "checkpoints/update-000000002"


@pytest.fixture(autouse=True)
def no_delays(monkeypatch):
    monkeypatch.setattr("millrace.storage.remote._FIRST_DELAY_SECONDS", 0.01)


@pytest.fixture
def url(on_another_machine):
    """A run of two checkpoints, written by another machine."""
    on_another_machine("first")
    url = new_url()
    folder = make_run(url)
    save_checkpoint(folder, 1)
    save_checkpoint(folder, 2)
    Uploader(folder).finish(20.0, print)
    on_another_machine("cache")
    return url


def get_files(folder):
    return json.loads((folder / "manifest.json").read_text())["files"]


def names_in(folder):
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    return names - {".remote.json"}


def test_everything_but_arrays_is_downloaded(url):
    folder = to_local(url)
    refresh(folder)
    assert names_in(folder) == {
        "config.yml",
        "metrics.jsonl",
        "checkpoints/update-000000001/manifest.json",
        f"{NEWEST}/manifest.json",
    }
    assert working_copies().stat().st_mode & 0o777 == 0o700


def test_arrays_are_downloaded_when_they_are_needed_and_verified(url):
    folder = to_local(url)
    refresh(folder)
    download_arrays(folder / NEWEST, get_files(folder / NEWEST), checksum)
    for name, (size, digest) in get_files(folder / NEWEST).items():
        path = folder / NEWEST / name
        assert (path.stat().st_size, checksum(path)) == (size, digest)
    assert not (folder / "checkpoints/update-000000001/state/a").exists()


def test_arrays_that_differ_from_the_manifest_are_not_kept(url):
    Remote(url).write(f"{NEWEST}/state/a", b"damaged")
    folder = to_local(url)
    refresh(folder)
    download_arrays(folder / NEWEST, get_files(folder / NEWEST), checksum)
    assert not (folder / NEWEST / "state/a").exists()  # the checkpoint is damaged
    assert (folder / NEWEST / "state/b").exists()


def test_arrays_that_are_damaged_on_this_machine_are_downloaded_again(url):
    folder = to_local(url)
    refresh(folder)
    files = get_files(folder / NEWEST)
    download_arrays(folder / NEWEST, files, checksum)
    for name, content in (("state/a", b""), ("state/b", b"x" * files["state/b"][0])):
        (folder / NEWEST / name).write_bytes(content)
    download_arrays(folder / NEWEST, files, checksum)
    for name, (size, digest) in files.items():
        path = folder / NEWEST / name
        assert (path.stat().st_size, checksum(path)) == (size, digest)


@pytest.mark.parametrize("inside", ["checkpoints", NEWEST])
def test_a_path_inside_a_run_refreshes_the_run(url, inside):
    refresh(to_local(f"{url}/{inside}"))
    assert (to_local(url) / "config.yml").is_file()


def test_a_folder_of_runs_is_downloaded_with_all_of_them(url):
    parent, _, name = url.rpartition("/")
    refresh(to_local(parent))
    assert (to_local(parent) / name / "config.yml").is_file()


def test_a_run_of_this_machine_stays_as_it_is_in_a_folder_of_runs(url, monkeypatch):
    parent = f"{url}-and-others"
    own, other = f"{parent}/own", f"{parent}/read/other"
    folder = make_run(own)
    save_checkpoint(folder, 1)
    Uploader(folder).finish(20.0, print)
    (folder / "metrics.jsonl").write_text("newer\n")  # training continues
    save_checkpoint(folder, 2)
    Remote(other).write("config.yml", b"command: test\n")
    refresh(to_local(parent))
    assert (folder / "metrics.jsonl").read_text() == "newer\n"
    assert (folder / NEWEST / "state/a").exists()
    monkeypatch.setattr(download, "_LOCK_SECONDS", 0.2)
    begun = make_run(f"{parent}/begun")  # and is about to be uploaded
    with locked(begun):
        refresh(to_local(parent))
    assert (to_local(other) / "config.yml").exists()
    for name in stored(parent):  # somebody empties the storage
        Remote(parent).delete(name)
    refresh(to_local(parent))
    assert (folder / NEWEST / "state/a").exists()
    assert not to_local(other).exists()


def test_changes_are_downloaded_and_deletions_followed(url, monkeypatch):
    folder, remote = to_local(url), Remote(url)
    refresh(folder)
    (folder / "mine.txt").write_text("of the user")
    remote.write("metrics.jsonl", b"{}\n")
    remote.write("report.html", b"page")
    for name in stored(url):
        if name.startswith("checkpoints/update-000000001/"):
            remote.delete(name)
    fetched = []
    real = Remote.download
    monkeypatch.setattr(
        Remote, "download", lambda self, n, path: (fetched.append(n), real(self, n, path))
    )
    refresh(folder)
    assert fetched == ["metrics.jsonl", "report.html"]
    assert (folder / "metrics.jsonl").read_bytes() == b"{}\n"
    assert not (folder / "checkpoints/update-000000001").exists()
    assert (folder / "mine.txt").exists()


def test_arrays_of_an_earlier_checkpoint_of_the_same_name_are_not_used(url):
    folder = to_local(url)
    refresh(folder)
    download_arrays(folder / NEWEST, get_files(folder / NEWEST), checksum)
    for path in [save_checkpoint(folder / "other", 2, "different")]:
        for name in ("state/a", "state/b", "manifest.json"):
            Remote(url).write(f"{NEWEST}/{name}", (path / name).read_bytes())
    refresh(folder)
    assert not (folder / NEWEST / "state/a").exists()
    download_arrays(folder / NEWEST, get_files(folder / NEWEST), checksum)
    assert (folder / NEWEST / "state/a").read_text().endswith("different")


def test_half_a_checkpoint_is_not_seen(url):
    Remote(url).delete(f"{NEWEST}/manifest.json")
    folder = to_local(url)
    refresh(folder)
    assert not (folder / NEWEST).exists()
    assert (folder / "checkpoints/update-000000001").exists()


def test_what_this_machine_wrote_last_is_not_downloaded(on_another_machine):
    url = new_url()
    folder = make_run(url)
    save_checkpoint(folder, 1)
    Uploader(folder).finish(20.0, print)
    save_checkpoint(folder, 2)  # not uploaded: its upload failed
    refresh(folder)
    assert (folder / NEWEST / "state/a").exists()


def test_a_run_that_was_continued_elsewhere_replaces_the_working_copy(
    on_another_machine, caplog
):
    url = new_url()
    folder = make_run(url)
    save_checkpoint(folder, 1)
    Uploader(folder).finish(20.0, print)
    save_checkpoint(folder, 3, "only here")
    on_another_machine()
    there = to_local(url)
    refresh(there)
    save_checkpoint(there, 2)
    Uploader(there).finish(20.0, print)
    on_another_machine("cache")
    refresh(folder)
    assert complete_checkpoints(url) == ["update-000000001", "update-000000002"]
    assert (folder / NEWEST / "manifest.json").exists()
    assert not (folder / "checkpoints/update-000000003").exists()
    (kept,) = folder.parent.glob("*.kept")
    assert (kept / "checkpoints/update-000000003/state/a").read_text().endswith("here")
    assert f"is kept in {kept}" in caplog.text


def test_an_address_without_a_run_leaves_no_folder():
    folder = to_local(new_url())
    refresh(folder)
    assert not folder.exists()


def test_a_listing_cannot_write_outside_the_working_copy(url, monkeypatch):
    evil = ["../evil", "a/../../evil", "/evil", "a//b", "./evil"]

    def find(self, root, detail):
        info = {"size": 1, "type": "file", "mtime": 1.0}
        return {f"{root}/{name}": info for name in [*evil, "good"]}

    remote = Remote(url)
    monkeypatch.setattr(type(remote._files), "find", find)
    assert list(remote.list()) == ["good"]


def test_a_temporary_error_is_tried_again(url, monkeypatch):
    real, failures = Remote.list, [OSError("slow down"), ConnectionError("reset")]

    def list_files(self, folder=""):
        if failures:
            raise failures.pop()
        return real(self, folder)

    monkeypatch.setattr(Remote, "list", list_files)
    refresh(to_local(url))
    assert not failures and (to_local(url) / "config.yml").exists()


def test_a_lasting_error_says_what_to_check(url, monkeypatch):
    def fail(self, folder=""):
        raise PermissionError("access denied")

    monkeypatch.setattr(Remote, "list", fail)
    with pytest.raises(StorageError) as raised:
        refresh(to_local(url))
    expected = (
        f"{url} cannot be read: access denied. Check the address, and your credentials"
    )
    assert str(raised.value) == f"{expected} for it."


def test_a_cache_that_others_may_write_to_is_refused(url, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(StorageError, match="because every user may write to"):
        refresh(to_local(url))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_working_copy_of_another_user_is_refused(url):
    working_copies().mkdir(parents=True)
    os.chown(working_copies(), 54321, 54321)
    with pytest.raises(StorageError, match="belongs to user 54321"):
        refresh(to_local(url))


def test_processes_wait_for_each_other(url, monkeypatch):
    folder = to_local(url)
    folder.mkdir(parents=True)
    monkeypatch.setattr(download, "_LOCK_SECONDS", 0.2)
    with locked(folder), pytest.raises(StorageError, match="Another process is using"):
        refresh(folder)
    monkeypatch.setattr(download, "_LOCK_SECONDS", 20.0)
    threads = [threading.Thread(target=refresh, args=(folder,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (folder / "config.yml").exists()
