"""
Base58 with the Bitcoin alphabet (base58btc), as multibase `z` values have it (reference 8.2).

JSON and base64 as they come off the wire, read strictly and at C speed (reference 1.6 and 10.5).

Every failure is a :class:`ValueError` whose text says nothing about the input.

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

import orjson
import pybase64

_BASE58_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58_DIGITS = {character: value for value, character in enumerate(_BASE58_ALPHABET)}
# Ten digits fit in a machine word: long values (did:peer:4 documents) are worked on in pieces of that size.
_BASE58_CHUNK = 10
_BASE58_CHUNK_BASE = 58**_BASE58_CHUNK


def encode_base58(data: bytes) -> str:
    """The digits; each leading zero byte is a leading `1`."""
    rest = int.from_bytes(data, "big")
    pieces = []
    while rest:
        rest, piece = divmod(rest, _BASE58_CHUNK_BASE)
        pieces.append(_encode_base58_digits(piece))
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(pieces)).lstrip("1")


def _encode_base58_digits(piece: int) -> str:
    digits = []
    for _ in range(_BASE58_CHUNK):
        piece, digit = divmod(piece, 58)
        digits.append(_BASE58_ALPHABET[digit])
    return "".join(reversed(digits))


def decode_base58(text: str) -> bytes:
    """
    The bytes. The work grows with the square of the length, so bound it first (8192 characters take a millisecond).

    :raise ValueError: a character outside the alphabet.
    """
    digits = text.lstrip("1")
    number = 0
    try:
        for start in range(0, len(digits), _BASE58_CHUNK):
            piece = 0
            part = digits[start : start + _BASE58_CHUNK]
            for character in part:
                piece = piece * 58 + _BASE58_DIGITS[character]
            number = number * 58 ** len(part) + piece
    except KeyError:
        raise ValueError("not base58") from None
    return bytes(len(text) - len(digits)) + number.to_bytes((number.bit_length() + 7) // 8, "big")


# What the last character of an unpadded group may be: the bits it has too many must be zero, or one envelope could
# be written in several ways.
_FINAL_CHARACTERS = ("", "", "AQgw", "AEIMQUYcgkosw048")
_PADDING = ("", "", "==", "=")
_FINAL_BYTES = tuple(last.encode() for last in _FINAL_CHARACTERS)
_PADDING_BYTES = tuple(padding.encode() for padding in _PADDING)
_WHITE_SPACE = b" \t\r\n\f\v"
_URL_TO_STANDARD = bytes.maketrans(b"-_", b"+/")

# Values in one text. One that takes three bytes in it may take 200 in memory.
MAX_VALUES = 50_000
# Matches more than so many commas, brackets and braces outside of strings. Possessive, so that it looks at no byte
# twice and keeps nothing.
_EXCESS_VALUES = re.compile(
    rb'(?>(?>[^",\[{]++|"(?>[^"\\]++|\\.)*+"?)*+[,\[{]){%d}+' % (MAX_VALUES + 1),
    re.DOTALL,
)


def loads(raw: bytes | str) -> Any:
    """
    Any JSON value. Integers beyond 64 bits come back as floats.

    :raise ValueError: not JSON, not UTF-8, NaN or an infinity, nested more than 1024 deep, or of more than
        :data:`MAX_YAML_VALUES` values.
    """
    if len(raw) > MAX_VALUES:
        check_value_count(raw)
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise ValueError("not JSON") from None


def loads_object(raw: bytes | str) -> dict[str, Any]:
    """
    A JSON object; of members with the same name the last one counts.

    :raise ValueError: as :func:`loads`, or some other JSON value.
    """
    if len(raw) > MAX_VALUES:
        check_value_count(raw)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise ValueError("not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def check_value_count(raw: bytes | str) -> None:
    """
    Bound what parsing takes before it begins. Each value but the first has a comma, bracket or brace before it.

    :raise ValueError: there are more than :data:`MAX_YAML_VALUES` values.
    """
    text = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
    marks = text.count(b",") + text.count(b"[") + text.count(b"{")
    if marks > MAX_VALUES and _EXCESS_VALUES.match(text):
        raise ValueError("too many values")


def loads_unique_members(raw: bytes) -> dict[str, Any]:
    """
    A JSON object in which no object, however deep, has two members of the same name.

    :raise ValueError: as :func:`loads_object`, or there is such a pair.
    """
    value = loads_object(raw)
    # Compact JSON comes back byte for byte unless a member was lost; only other spellings pay for the slow parser.
    try:
        if orjson.dumps(value) == raw:
            return value
    except orjson.JSONEncodeError:
        pass  # deeper than it writes, though not deeper than it reads
    try:
        json.loads(raw, object_pairs_hook=_check_unique_members)
    except (ValueError, RecursionError):
        raise ValueError("not JSON with unique member names") from None
    return value


def _check_unique_members(members: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(members)
    if len(value) != len(members):
        raise ValueError
    return value


def dumps(value: object) -> bytes:
    """
    Compact JSON in UTF-8, members in the order they have.

    :raise ValueError: what JSON or orjson cannot write, which includes integers beyond 64 bits and values nested
        more than 254 deep (:func:`loads` reads deeper ones).
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise ValueError("no JSON for this") from None


