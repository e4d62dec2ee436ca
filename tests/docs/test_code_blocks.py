"""The code in the documentation runs and prints the output shown."""

import pytest
from docs_blocks import (
    ROOT,
    Block,
    blocks,
    outputs_match,
    run_command,
    run_python,
    split_commands,
)

PAGES = sorted((ROOT / "docs").glob("*.md"))
TESTED_ELSEWHERE = {"pipelines.md"}
SLOW = {
    *("first_run.md", "cnn.md", "autoencoder.md", "vcd.md", "export.md"),
    *("augmentation.md", "fine_tuning.md", "notebook.md", "several_gpus.md"),
}
"""Pages whose blocks take long; other tests also cover what they do."""


def pages_with(language: str) -> list:
    chosen = [
        page
        for page in PAGES
        if page.name not in TESTED_ELSEWHERE
        and any(b.language == language for b in blocks(page))
    ]
    return [
        pytest.param(
            page,
            id=page.stem,
            marks=[pytest.mark.slow] * (page.name in SLOW),
        )
        for page in chosen
    ]


@pytest.mark.parametrize("page", pages_with("python"))
def test_the_python_blocks_of_a_page_run(page, tmp_path):
    codes = [b.text for b in blocks(page) if b.language == "python"]
    # Blocks included from a file are tested with that file.
    own = [code for code in codes if not code.startswith("--8<--")]
    if own:
        run_python(own, tmp_path)


@pytest.mark.parametrize("page", pages_with("console"))
def test_the_commands_of_a_page_print_the_output_shown(page, tmp_path):
    for block in blocks(page):
        if block.language != "console":
            continue
        for command, expected in split_commands(block):
            printed = run_command(command, tmp_path)
            assert outputs_match(expected, printed), f"$ {command}\n" + "\n".join(printed)


def test_numbers_may_differ_but_words_may_not():
    expected = ["loss 0.25  in 3 s", "…", "done"]
    assert outputs_match(expected, ["loss 1.5e-3  in 12,000 s", "any", "line", "done"])
    assert outputs_match(expected, ["loss 1 in 2 s", "done"])
    assert outputs_match(expected, ["loss nan in 2 s", "done"])
    assert not outputs_match(expected, ["cost 0.25  in 3 s", "done"])
    assert not outputs_match(expected, ["loss 0.25  in 3 s", "undone"])
    assert not outputs_match([], ["something"])


def test_a_command_over_several_lines_is_read_as_one():
    block = Block("console", "$ one \\\n    --two\nout\n$ three\n")
    assert split_commands(block) == [("one --two", ["out"]), ("three", [])]
