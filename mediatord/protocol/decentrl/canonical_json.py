"""
Canonical JSON for signatures (reference section 4): the output of a JavaScript engine with sorted members.

orjson serialises a value unless it contains a number or a name for which the two would differ.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import orjson

from mediatord.protocol import encoding

# Maximum nesting depth, the outermost object counted.
MAX_DEPTH = 64
# Maximum number of values at all levels. A thousand events with forty tags each have fewer.
MAX_VALUES = 50_000
# Maximum number of numbers with fraction or exponent, which take a hundred times as long. A command has one per
# timestamp.
MAX_FRACTIONS = 10_000

# JavaScript represents every integer up to 2^53 exactly; orjson writes integers below 2^63.
_MAX_SAFE_INTEGER = 2**53
_INT64_LIMIT = 2**63

# UTF-8 lead bytes of characters beyond U+FFFF, which JavaScript sorts before U+E000.
_SUPPLEMENTARY_LEAD_BYTES = b"\xf0\xf1\xf2\xf3\xf4"
_SURROGATE = re.compile("[\ud800-\udfff]")
_LITERALS = {None: "null", True: "true", False: "false"}
_quote = json.encoder.encode_basestring
# Python uses an exponent for 1e-05 and 1e+16; JavaScript does not yet.
_MIN_DECIMAL_EXPONENT, _MAX_DECIMAL_EXPONENT = -6, 20


def loads(raw: bytes) -> dict[str, Any]:
    """
    Parse an unambiguous JSON object.

    :raise ValueError: not a JSON object; duplicate members, NaN, an infinity, a number beyond a double, a lone
        surrogate, not UTF-8, nested more than 64 deep, more than 50 000 values, or more than 10 000 numbers with
        fraction or exponent.
    """
    commas = raw.count(b",")
    if commas > MAX_FRACTIONS or commas + raw.count(b"{") + raw.count(b"[") > MAX_VALUES:
        # Checked before the slower parsing steps; this parser handles many small values fast.
        _check_numbers(encoding.loads_object(raw))
    value = encoding.loads_unique_members(raw)
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and _measure_depth(value) > MAX_DEPTH:
        raise ValueError("nested too deep")
    return value


def canonicalize(value: Any) -> bytes:
    """
    Canonical form in UTF-8.

    Lone surrogates are escaped. Member names that look like integers are sorted as text.

    :param value: made of JSON types; tuples count as arrays.
    :raise ValueError: another type, NaN, an integer beyond a double, or excessive nesting.
    """
    if type(value) is dict or type(value) is list:
        try:
            text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        except orjson.JSONEncodeError:
            pass
        else:
            if _is_written_alike(value) and (
                text.isascii() or len(text.translate(None, _SUPPLEMENTARY_LEAD_BYTES)) == len(text)
            ):
                return text
    return _canonicalize_in_python(value)


def normalize_number(value: int | float) -> int | float:
    """
    The number that a JavaScript engine would hold; integral values as int within 64 bits.

    :raise ValueError: NaN, an infinity, or an integer beyond a double.
    """
    if type(value) is int and -_MAX_SAFE_INTEGER <= value <= _MAX_SAFE_INTEGER:
        return value
    double = _to_double(value)
    return int(double) if double.is_integer() and abs(double) < _INT64_LIMIT else double


def _measure_depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
    return depth


def _check_numbers(value: Any) -> None:
    """:raise ValueError: too many values, or too many numbers with fraction or exponent."""
    values, fractions, found = 0, 0, [value]
    for outer in found:
        values += len(outer)
        if values > MAX_VALUES:
            raise ValueError("too many values")
        for inner in outer.values() if type(outer) is dict else outer:
            kind = type(inner)
            if kind is float:
                fractions += 1
            elif kind is dict or kind is list:
                found.append(inner)
    if fractions > MAX_FRACTIONS:
        raise ValueError("too many fractions")


def _is_written_alike(value: Any) -> bool:
    """Whether orjson and a JavaScript engine can differ in the order of members only."""
    found = [value]
    for outer in found:
        for inner in outer.values() if type(outer) is dict else outer:
            kind = type(inner)
            if kind is str:
                continue
            if kind is dict or kind is list:
                found.append(inner)
            elif not (
                kind is bool or inner is None or (kind is int and -_MAX_SAFE_INTEGER <= inner <= _MAX_SAFE_INTEGER)
            ):
                return False
    return True


def _canonicalize_in_python(value: Any) -> bytes:
    """As :func:`canonicalize`, value by value."""
    try:
        text = _format_value(value)
    except RecursionError:
        raise ValueError("nested too deep") from None
    try:
        return text.encode()
    except UnicodeEncodeError:
        # JavaScript treats two adjacent surrogates as one character.
        paired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", paired).encode()


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, (int, float)) and value is not True and value is not False:
        return _format_number(value)
    if value is None or isinstance(value, bool):
        return _LITERALS[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join([_format_value(item) for item in value])}]"
    if isinstance(value, dict):
        members = [f"{_quote(name)}:{_format_value(value[name])}" for name in sorted(value, key=_utf16_sort_key)]
        return f"{{{','.join(members)}}}"
    raise ValueError("no JSON for this")


def _utf16_sort_key(name: object) -> bytes:
    if not isinstance(name, str):
        raise ValueError("the name of a member is not a text")
    return name.encode("utf-16-be", "surrogatepass")


def _format_number(value: int | float) -> str:
    """ECMAScript's Number::toString; its digits are those of Python's repr."""
    if isinstance(value, int) and -_MAX_SAFE_INTEGER <= value <= _MAX_SAFE_INTEGER:
        return int.__repr__(value)
    text = float.__repr__(_to_double(value))
    if text.endswith(".0"):
        return "0" if text == "-0.0" else text[:-2]
    if "e" not in text:
        return text
    mantissa, _, exponent = text.partition("e")
    power = int(exponent)
    if not _MIN_DECIMAL_EXPONENT <= power <= _MAX_DECIMAL_EXPONENT:
        return f"{mantissa}e{power:+d}"
    sign = "-" if mantissa.startswith("-") else ""
    digits = mantissa.removeprefix("-").replace(".", "")
    return sign + (f"0.{'0' * (-power - 1)}{digits}" if power < 0 else digits.ljust(power + 1, "0"))


def _to_double(value: int | float) -> float:
    try:
        double = float(value)
    except OverflowError:
        raise ValueError("a number too large for a double") from None
    if not math.isfinite(double):
        raise ValueError("not a number of JSON")
    return double