def decode_base64url(text: object) -> bytes:
    """
    Base64url, without padding or with all of it, and with nothing else in between.

    :param text: str or bytes; whatever else JSON may have in its place is malformed too.
    :raise ValueError: a foreign character (white space, `+` and `/` included), a wrong length, stray padding, or
        bits left over at the end that are not zero.
    """
    if not isinstance(text, str):
        text = _decode_latin1(text)
    rest = len(text) % 4
    if not rest and text.endswith("="):
        text = text.rstrip("=")
        rest = len(text) % 4
        # What is not padded to a multiple of four fails below: `=` is no last character.
        if not rest:
            raise ValueError("not base64url")
    if rest:
        if text[-1] not in _FINAL_CHARACTERS[rest]:
            raise ValueError("not base64url")
        text += _PADDING[rest]
    # pybase64 takes the standard alphabet as well, even where it is told another one.
    if "+" in text or "/" in text:
        raise ValueError("not base64url")
    try:
        return pybase64.b64decode(text, b"-_", validate=True)
    except ValueError:
        raise ValueError("not base64url") from None


def decode_unpadded_base64url(text: bytes) -> bytes:
    """
    The same for many bytes, without padding.

    :raise ValueError: as :func:`decode_base64url`, or there is padding.
    """
    rest = len(text) % 4
    if rest:
        if text[-1] not in _FINAL_BYTES[rest]:
            raise ValueError("not base64url")
        text += _PADDING_BYTES[rest]
    elif text.endswith(b"="):
        raise ValueError("padded")
    if b"+" in text or b"/" in text:
        raise ValueError("not base64url")
    return pybase64.b64decode(text, b"-_", validate=True)


def _decode_latin1(text: object) -> str:
    if not isinstance(text, bytes):
        raise ValueError("not a text")
    return text.decode("latin-1")


def encode_base64url(data: bytes) -> str:
    """Base64url without padding."""
    return pybase64.b64encode_as_string(data, b"-_").rstrip("=")


def decode_lenient_base64(text: str) -> bytes:
    """
    Base64 as it is found in attachments: either alphabet or both, padded or not, with white space anywhere
    (reference 2.2).

    :raise ValueError: any other character, or a length that no data has.
    """
    try:
        body = text.encode("ascii").translate(_URL_TO_STANDARD, _WHITE_SPACE).rstrip(b"=").decode()
    except UnicodeEncodeError:
        raise ValueError("not base64") from None
    if len(body) % 4 == 1:
        raise ValueError("not base64")
    try:
        return pybase64.b64decode(body + _PADDING[len(body) % 4], validate=True)
    except ValueError:
        raise ValueError("not base64") from None


def decode_base64(text: object) -> bytes:
    """
    Decode base64 in either alphabet, unpadded or fully padded.

    :raise ValueError: as :func:`decode_base64url`.
    """
    if not isinstance(text, str):
        raise ValueError("not base64")
    return decode_base64url(text.replace("+", "-").replace("/", "_"))


def encode_base64(data: bytes) -> str:
    """Base64 in the standard alphabet, padded."""
    return pybase64.b64encode_as_string(data)


def wrap_json_fragment(text: bytes) -> object:
    """JSON that is written already, to be put into a larger value for :func:`dumps` as it is."""
    return orjson.Fragment(text)


