"""Shows the examples in docstrings as code on the API page."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).+)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Puts a fence around what begins with ``>>>``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change a docstring once it has been read."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
