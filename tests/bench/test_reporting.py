"""Results as files and tables, ratios to PyTorch, and comparison with earlier results."""

import copy
import csv
import json

import pytest
from bench_entries import measured

from millrace.bench import command
from millrace.bench.measuring import is_uncertain, relative_noise
from millrace.bench.reporting import (
    compare_results,
    format_csv,
    format_markdown,
    judge_change,
    read_results,
)
from millrace.bench.session import compare_with_torch, format_torch_ratio
from millrace.cli import main
from millrace.config import ConfigurationError


def peer(*values):
    return {"samples_per_second": list(values), "median": sorted(values)[len(values) // 2]}


def entry(*speeds, peers, **others):
    ours = measured(*speeds)
    return ours | compare_with_torch(ours, peers) | others


def test_the_ratio_is_to_the_faster_pytorch_variant():
    for order in (("eager", "compiled"), ("compiled", "eager")):
        peers = dict(zip(order, (peer(50.0), peer(80.0)), strict=True))
        assert entry(100, 100, 100, peers=peers)["ratio"] == pytest.approx(1.25)


def test_the_latency_ratio_is_to_the_shorter_pytorch_latency():
    peers = {
        name: peer(1.0) | {"latency_ms": {"p50": p50}}
        for name, p50 in (("eager", 3.0), ("compiled", 2.0))
    }
    ours = {"samples_per_second": {"lowest": 1, "median": 1, "highest": 1}}
    figures = compare_with_torch(ours | {"latency_ms": {"p50": 4.0}}, peers)
    assert (figures["torch_latency_p50_ms"], figures["latency_ratio"]) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("peers", "uncertain"),
    [
        ({"eager": peer(89.0, 90.0, 91.0)}, False),
        ({"eager": peer(80.0, 90.0, 100.0)}, True),
        # The spread of the slower variant does not matter.
        ({"eager": peer(10.0, 80.0, 85.0), "compiled": peer(90.0, 90.0, 90.0)}, False),
    ],
)
def test_a_ratio_within_the_noise_is_marked(peers, uncertain):
    figures = entry(99, 100, 101, peers=peers)
    assert is_uncertain(figures) == figures["ratio_uncertain"] == uncertain
    text = format_markdown({"facts": {}, "entries": [figures]})
    assert ("| ~1.11 " in text) == ("~: the distance of the ratio" in text) == uncertain
    (row,) = csv.DictReader(format_csv([figures]).splitlines())
    assert row["ratio_uncertain"] == str(uncertain)
    assert ("~1.11 times PyTorch" in format_torch_ratio(figures)) == uncertain


def test_our_own_noise_makes_a_ratio_uncertain():
    assert is_uncertain(entry(80, 100, 120, peers={"eager": peer(90.0)}))


def test_pytorch_speeds_have_a_spread():
    figures = entry(100, 100, 100, peers={"compiled": peer(38.0, 40.0, 46.0)})
    text = format_markdown({"facts": {}, "entries": [figures]})
    assert "| torch compiled | compiled spread |" in text and "| 20.0 % " in text
    (row,) = csv.DictReader(format_csv([figures]).splitlines())
    lowest, highest = row["torch_compiled_lowest"], row["torch_compiled_highest"]
    assert (lowest, row["torch_compiled"], highest) == ("38.0", "40.0", "46.0")
    assert float(row["ratio_noise"]) == pytest.approx(0.2)


def test_if_a_pytorch_variant_fails_the_reason_is_shown_and_the_other_compared():
    peers = {"eager": peer(50.0), "compiled": {"error": "RuntimeError: no compiler"}}
    figures = entry(100, 100, 100, peers=peers)
    assert figures["ratio"] == 2.0
    text = format_markdown({"facts": {}, "entries": [figures]})
    assert "- x, PyTorch compiled: RuntimeError: no compiler." in text
    assert format_torch_ratio(figures) == (
        "2.00 times PyTorch: eager 50.0, compiled failed: RuntimeError: no compiler"
    )


def test_without_pytorch_figures_there_is_a_reason_instead_of_a_ratio():
    figures = entry(1, 1, 1, peers={"eager": {"error": "a"}, "compiled": {"error": "b"}})
    assert "ratio" not in figures
    assert format_torch_ratio(figures) == "not compared with PyTorch: eager: a; compiled: b"
    (row,) = csv.DictReader(format_csv([figures]).splitlines())
    assert (row["ratio"], row["no_ratio"]) == ("", "eager: a; compiled: b")


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        (None, ["latency p50"]),
        (99, ["latency p50"]),
        (300, ["latency p50", "p99"]),
        (1000, ["latency p50", "p99", "p99.9"]),
    ],
)
def test_percentiles_are_shown_if_there_were_enough_calls(calls, shown):
    latency = {"mean": 1.0, "p50": 1.0, "p99": 2.0, "p99.9": 3.0}
    known = {} if calls is None else {"latency_calls": calls}
    figures = entry(1, 1, 1, peers={"eager": peer(1.0)}, latency_ms=latency, **known)
    text = format_markdown({"facts": {}, "entries": [figures]})
    (header,) = (line for line in text.splitlines() if line.startswith("| entry"))
    names = [name.strip() for name in header.split("|")]
    assert [n for n in ("latency p50", "p99", "p99.9") if n in names] == shown