# Members and items that are looked at one by one in a document. An attachment has three, a message a dozen.
MAX_MEMBERS = 2000


class PathStep(Enum):
    """A step of a path."""

    ITEM = "every item of an array"


EACH_ITEM: Final = PathStep.ITEM

Span: TypeAlias = tuple[int, int]
PatternMatcher: TypeAlias = Callable[[str, int], re.Match[str] | None]

# Walks at C speed over a value of any size. Numbers stay texts: converting them can take quadratic time.
_scan_value = json.JSONDecoder(parse_int=str, parse_float=str).raw_decode
_match_blank = re.compile(r"[ \t\n\r]*+").match
_match_colon = re.compile(r"[ \t\n\r]*+:[ \t\n\r]*+").match
_match_separator = re.compile(r"[ \t\n\r]*+([,\]}])[ \t\n\r]*+").match
_STRING_LITERAL = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BRACES_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_DEPTH_STEPS = [1 if byte == ord("[") else -1 for byte in range(256)]


def measure_nesting_depth(text: bytes) -> int:
    """Objects and arrays within one another in a JSON text, the outermost counted; in linear time."""
    brackets = _STRING_LITERAL.sub(b"", text).translate(_BRACES_TO_BRACKETS, _ALL_BUT_BRACKETS)
    found = 0
    while brackets:
        # Without the innermost pairs it is flatter by one. That is the faster way as long as they are many.
        fewer = brackets.replace(b"[]", b"")
        found += 1
        if 2 * len(fewer) > len(brackets):
            return found + max(accumulate(map(_DEPTH_STEPS.__getitem__, fewer)))
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

    def find(self, *path: str | PathStep) -> Any:
        """
        Where a path leads to from the outermost value; of several members with the same name the last one counts, as
        for a parser.

        :param path: names of members, and :data:`EACH_ITEM` for all items of an array.
        :return: the span of a value, None where there is none; for each item of an array, in a list.
        :raise ValueError: it is nested too deep, or more was looked at than :data:`MAX_MEMBERS`.
        """
        return self._find(self._end(_match_blank, 0), path)[0]

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
        start = self._end(_match_blank, 0) if span is None else span[0]
        if self._text[start : start + 1] != "{":
            raise ValueError("no object")
        members = []
        at, more = self._first(start)
        while more:
            name, name_end = self._scanned(at)
            value = self._end(_match_colon, name_end)
            end = self._scanned(value)[1]
            if name not in without and name not in added:
                members.append(self.text((at, name_end)) + b":" + self.text((value, end)))
            at, more = self._next(end)
        members += [json.dumps(name).encode() + b":" + value for name, value in added.items()]
        return b"{" + b",".join(members) + b"}"

    def _find(self, start: int, path: Sequence[str | PathStep]) -> tuple[Any, int]:
        """What a path leads to from the value that begins there, and where that value ends: it is read only once."""
        if not path or self._text[start : start + 1] != ("[" if path[0] is EACH_ITEM else "{"):
            end = self._scanned(start)[1]
            return (None if path else (start, end)), end
        step, *rest = path
        items: list[Any] = []
        found: Any = None
        at, more = self._first(start)
        while more:
            if step is EACH_ITEM:
                found, end = self._find(at, rest)
                items.append(found)
            else:
                name, end = self._scanned(at)
                at = self._end(_match_colon, end)
                if name == step:
                    found, end = self._find(at, rest)
                else:
                    end = self._scanned(at)[1]
            at, more = self._next(end)
        return (items if step is EACH_ITEM else found), at

    def _first(self, start: int) -> tuple[int, bool]:
        """Where the first entry of an object or array begins; without one, where that ends, and False."""
        at = self._end(_match_blank, start + 1)
        return (at + 1, False) if self._text[at : at + 1] in ("]", "}") else (at, self._counted())

    def _next(self, end: int) -> tuple[int, bool]:
        """The same for the entry after the one that ends there."""
        separator = _match_separator(self._text, end)
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
            return _scan_value(self._text, start)
        except RecursionError:
            raise ValueError("nested too deep") from None

    def _end(self, pattern: PatternMatcher, at: int) -> int:
        found = pattern(self._text, at)
        if found is None:
            raise ValueError("not JSON")
        return found.end()
