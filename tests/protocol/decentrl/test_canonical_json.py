"""Canonical JSON, byte for byte as JavaScript writes it (reference section 4)."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mediatord.protocol.decentrl.canonical_json import canonicalize, loads, normalize_number
from tests.protocol.decentrl.javascript import NODE, RECORDED, canonicalize_with_node, edge_cases, random_texts

ANY_TEXT = st.text(st.characters(categories=None))
EXACT = 2**53


def values(names: st.SearchStrategy[str], leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Strategy of JSON values with these member names and leaves."""
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=20
    )


LEAVES = st.none() | st.booleans() | st.integers(-EXACT, EXACT) | st.text()
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**1000), 2**1000)
ORDINARY = values(st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"])), LEAVES)
ANYTHING = values(ANY_TEXT, LEAVES | NUMBERS | ANY_TEXT)
READABLE = st.dictionaries(st.text(), values(st.text(), LEAVES | NUMBERS), max_size=4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            r'{"b":1,"a":{"d":[3,{"z":1.0,"y":null}],"c":"é/\u0001\""}}',
            r'{"a":{"c":"é/\u0001\"","d":[3,{"y":null,"z":1}]},"b":1}',
        ),
        ("[1.0,1e16,1e21,1e-7,0.000001,-0.0]", "[1,10000000000000000,1e+21,1e-7,0.000001,0]"),
        ("[1.5e300, -1.5e-300, 123e18, 1e20, -1e-6, 12e-7]", "[1.5e+300,-1.5e-300,123000000000000000000,"
         "100000000000000000000,-0.000001,0.0000012]"),
        ("[9007199254740991, 9007199254740993, -18446744073709551617]", "[9007199254740991,9007199254740992,"
         "-18446744073709552000]"),
        (r'["\b\t\n\f\r\u000b\u001f\u007f\u2028\u2029\/"]', '["\\b\\t\\n\\f\\r\\u000b\\u001f\x7f\u2028\u2029/"]'),
        (r'{"10":1,"9":2,"":3,"a":4,"A":5}', '{"":3,"10":1,"9":2,"A":5,"a":4}'),
        ('{"\ue000":1,"\U0001f600":2,"\ud7ff":3}', '{"\ud7ff":3,"\U0001f600":2,"\ue000":1}'),
        ("{}", "{}"),
        ("[[],{},[null,true,false]]", "[[],{},[null,true,false]]"),
    ],
)  # fmt: skip
def test_known_answers(text: str, expected: str) -> None:
    """The vectors of reference section 16, and one case for each rule of section 4."""
    assert canonicalize(json.loads(text)) == expected.encode()


def test_lone_surrogates() -> None:
    """Lone surrogates are escaped in lower case; adjacent halves are one character."""
    assert canonicalize(["\ud800", "\udfffx\udbff"]) == rb'["\ud800","\udfffx\udbff"]'
    assert canonicalize({"\ud83d\ude00": "\ud83d\ude00"}) == '{"😀":"😀"}'.encode()
    assert canonicalize({"\ue000": 1, "\ud800": 2}) == rb'{"\ud800":2,"' + "\ue000".encode() + b'":1}'


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.0, b"1"), (-0.0, b"0"), (1e21, b"1e+21"), (True, b"true"), (None, b"null"), ("é", '"é"'.encode())],
)
def test_top_level_scalars(value: object, expected: bytes) -> None:
    """A value need not be an object."""
    assert canonicalize(value) == expected


def test_tuples_are_arrays() -> None:
    """Tuples are written like lists, on either path."""
    assert canonicalize({"a": (1, 2)}) == b'{"a":[1,2]}'
    assert canonicalize((1.5, (2,))) == b"[1.5,[2]]"


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        [math.nan],
        {"a": [math.inf]},
        [-math.inf],
        [10**400],
        {1: 2},
        {None: 2},
        {"a": 1.5, 2: 3},
        [b"bytes"],
        [{1, 2}],
        [object()],
        float,
    ],
)
def test_rejects_values_outside_json(value: object) -> None:
    """ValueError, and no null for NaN."""
    with pytest.raises(ValueError):
        canonicalize(value)


def test_deep_nesting() -> None:
    """Depth that orjson refuses is written by the other serializer; a cycle is a ValueError."""
    deep: Any = []
    for _ in range(299):
        deep = [deep]
    assert canonicalize(deep) == b"[" * 300 + b"]" * 300
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError):
        canonicalize(endless)


@settings(deadline=None)
@given(ANYTHING)
def test_both_serializers_agree(value: object) -> None:
    """A value is written alike beside a fraction, which orjson writes unlike JavaScript, and without."""
    assert canonicalize([value, 0.5]) == b"[" + canonicalize([value])[1:-1] + b",0.5]"


@settings(deadline=None)
@given(ORDINARY)
def test_matches_standard_library(value: object) -> None:
    """Without fractions, large integers and rare characters in names, json.dumps with sorted keys gives the same."""
    assert (
        canonicalize(value) == json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    )


