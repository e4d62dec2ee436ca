"""The tree keeps to plain American English and to the names in CONTRIBUTING.md.

A word that comes back is a test that fails. Where an old word has to stay, ``EXCEPTIONS``
lists it by file, with the reason.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
AREAS = (
    *sorted(
        f"{parent}/{path.name}"
        for parent in ("millrace", "millrace/apps", "tests")
        for path in (ROOT / parent).iterdir()
        if path.is_dir() and path.name not in ("apps", "__pycache__")
    ),
    *("millrace", "tests/apps", "tests", "benchmarks", "docs", "examples", ".github", "."),
)
SUFFIXES = {".cff", ".css", ".md", ".py", ".toml", ".yaml", ".yml"}
NOT_OURS = {
    "benchmarks/results": "reports are kept as they were written",
    "docs/results.md": "made from those reports",
    "tests/test_language.py": "has all the words",
}

WORDS = {
    # Words of another century, and what to say instead.
    r"\bforet(?:ell|old)\w*": "predict",
    r"\b(?:where|there|here)(?:in|by|of)\b": "in which, so, of it",
    r"\banew\b": "again",
    r"\blest\b": "so that ... not",
    r"\blikewise\b": "also",
    r"\bshall\b": "must, will",
    r"\bwhilst\b|\bamongst\b|\btowards\b|\bfor ever\b": "while, among, toward, forever",
    r"\bbeside\b": "next to",
    r"\bby itself\b": "on its own",
    r"\bforth and back\b": "back and forth",
    r"\bgoes on\b": "continues",
    r"\bis to be\b": "must be",
    r"\bone's own\b": "your own",
    r"\bsaid of\b": "say the thing",
    r"\bsees to it\b": "checked by",
    r"\bso many\b": "N, the number of",
    r"\btaken for\b": "predicted as, mistaken for",
    r"\bcan be told\b": "options of",
    r"\bdata[ -]sets?\b": "dataset",
    # Metaphors. README has the only one.
    r"\bmillers?\b|\bmills\b|\bmill race\b|\bsluices?\b|\btimetables?\b": "the thing itself",
    # British spellings.
    r"behaviour|catalogue|colour|favour|honour|neighbour": "American spelling",
    r"\bcentre|\bgrey\b|learnt|artefact|licence|fulfil\b": "American spelling",
    r"(?:label|model|cancel|travel)l(?:ed|ing)\b": "American spelling",
    r"analyse": "American spelling",
    r"(?:binar|general|initial|local|maxim|minim|normal|optim|organ|parallel|quant|random"
    r"|real|recogn|regular|serial|special|standard|summar|synchron|util|vector|visual)"
    r"is(?:e|ed|er|ers|es|ing|ation)": "American spelling",
}
NAMES = {
    # Old names of this code that mean nothing else. CHANGELOG.md lists them all.
    r"\bcarried(?:_reduction)?\b": "model_state",
    r"\b(?:Beside|put_aside)\b": "AsyncValidation, snapshot",
    r"\b(?:account_of|from_first|peers_of)\b": "run_metadata, broadcast",
    r"\b(?:Callee|Finished)\b": "RunResult",
    r"\b(?:FiniteWatch|Gathered|staged_loss|separated_update)\b": "the new name",
    r"\b(?:said_of|lines_about|warnings_about)\b": "format_*, notices",
    r"\b(?:stops_diverged|when_compiled|by_itself|picture_shape)\b": "the new name",
    r"\bmillrace[./](?:host|launch)[./]\w": "loop, run, checkpoint, distributed, commands",
}


class Exception_(NamedTuple):
    """A word that may stay in a file."""

    path: str
    word: str
    reason: str


_ALIAS = "the old spelling of an option is an alias"
_QUOTE = "quotes command lines from other people's documents"
EXCEPTIONS = [
    Exception_("README.md", "mill race", "the one metaphor"),
    Exception_("millrace/apps/cnn/README.md", "optimiser", _ALIAS),
    Exception_("millrace/apps/cnn/README.md", "optimisation", _ALIAS),
    Exception_("millrace/apps/cnn/README.md", "normalise", _ALIAS),
    Exception_("millrace/apps/cnn/config/data.py", "normalise", _ALIAS),
    Exception_("millrace/apps/cnn/config/graphcore.py", "optimisation", _ALIAS),
    Exception_("millrace/apps/cnn/config/training.py", "optimiser", _ALIAS),
    Exception_("millrace/apps/vcd/config/sections.py", "binarised", _ALIAS),
    Exception_("millrace/bench/spec.yml", "normalise", _QUOTE),
    Exception_("millrace/bench/spec.yml", "optimiser", _QUOTE),
    Exception_("millrace/bench/spec.yml", "optimisation", _QUOTE),
    Exception_("millrace/checkpoint/manifest.py", "carried", "field in format 1"),
    Exception_("millrace/checkpoint/manifest.py", "optimiser", "field in format 1"),
    Exception_("millrace/program/step.py", "carried", "the old name is an alias"),
    Exception_("mkdocs.yml", "grey", "name of a color in the theme"),
    Exception_("docs/from_graphcore.md", "normalise", _ALIAS),
    Exception_("docs/from_graphcore.md", "optimisation", _ALIAS),
    Exception_("tests/apps/cnn/test_benchmark_commands.py", "normalise", _QUOTE),
    Exception_("tests/apps/cnn/test_benchmark_commands.py", "optimiser", _QUOTE),
    Exception_("tests/apps/cnn/test_benchmark_commands.py", "optimisation", _QUOTE),
    Exception_("tests/apps/cnn/test_seed_commands.py", "optimisation", _QUOTE),
    Exception_("tests/checkpoint/test_files.py", "carried", "writes format 1"),
    Exception_("tests/distributed/test_poprun_commands.py", "normalise", _QUOTE),
    Exception_("tests/distributed/test_poprun_commands.py", "optimiser", _QUOTE),
    Exception_("tests/distributed/test_poprun_commands.py", "optimisation", _QUOTE),
    Exception_("tests/docs/test_from_graphcore.py", "normalise", _QUOTE),
    Exception_("tests/docs/test_from_graphcore.py", "optimisation", _QUOTE),
]


class Hit(NamedTuple):
    """A banned word in the tree."""

    path: str
    line: int
    word: str
    instead: str


def files_in(area: str) -> list[Path]:
    """Return the files of an area that no smaller area has."""
    folder = ROOT / area
    is_whole = not any(a.startswith(f"{area}/") for a in AREAS) and area != "."
    found = folder.rglob("*") if is_whole else folder.iterdir()
    return sorted(
        p for p in found if p.is_file() and (p.suffix in SUFFIXES or is_makefile(p))
    )


def is_makefile(path: Path) -> bool:
    return path.name == "Makefile"


def find_hits(path: Path) -> Iterator[Hit]:
    name = path.relative_to(ROOT).as_posix()
    if any(name == entry or name.startswith(f"{entry}/") for entry in NOT_OURS):
        return
    # The changelog lists old names.
    banned = WORDS if name == "CHANGELOG.md" else WORDS | NAMES
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for pattern, instead in banned.items():
            # Names are told apart by their case, words are not.
            flags = re.IGNORECASE if pattern in WORDS else 0
            for match in re.finditer(pattern, line, flags):
                yield Hit(name, number, match[0], instead)


def excuse(hit: Hit) -> Exception_ | None:
    """Return the exception that allows a hit."""
    for entry in EXCEPTIONS:
        if entry.path == hit.path and entry.word == hit.word.lower():
            return entry
    return None


@pytest.mark.parametrize("area", AREAS)
def test_no_banned_word_comes_back(area):
    hits = [hit for path in files_in(area) for hit in find_hits(path) if not excuse(hit)]
    assert not hits, "\n" + "\n".join(
        f"{hit.path}:{hit.line}: {hit.word!r}; say: {hit.instead}" for hit in hits
    )


def test_every_exception_is_needed():
    used = {
        excuse(hit)
        for path in map(ROOT.joinpath, {e.path for e in EXCEPTIONS})
        for hit in find_hits(path)
    }
    assert [entry for entry in EXCEPTIONS if entry not in used] == []


def test_areas_have_all_files():
    listed = {path for area in AREAS for path in files_in(area)}
    top = ("millrace", "tests", "docs", "examples", "benchmarks")
    everything = {
        path
        for name in top
        for path in (ROOT / name).rglob("*")
        if path.is_file() and path.suffix in SUFFIXES
    }
    assert everything - listed == set()


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
def test_a_banned_word_would_be_seen(text, word, tmp_path, monkeypatch):
    import test_language as module

    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(text)
    assert [hit.word for hit in module.find_hits(tmp_path / "page.md")] == [word]


def test_ordinary_words_are_not_banned(tmp_path, monkeypatch):
    import test_language as module

    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(
        "It is realistic, precise and otherwise analyzed; besides, noise raises it. "
        "A finished run has gathered samples; millrace launch continues."
    )
    assert list(module.find_hits(tmp_path / "page.md")) == []
