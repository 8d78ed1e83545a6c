"""
Base58, base64 and strict JSON of the wire formats, and access to the source text of JSON values (reference 1.6, 8.2,
10.5).

Every decoder raises a :class:`ValueError` whose text reveals nothing of the input.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from hashlib import sha256
from itertools import accumulate
from typing import Any, Final, TypeAlias

import orjson
import pybase64
from pybase64 import b64decode

_BASE58_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58_DIGITS = {character: value for value, character in enumerate(_BASE58_ALPHABET)}
# Ten digits fit into a machine word. Long values (did:peer:4 documents) are converted in chunks of that size.
_BASE58_CHUNK = 10
_BASE58_CHUNK_BASE = 58**_BASE58_CHUNK
# Multicodec of a SHA2-256 hash and its length.
SHA2_256_MULTIHASH = b"\x12\x20"


def encode_base58(data: bytes) -> str:
    """Encode as base58btc; each leading zero byte becomes a leading `1`."""
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
    Decode base58btc. Takes quadratic time, so callers bound the length first (8192 characters take 1 ms).

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


# Allowed last characters of an unpadded group: its unused bits must be zero, or one envelope would have several
# encodings.
_FINAL_CHARACTERS = (b"", b"", b"AQgw", b"AEIMQUYcgkosw048")
_PADDING = (b"", b"", b"==", b"=")
_PLUS, _SLASH = b"+/"
_WHITE_SPACE = b" \t\r\n\f\v"
_URL_TO_STANDARD = bytes.maketrans(b"-_", b"+/")

# Maximum number of JSON values in one document. A value of three bytes can take 200 bytes of memory once parsed.
MAX_VALUES = 50_000
# Matches more than MAX_VALUES commas, brackets and braces outside of strings. Possessive: linear time, no
# backtracking.
_EXCESS_VALUES = re.compile(
    rb'(?>(?>[^",\[{]++|"(?>[^"\\]++|\\.)*+"?)*+[,\[{]){%d}+' % (MAX_VALUES + 1),
    re.DOTALL,
)


def loads(raw: bytes | str) -> Any:
    """
    Parse JSON. Integers beyond 64 bits become floats.

    :raise ValueError: not JSON, not UTF-8, NaN or an infinity, nested more than 1024 deep, or more than
        :data:`MAX_VALUES` values.
    """
    if len(raw) > MAX_VALUES:
        check_value_count(raw)
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise ValueError("not JSON") from None


def loads_object(raw: bytes | str) -> dict[str, Any]:
    """
    Parse a JSON object; the last of duplicate members wins.

    :raise ValueError: as :func:`loads`, or another JSON value.
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
    Limit the memory of a parsed document before parsing it: each value but the first follows a comma, bracket or
    brace.

    :raise ValueError: more than :data:`MAX_VALUES` values.
    """
    text = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
    marks = text.count(b",") + text.count(b"[") + text.count(b"{")
    if marks > MAX_VALUES and _EXCESS_VALUES.match(text):
        raise ValueError("too many values")


def loads_unique_members(raw: bytes) -> dict[str, Any]:
    """
    Parse a JSON object that has no duplicate members at any depth.

    :raise ValueError: as :func:`loads_object`, or a duplicate.
    """
    value = loads_object(raw)
    # Compact JSON round-trips byte by byte unless a member was lost; only other spellings need the slow parser.
    try:
        if orjson.dumps(value) == raw:
            return value
    except orjson.JSONEncodeError:
        pass  # orjson reads deeper nesting than it writes
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
    Serialise as compact UTF-8 JSON, members in their given order.

    The result of orjson keeps what was reserved for escapes, about ten times its length, so it is copied.

    :raise ValueError: not serialisable; this includes integers beyond 64 bits and nesting beyond 254 (:func:`loads`
        reads deeper values).
    """
    try:
        return bytes(memoryview(orjson.dumps(value)))
    except orjson.JSONEncodeError:
        raise ValueError("no JSON for this") from None


def decode_base64url(text: object) -> bytes:
    """
    Decode base64url strictly, unpadded or fully padded.

    :param text: str or bytes; other JSON values are malformed.
    :raise ValueError: a foreign character (white space, `+` and `/` included), a wrong length, stray padding, or
        unused bits that are not zero.
    """
    if isinstance(text, str):
        text = text.encode("ascii", "replace")
    elif not isinstance(text, bytes):
        raise ValueError("not a text")
    if text.endswith(b"=") and not len(text) % 4:
        text = text.removesuffix(b"=").removesuffix(b"=")
    rest = len(text) % 4
    if rest:
        # A remaining `=` fails here as well.
        if text[-1] not in _FINAL_CHARACTERS[rest]:
            raise ValueError("not base64url")
        text += _PADDING[rest]
    # pybase64 accepts the standard alphabet even if told another one.
    if _PLUS in text or _SLASH in text:
        raise ValueError("not base64url")
    try:
        return b64decode(text, b"-_", True)
    except ValueError:
        raise ValueError("not base64url") from None


