"""Regressions with their noise."""

import copy
import json

import pytest
from bench_entries import measured
from millrace.bench.comparing import compare, read_results, verdict
from millrace.bench.noise import noise_of

from millrace.bench import command
from millrace.cli import main
from millrace.config import ConfigurationError


def results(*speeds, device="cpu", **others):
    low, middle, high = speeds
    speed = {"lowest": low, "median": middle, "highest": high}
    entry = {"name": "x", "status": "measured", "samples_per_second": speed}
    entry |= {"command": "vcd train"}
    facts = {"date": "2026-01-01", "commit": "abc", "device": device}
    return {"facts": facts, "entries": [entry | others]}


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ((80, 81, 82), "SLOWER"),
        ((118, 120, 122), "FASTER"),
        ((95, 97, 99), "the same"),
        ((60, 90, 120), "the same"),  # slower by 10 %, but how can one tell
    ],
)
def test_a_change_counts_only_beyond_the_noise(new, said):
    table = compare(results(99, 100, 101), results(*new))
    assert said in table and "| x " in table


def test_noise_is_how_far_the_values_of_both_are_apart():
    old, new = (
        results(*speeds)["entries"][0]["samples_per_second"]
        for speeds in ((99, 100, 101), (190, 200, 200))
    )
    assert noise_of(old, new) == pytest.approx(0.02 + 0.05)
    still = {"lowest": 5, "median": 5, "highest": 5}
    assert verdict(0.005, noise_of(still)) == "the same"


def test_what_was_not_measured_both_times_is_left_out():
    skipped = results(1, 1, 1, status="skipped")
    assert compare(skipped, results(1, 1, 1)) == "Nothing was measured both times."


def test_another_device_is_named():
    said = compare(results(1, 1, 1, device="NVIDIA H200"), results(1, 1, 1))
    assert "another device: NVIDIA H200; this is cpu" in said


def test_a_file_that_is_something_else_is_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"ratio": 1}))
    (tmp_path / "b.json").write_text("no")
    with pytest.raises(ConfigurationError, match=r"not a results\.json"):
        read_results(tmp_path / "a.json")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_results(tmp_path / "b.json")


def test_entries_of_other_commands_are_not_called_slower_or_faster():
    table = compare(results(9, 9, 9), results(5, 5, 5, command="vcd train -b 512"))
    assert "another command" in table and "SLOWER" not in table


WHOLE = {
    "facts": {"date": "2026-01-01", "device": "cpu", "commit": "abc", "command": "x"},
    "limits": {},
    "entries": [
        measured(1.0, 2.0, 3.0),
        {"name": "y", "command": "vcd train", "status": "skipped", "reason": "no data"},
    ],
}


@pytest.mark.parametrize("option", ["--compare", "--page"])
@pytest.mark.parametrize(
    ("place", "missing", "said"),
    [
        ((), "facts", "it has no facts"),
        (("facts",), "device", "facts has no device"),
        (("entries", 0), "name", "entry 1 has no name"),
        (("entries", 0), "samples_per_second", "entry x has no samples_per_second"),
        (("entries", 0), "peak_bytes", "entry x has no peak_bytes"),
        (("entries", 0, "samples_per_second"), "lowest", "of entry x has no lowest"),
        (("entries", 1), "reason", "entry y has no reason"),
    ],
)
def test_an_incomplete_file_is_refused_before_anything_is_measured(
    option, place, missing, said, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(command, "_prepare_process", lambda _: pytest.fail("too late"))
    path, whole = tmp_path / "results.json", copy.deepcopy(WHOLE)
    path.write_text(json.dumps(whole))
    assert read_results(path) == WHOLE
    part = whole
    for step in place:
        part = part[step]
    del part[missing]
    path.write_text(json.dumps(whole))
    with pytest.raises(SystemExit) as left:
        main(["bench", "vcd_test", option, str(path)])
    assert left.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_speed_that_is_no_number_is_refused(tmp_path):
    whole = copy.deepcopy(WHOLE)
    whole["entries"][0]["samples_per_second"]["median"] = None
    (tmp_path / "a.json").write_text(json.dumps(whole))
    with pytest.raises(ConfigurationError, match="of entry x has no number"):
        read_results(tmp_path / "a.json")
