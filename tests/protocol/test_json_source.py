"""Slices of JSON documents."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediatord.protocol.encoding import EACH_ITEM, MAX_MEMBERS, JSONSource, PathStep, measure_nesting_depth
from tests.protocol.json_texts import NUMBERS, values


def found(document: bytes, *path: str | PathStep) -> Any:
    """The texts that a path leads to."""
    source = JSONSource(document)
    spans = source.find(*path)
    if isinstance(spans, list):
        return [None if span is None else source.text(span).decode() for span in spans]
    return None if spans is None else source.text(spans).decode()


@given(st.lists(values, max_size=5), st.sampled_from(["", " ", "\n\t"]))
def test_items(texts: list[str], blank: str) -> None:
    """Every item is found as it was written, and so is all of it."""
    array = f"[{blank}{f'{blank},{blank}'.join(texts)}{blank}]"
    document = f"{blank}{array}{blank}".encode()
    assert found(document, EACH_ITEM) == texts
    assert found(document) == array


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), values, max_size=5), st.booleans())
def test_members(texts: dict[str, str], ascii_only: bool) -> None:
    """And every member, however its name is spelled."""
    members = [f"{json.dumps(name, ensure_ascii=ascii_only)} : {text}" for name, text in texts.items()]
    document = f"{{{' , '.join(members)}}}".encode()
    for name, text in texts.items():
        assert found(document, name) == text


@given(values, values)
def test_paths(text: str, other: str) -> None:
    """Of members with the same name the last one counts, at every step."""
    document = (
        f'{{"x":{other},"a":{{"b":{other}}},"a":{{"b":{other},"\\u0062":[{text}]}},"y":{other},"b":{other}}}'
    ).encode()
    assert found(document, "a", "b", EACH_ITEM) == [text]
    attachments = (
        f'[{{"d":{{"j":{other},"j":{text}}}}},{other if other[0] != "{" else 0},{{}},{{"d":{{"j":{text}}}}}]'
    )
    assert found(f'{{"as":{attachments}}}'.encode(), "as", EACH_ITEM, "d", "j") == [text, None, None, text]


@pytest.mark.parametrize("number", NUMBERS)
def test_edited(number: str) -> None:
    """What stays in an object is as it was; what is added replaces what was there."""
    document = f'{{ "a" : {number}, "b":2, "\\u0063":[ ], "d":{{"b": {number} }} }}'.encode()
    edited = JSONSource(document).edited(without=["b"], added={"c": b"1", "e": b"{}"})
    assert edited == f'{{"a":{number},"d":{{"b": {number} }},"c":1,"e":{{}}}}'.encode()
    assert JSONSource(document).edited(without="abcd") == b"{}"
    inner = JSONSource(document)
    assert inner.edited(inner.find("d"), added={"x": b"0"}) == f'{{"b":{number},"x":0}}'.encode()


@pytest.mark.parametrize("document", [b"", b" ", b"{", b"[1", b'{"a"', b'{"a":', b"[1 2]", b'{"a" 1}', b"\xff"])
def test_no_json(document: bytes) -> None:
    """Of what is no JSON nothing is found."""
    for path in (["a"], [EACH_ITEM], []):
        with pytest.raises(ValueError, match="."):
            JSONSource(document).find(*path)
    with pytest.raises(ValueError, match="."):
        JSONSource(document).edited()


def test_missing() -> None:
    """A path that leads nowhere, or through another kind of value."""
    for path in (["b"], ["a", "b"], [EACH_ITEM], ["a", EACH_ITEM]):
        assert found(b'{"a":1}', *path) is None
    assert found(b"[]", EACH_ITEM) == []
    with pytest.raises(ValueError, match="no object"):
        JSONSource(b"[]").edited()


def test_bounds() -> None:
    """Only so many members are looked at, in all; a value may have any number of them."""
    many = b",".join([b"0"] * (MAX_MEMBERS - 1))
    assert len(found(b'{"a":[%b]}' % many, "a", EACH_ITEM)) == MAX_MEMBERS - 1
    with pytest.raises(ValueError, match="too many"):
        found(b"[0,%b,0]" % many, EACH_ITEM)
    assert found(b'{"a":[%b]}' % b",".join([many] * 50), "a")
    with pytest.raises(ValueError, match="too deep"):
        found(b'{"a":%b%b}' % (b"[" * 5000, b"]" * 5000), "a")


@given(values)
def test_depth(text: str) -> None:
    """As a parser would find it; brackets in texts are none."""
    assert measure_nesting_depth(text.encode()) == levels(json.loads(text, object_pairs_hook=list))


def levels(value: Any) -> int:
    """Objects, which are lists of pairs here, and arrays within one another."""
    if isinstance(value, list):
        return 1 + max((levels(one[1] if isinstance(one, tuple) else one) for one in value), default=0)
    return 0