@settings(deadline=None)
@given(READABLE)
def test_round_trip(value: dict[str, object]) -> None:
    """Canonical JSON is parsed to the same numbers, and stays unchanged."""
    text = canonicalize(value)
    assert canonicalize(loads(text)) == text
    assert json.loads(text, parse_int=float) == json.loads(json.dumps(value), parse_int=float)


@settings(deadline=None)
@given(READABLE, st.sampled_from([None, 2]), st.booleans())
def test_canonical_form_is_unique(value: dict[str, object], indent: int | None, escaped: bool) -> None:
    """Any notation of an object has the same canonical form."""
    assert canonicalize(loads(json.dumps(value, indent=indent, ensure_ascii=escaped).encode())) == canonicalize(value)


def test_recorded_results_of_node() -> None:
    """Hundreds of values recorded from Node: see tests/vectors/README.md."""
    for pair in json.loads(RECORDED.read_bytes()):
        assert canonicalize(json.loads(pair["json"])) == pair["canonical"].encode(), pair["json"]


@pytest.mark.system
@pytest.mark.skipif(NODE is None, reason="Node is not installed; `apt-get install nodejs` does that")
def test_matches_node() -> None:
    """Thousands of values, numbers of all exponents among them, are written as Node writes them."""
    texts = [*edge_cases(), *random_texts(Random("as Node does"), 6000)]
    for text, expected in zip(texts, canonicalize_with_node(texts), strict=True):
        assert canonicalize(json.loads(text)) == expected.encode(), text
        assert _canonicalize_leniently(f'{{"_":{text}}}') in (f'{{"_":{expected}}}', None), text


def _canonicalize_leniently(text: str) -> str | None:
    """Canonicalize with json.loads, which accepts lone surrogates."""
    try:
        return canonicalize(loads(text.encode())).decode()
    except ValueError:
        assert "\\ud" in text
        return None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'"a"',
        b"1",
        b"null",
        b"{",
        b"{}x",
        b"\xef\xbb\xbf{}",
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":1' + b"0" * 400 + b"}",
        b'{"a":"\xff"}',
        b'{"a":"\\ud800"}',
        b'{"\\udc00":1}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":1,"a":1}',
        b'{"a":1,"\\u0061":2}',
        b'{"a":[{"b":1, "b":1}]}',
        b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
        b'{"a":' * 65 + b"1" + b"}" * 65,
        b'{"a":' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"a":' + b"[" * 100_000,
    ],
)
def test_rejects_invalid_json(raw: bytes) -> None:
    """No object, invalid, ambiguous or too deep: ValueError without the input."""
    message = r"^(not JSON|not a JSON object|not JSON with unique .*|nested too deep|too many values)$"
    with pytest.raises(ValueError, match=message):
        loads(raw)


def test_accepts_maximum_depth() -> None:
    """64 levels, the object included, with any number of siblings."""
    loads(b'{"a":' + b"[" * 63 + b"]" * 63 + b"}")
    loads(b'{"a":[' + b"{}," * 1000 + b'"[[{"]}')


def test_limits_fractions() -> None:
    """The number of fractions, which are expensive, is limited; integers are not counted."""
    loads(b'{"a":[' + b"1e-7," * 9_999 + b"0.5]}")
    loads(b'{"a":[' + b"7," * 20_000 + b"0.5]}")
    with pytest.raises(ValueError, match="^too many fractions$"):
        loads(b'{"a":[' + b"1e-7," * 10_000 + b'0.5],"b":"x"}')


def test_limits_values() -> None:
    """50 000 values; commas and brackets in strings do not count."""
    loads(b'{"a":[' + b"1," * 49_998 + b"1]}")
    loads(b'{"a":"' + b",[{" * 100_000 + b'"}')
    for many in (b"1,", b"[],", b"{},"):
        with pytest.raises(ValueError, match="^too many values$"):
            loads(b'{"a":[' + many * 50_000 + b"1]}")


def test_accepts_unusual_characters() -> None:
    """U+0000, characters beyond U+FFFF and escaped pairs."""
    assert loads(rb'{"a":"\u0000\ud83d\ude00"}') == {"a": "\0😀"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, 1),
        (-0.0, 0),
        (1.5, 1.5),
        (1760000000, 1760000000),
        (EXACT + 1, EXACT),
        (-EXACT - 1, -EXACT),
        (1e18, 10**18),
        (2.0**63, 2.0**63),
        (10**30, 1e30),
    ],
)
def test_plain_number(value: float, expected: float) -> None:
    """The nearest double, or an integer if that is whole and fits in 64 bits (reference section 4)."""
    plain = normalize_number(value)
    assert plain == expected
    assert type(plain) is type(expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_rejects_numbers_outside_json(value: float) -> None:
    """Numbers that JavaScript cannot write as JSON are a ValueError."""
    with pytest.raises(ValueError):
        normalize_number(value)


@settings(deadline=None)
@given(NUMBERS)
def test_plain_number_keeps_canonical_form(value: float) -> None:
    """A number and its plain form have the same canonical form."""
    try:
        plain = normalize_number(value)
    except ValueError:
        assert abs(value) > 1.7e308
    else:
        assert canonicalize([plain]) == canonicalize([value])
