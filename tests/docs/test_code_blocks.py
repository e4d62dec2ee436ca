"""Every block of code in the documentation runs alone, and prints the output shown."""

import pytest
from docs_blocks import (
    ROOT,
    Block,
    blocks,
    outputs_match,
    run_command,
    run_scripts,
    split_commands,
    write_scripts,
)

PAGES = sorted((ROOT / "docs").glob("*.md"))
TESTED_ELSEWHERE = {"pipelines.md"}
SLOW = {
    *("cnn.md", "autoencoder.md", "vcd.md", "augmentation.md", "fine_tuning.md"),
    "several_gpus.md",
}
"""Pages whose blocks take long; other tests also cover what they do."""
NEEDED = {"export.md": ("flatbuffers", "onnx", "onnxruntime")}
"""Libraries that the commands of a page need."""


def pages_with_code() -> list:
    chosen = [
        page
        for page in PAGES
        if page.name not in TESTED_ELSEWHERE
        and {"console", "python"} & {b.language for b in blocks(page)}
    ]
    return [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.name in SLOW))
        for page in chosen
    ]


@pytest.mark.parametrize("page", pages_with_code())
def test_every_block_of_a_page_runs_and_prints_the_output_shown(page, tmp_path):
    for name in NEEDED.get(page.name, ()):
        pytest.importorskip(name)
    folder = tmp_path / "commands"
    folder.mkdir()
    found = blocks(page)
    for block in found:
        if block.language != "console":
            continue
        for command, expected in split_commands(block):
            printed = run_command(command, folder)
            assert outputs_match(expected, printed), f"$ {command}\n" + "\n".join(printed)
    if scripts := write_scripts(found, folder):
        run_scripts(scripts)


def test_a_python_block_sees_neither_names_nor_files_of_others(tmp_path):
    folder = tmp_path / "commands"
    folder.mkdir()
    page = [
        Block("console", "$ touch made"),
        Block("python", "# After the command above\nopen('made')\nx = 1\n"),
        Block("python", "import os\nopen('own', 'w').close()\nprint(len(os.listdir()))\n"),
        Block("python", "# After the script above, in its folder\nopen('own')\n"),
        Block("python", "print(x)\n"),
    ]
    (folder / "made").touch()
    *scripts, last = write_scripts(page, folder)
    assert run_scripts(scripts) == "3\n"  # the two scripts and "own"
    with pytest.raises(AssertionError, match="name 'x' is not defined"):
        run_scripts([scripts[0], last])


def test_numbers_may_differ_but_words_may_not():
    expected = ["loss 0.25  in 3 s", "…", "done"]
    assert outputs_match(expected, ["loss 1.5e-3  in 12,000 s", "any", "line", "done"])
    assert outputs_match(expected, ["loss 1 in 2 s", "done"])
    assert outputs_match(["loss 1"], ["loss 1  input_wait 0.025"])
    assert outputs_match(expected, ["loss nan in 2 s", "done"])
    assert not outputs_match(expected, ["cost 0.25  in 3 s", "done"])
    assert not outputs_match(expected, ["loss 0.25  in 3 s", "undone"])
    assert not outputs_match([], ["something"])


def test_a_command_over_several_lines_is_read_as_one():
    block = Block("console", "$ one \\\n    --two\nout\n$ three\n")
    assert split_commands(block) == [("one --two", ["out"]), ("three", [])]
