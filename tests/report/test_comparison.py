"""Several runs on one page, and the command that writes pages."""

import re

import pytest
from made_runs import EVENTS, find_chart, make_run

from millrace.cli import main
from millrace.commands.report import format_figures
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


def test_the_best_results_come_first_with_their_epochs(runs, tmp_path):
    worse = [*EVENTS, {"update": 99, "epoch": 3.0, "time": 5, "validation_accuracy": 0.6}]
    third = read_run(make_run(tmp_path / "third", events=worse))
    page = comparison_page([*runs, third])
    assert page.index("best validation accuracy") < page.index(">validation accuracy")
    assert cells(page, "best validation accuracy") == ["0.9611 at epoch 2"] * 3
    best = {"metric": "validation_accuracy", "value": 0.99, "update": 44, "epoch": 1.0}
    named = read_run(make_run(tmp_path / "named", best=best))
    page = comparison_page([named, third])
    assert '<td class="best">0.99 at epoch 1</td>' in page


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


def test_the_command_compares_runs_in_the_given_file(tmp_path, runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "both.html"
    paths = [str(run.path) for run in runs]
    assert millrace(*paths, "--out", str(out)) == 0
    assert "2 runs: first, second" in out.read_text()
    header, first, second, path = capsys.readouterr().out.splitlines()
    columns = re.split(r"  +", header)
    assert columns == [
        *("run", "status", "best validation accuracy", "last", "train loss"),
        *("samples/s", "time"),
    ]
    assert re.split(r"  +", first)[:5] == [
        *("first", "completed", "0.9611 at epoch 2", "0.9611", "0.25")
    ]
    assert second.split()[-3:] == ["21,140", "4.1", "s"] and path == str(out)
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
    assert millrace("--serve", str(tmp_path / "nowhere")) == 2
    assert "There is no folder" in capsys.readouterr().err
    assert millrace("--port", "80", str(tmp_path / "run")) == 2
    assert "give --serve as well" in capsys.readouterr().err
    assert millrace(str(tmp_path), str(tmp_path), "--serve") == 2
    assert "--serve shows one folder" in capsys.readouterr().err


def test_metrics_that_do_not_fit_the_terminal_are_left_out(runs):
    wide, narrow = (format_figures(runs, width) for width in (200, 76))
    assert "train loss" in wide[0] and "train loss" not in narrow[0]
    assert max(map(len, narrow)) <= 76


def test_runs_that_are_judged_by_other_metrics_name_them(runs, tmp_path):
    events = [{"update": 9, "epoch": 3.0, "time": 2.0, "validation_rmse": 0.75}]
    other = make_run(tmp_path / "other", events=events, metrics={"validation_rmse": 0.75})
    lines = format_figures([runs[0], read_run(other)], 120)
    assert "validation accuracy 0.9611 at epoch 2  0.9611" in lines[1]
    assert "validation RMSE 0.75 at epoch 3" in lines[2]


def test_several_curves_of_a_color_are_dashed_by_turns(runs, tmp_path):
    records = [read_run(make_run(tmp_path / f"run-{n}")) for n in range(10)]
    chart = find_chart(comparison_page(records), "train loss")
    lines = re.findall(r'stroke="var\(--(c\d)\)"([^>]*)/>', chart)
    assert [color for color, _ in lines[8:]] == ["c0", "c1"]
    assert ["dasharray" in rest for _, rest in lines] == [False] * 8 + [True] * 2
