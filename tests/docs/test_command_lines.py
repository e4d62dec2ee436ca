"""Every command line in the documentation names existing commands and options."""

import re
import shlex

import pytest
from docs_blocks import ROOT

from millrace.commands.registry import COMMANDS
from millrace.commands.scripts import SCRIPTS
from millrace.config.command_line import _build_parser, _hyphenate

PAGES = [
    *(ROOT / "docs").glob("*.md"),
    ROOT / "README.md",
    *(ROOT / "millrace").rglob("README.md"),
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ENDS = ("|", ";", "&&", "&", ">", "2>&1")


def find_commands(text: str) -> list[list[str]]:
    """Return the words of the commands in the fenced blocks of a page, without ours."""
    found = []
    for language, block in _FENCE.findall(text):
        if language in ("python", "json", "yaml"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if line.removeprefix("$ ").startswith("millrace "):
                words = shlex.split(line.removeprefix("$ "), comments=True)[1:]
                ends = [n for n, word in enumerate(words) if word in _ENDS]
                found.append(words[: min(ends, default=len(words))])
    return found


def check(words: list[str]) -> None:
    """Raise an error if a command line is not valid."""
    if words[0] == "launch":
        words = words[words.index("--") + 1 :] if "--" in words else words
        words = words[1:] if words[0] == "millrace" else words
    length = 1 if words[0] in COMMANDS else 2
    command = COMMANDS[" ".join(words[:length])]
    path = command.named_configs_path()
    parser = _build_parser(command.load_config_type(), "millrace", path)
    _, unknown = parser.parse_known_args([_hyphenate(word) for word in words[length:]])
    assert set(unknown) <= {"..."}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_the_command_lines_of_a_page_are_valid(page):
    for words in find_commands(page.read_text()):
        is_program = words[0] in SCRIPTS  # has a test of its own
        is_schematic = any("…" in word or word.startswith("<") for word in words)
        if not is_program and not is_schematic and not words[0].startswith("-"):
            try:
                check(words)
            except Exception as error:
                error.add_note(f"in: millrace {shlex.join(words)}")
                raise


def test_a_wrong_value_in_a_command_line_would_be_found():
    (words,) = find_commands("```text\nmillrace cnn train \\\n    --dataset cifar-10\n```")
    with pytest.raises(ValueError, match="cifar-10"):
        check(words)
