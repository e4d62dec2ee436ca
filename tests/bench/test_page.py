"""The results page shows what the kept files contain."""

import fnmatch
import json
from importlib import resources
from pathlib import Path

import pytest
import yaml
from bench_entries import measured

from millrace.bench.page import (
    find_drawings,
    find_published,
    find_reports,
    find_results,
    format_pages,
    write_page,
)
from millrace.bench.reporting import write_results
from millrace.bench.spec import load_spec
from millrace.cli import main
from millrace.config import ConfigurationError

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks" / "results"


def test_an_unwritable_page_or_result_is_named(tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(ConfigurationError, match=r"Cannot write .*taken: Is a directory"):
        write_page([KEPT], taken)
    (taken / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"Cannot write .*file: File exists"):
        write_results(taken / "file", {"entries": []})


def results(date, median, device="a GPU"):
    entry = measured(
        *[median] * 3,
        name="resnet50_train_b256",
        command="cnn train --model resnet",
        flops_per_second=2e14,
        of_matmul_limit=0.25,
        peers={"eager": {"median": 1.0}, "compiled": {"error": "no"}},
        ratio=1.2,
    )
    skipped = {"name": "large", "command": "vcd train", "status": "skipped"}
    facts = {"date": date, "device": device, "commit": "abc", "command": "millrace bench"}
    entries = [entry, skipped | {"reason": "it needs 9 devices."}]
    return {"facts": facts, "limits": {"bytes": 4e12}, "entries": entries}


def test_the_pages_in_the_docs_are_up_to_date():
    pages = format_pages(find_results([KEPT]), find_reports([KEPT]))
    written = {p.name: p.read_text() for p in (ROOT / "docs").glob("results*.md")}
    assert written == pages, (
        "run: millrace bench --page benchmarks/results --out docs/results.md"
    )
    for drawing in find_drawings(find_reports([KEPT])):
        copy = ROOT / "docs" / "results" / drawing.name
        assert copy.read_bytes() == drawing.read_bytes()


def test_the_page_shows_the_drawings_of_reports(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(results("2026-01-01", 5.0)))
    (tmp_path / "2026-01-01-curves.md").write_text("# curves\n\n![c](curves.svg)\n")
    (tmp_path / "curves.svg").write_text("<svg/>")
    out = tmp_path / "docs" / "results.md"
    out.parent.mkdir()
    with pytest.raises(SystemExit) as left:
        main(["bench", "--page", str(tmp_path), "--out", str(out)])
    assert left.value.code == 0
    page = out.with_name("results_runtime.md").read_text()
    assert "## curves\n\n![c](results/curves.svg)\n" in page
    assert (out.parent / "results" / "curves.svg").read_text() == "<svg/>"


def test_rows_have_commands_hardware_and_published_figures(tmp_path):
    for name, date, median in (("a", "2026-01-01", 5.0), ("b", "2026-02-01", 7123.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps(results(date, median)))
    pages = format_pages(find_results([tmp_path]))
    assert list(pages) == ["results.md", "results_training.md", "results_published.md"]
    text = pages["results_training.md"]
    assert text.index("## a GPU, 2026-02-01") < text.index("## a GPU, 2026-01-01")
    assert "| 7,123 " in text and "200.0 (25 %)" in text and "failed" in text
    assert "- resnet50_train_b256: `millrace cnn train --model resnet`" in text
    assert "42,029 (16 Bow IPUs (Bow Pod16), batch 1,920)" in text
    assert "a GPU, large: skipped, it needs 9 devices\n" in pages["results.md"]
    assert "[CNN training](results_training.md)" in pages["results.md"]


def test_the_command_writes_the_pages_or_prints_them(tmp_path, capsys):
    kept = tmp_path / "a.json"
    kept.write_text(json.dumps(results("2026-01-01", 5.0)))
    for arguments in ([], ["--out", str(tmp_path / "results.md")]):
        with pytest.raises(SystemExit) as left:
            main(["bench", "--page", str(kept), *arguments])
        assert left.value.code == 0
    names = ("results.md", "results_training.md", "results_published.md")
    written = "\n".join((tmp_path / name).read_text() for name in names)
    assert capsys.readouterr().out == written


def test_a_folder_without_results_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match=r"no results\.json"):
        find_results([tmp_path])


FILES = resources.files("millrace.bench")
SPECS = (None, Path(str(FILES / "graphcore.yml")))
NAMES = [entry.name for spec in SPECS for entry in load_spec(spec)]


def published():
    return yaml.safe_load((FILES / "published.yml").read_text())


def test_published_figures_have_a_source_and_existing_entries():
    for part in published():
        for pattern in part["entries"]:
            assert fnmatch.filter(NAMES, pattern), part["what"]
        for hardware, figure, batch, how, source in part["figures"]:
            assert all((hardware, figure, how, source)) and isinstance(batch, str)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("resnet50_infer_b1", "8,237 (1 RTX 4090, batch 256)"),
        ("efficientnet_b0_train_b128", "2,489 (1 A100 80GB, batch unknown)"),
        # The figure for Bow IPUs is for variant G16, a different network.
        ("efficientnet_b4_train_b64", "331 (1 A100 80GB, batch unknown)"),
        ("gc_efficientnet_b4_train", "8,936 (16 Bow IPUs (Bow Pod16), batch 6,144)"),
        ("vcd_small", ""),  # different images
        ("autoencoder_128_b64", ""),  # different ratings
    ],
)
def test_a_published_figure_is_shown_for_its_own_network(name, shown):
    assert name in NAMES
    assert find_published(name, published()) == shown


