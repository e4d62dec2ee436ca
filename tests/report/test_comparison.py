"""Several runs on one page, and the command that makes pages."""

import re

import pytest
from made_runs import EVENTS, make_run

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


def test_figures_stand_beside_each_other_and_the_better_one_is_marked(runs):
    page = comparison_page(runs)
    assert cells(page, "train loss") == ["0.25", "0.9"]
    assert '<td class="best">0.25</td>' in page  # the lower loss
    assert '<td class="best">0.97</td>' in page  # the higher accuracy
    assert cells(page, "updates") == ["88", "88"]


def test_what_differs_between_runs_is_listed_and_what_does_not_is_not(runs):
    page = comparison_page(runs)
    assert cells(page, "seed") == ["1", "0"]
    assert cells(page, "micro-batch-size") == ["", "8"]
    assert cells(page, "python") == ["3.11.7", "3.12.1"]
    assert "<th>num-epochs</th>" not in page and "<th>jax</th>" not in page


def test_each_metric_has_one_chart_with_a_curve_for_each_run(runs):
    page = comparison_page(runs)
    (chart,) = re.findall(r'aria-label="train loss">(.*?)</svg>', page)
    assert re.findall(r'class="line (c\d)"', chart) == ["c0", "c1"]
    assert "first" in chart and "second" in chart


def test_a_run_keeps_its_color_where_another_has_nothing_to_show(runs, tmp_path):
    bare = read_run(make_run(tmp_path / "bare", events=[], metrics={}))
    page = comparison_page([bare, runs[0]])
    (chart,) = re.findall(r'aria-label="train loss">(.*?)</svg>', page)
    assert re.findall(r'class="line (c\d)"', chart) == ["c1"]


def test_runs_of_the_same_name_are_told_apart_by_where_they_are(tmp_path):
    paths = [make_run(tmp_path / part / "run") for part in ("a", "b")]
    assert run_names([read_run(path) for path in paths]) == ["a/run", "b/run"]


def millrace(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["report", *words])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_the_command_makes_a_report_again(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert millrace(str(run)) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert "0.9611" in (run / "report.html").read_text()


def test_the_command_compares_runs_in_the_file_that_is_asked_for(tmp_path, runs, capsys):
    out = tmp_path / "both.html"
    paths = [str(run.path) for run in runs]
    assert millrace(*paths, "--out", str(out)) == 0
    assert "2 runs: first, second" in out.read_text()
    assert millrace(paths[0], "--out", str(out)) == 0
    assert "cnn train · first" in out.read_text()


def test_a_folder_of_runs_stands_for_all_of_them(tmp_path, runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert millrace(str(tmp_path)) == 0
    assert "2 runs: first, second" in (tmp_path / "comparison.html").read_text()


def test_a_wrong_command_says_what_is_missing(tmp_path, capsys):
    assert millrace() == 2
    assert "RUN is required" in capsys.readouterr().err
    assert millrace(str(tmp_path / "nowhere")) == 2
    assert "not the directory of a run" in capsys.readouterr().err
    assert millrace(str(make_run(tmp_path / "run")), "--out", "nowhere/x.html") == 2
    assert "no folder nowhere" in capsys.readouterr().err
