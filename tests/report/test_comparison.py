"""Several runs on one page, and the command that writes pages."""

import re

import pytest
from made_runs import EVENTS, find_chart, make_run

from millrace.cli import main
from millrace.report.comparison import comparison_page, run_names
from millrace.report.record import read_run


@pytest.fixture
def runs(tmp_path):
    slower = [e | {"train_loss": 0.9} if "train_loss" in e else e for e in EVENTS]
    first = make_run(tmp_path / "first", config={"seed": 1})
    second = make_run(
        tmp_path / "second",
        events=slower,
        config={"micro_batch_size": 8},
        metrics={"train_loss": 0.9, "validation_accuracy": 0.97},
        versions={"python": "3.12.1", "jax": "0.10.2"},
    )
    return [read_run(first), read_run(second)]


def cells(page: str, name: str) -> list[str]:
    (row,) = re.findall(rf"<tr><th>{name}</th>(.*?)</tr>", page)
    return re.findall(r"<td[^>]*>(.*?)</td>", row)


def test_results_are_side_by_side_and_the_best_is_marked(runs):
    page = comparison_page(runs)
    assert cells(page, "train loss") == ["0.25", "0.9"]
    assert '<td class="best">0.25</td>' in page  # the lower loss
    assert '<td class="best">0.97</td>' in page  # the higher accuracy
    assert cells(page, "updates") == ["88", "88"]


def test_only_differences_between_runs_are_listed(runs):
    page = comparison_page(runs)
    assert cells(page, "seed") == ["1", "0"]
    assert cells(page, "micro-batch-size") == ["", "8"]
    assert cells(page, "python") == ["3.11.7", "3.12.1"]
    assert "<th>num-epochs</th>" not in page and "<th>jax</th>" not in page


def test_each_metric_has_one_chart_with_a_curve_per_run(runs):
    page = comparison_page(runs)
    chart = find_chart(page, "train loss")
    assert re.findall(r'stroke="var\(--(c\d)\)"', chart) == ["c0", "c1"]
    assert "first" in chart and "second" in chart


def test_a_run_keeps_its_color_in_a_chart_without_another_run(runs, tmp_path):
    bare = read_run(make_run(tmp_path / "bare", events=[], metrics={}))
    page = comparison_page([bare, runs[0]])
    chart = find_chart(page, "train loss")
    assert re.findall(r'stroke="var\(--(c\d)\)"', chart) == ["c1"]


def test_runs_of_the_same_name_are_named_by_their_folders_too(tmp_path):
    paths = [make_run(tmp_path / part / "run") for part in ("a", "b")]
    assert run_names([read_run(path) for path in paths]) == ["a/run", "b/run"]


def millrace(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_the_command_writes_a_report_again(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert millrace(str(run)) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert "0.9611" in (run / "report.html").read_text()


def test_the_command_compares_runs_in_the_given_file(tmp_path, runs, capsys):
    out = tmp_path / "both.html"
    paths = [str(run.path) for run in runs]
    assert millrace(*paths, "--out", str(out)) == 0
    assert "2 runs: first, second" in out.read_text()
    assert millrace(paths[0], "--out", str(out)) == 0
    assert "cnn train · first" in out.read_text()


def test_a_folder_of_runs_compares_all_of_them(tmp_path, runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert millrace(str(tmp_path)) == 0
    assert "2 runs: first, second" in (tmp_path / "comparison.html").read_text()


def test_an_error_says_what_is_missing(tmp_path, capsys):
    assert millrace() == 2
    assert "RUN is required" in capsys.readouterr().err
    assert millrace(str(tmp_path / "nowhere")) == 2
    assert "is not a run directory" in capsys.readouterr().err
    assert millrace(str(make_run(tmp_path / "run")), "--out", "nowhere/x.html") == 2
    assert "no folder nowhere" in capsys.readouterr().err
