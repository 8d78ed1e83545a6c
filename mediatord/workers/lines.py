"""What supervisor and workers say to each other: a JSON array of a word and what belongs to it, one a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Hear = Callable[[str, Any], None]


def written(word: str, content: Any = None) -> bytes:
    """One line."""
    return json.dumps([word, content], separators=(",", ":")).encode("ascii") + b"\n"


class Lines:
    """
    Lines out of the pieces that pipes deliver.

    :param hear: called with the word and the content of every line.
    """

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._begun = bytearray()

    def feed(self, data: bytes) -> None:
        """Take what came."""
        self._begun += data
        if b"\n" not in data:
            return
        *whole, rest = bytes(self._begun).split(b"\n")
        self._begun[:] = rest
        for line in whole:
            self._hear(*json.loads(line))
