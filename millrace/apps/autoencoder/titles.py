"""What items are called: the title files of Netflix and MovieLens, and the like."""

import codecs
import csv
import gzip
from pathlib import Path

from millrace.config import ConfigurationError

_DELIMITERS = ("::", "|", "\t", ",")


def load_titles(path: Path) -> dict[str, str]:
    """Return the titles by item.

    A line has the identifier, then the title; with commas between, a year may stand
    between them, as in Netflix's file, whose titles may have commas themselves. What
    follows the title in MovieLens' files is left out.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"Cannot read the titles in {path}: {reason}.") from error
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = content.decode("latin-1")  # Netflix's and MovieLens' older files
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigurationError(f"The file of titles {path} is empty.")
    delimiter = _delimiter_of(lines[0])
    fields = [line.split(delimiter) for line in lines]
    if delimiter == ",":
        fields = [_from_commas(line) for line in lines]
    return {entry[0].strip(): entry[1].strip() for entry in fields if len(entry) > 1}


def _delimiter_of(line: str) -> str:
    """Return what follows the identifier; others may stand in the title and after it."""
    found = {line.find(mark): mark for mark in _DELIMITERS if mark in line}
    return found[min(found)] if found else ","


def _from_commas(line: str) -> list[str]:
    entry = next(csv.reader([line]))
    if len(entry) > 2 and (entry[1].isdigit() or entry[1] == "NULL"):
        title, year = line.split(",", 2)[2], entry[1]
        return [entry[0], title if year == "NULL" else f"{title} ({year})"]
    return entry
