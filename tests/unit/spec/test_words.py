"""Words of others inside flodl's own lines."""

import pytest

from flodl.spec.words import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ValueError: boom", "ValueError: boom"),
        ("two\n\tlines, é", "two\n\tlines, é"),
        ("\x1b[31mred\x1b]0;title\x07\r", r"\x1b[31mred\x1b]0;title\x07\r"),
        ("\x9b2J\u202e", r"\x9b2J\u202e"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
