"""``millrace bench``, from the command to the files it writes."""

import csv
import dataclasses
import json
import re

import pytest

from millrace.bench.config import BenchConfig
from millrace.bench.session import Session, find_unmeasured
from millrace.bench.spec import load_spec
from millrace.cli import main
from millrace.program import compiling

SPEC = {
    "infer": {
        "command": "cnn validate --dataset digits --synthetic-data --num-batches 3",
        "batch_sizes": [2],
    },
    "train": {
        "command": "cnn train --dataset digits --batch-size 8 --updates-per-execution 1",
        "about": "the real digits",
    },
    "wide": {"command": "cnn train --dataset digits --num-replicas 9"},
    "absent": {"command": "cnn train --model resnet50 --dataset imagenet"},
    "elsewhere": {"command": "cnn train --dataset digits", "needs": "gpu"},
    "broken": {"command": "cnn train --dataset digits --pipeline-splits no_such_layer"},
}

# One entry needs a GPU, and one needs more devices than the test suite has.
pytestmark = pytest.mark.cpu("which entries run depends on the devices")


def bench(*arguments):
    with pytest.raises(SystemExit) as left:
        main(["bench", *map(str, arguments)])
    return left.value.code


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Run all entries once; return the status, the folder and the results."""
    folder = tmp_path_factory.mktemp("bench")
    path = folder / "spec.yml"
    path.write_text(json.dumps(SPEC))
    out = folder / "out"
    options = (
        "--seconds",
        0.1,
        "--max-seconds",
        1,
        "--repeat",
        3,
        "--commit",
        "abc",
        "--compile-threads",
        2,
    )
    status = bench("--spec", path, "--out", out, *options)
    return status, out, json.loads((out / "results.json").read_text())


def get_entry(results, name):
    return next(entry for entry in results["entries"] if entry["name"] == name)


def test_a_failing_entry_sets_the_status_but_does_not_stop_the_others(measured):
    status, _, results = measured
    assert status == 1
    states = {entry["name"]: entry["status"] for entry in results["entries"]}
    assert states == {
        "infer_b2": "measured",
        "train": "measured",
        "wide": "skipped",
        "absent": "skipped",
        "elsewhere": "skipped",
        "broken": "failed",
    }
    assert "no_such_layer" in get_entry(results, "broken")["reason"]


def test_a_second_session_leaves_out_what_the_first_has_measured(
    measured, tmp_path, capsys
):
    _, out, _ = measured
    spec = out.parent / "spec.yml"
    arguments = ("--spec", spec, "--skip-measured", out, "--out", tmp_path / "second")
    assert bench("train", "infer_b2", *arguments) == 0
    assert "all of these entries are measured already" in capsys.readouterr().err
    assert not (tmp_path / "second").exists()
    assert bench("train", "--spec", spec, "--skip-measured", tmp_path / "none") == 2


@pytest.mark.parametrize("place", ["folder", "file", "parent"])
def test_a_second_session_does_not_replace_what_it_leaves_out(measured, place, capsys):
    _, out, _ = measured
    content = (out / "results.json").read_text()
    places = {"folder": out, "file": out / "results.json", "parent": out.parent}
    spec = out.parent / "spec.yml"
    arguments = ("--spec", spec, "--out", out, "--skip-measured", places[place])
    assert bench("absent", *arguments) == 2
    assert "has results that --skip-measured reads" in capsys.readouterr().err
    assert (out / "results.json").read_text() == content


def test_only_the_same_command_on_the_same_device_is_left_out(measured):
    _, out, results = measured
    entry = next(e for e in load_spec(out.parent / "spec.yml") if e.name == "train")
    assert find_unmeasured([entry], [results]) == []
    other = dataclasses.replace(entry, command=entry.command + " --seed 1")
    assert find_unmeasured([other], [results]) == [other]
    results = results | {"facts": results["facts"] | {"device": "another"}}
    assert find_unmeasured([entry], [results]) == [entry]


@pytest.mark.slow
def test_on_an_accelerator_an_entry_is_measured_before_the_next_is_compiled(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(Session, "_run_side_by_side", Session._run_ours_first)
    path = tmp_path / "spec.yml"
    path.write_text(json.dumps(SPEC))
    arguments = ("infer_b2", "broken", "train", "--spec", path, "--out", tmp_path / "out")
    assert (
        bench(
            *arguments,
            "--seconds",
            0.1,
            "--max-seconds",
            1,
            "--repeat",
            2,
            "--compile-threads",
            1,
        )
        == 1
    )
    logged = re.findall(
        r"s  (\S+): (compiled|failed|[\d,.]+ samples)", capsys.readouterr().err
    )
    order = [(name, what.split()[-1]) for name, what in logged]
    assert order == [
        ("infer_b2", "compiled"),
        ("infer_b2", "samples"),
        ("train", "compiled"),
        ("train", "samples"),
        ("broken", "failed"),
    ]


def test_true_and_false_in_xla_options_become_booleans():
    config = BenchConfig(xla=["a=true", "b=False", "c=CONCURRENT", "d=3", "e=x=y"])
    assert config.xla_options == {
        "a": True,
        "b": False,
        "c": "CONCURRENT",
        "d": "3",
        "e": "x=y",
    }


def test_skipped_entries_have_a_reason(measured):
    _, _, results = measured
    assert (
        get_entry(results, "wide")["reason"] == "it needs 9 devices, and this machine has 8"
    )
    assert get_entry(results, "elsewhere")["reason"] == "it needs a GPU"
    assert "There is no imagenet in" in get_entry(results, "absent")["reason"]


def test_the_figures_are_consistent(measured):
    _, _, results = measured
    for name, samples in (("infer_b2", 2), ("train", 8)):
        entry = get_entry(results, name)
        speeds = entry["samples_per_second"]
        assert len(speeds["values"]) == 3  # without the first
        assert speeds["lowest"] <= speeds["median"] <= speeds["highest"]
        assert entry["samples_per_unit"] == samples
        seconds = entry["ms_per_unit"] / 1e3
        assert samples / seconds == pytest.approx(speeds["median"])
        assert entry["flops_per_second"] > 0 and entry["bytes_per_second"] > 0
        limit = results["limits"]["flops_float32"]
        share = entry["flops_per_second"] / limit
        assert entry["of_matmul_limit"] == pytest.approx(share)
        assert entry["peak_bytes"] > 0 and entry["compile_seconds"] > 0
    entry = get_entry(results, "infer_b2")
    assert entry["latency_calls"] >= 20 and entry["latency_ms"]["p50"] > 0
    entry = get_entry(results, "train")
    assert (entry["latency_ms"], entry["latency_calls"]) == ({}, 0)


def test_csv_and_markdown_agree_with_json(measured):
    _, out, results = measured
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [row["name"] for row in rows] == [e["name"] for e in results["entries"]]
    median = get_entry(results, "train")["samples_per_second"]["median"]
    assert float(rows[1]["samples_per_second"]) == pytest.approx(median)
    text = (out / "results.md").read_text()
    assert "| train " in text and "commit: abc" in text
    assert "`millrace cnn train --dataset digits --batch-size 8" in text
    assert "(the real digits)" in text and "- wide skipped: it needs 9 devices" in text


@pytest.mark.slow
def test_a_batch_that_is_too_large_is_skipped_with_the_largest_that_fits(
    tmp_path, monkeypatch
):
    command = "cnn train --dataset digits --batch-size 100 --updates-per-execution 1"
    (tmp_path / "spec.yml").write_text(json.dumps({"large": {"command": command}}))
    monkeypatch.setattr(compiling, "memory_limit", lambda _: 1 << 19)
    assert bench("--spec", tmp_path / "spec.yml", "--out", tmp_path / "out") == 0
    (entry,) = json.loads((tmp_path / "out" / "results.json").read_text())["entries"]
    assert entry["status"] == "skipped"
    assert re.fullmatch(
        r"batch 100 needs \d\.\d MiB of 512\.0 KiB; the largest power of two that fits is "
        r"(4|8|16|32|64)",
        entry["reason"],
    )


def test_help_needs_no_jax():
    import subprocess
    import sys

    code = (
        "import sys\nfrom millrace.cli import main\n"
        "try:\n    main(['bench', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--peer" in done.stdout
