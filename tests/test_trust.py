"""Caches that other users could change are not used."""

import os
import subprocess
import sys

import numpy as np
import pytest

from millrace.config import ConfigurationError
from millrace.data import catalog, weights
from millrace.data.fetch import fetch
from millrace.data.ratings import reading
from millrace.durable import write_atomically
from millrace.run import run as running
from millrace.trust import find_writers


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "cache"
    made.mkdir(mode=0o755)
    return made


def test_a_folder_of_ones_own_is_trusted(folder):
    assert find_writers(folder) is None
    assert find_writers(folder / "not" / "there" / "yet") is None


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_folder_that_everybody_may_write_to_is_not(folder, mode):
    folder.chmod(mode)
    expected = f"every user may write to {folder}"
    assert find_writers(folder) == expected
    assert find_writers(folder, trust_owner=True) == expected
    assert find_writers(folder / "inside") == expected
    folder.chmod(mode | 0o1000)  # nobody can rename what is in it, but add to it
    assert find_writers(folder) == expected
    (folder / "inside").mkdir(mode=0o755)
    assert find_writers(folder / "inside") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_folder_of_another_user_or_group_is_trusted_only_if_asked_for(folder):
    os.chown(folder, 54321, 0)
    assert find_writers(folder) == f"{folder} belongs to user 54321"
    assert find_writers(folder, trust_owner=True) is None
    os.chown(folder, 0, 54321)
    folder.chmod(0o775)
    assert find_writers(folder) == f"the group 54321 may write to {folder}"
    assert find_writers(folder, trust_owner=True) is None


def test_a_link_is_judged_by_what_it_points_to(folder, tmp_path):
    folder.chmod(0o777)
    (tmp_path / "link").symlink_to(folder)
    assert find_writers(tmp_path / "link") is not None


def test_a_link_that_others_could_replace_is_not_trusted(folder, tmp_path):
    (tmp_path / "own").mkdir(mode=0o755)
    link = folder / "link"
    link.symlink_to(tmp_path / "own")
    assert find_writers(link / "inside") is None
    folder.chmod(0o777)
    assert find_writers(link / "inside") == f"every user may write to {folder}"
    folder.chmod(0o1777)  # nobody can replace the links of others
    assert find_writers(link / "inside") is None
    if os.geteuid() == 0:
        os.lchown(link, 54321, 54321)
        assert find_writers(link / "inside") == f"{link} belongs to user 54321"


def test_downloads_are_not_read_or_written_where_everybody_can(folder, monkeypatch):
    monkeypatch.setenv("MILLRACE_DATA", str(folder))
    folder.chmod(0o777)
    with pytest.raises(ConfigurationError, match="because every user may write to"):
        weights.find_weights("timm/resnet18.a1_in1k")
    with pytest.raises(ConfigurationError, match="another folder with MILLRACE_DATA"):
        fetch(catalog.CATALOG["mnist"], folder / "mnist", progress=lambda *_: None)
    assert catalog.find_downloaded("mnist") == folder / "mnist"  # there is nothing to trust
    (folder / "mnist").mkdir(mode=0o777)
    with pytest.raises(ConfigurationError, match="every user may write to"):
        catalog.find_downloaded("mnist")


def test_ratings_are_parsed_instead(folder, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("MILLRACE_DATA", str(folder))
    folder.chmod(0o777)
    file = tmp_path / "ratings.txt"
    file.write_text("1 2 3.5\n2 2 4\n".replace(" ", "\t"))
    assert np.asarray(reading.load_ratings(str(file)).values).tolist() == [3.5, 4]
    assert "Ratings are not cached, because every user" in caplog.text
    assert not list(folder.iterdir())


class Console:
    """Collects warnings."""

    def __init__(self):
        self.lines = []

    def warning(self, line):
        self.lines.append(line)


def test_compiled_programs_are_not_shared_with_everybody(folder, monkeypatch):
    console = Console()
    lines = console.lines
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    expected = folder / "millrace" / "compiled"
    assert running._find_compile_cache(console) == expected and not lines
    folder.chmod(0o777)
    assert running._find_compile_cache(console) is None
    assert lines == [
        f"Compiled programs are not kept in {expected}, because every user may write to "
        f"{folder}."
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_compiled_programs_of_another_user_are_not_used(folder, monkeypatch):
    console = Console()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    (folder / "millrace" / "compiled").mkdir(parents=True)
    os.chown(folder / "millrace" / "compiled", 54321, 54321)
    assert running._find_compile_cache(console) is None
    assert console.lines[0].endswith("compiled belongs to user 54321.")


USES_A_CACHE = """
import os, sys
import jax
from millrace.run import run

class Console:
    def warning(self, line):
        print(line)

jax.jit(lambda x: x * 2.5).lower(1.0).compile()  # JAX has opened it
run._find_compile_cache(Console())
before = set(os.listdir(sys.argv[1]))
jax.jit(lambda x: x * 3.5).lower(1.0).compile()
print("used" if set(os.listdir(sys.argv[1])) != before else "not used")
"""


@pytest.mark.parametrize(("mode", "is_used"), [(0o700, True), (0o777, False)])
def test_a_chosen_folder_of_compiled_programs_is_used_unless_others_may_write_to_it(
    folder, mode, is_used
):
    folder.chmod(mode)
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    output = subprocess.run(
        [sys.executable, "-c", USES_A_CACHE, str(folder)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    refusal = f"are not used, because every user may write to {folder}"
    assert (refusal in output) == (not is_used)
    assert output.splitlines()[-1] == ("used" if is_used else "not used")


def test_datasets_of_tensorflow_are_not_read_where_everybody_can_write(folder, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))
    assert catalog.find_tfds_folder() == folder
    folder.chmod(0o777)
    with pytest.raises(ConfigurationError, match="another folder with TFDS_DATA_DIR"):
        catalog.find_tfds_folder()
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder / "missing"))
    assert catalog.find_tfds_folder() == folder / "missing"  # there is nothing to trust


def test_private_files_can_be_read_by_their_owner_only(tmp_path):
    before = os.umask(0o000)
    try:
        write_atomically(tmp_path / "public", "")
        write_atomically(tmp_path / "private", "", private=True)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"public": 0o666, "private": 0o600}
