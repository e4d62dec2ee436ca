"""The catalog of datasets is consistent, and its errors say how to get a dataset."""

import dataclasses
import urllib.request
from pathlib import Path

import pytest

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig
from millrace.config import build
from millrace.data import catalog
from millrace.data.catalog import CATALOG, data_folder


def test_the_entries_of_the_catalog_are_consistent():
    for name, known in CATALOG.items():
        assert known.name == name
        assert len(known.mean) == len(known.std) == known.image_shape[2]
        for file in known.files:
            assert len(file.md5) == 32 and file.num_bytes > 0
            assert file.sha256 is None or len(file.sha256) == 64
        with pytest.raises(dataclasses.FrozenInstanceError):
            known.name = "another"


def test_a_missing_dataset_error_names_the_folder_and_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path / "cache"))
    with pytest.raises(catalog.DatasetNotFound) as caught:
        data.load(build(CnnConfig, {"dataset": "cifar10", "dataset_path": tmp_path}))
    for part in (
        str(tmp_path),
        "cifar-10-binary.tar.gz",
        "`millrace data fetch cifar10`",
        str(Path(tmp_path, "cache", "cifar10")),
    ):
        assert part in str(caught.value)


def test_the_data_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    monkeypatch.delenv("MILLRACE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert data_folder() == Path("/some/cache/millrace")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_folder() == Path.home() / ".cache" / "millrace"


def test_the_urls_of_the_catalog_are_well_formed():
    for known in CATALOG.values():
        if known.url is not None:
            request = urllib.request.Request(known.url)
            assert request.type in ("http", "https") and known.url.endswith("/")


@pytest.mark.parametrize(
    ("name", "size", "md5"),
    [
        ("cifar10", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),
        ("cifar100", 168_513_733, "03b5dce01913d631647c71ecec9e9cb8"),
    ],
)
def test_the_archives_of_cifar_have_the_published_sizes_and_checksums(name, size, md5):
    (file,) = CATALOG[name].files
    assert (file.num_bytes, file.md5) == (size, md5)