def encode_multihash(data: bytes) -> str:
    """The SHA-256 multihash of `data` as base58btc multibase."""
    return "z" + encode_base58(SHA2_256_MULTIHASH + sha256(data).digest())


def encode_base64url(data: bytes) -> str:
    """Base64url without padding."""
    return pybase64.b64encode_as_string(data, b"-_").rstrip("=")


def decode_lenient_base64(text: str) -> bytes:
    """
    Decode base64 of attachments: either alphabet, padded or not, white space anywhere (reference 2.2).

    :raise ValueError: any other character, or an impossible length.
    """
    body = text.encode("ascii", "replace").translate(_URL_TO_STANDARD, _WHITE_SPACE).rstrip(b"=")
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


# Embeds serialised JSON verbatim in a value for dumps().
wrap_json_fragment: Callable[[bytes], object] = orjson.Fragment


# Maximum number of members and items visited in one document. An attachment has three, a message a dozen.
MAX_MEMBERS = 2000


class PathStep(Enum):
    """A step of a path that is not a member name."""

    ITEM = "every item of an array"


EACH_ITEM: Final = PathStep.ITEM

Span: TypeAlias = tuple[int, int]
PatternMatcher: TypeAlias = Callable[[str, int], re.Match[str] | None]

# Scans values of any size at C speed. Numbers stay text, since converting them can take quadratic time.
_scan_value = json.JSONDecoder(parse_int=str, parse_float=str).raw_decode
_match_blank = re.compile(r"[ \t\n\r]*+").match
_match_colon = re.compile(r"[ \t\n\r]*+:[ \t\n\r]*+").match
_match_separator = re.compile(r"[ \t\n\r]*+([,\]}])[ \t\n\r]*+").match
_STRING_LITERAL = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BRACES_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_DEPTH_STEPS = [1 if byte == ord("[") else -1 for byte in range(256)]


def measure_nesting_depth(text: bytes) -> int:
    """Nesting depth of objects and arrays in a JSON text, the outermost counted; linear time."""
    brackets = _STRING_LITERAL.sub(b"", text).translate(_BRACES_TO_BRACKETS, _ALL_BUT_BRACKETS)
    found = 0
    while brackets:
        # Removing the innermost pairs reduces the depth by one. That is fast while there are many of them.
        fewer = brackets.replace(b"[]", b"")
        found += 1
        if 2 * len(fewer) > len(brackets):
            return found + max(accumulate(map(_DEPTH_STEPS.__getitem__, fewer)))
        brackets = fewer
    return found


class JSONSource:
    """
    The source text of a JSON document with access to the spans of its values.

    A parser loses details: integers beyond 64 bits become floats, escapes and white space vanish, duplicates
    collapse. Values that are covered by somebody's signature or hash are therefore forwarded as slices of the source.
    The document must have been validated by a parser; spans of invalid JSON are meaningless.

    :raise ValueError: not UTF-8.
    """

    def __init__(self, document: bytes) -> None:
        self._text = document.decode()
        self._left = MAX_MEMBERS

    def find(self, *path: str | PathStep) -> Any:
        """
        Locate a value by its path from the root; the last of duplicate members wins, as in a parser.

        :param path: member names, and :data:`EACH_ITEM` for every item of an array.
        :return: the span of the value, None if absent; a list of these for each item of an array.
        :raise ValueError: nested too deep, or more than :data:`MAX_MEMBERS` members visited.
        """
        return self._find(self._end(_match_blank, 0), path)[0]

    def text(self, span: Span) -> bytes:
        """The source text of a span."""
        start, end = span
        return self._text[start:end].encode()

    def edited(
        self, span: Span | None = None, *, without: Collection[str] = (), added: Mapping[str, bytes] | None = None
    ) -> bytes:
        """
        The source of an object with members removed and added; everything else stays verbatim.

        :param span: of the object; default: the root.
        :param added: JSON by member name; replaces members of these names.
        :raise ValueError: as :meth:`find`, or not an object.
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
        """
        Locate a path below the value at `start`; also returns where that value ends, so that it is scanned only once.
        """
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
        """Position of the first entry of an object or array and True; the end of an empty one and False."""
        at = self._end(_match_blank, start + 1)
        return (at + 1, False) if self._text[at : at + 1] in ("]", "}") else (at, self._counted())

    def _next(self, end: int) -> tuple[int, bool]:
        """As :meth:`_first`, for the entry after the one that ends at `end`."""
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
        """The value at `start`, its numbers as text, and where it ends."""
        try:
            return _scan_value(self._text, start)
        except RecursionError:
            raise ValueError("nested too deep") from None

    def _end(self, pattern: PatternMatcher, at: int) -> int:
        found = pattern(self._text, at)
        if found is None:
            raise ValueError("not JSON")
        return found.end()
