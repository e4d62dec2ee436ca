"""The fast parser agrees with the plain one, or declines."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.data.ratings.fast_parser import parse_fast
from millrace.data.ratings.parser import BadLine, LineLayout, parse_lines

fields = st.sampled_from(
    [
        "1",
        "23",
        "456",
        "0",
        "4.5",
        "3.",
        ".5",
        "5.25",
        "007",
        "-1",
        "x",
        "",
        " 2",
        '"3"',
        ".",
        "björn",
        "ß",
        "\u3000x",
        "x\u00a0",
        "a text of more than one word of bytes",
        "\0",
    ]
)


@given(st.lists(st.tuples(fields, fields, fields), min_size=1, max_size=6), st.booleans())
def test_the_fast_parser_agrees_with_the_plain_one_or_declines(lines, texts):
    chunk = "".join("\t".join(line) + "\n" for line in lines).encode()
    kinds = frozenset({"user", "item"} if texts else ())
    layout = LineLayout(b"\t", 3, 0, 1, 2, None, (0.5, 500), kinds)
    fast = parse_fast(chunk, layout)
    try:
        plain = parse_lines(chunk, layout)
    except BadLine:
        assert fast is None
        return
    if fast is not None:
        for a, b in zip(fast[:3], plain[:3], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("prefix", ["", "u", "a user of any length ", "ü"])
def test_ordinary_lines_are_parsed_fast(prefix):
    chunk = "".join(f"{prefix}{n}::{n % 7}::{n % 10 / 2 + 0.5}::{n}\n" for n in range(99))
    kinds = frozenset({"user"} if prefix else ())
    layout = LineLayout(b"::", 4, 0, 1, 2, 3, (0.5, 5), kinds)
    fast = parse_fast(chunk.encode(), layout)
    assert fast is not None
    plain = parse_lines(chunk.encode(), layout)
    for a, b in zip(fast, plain, strict=True):
        np.testing.assert_array_equal(a, b)