def test_files_from_before_a_figure_existed_are_shown_without_it(tmp_path):
    kept = results("2026-01-01", 100.0)
    kept["entries"][0] |= {
        "latency_ms": {"mean": 1.0, "p50": 1.5, "p99": 2.5, "p99.9": 3.5},
        "peers": {"eager": {"median": 95.0, "samples_per_second": [90.0, 95.0, 99.5]}},
        "ratio": 100 / 95,
    }
    (tmp_path / "a.json").write_text(json.dumps(kept))
    text = format_pages(find_results([tmp_path]))["results_training.md"]
    assert "| eager spread |" in text and "| 10.0 % " in text
    assert "| ~1.05 |" in text and "\n~: the distance of the ratio from 1" in text
    assert "| 1.500 " in text and "2.500" not in text  # the number of calls is unknown


def test_the_page_has_the_newest_report_of_each_subject_and_device(tmp_path):
    for name in ("2026-01-01-speed-cpu", "2026-02-01-speed-cpu", "2026-01-01-speed-GPU"):
        (tmp_path / f"{name}.md").write_text(f"# {name}\n\n- commit: abc\n\n## More\n")
    (tmp_path / "README.md").write_text("# not a report\n")
    (tmp_path / "a.json").write_text(json.dumps(results("2026-01-01", 5.0)))
    found = find_reports([tmp_path])
    assert [path.stem for path in found] == ["2026-01-01-speed-GPU", "2026-02-01-speed-cpu"]
    text = format_pages(find_results([tmp_path]), found)["results_runtime.md"]
    assert "## 2026-02-01-speed-cpu\n" in text and "\n### More\n" in text
    assert "2026-01-01-speed-cpu" not in text and "not a report" not in text


def test_lines_of_the_documents_are_compared_with_published_figures(tmp_path):
    session = results("2026-01-01", 5.0)
    lines = [
        {"line": "a model, 1 x IPU-M2000"},
        {
            "line": "a model, 1 x IPU-POD16",
            "changed": "1 replica instead of 4",
            "published": [[8000, 16, "Bow IPUs", "batch 5"]],
        },
    ]
    session["entries"][0] |= {
        **{"name": "gc_model", "command": "train.py --model resnet", "lines": lines},
        **{"precision": "16.16", "about": "generated images"},
        **{"measured": {"seconds": 8.0}, "samples_per_unit": 10, "unit": "update"},
    }
    older = results("2025-01-01", 3.0)
    older["entries"][0] |= {"name": "gc_model", "lines": lines, "about": "old"}
    for number, found in enumerate((older, session)):
        (tmp_path / f"{number}.json").write_text(json.dumps(found))
    pages = format_pages(find_results([tmp_path]))
    page = pages["results_graphcore.md"]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if "| a model" in line
    ]
    assert len(rows) == 2 and "; old" not in page
    # What another session on the same device has measured is not missing.
    older["entries"][0] |= {"status": "failed", "reason": "not reached"}
    (tmp_path / "0.json").write_text(json.dumps(older))
    assert "not reached" not in format_pages(find_results([tmp_path]))["results.md"]
    assert rows[0][1:6] == ["16.16", "", "", "5", "4 updates of 10"]
    assert rows[0][6:8] == ["1 s", "generated images"]
    assert rows[1][2:4] == ["8,000 on 16 Bow IPUs (batch 5)", "500"]
    assert rows[1][7] == "1 replica instead of 4; generated images"
    assert "results_graphcore.md" in pages["results.md"]
    assert "`millrace train.py --model resnet`" in page
