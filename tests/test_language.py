"""The tree uses plain American English and the current names of the code.

Where an old word has to stay, ``EXCEPTIONS`` lists it by file, with the reason.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (".github", "benchmarks", "docs", "examples", "millrace", "tests")
SUFFIXES = {".cff", ".css", ".js", ".md", ".py", ".toml", ".yaml", ".yml"}
SKIPPED = {
    "benchmarks/results": "reports are kept unchanged",
    "docs/results.md": "generated from those reports",
    "docs/results": "its pages by subject",
    "tests/test_language.py": "contains all the words",
}

# Banned words, in any case, and what to say instead.
WORDS = {
    # Archaic idiom.
    r"\bforet(?:ell|old)\w*": "predict",
    r"\b(?:where|there|here)(?:in|by|of|upon)\b": "in which, so, of it",
    r"\banew\b": "again",
    r"\blest\b": "so that ... not",
    r"\blikewise\b": "also",
    r"\bshall\b": "must, will",
    r"\bwhilst\b|\bamongst\b|\btowards\b|\bfor ever\b": "while, among, toward, forever",
    r"\bbeside\b": "next to",
    r"\bby itself\b": "on its own",
    r"\bof (?:its|their) own accord\b": "on its own",
    r"\bforth and back\b": "back and forth",
    r"\bgoes on\b": "continues",
    r"\bis to be\b": "must be",
    r"\bone's own\b": "your own",
    r"\bsaid of\b": "say the thing",
    r"\bsees to it\b": "checked by",
    r"\bso many\b": "N, the number of",
    r"\btaken for\b": "predicted as, mistaken for",
    r"\bcan be told\b|\b(?:is|are) told\b": "options of, knows, is given",
    r"\bdata[ -]sets?\b|data_set": "dataset",
    # Metaphors. README has the only one.
    r"\bmillers?\b|\bmills\b|\bmill race\b|\bsluices?\b|\btimetables?\b": "a plain word",
    # British spelling.
    r"behaviour|catalogue|colour|favour|honour|neighbour": "American spelling",
    r"\bcentre|\bgrey\b|learnt|artefact|licence|fulfil\b|analyse": "American spelling",
    r"(?:label|model|cancel|travel)l(?:ed|ing)\b": "American spelling",
    r"(?:binar|general|initial|local|maxim|minim|normal|optim|organ|parallel|quant|random"
    r"|real|recogn|regular|serial|special|standard|summar|synchron|util|vector|visual)"
    r"is(?:e|ing|ation)[a-z]*": "American spelling",
}
# Old names of this code that have no other meaning.
NAMES = {
    r"\bcarried(?:_reduction)?\b": "model_state",
    r"\b(?:Beside|put_aside)\b": "AsyncValidation, snapshot",
    r"\b(?:account_of|from_first|peers_of)\b": "run_metadata, broadcast",
    r"\b(?:Callee|Finished)\b": "RunResult",
    r"\b(?:FiniteWatch|Gathered|staged_loss|separated_update)\b": "the new name",
    r"\b(?:said_of|lines_about|warnings_about)\b": "format_*, *_notices",
    r"\b(?:stops_diverged|when_compiled|by_itself|picture_shape)\b": "the new name",
    r"@@[A-Z]+@@": "the text that was meant to be there",
    r"\bmillrace[./](?:host|launch)[./]\w": "loop, run, checkpoint, distributed, commands",
}
_BANNED_WORDS = [(re.compile(word, re.IGNORECASE), say) for word, say in WORDS.items()]
_BANNED_NAMES = [(re.compile(name), say) for name, say in NAMES.items()]

_ALIAS = "the old spelling of an option is an alias"
_QUOTE = "quotes command lines from other people's documents"
_FORMAT_1 = "a field in format 1"
EXCEPTIONS = {
    ("CHANGELOG.md", "normalise"): _ALIAS,
    ("CHANGELOG.md", "optimiser"): "names of 0.1.0",
    ("README.md", "mill race"): "the one metaphor",
    ("docs/from_graphcore.md", "normalise"): _ALIAS,
    ("docs/from_graphcore.md", "optimisation"): _ALIAS,
    ("docs/from_graphcore.md", "optimiser"): _ALIAS,
    ("millrace/apps/cnn/README.md", "normalise"): _ALIAS,
    ("millrace/apps/cnn/README.md", "optimisation"): _ALIAS,
    ("millrace/apps/cnn/README.md", "optimiser"): _ALIAS,
    ("millrace/apps/cnn/config/data.py", "normalise"): _ALIAS,
    ("millrace/apps/cnn/config/graphcore.py", "optimisation"): _ALIAS,
    ("millrace/apps/cnn/config/training.py", "optimiser"): _ALIAS,
    ("millrace/apps/vcd/config/sections.py", "binarised"): _ALIAS,
    ("millrace/apps/vcd/config/reference.py", "binarise"): _ALIAS,
    ("millrace/apps/vcd/config/reference.py", "optimiser"): _ALIAS,
    ("millrace/bench/graphcore.yml", "normalise"): _QUOTE,
    ("millrace/bench/graphcore.yml", "optimisation"): _QUOTE,
    ("millrace/bench/graphcore.yml", "optimiser"): _QUOTE,
    ("millrace/bench/spec.yml", "optimiser"): _QUOTE,
    ("millrace/checkpoint/manifest.py", "carried"): _FORMAT_1,
    ("millrace/checkpoint/manifest.py", "optimiser"): _FORMAT_1,
    ("millrace/program/step.py", "carried"): "the old name is an alias",
    ("mkdocs.yml", "grey"): "name of a color in the theme",
    ("tests/apps/cnn/test_benchmark_commands.py", "normalise"): _QUOTE,
    ("tests/apps/cnn/test_benchmark_commands.py", "optimiser"): _QUOTE,
    ("tests/apps/cnn/test_seed_commands.py", "optimisation"): _QUOTE,
    ("tests/apps/vcd/test_config.py", "binarised"): _QUOTE,
    ("tests/apps/vcd/test_config.py", "optimiser"): _QUOTE,
    ("tests/seed_lines.py", "normalise"): _QUOTE,
    ("tests/seed_lines.py", "optimisation"): _QUOTE,
    ("tests/seed_lines.py", "optimiser"): _QUOTE,
    ("tests/checkpoint/test_old_formats.py", "carried"): _FORMAT_1,
    ("tests/checkpoint/test_old_formats.py", "optimiser"): _FORMAT_1,
    ("tests/distributed/test_slurm.py", "cancelled"): "a state of a job in Slurm",
    ("tests/docs/test_from_graphcore.py", "normalise"): _QUOTE,
    ("tests/docs/test_from_graphcore.py", "optimisation"): _QUOTE,
}


def find_words(text: str, names: bool = True) -> list[tuple[int, str, str]]:
    """Return the line, the word and its replacement for every banned word in a text."""
    banned = _BANNED_WORDS + _BANNED_NAMES * names
    return [
        (text.count("\n", 0, match.start()) + 1, match[0], replacement)
        for pattern, replacement in banned
        for match in pattern.finditer(text)
    ]


def scan_tree() -> dict[tuple[str, str], list[str]]:
    """Return a message per place of a banned word, by file and word."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    hits: dict[tuple[str, str], list[str]] = {}
    for path in sorted([*ROOT.iterdir(), *paths]):
        name = path.relative_to(ROOT).as_posix()
        is_text = path.is_file() and (path.suffix in SUFFIXES or path.name == "Makefile")
        if not is_text or any(
            name == s or name.startswith((f"{s}/", f"{s}_")) for s in SKIPPED
        ):
            continue
        # The changelog lists old names.
        found = find_words(path.read_text(), names=name != "CHANGELOG.md")
        for number, word, instead in found:
            message = f"{name}:{number}: {word!r}; say: {instead}"
            hits.setdefault((name, word.lower()), []).append(message)
    return hits


def test_banned_words_do_not_come_back_and_every_exception_is_needed():
    hits = scan_tree()
    messages = [m for key, lines in hits.items() if key not in EXCEPTIONS for m in lines]
    assert not messages, "\n" + "\n".join(messages)
    assert not EXCEPTIONS.keys() - hits.keys()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("the ratings Foretold by it", "Foretold"),
        ("def set_colour(x):", "colour"),
        ("state = carried", "carried"),
        ("from millrace.host.runner import Runner", "millrace.host.r"),
        ("the normalisation layer", "normalisation"),
    ],
)
def test_a_banned_word_is_found(text, word):
    assert [found for _, found, _ in find_words(text)] == [word]


def test_ordinary_words_are_not_banned():
    assert not find_words(
        "It is realistic, precise and otherwise analyzed; besides, noise raises it. "
        "A finished run has gathered samples; millrace launch continues."
    )
