"""Adapt pages written for the repository to the site: links and included READMEs."""

import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)#]+)(#[^)]*)?\)")
_SNIPPET = re.compile(r'^--8<-- "(.+README\.md)"$', re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Include READMEs, and rewrite links that point outside of ``docs``."""
    if page.file.name.startswith("results_"):
        page.meta["hide"] = ["toc"]  # tables are as wide as the rest of the window
    markdown = _SNIPPET.sub(lambda match: _included(_ROOT / match[1]), markdown)
    return _LINK.sub(_link, markdown)


def _included(path: Path) -> str:
    """Return a README with its headings one level lower."""
    text = re.sub(r"^(#+ )", r"#\1", path.read_text(), flags=re.MULTILINE)
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    # A comment in a code block is not a heading.
    parts[1::2] = [re.sub(r"^#(#+ )", r"\1", p, flags=re.MULTILINE) for p in parts[1::2]]
    return "".join(parts)


def _link(match: re.Match[str]) -> str:
    """Link to a page of the site, or keep only the text of a link to another file."""
    text, _, target, anchor = match.groups()
    if target.startswith("docs/"):
        return f"[{text}]({target.removeprefix('docs/')}{anchor or ''})"
    return text
