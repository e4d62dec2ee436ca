"""The code in the documentation runs, and prints what the pages say."""

import pytest
from docs_blocks import ROOT, alike, blocks, commands, run_command, run_python

PAGES = sorted((ROOT / "docs").glob("*.md"))
OTHERS = {"pipelines.md"}  # has a test of its own
LONG = {"first_run.md", "cnn.md", "autoencoder.md", "vcd.md"}
"""Pages whose blocks take a while; what they do, other tests see to as well."""


def pages_with(language: str) -> list:
    chosen = [
        page
        for page in PAGES
        if page.name not in OTHERS and any(b.language == language for b in blocks(page))
    ]
    return [
        pytest.param(
            page,
            id=page.stem,
            marks=[pytest.mark.slow] * (page.name in LONG),
        )
        for page in chosen
    ]


@pytest.mark.parametrize("page", pages_with("python"))
def test_the_python_of_a_page_runs(page, tmp_path):
    codes = [b.text for b in blocks(page) if b.language == "python"]
    # What is included from a file is run where that file is.
    own = [code for code in codes if not code.startswith("--8<--")]
    if own:
        run_python(own, tmp_path)


@pytest.mark.parametrize("page", pages_with("console"))
def test_the_commands_of_a_page_print_what_it_says(page, tmp_path):
    for block in blocks(page):
        if block.language != "console":
            continue
        for command, told in commands(block):
            printed = run_command(command, tmp_path)
            assert alike(told, printed), f"$ {command}\n" + "\n".join(printed)


def test_numbers_may_differ_but_words_may_not():
    told = ["loss 0.25  in 3 s", "…", "done"]
    assert alike(told, ["loss 1.5e-3  in 12,000 s", "any", "line", "done"])
    assert alike(told, ["loss 1 in 2 s", "done"])
    assert alike(told, ["loss nan in 2 s", "done"])
    assert not alike(told, ["cost 0.25  in 3 s", "done"])
    assert not alike(told, ["loss 0.25  in 3 s", "undone"])
    assert not alike([], ["something"])


def test_commands_over_several_lines_are_read_as_one():
    from docs_blocks import Block

    block = Block("console", "$ one \\\n    --two\nout\n$ three\n")
    assert commands(block) == [("one --two", ["out"]), ("three", [])]
