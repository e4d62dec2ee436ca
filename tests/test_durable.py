"""Files are replaced completely or not at all."""

import pytest

from millrace.durable import finite_json, replacing, write_atomically


def test_finite_json_keeps_finite_values():
    value = {"a": [1, 2.5, None, True, "nan"], "b": {"c": -0.0}}
    assert finite_json(value) == value


def test_a_file_is_replaced_completely_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "summary.json"
    write_atomically(path, "old")
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_write_that_fails_halfway_leaves_the_old_file(tmp_path):
    path = tmp_path / "summary.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "x" * 100_000 + "\ud800")  # not encodable
    assert path.read_text() == "old"


# Temporary files


def test_a_link_in_place_of_a_temporary_file_is_never_followed(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "known")
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    (tmp_path / ".summary.json.known.partial").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "summary.json", "new")
    assert victim.read_text() == "years of work"


def test_names_of_temporary_files_cannot_be_predicted(tmp_path):
    names = set()
    for _ in range(3):
        with replacing(tmp_path / "file"):
            names |= {path.name for path in tmp_path.glob(".file.*.partial")}
    assert len(names) == 3


def test_a_write_that_fails_leaves_no_temporary_file(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "summary.json", "\ud800")
    assert list(tmp_path.iterdir()) == []


def test_files_have_default_permissions(tmp_path):
    (tmp_path / "other").write_text("")
    write_atomically(tmp_path / "ours", "")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
