"""Text of others, as it can be shown: it may have been made to do something to a terminal."""

from __future__ import annotations


def visible(text: str) -> str:
    """With escapes in place of what is no character to be seen: control characters, directions, halves of pairs."""
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text])
