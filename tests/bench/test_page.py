"""The results page is what the kept files say."""

import fnmatch
import json
from importlib import resources
from pathlib import Path

import pytest
import yaml
from bench_entries import measured

from millrace.bench.page import beside, drawings_in, files_in, page, reports_in, write_page
from millrace.bench.reporting import write_results
from millrace.bench.spec import load_spec
from millrace.cli import main
from millrace.config import ConfigurationError

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks" / "results"


def test_a_page_or_results_that_cannot_be_written_are_named(tmp_path):
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


def test_the_page_in_the_docs_is_made_from_the_kept_files():
    made = page(files_in([KEPT]), reports_in([KEPT]))
    assert (ROOT / "docs" / "results.md").read_text() == made, (
        "millrace bench --page benchmarks/results --out docs/results.md makes it again"
    )
    for drawing in drawings_in(reports_in([KEPT])):
        copy = ROOT / "docs" / "results" / drawing.name
        assert copy.read_bytes() == drawing.read_bytes()


def test_the_page_shows_drawings_of_reports(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(results("2026-01-01", 5.0)))
    (tmp_path / "2026-01-01-curves.md").write_text("# curves\n\n![c](curves.svg)\n")
    (tmp_path / "curves.svg").write_text("<svg/>")
    out = tmp_path / "docs" / "results.md"
    out.parent.mkdir()
    with pytest.raises(SystemExit) as left:
        main(["bench", "--page", str(tmp_path), "--out", str(out)])
    assert left.value.code == 0
    assert "### curves\n\n![c](results/curves.svg)\n" in out.read_text()
    assert (out.parent / "results" / "curves.svg").read_text() == "<svg/>"


def test_every_row_has_its_command_its_hardware_and_what_others_say(tmp_path):
    for name, date, median in (("a", "2026-01-01", 5.0), ("b", "2026-02-01", 7123.0)):
        text = json.dumps(results(date, median))
        (tmp_path / f"{name}.json").write_text(text)
    made = page(files_in([tmp_path]))
    assert made.index("## a GPU, 2026-02-01") < made.index("## a GPU, 2026-01-01")
    assert "| 7,123 " in made and "200.0 (25 %)" in made and "failed" in made
    assert "- resnet50_train_b256: `millrace cnn train --model resnet`" in made
    assert "42,029 (16 Bow IPUs (Bow Pod16), batch 1,920)" in made
    assert "- large: skipped, it needs 9 devices\n" in made


def test_the_command_writes_the_page_or_prints_it(tmp_path, capsys):
    kept = tmp_path / "a.json"
    kept.write_text(json.dumps(results("2026-01-01", 5.0)))
    for words in ([], ["--out", str(tmp_path / "page.md")]):
        with pytest.raises(SystemExit) as left:
            main(["bench", "--page", str(kept), *words])
        assert left.value.code == 0
    assert (tmp_path / "page.md").read_text() == capsys.readouterr().out


def test_a_folder_without_results_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="no results"):
        files_in([tmp_path])


def published():
    files = resources.files("millrace.bench")
    return yaml.safe_load((files / "published.yml").read_text())


def test_all_published_figures_name_their_source_and_the_entries_that_there_are():
    names = [entry.name for entry in load_spec(None)]
    for part in published():
        for pattern in part["entries"]:
            assert fnmatch.filter(names, pattern), part["what"]
        for hardware, figure, batch, how, source in part["figures"]:
            assert all((hardware, figure, how, source)) and isinstance(batch, str)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("resnet50_infer_b1", "8,237 (1 RTX 4090, batch 256)"),
        ("efficientnet_b0_train_b128", "2,489 (1 A100 80GB, batch not said)"),
        # Bow IPUs had the variant G16, which is another network.
        ("efficientnet_b4_train_b64", "331 (1 A100 80GB, batch not said)"),
        ("tf1_efficientnet_b4_train_m2000", "8,936 (16 Bow IPUs (Bow Pod16), batch 6,144)"),
        ("vcd_test", ""),  # other pictures
        ("autoencoder_128_b64", ""),  # other ratings
    ],
)
def test_a_published_figure_stands_beside_its_own_network_and_says_its_batch(name, said):
    assert name in [entry.name for entry in load_spec(None)]
    assert beside(name, published()) == said


def test_kept_files_without_newer_figures_are_shown_with_what_they_have(tmp_path):
    kept = results("2026-01-01", 100.0)
    kept["entries"][0] |= {
        "latency_ms": {"mean": 1.0, "p50": 1.5, "p99": 2.5, "p99.9": 3.5},
        "peers": {"eager": {"median": 95.0, "samples_per_second": [90.0, 95.0, 99.5]}},
        "ratio": 100 / 95,
    }
    (tmp_path / "a.json").write_text(json.dumps(kept))
    made = page(files_in([tmp_path]))
    assert "| eager spread |" in made and "| 10.0 % " in made
    assert "| ~1.05 |" in made and "\n~: the ratio is no further from 1" in made
    assert "| 1.500 " in made and "2.500" not in made  # of how many calls is not known


def test_of_each_subject_and_device_the_newest_report_is_on_the_page(tmp_path):
    for name in ("2026-01-01-speed-cpu", "2026-02-01-speed-cpu", "2026-01-01-speed-GPU"):
        (tmp_path / f"{name}.md").write_text(f"# {name}\n\n- commit: abc\n\n## More\n")
    (tmp_path / "README.md").write_text("# not a report\n")
    (tmp_path / "a.json").write_text(json.dumps(results("2026-01-01", 5.0)))
    found = reports_in([tmp_path])
    assert [path.stem for path in found] == ["2026-01-01-speed-GPU", "2026-02-01-speed-cpu"]
    made = page(files_in([tmp_path]), found)
    assert made.index("## Published") < made.index("\n## Reports\n")
    assert "### 2026-02-01-speed-cpu\n" in made and "\n#### More\n" in made
    assert "2026-01-01-speed-cpu" not in made and "not a report" not in made
