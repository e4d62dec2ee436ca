"""The options as they were typed, for messages: ``--batch-size``, not micro_batch_size.

A process has one command line, so there is one record of it. Calls from Python leave none.
"""

import argparse
import re
from collections.abc import Sequence

_typed: dict[str, str] = {}
"""Options by name, as they were typed."""


def record_spelling(
    parser: argparse.ArgumentParser, given: Sequence[str], parsed: Sequence[str]
) -> None:
    """Remember how the options of a command line were spelled.

    Args:
        parser: The parser of the command.
        given: The words as they were typed.
        parsed: The same words as the parser gets them.
    """
    flags = {name: action for action in parser._actions for name in action.option_strings}
    _typed.clear()
    for word, as_parsed in zip(given, parsed, strict=True):
        typed, name = word.partition("=")[0], as_parsed.partition("=")[0]
        matching = [flags[name]] if name in flags else []
        if not matching and name.startswith("--"):  # possibly abbreviated
            matching = [action for known, action in flags.items() if known.startswith(name)]
        destinations = {action.dest for action in matching}
        if len(destinations) == 1:
            _typed[destinations.pop()] = typed


def as_typed(text: str) -> str:
    """Return a message with the options that it names as they were typed.

    A name of one word could be an ordinary word, so besides its flag it is replaced only at
    the start: "seed must be". A name in a path is none.
    """
    for name, typed in _typed.items():
        pattern = f"--{name.replace('_', '-')}"
        if "_" in name:
            pattern += f"|{name}"
        else:
            pattern += rf"|(?:^|(?<=: )){name}(?= (?:must|was|is) )"
        text = re.sub(rf"(?<![\w./-])(?:{pattern})(?![\w/-]|\.\w)", typed, text)
    return text
