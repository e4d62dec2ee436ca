"""Fits pages written for the repository into the site: links and included pages."""

import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)#]+)(#[^)]*)?\)")
_SNIPPET = re.compile(r'^--8<-- "(.+README\.md)"$', re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Include READMEs below a page's own text, and turn links that leave ``docs``."""
    markdown = _SNIPPET.sub(lambda match: _included(_ROOT / match[1]), markdown)
    return _LINK.sub(_link, markdown)


def _included(path: Path) -> str:
    """Return a README with its headings one level lower."""
    text = re.sub(r"^(#+ )", r"#\1", path.read_text(), flags=re.MULTILINE)
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    # A comment in a block of commands is no heading.
    parts[1::2] = [re.sub(r"^#(#+ )", r"\1", p, flags=re.MULTILINE) for p in parts[1::2]]
    return "".join(parts)


def _link(match: re.Match[str]) -> str:
    """Point into the site where the target is a page of it, otherwise just name it."""
    words, _, target, place = match.groups()
    if target.startswith("docs/"):
        return f"[{words}]({target.removeprefix('docs/')}{place or ''})"
    return words
