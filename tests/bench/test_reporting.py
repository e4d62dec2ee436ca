"""What is said of an entry beside PyTorch's figures."""

import csv

import pytest
from bench_entries import measured
from millrace.bench.noise import is_uncertain

from millrace.bench.reporting import as_csv, as_markdown
from millrace.bench.session import against_torch, compared


def peer(*values):
    return {"samples_per_second": list(values), "median": sorted(values)[len(values) // 2]}


def entry(*speeds, peers, **others):
    ours = measured(*speeds)
    return ours | compared(ours, peers) | others


def test_ours_is_compared_with_the_faster_of_pytorch_s_two():
    for order in (("eager", "compiled"), ("compiled", "eager")):
        peers = dict(zip(order, (peer(50.0), peer(80.0)), strict=True))
        assert entry(100, 100, 100, peers=peers)["ratio"] == pytest.approx(1.25)


def test_ours_is_compared_with_the_shorter_of_pytorch_s_latencies():
    peers = {
        name: peer(1.0) | {"latency_ms": {"p50": p50}}
        for name, p50 in (("eager", 3.0), ("compiled", 2.0))
    }
    ours = {"samples_per_second": {"lowest": 1, "median": 1, "highest": 1}}
    found = compared(ours | {"latency_ms": {"p50": 4.0}}, peers)
    assert (found["torch_latency_p50_ms"], found["latency_ratio"]) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("peers", "uncertain"),
    [
        ({"eager": peer(89.0, 90.0, 91.0)}, False),
        ({"eager": peer(80.0, 90.0, 100.0)}, True),
        # Of the slower one, it does not matter how far the values are apart.
        ({"eager": peer(10.0, 80.0, 85.0), "compiled": peer(90.0, 90.0, 90.0)}, False),
    ],
)
def test_a_ratio_within_the_noise_is_marked(peers, uncertain):
    found = entry(99, 100, 101, peers=peers)
    assert is_uncertain(found) == found["ratio_uncertain"] == uncertain
    text = as_markdown({"facts": {}, "entries": [found]})
    assert ("| ~1.11 " in text) == ("~: the ratio is no further" in text) == uncertain
    (row,) = csv.DictReader(as_csv([found]).splitlines())
    assert row["ratio_uncertain"] == str(uncertain)
    assert ("~1.11 of PyTorch" in against_torch(found)) == uncertain


def test_our_own_noise_makes_a_ratio_uncertain_too():
    assert is_uncertain(entry(80, 100, 120, peers={"eager": peer(90.0)}))


def test_the_spread_of_pytorch_s_values_stands_beside_their_median():
    found = entry(100, 100, 100, peers={"compiled": peer(38.0, 40.0, 46.0)})
    text = as_markdown({"facts": {}, "entries": [found]})
    assert "| torch compiled | compiled spread |" in text and "| 20.0 % " in text
    (row,) = csv.DictReader(as_csv([found]).splitlines())
    lowest, highest = row["torch_compiled_lowest"], row["torch_compiled_highest"]
    assert (lowest, row["torch_compiled"], highest) == ("38.0", "40.0", "46.0")
    assert float(row["ratio_noise"]) == pytest.approx(0.2)


def test_a_variant_that_failed_says_why_and_the_other_is_compared_with():
    peers = {"eager": peer(50.0), "compiled": {"error": "RuntimeError: no compiler"}}
    found = entry(100, 100, 100, peers=peers)
    assert found["ratio"] == 2.0
    text = as_markdown({"facts": {}, "entries": [found]})
    assert "- x, PyTorch compiled: RuntimeError: no compiler." in text
    assert against_torch(found) == (
        "2.00 of PyTorch, eager 50.0, compiled failed: RuntimeError: no compiler"
    )


def test_without_any_of_pytorch_s_figures_there_is_no_ratio_but_a_reason():
    found = entry(1, 1, 1, peers={"eager": {"error": "a"}, "compiled": {"error": "b"}})
    assert "ratio" not in found
    assert against_torch(found) == "not compared with PyTorch: eager: a; compiled: b"
    (row,) = csv.DictReader(as_csv([found]).splitlines())
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
def test_percentiles_are_shown_where_there_were_enough_calls(calls, shown):
    latency = {"mean": 1.0, "p50": 1.0, "p99": 2.0, "p99.9": 3.0}
    known = {} if calls is None else {"latency_calls": calls}
    found = entry(1, 1, 1, peers={"eager": peer(1.0)}, latency_ms=latency, **known)
    text = as_markdown({"facts": {}, "entries": [found]})
    (header,) = (line for line in text.splitlines() if line.startswith("| entry"))
    names = [name.strip() for name in header.split("|")]
    assert [n for n in ("latency p50", "p99", "p99.9") if n in names] == shown
