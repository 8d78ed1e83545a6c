"""
The source text of a value inside a JSON document.

A parsed value does not say how it was written: integers beyond 64 bits have become floats, escapes and white space
are gone, of members with the same name one is left. What somebody else's signature, hash or parser may depend on is
therefore passed on as a slice of the document, not written again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

# Members and items that are looked at one by one in a document. An attachment has three, a message a dozen.
MAX_MEMBERS = 2000

Span: TypeAlias = tuple[int, int]
Pattern: TypeAlias = Callable[[str, int], re.Match[str] | None]

# Walks at C speed over a value of any size. Numbers stay texts: converting them can take quadratic time.
_scan = json.JSONDecoder(parse_int=str, parse_float=str).scan_once
_blank = re.compile(r"[ \t\n\r]*+").match
_colon = re.compile(r"[ \t\n\r]*+:[ \t\n\r]*+").match
_separator = re.compile(r"[ \t\n\r]*+([,\]}])[ \t\n\r]*+").match


class JSONSource:
    """
    A JSON document as text, and where its values stand.

    Whether it is JSON is for a parser to say beforehand; of what is none, the spans mean nothing.

    :raise ValueError: not UTF-8.
    """

    def __init__(self, document: bytes) -> None:
        self._text = document.decode()
        self._left = MAX_MEMBERS

    @property
    def root(self) -> Span:
        """The outermost value, and the white space behind it."""
        return self._end(_blank, 0), len(self._text)

    def members(self, span: Span) -> dict[str, Span]:
        """
        The values in an object, by name. Of several members with the same name the last one counts, as for a parser.

        :raise ValueError: it is no object, is nested too deep, or more was looked at than :data:`MAX_MEMBERS`.
        """
        return {name: value for name, _, value in self._entries(span, "{}")}

    def items(self, span: Span) -> list[Span]:
        """
        The values in an array.

        :raise ValueError: as :meth:`members`, for an array.
        """
        return [value for _, _, value in self._entries(span, "[]")]

    def value(self, *names: str) -> Span:
        """
        The value that a path of names leads to from the root.

        :raise ValueError: as :meth:`members`, or there is no such member.
        """
        span = self.root
        for name in names:
            members = self.members(span)
            if name not in members:
                raise ValueError("no such member")
            span = members[name]
        return span

    def text(self, span: Span) -> bytes:
        """How a value is written."""
        start, end = span
        return self._text[start:end].encode()

    def edited(self, span: Span, *, without: Collection[str] = (), added: Mapping[str, bytes] | None = None) -> bytes:
        """
        An object with some members left out and others added; what stays is written as it was.

        :param added: JSON by name; members that have one of these names are left out.
        :raise ValueError: as :meth:`members`.
        """
        added = added or {}
        members = [
            self.text(written) + b":" + self.text(value)
            for name, written, value in self._entries(span, "{}")
            if name not in without and name not in added
        ]
        members += [json.dumps(name).encode() + b":" + value for name, value in added.items()]
        return b"{" + b",".join(members) + b"}"

    def _entries(self, span: Span, brackets: str) -> list[tuple[str, Span, Span]]:
        """The entries of an object or array: the name, empty in an array, its span, and that of the value."""
        text, at, entries = self._text, span[0], list[tuple[str, Span, Span]]()
        if text[at : at + 1] != brackets[0]:
            raise ValueError("another kind of value")
        at = self._end(_blank, at + 1)
        closed = text[at : at + 1] == brackets[1]
        while not closed:
            self._left -= 1
            if self._left < 0:
                raise ValueError("too many members")
            name, written = "", (at, at)
            if brackets == "{}":
                name, end = self._scanned(at)
                written, at = (at, end), self._end(_colon, end)
            _, end = self._scanned(at)
            entries.append((name, written, (at, end)))
            separator = _separator(text, end)
            if separator is None:
                raise ValueError("not JSON")
            at, closed = separator.end(), separator[1] != ","
        return entries

    def _scanned(self, start: int) -> tuple[Any, int]:
        """The value that begins there, with its numbers as texts, and where it ends."""
        try:
            return _scan(self._text, start)
        except RecursionError:
            raise ValueError("nested too deep") from None
        except StopIteration:
            raise ValueError("not JSON") from None

    def _end(self, pattern: Pattern, at: int) -> int:
        found = pattern(self._text, at)
        if found is None:
            raise ValueError("not JSON")
        return found.end()
