from pathlib import Path

import pytest

from millrace.storage.address import (
    StorageError,
    display,
    find_url,
    is_url,
    to_local,
    working_copies,
)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/runs/first",
        "gs://bucket/run 1/ü",
        "memory://run",
        "file:///tmp/run",
        "s3://bucket",
    ],
)
def test_an_address_and_its_working_copy_name_each_other(url):
    folder = to_local(url)
    assert folder.is_relative_to(working_copies())
    assert find_url(folder) == display(folder) == url
    assert find_url(folder / "checkpoints") == f"{url}/checkpoints"
    assert to_local(f"{url}/") == folder


def test_an_address_that_became_a_path_is_still_one():
    for url in ("s3://bucket/run", "file:///tmp/run"):
        assert to_local(Path(url)) == to_local(url)


@pytest.mark.parametrize("path", ["runs/first", "/tmp/s3", "C:/runs", "a:b", "12:30"])
def test_other_paths_stay_as_they_are(path):
    assert not is_url(path)
    assert to_local(path) == Path(path)
    assert find_url(Path(path)) is None
    assert display(Path(path)) == path


@pytest.mark.parametrize(
    "url", ["s3://", "s3://bucket//run", "s3://bucket/../run", "s3://./run", "s3://a/\0"]
)
def test_an_address_that_could_leave_the_cache_is_refused(url):
    with pytest.raises(StorageError, match="is not the address of a run"):
        to_local(url)
