"""
JSON and base64 as they come off the wire, read strictly and at C speed (reference 1.6 and 10.5).

Every failure is a :class:`ValueError` whose text says nothing about the input.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
import pybase64

# What the last character of an unpadded group may be: the bits it has too many must be zero, or one envelope could
# be written in several ways.
_LAST = ("", "", "AQgw", "AEIMQUYcgkosw048")
_PADDING = ("", "", "==", "=")
_LAST_BYTE = tuple(last.encode() for last in _LAST)
_PADDING_BYTES = tuple(padding.encode() for padding in _PADDING)
_SPACE = b" \t\r\n\f\v"
_URL_TO_STANDARD = bytes.maketrans(b"-_", b"+/")

# Values in one text. One that takes three bytes in it may take 200 in memory.
MAX_VALUES = 50_000
# Matches more than so many commas, brackets and braces outside of strings. Possessive, so that it looks at no byte
# twice and keeps nothing.
_EXCESS = re.compile(
    rb'(?>(?>[^",\[{]++|"(?>[^"\\]++|\\.)*+"?)*+[,\[{]){%d}+' % (MAX_VALUES + 1),
    re.DOTALL,
)


def loads(raw: bytes | str) -> Any:
    """
    Any JSON value. Integers beyond 64 bits come back as floats.

    :raise ValueError: not JSON, not UTF-8, NaN or an infinity, nested more than 1024 deep, or of more than
        :data:`MAX_VALUES` values.
    """
    if len(raw) > MAX_VALUES:
        refuse_excess(raw)
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
        refuse_excess(raw)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise ValueError("not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def refuse_excess(raw: bytes | str) -> None:
    """
    Bound what parsing takes before it begins. Each value but the first has a comma, bracket or brace before it.

    :raise ValueError: there are more than :data:`MAX_VALUES` values.
    """
    text = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
    marks = text.count(b",") + text.count(b"[") + text.count(b"{")
    if marks > MAX_VALUES and _EXCESS.match(text):
        raise ValueError("too many values")


def loads_unique(raw: bytes) -> dict[str, Any]:
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
        json.loads(raw, object_pairs_hook=_unique_members)
    except (ValueError, RecursionError):
        raise ValueError("not JSON with unique member names") from None
    return value


def _unique_members(members: list[tuple[str, Any]]) -> dict[str, Any]:
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


def b64url_decode(text: object) -> bytes:
    """
    Base64url, without padding or with all of it, and with nothing else in between.

    :param text: str or bytes; whatever else JSON may have in its place is malformed too.
    :raise ValueError: a foreign character (white space, `+` and `/` included), a wrong length, stray padding, or
        bits left over at the end that are not zero.
    """
    if not isinstance(text, str):
        text = _characters(text)
    rest = len(text) % 4
    if not rest and text.endswith("="):
        text = text.rstrip("=")
        rest = len(text) % 4
        # What is not padded to a multiple of four fails below: `=` is no last character.
        if not rest:
            raise ValueError("not base64url")
    if rest:
        if text[-1] not in _LAST[rest]:
            raise ValueError("not base64url")
        text += _PADDING[rest]
    # pybase64 takes the standard alphabet as well, even where it is told another one.
    if "+" in text or "/" in text:
        raise ValueError("not base64url")
    try:
        return pybase64.b64decode(text, b"-_", validate=True)
    except ValueError:
        raise ValueError("not base64url") from None


def b64url_decode_ascii(text: bytes) -> bytes:
    """
    The same for many bytes, without padding.

    :raise ValueError: as :func:`b64url_decode`, or there is padding.
    """
    rest = len(text) % 4
    if rest:
        if text[-1] not in _LAST_BYTE[rest]:
            raise ValueError("not base64url")
        text += _PADDING_BYTES[rest]
    elif text.endswith(b"="):
        raise ValueError("padded")
    if b"+" in text or b"/" in text:
        raise ValueError("not base64url")
    return pybase64.b64decode(text, b"-_", validate=True)


def _characters(text: object) -> str:
    if not isinstance(text, bytes):
        raise ValueError("not a text")
    return text.decode("latin-1")


def b64url_encode(data: bytes) -> str:
    """Base64url without padding."""
    return pybase64.b64encode_as_string(data, b"-_").rstrip("=")


def b64_lenient_decode(text: str) -> bytes:
    """
    Base64 as it is found in attachments: either alphabet or both, padded or not, with white space anywhere
    (reference 2.2).

    :raise ValueError: any other character, or a length that no data has.
    """
    try:
        body = text.encode("ascii").translate(_URL_TO_STANDARD, _SPACE).rstrip(b"=").decode()
    except UnicodeEncodeError:
        raise ValueError("not base64") from None
    if len(body) % 4 == 1:
        raise ValueError("not base64")
    try:
        return pybase64.b64decode(body + _PADDING[len(body) % 4], validate=True)
    except ValueError:
        raise ValueError("not base64") from None


def verbatim(text: bytes) -> object:
    """JSON that is written already, to be put into a larger value for :func:`dumps` as it is."""
    return orjson.Fragment(text)
