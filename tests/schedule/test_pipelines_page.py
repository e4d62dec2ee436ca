"""docs/pipelines.md quotes what the command prints and shows what it draws."""

import re
import shlex
from pathlib import Path

import pytest

from millrace.cli import main
from millrace.schedule.table import SCHEDULES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/pipelines.md").read_text()
BLOCKS = "\n".join(re.findall(r"^```console\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
COMMANDS = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n?)*)", BLOCKS, re.MULTILINE)
DRAWN = [command for command, _ in COMMANDS if "--out" in command]
SHOWN = [(command, output.strip("\n")) for command, output in COMMANDS if output.strip()]


def call(command: str, capsys) -> str:
    """Run a command of the page and return its output."""
    command, _, selection = command.partition(" | ")
    program, *arguments = shlex.split(command)
    assert program == "millrace"
    with pytest.raises(SystemExit):
        main(arguments)
    lines = "".join(capsys.readouterr()).splitlines()
    if selection.startswith("tail -"):
        lines = lines[-int(selection.removeprefix("tail -")) :]
    elif selection.startswith("grep "):
        lines = [line for line in lines if selection.removeprefix("grep ") in line]
    return "\n".join(lines)


@pytest.mark.parametrize("command", DRAWN)
def test_a_drawing_is_what_its_command_draws(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "docs/images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    call(command, capsys)
    path = command.split("--out ")[1]
    assert (tmp_path / path).read_bytes() == (ROOT / path).read_bytes()


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_the_page_quotes_what_the_command_prints(command, output, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert call(command, capsys) == output


def test_every_drawing_on_the_page_has_its_command():
    drawings = {f"docs/{name}" for name in re.findall(r"\]\((images/[^)]*)\)", PAGE)}
    assert drawings == {command.split("--out ")[1] for command in DRAWN}
    assert drawings == {
        f"docs/images/{path.name}" for path in (ROOT / "docs/images").glob("*.svg")
    }


def test_the_table_of_times_agrees_with_the_command(capsys, monkeypatch):
    rows = re.findall(
        r"^\| ([\w-]+) \| (\d+) \| ([\d.]+%) \| (\d+) \| ([\d.]+%) \|$", PAGE, re.MULTILINE
    )
    assert [row[0] for row in rows] == list(SCHEDULES)
    for schedule, in_ticks, ticks_idle, free, free_idle in rows:
        for execution, time, idle in (
            ("ticks", in_ticks, ticks_idle),
            ("free", free, free_idle),
        ):
            printed = call(
                f"millrace schedule --schedule {schedule} --execution {execution} "
                "--gradient-accumulation-count 8",
                capsys,
            )
            assert re.search(rf"^time +{time} forward passes", printed, re.MULTILINE)
            assert re.search(rf"^idle +{idle} of device time", printed, re.MULTILINE)


def test_the_table_of_idle_shares_agrees_with_the_command(capsys):
    counts = re.search(r"accumulation count \|(.*)\|\n.*\n\| idle \|(.*)\|", PAGE)
    assert counts
    for count, idle in zip(*(row.split("|") for row in counts.groups()), strict=True):
        command = f"millrace schedule --gradient-accumulation-count {count.strip()}"
        printed = call(command, capsys)
        assert f"idle          {idle.strip()} of device time" in printed


def test_the_python_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert "% idle" in capsys.readouterr().out
    assert (tmp_path / "pipeline.svg").stat().st_size > 1000
