"""
The source text of a value inside a JSON document.

A parsed value does not say how it was written: integers beyond 64 bits have become floats, escapes and white space
are gone, of members with the same name one is left. What somebody else's signature, hash or parser may depend on is
therefore passed on as a slice of the document, not written again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from itertools import accumulate
from typing import Any, Final, TypeAlias

# Members and items that are looked at one by one in a document. An attachment has three, a message a dozen.
MAX_MEMBERS = 2000


class Each(Enum):
    """A step of a path."""

    ITEM = "every item of an array"


EACH: Final = Each.ITEM

Span: TypeAlias = tuple[int, int]
Pattern: TypeAlias = Callable[[str, int], re.Match[str] | None]

# Walks at C speed over a value of any size. Numbers stay texts: converting them can take quadratic time.
_scan = json.JSONDecoder(parse_int=str, parse_float=str).raw_decode
_blank = re.compile(r"[ \t\n\r]*+").match
_colon = re.compile(r"[ \t\n\r]*+:[ \t\n\r]*+").match
_separator = re.compile(r"[ \t\n\r]*+([,\]}])[ \t\n\r]*+").match
_string = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_as_arrays = bytes.maketrans(b"{}", b"[]")
_no_brackets = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEPS = [1 if byte == ord("[") else -1 for byte in range(256)]


def depth(text: bytes) -> int:
    """Objects and arrays within one another in a JSON text, the outermost counted; in linear time."""
    brackets = _string.sub(b"", text).translate(_as_arrays, _no_brackets)
    found = 0
    while brackets:
        # Without the innermost pairs it is flatter by one. That is the faster way as long as they are many.
        fewer = brackets.replace(b"[]", b"")
        found += 1
        if 2 * len(fewer) > len(brackets):
            return found + max(accumulate(map(_STEPS.__getitem__, fewer)))
        brackets = fewer
    return found


class JSONSource:
    """
    A JSON document as text, and where its values stand.

    Whether it is JSON is for a parser to say beforehand; of what is none, the spans mean nothing.

    :raise ValueError: not UTF-8.
    """

    def __init__(self, document: bytes) -> None:
        self._text = document.decode()
        self._left = MAX_MEMBERS

    def find(self, *path: str | Each) -> Any:
        """
        Where a path leads to from the outermost value; of several members with the same name the last one counts, as
        for a parser.

        :param path: names of members, and :data:`EACH` for all items of an array.
        :return: the span of a value, None where there is none; for each item of an array, in a list.
        :raise ValueError: it is nested too deep, or more was looked at than :data:`MAX_MEMBERS`.
        """
        return self._find(self._end(_blank, 0), path)[0]

    def text(self, span: Span) -> bytes:
        """How a value is written."""
        start, end = span
        return self._text[start:end].encode()

    def edited(
        self, span: Span | None = None, *, without: Collection[str] = (), added: Mapping[str, bytes] | None = None
    ) -> bytes:
        """
        An object with some members left out and others added; what stays is written as it was.

        :param span: of the object; the outermost value unless given.
        :param added: JSON by name; members that have one of these names are left out.
        :raise ValueError: as :meth:`find`, or it is no object.
        """
        added = added or {}
        start = self._end(_blank, 0) if span is None else span[0]
        if self._text[start : start + 1] != "{":
            raise ValueError("no object")
        members = []
        at, more = self._first(start)
        while more:
            name, name_end = self._scanned(at)
            value = self._end(_colon, name_end)
            end = self._scanned(value)[1]
            if name not in without and name not in added:
                members.append(self.text((at, name_end)) + b":" + self.text((value, end)))
            at, more = self._next(end)
        members += [json.dumps(name).encode() + b":" + value for name, value in added.items()]
        return b"{" + b",".join(members) + b"}"

    def _find(self, start: int, path: Sequence[str | Each]) -> tuple[Any, int]:
        """What a path leads to from the value that begins there, and where that value ends: it is read only once."""
        if not path or self._text[start : start + 1] != ("[" if path[0] is EACH else "{"):
            end = self._scanned(start)[1]
            return (None if path else (start, end)), end
        step, *rest = path
        items: list[Any] = []
        found: Any = None
        at, more = self._first(start)
        while more:
            if step is EACH:
                found, end = self._find(at, rest)
                items.append(found)
            else:
                name, end = self._scanned(at)
                at = self._end(_colon, end)
                if name == step:
                    found, end = self._find(at, rest)
                else:
                    end = self._scanned(at)[1]
            at, more = self._next(end)
        return (items if step is EACH else found), at

    def _first(self, start: int) -> tuple[int, bool]:
        """Where the first entry of an object or array begins; without one, where that ends, and False."""
        at = self._end(_blank, start + 1)
        return (at + 1, False) if self._text[at : at + 1] in ("]", "}") else (at, self._counted())

    def _next(self, end: int) -> tuple[int, bool]:
        """The same for the entry after the one that ends there."""
        separator = _separator(self._text, end)
        if separator is None:
            raise ValueError("not JSON")
        return (separator.end(), self._counted()) if separator[1] == "," else (separator.end(1), False)

    def _counted(self) -> bool:
        self._left -= 1
        if self._left < 0:
            raise ValueError("too many members")
        return True

    def _scanned(self, start: int) -> tuple[Any, int]:
        """The value that begins there, with its numbers as texts, and where it ends."""
        try:
            return _scan(self._text, start)
        except RecursionError:
            raise ValueError("nested too deep") from None

    def _end(self, pattern: Pattern, at: int) -> int:
        found = pattern(self._text, at)
        if found is None:
            raise ValueError("not JSON")
        return found.end()