def results(*speeds, device="cpu", **others):
    low, middle, high = speeds
    speed = {"lowest": low, "median": middle, "highest": high}
    entry = {"name": "x", "status": "measured", "samples_per_second": speed}
    entry |= {"command": "vcd train"}
    facts = {"date": "2026-01-01", "commit": "abc", "device": device}
    return {"facts": facts, "entries": [entry | others]}


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        ((80, 81, 82), "SLOWER"),
        ((118, 120, 122), "FASTER"),
        ((95, 97, 99), "same"),
        ((60, 90, 120), "same"),  # 10 % slower, but within the noise
    ],
)
def test_a_change_counts_only_beyond_the_noise(new, verdict):
    table = compare_results(results(99, 100, 101), results(*new))
    assert verdict in table and "| x " in table


def test_noise_is_the_sum_of_both_spreads():
    old, new = (
        results(*speeds)["entries"][0]["samples_per_second"]
        for speeds in ((99, 100, 101), (190, 200, 200))
    )
    assert relative_noise(old, new) == pytest.approx(0.02 + 0.05)
    still = {"lowest": 5, "median": 5, "highest": 5}
    assert judge_change(0.005, relative_noise(still)) == "same"


def test_entries_not_measured_in_both_sessions_are_left_out():
    skipped = results(1, 1, 1, status="skipped")
    assert (
        compare_results(skipped, results(1, 1, 1))
        == "No entry was measured in both sessions."
    )


def test_different_devices_are_named():
    table = compare_results(results(1, 1, 1, device="NVIDIA H200"), results(1, 1, 1))
    assert "The devices differ: NVIDIA H200 before, cpu now." in table


def test_a_file_that_is_not_a_result_is_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"ratio": 1}))
    (tmp_path / "b.json").write_text("no")
    with pytest.raises(ConfigurationError, match=r"not a results\.json"):
        read_results(tmp_path / "a.json")
    with pytest.raises(ConfigurationError, match="Cannot read"):
        read_results(tmp_path / "b.json")


def test_entries_with_different_commands_get_no_verdict():
    table = compare_results(results(9, 9, 9), results(5, 5, 5, command="vcd train -b 512"))
    assert "different command" in table and "SLOWER" not in table


COMPLETE = {
    "facts": {"date": "2026-01-01", "device": "cpu", "commit": "abc", "command": "x"},
    "limits": {},
    "entries": [
        measured(1.0, 2.0, 3.0),
        {"name": "y", "command": "vcd train", "status": "skipped", "reason": "no data"},
    ],
}


@pytest.mark.parametrize("option", ["--compare", "--page"])
@pytest.mark.parametrize(
    ("place", "missing", "message"),
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
    option, place, missing, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(command, "_prepare_process", lambda _: pytest.fail("too late"))
    path, content = tmp_path / "results.json", copy.deepcopy(COMPLETE)
    path.write_text(json.dumps(content))
    assert read_results(path) == COMPLETE
    part = content
    for step in place:
        part = part[step]
    del part[missing]
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit) as left:
        main(["bench", "vcd_small", option, str(path)])
    assert left.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_speed_that_is_not_a_number_is_refused(tmp_path):
    content = copy.deepcopy(COMPLETE)
    content["entries"][0]["samples_per_second"]["median"] = None
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match="of entry x is not a number"):
        read_results(tmp_path / "a.json")
