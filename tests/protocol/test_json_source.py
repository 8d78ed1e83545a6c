"""Slices of JSON documents."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediatord.protocol.encoding import EACH_ITEM, MAX_MEMBERS, JSONSource, PathStep, measure_nesting_depth
from tests.protocol.json_texts import NUMBERS, values


def texts_at(document: bytes, *path: str | PathStep) -> Any:
    """The source texts that a path leads to."""
    source = JSONSource(document)
    spans = source.find(*path)
    if isinstance(spans, list):
        return [None if span is None else source.text(span).decode() for span in spans]
    return None if spans is None else source.text(spans).decode()


@given(st.lists(values, max_size=5), st.sampled_from(["", " ", "\n\t"]))
def test_items(texts: list[str], blank: str) -> None:
    """Every item is found as it was written, and so is the whole."""
    array = f"[{blank}{f'{blank},{blank}'.join(texts)}{blank}]"
    document = f"{blank}{array}{blank}".encode()
    assert texts_at(document, EACH_ITEM) == texts
    assert texts_at(document) == array


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), values, max_size=5), st.booleans())
def test_members(texts: dict[str, str], ascii_only: bool) -> None:
    """Every member is found, however its name is spelled."""
    members = [f"{json.dumps(name, ensure_ascii=ascii_only)} : {text}" for name, text in texts.items()]
    document = f"{{{' , '.join(members)}}}".encode()
    for name, text in texts.items():
        assert texts_at(document, name) == text


@given(values, values)
def test_duplicate_members(text: str, other: str) -> None:
    """Of members with the same name the last one counts, at every level."""
    document = (
        f'{{"x":{other},"a":{{"b":{other}}},"a":{{"b":{other},"\\u0062":[{text}]}},"y":{other},"b":{other}}}'
    ).encode()
    assert texts_at(document, "a", "b", EACH_ITEM) == [text]
    attachments = (
        f'[{{"d":{{"j":{other},"j":{text}}}}},{other if other[0] != "{" else 0},{{}},{{"d":{{"j":{text}}}}}]'
    )
    assert texts_at(f'{{"as":{attachments}}}'.encode(), "as", EACH_ITEM, "d", "j") == [text, None, None, text]


@pytest.mark.parametrize("number", NUMBERS)
def test_edited(number: str) -> None:
    """Remaining members are unchanged; additions replace existing ones."""
    document = f'{{ "a" : {number}, "b":2, "\\u0063":[ ], "d":{{"b": {number} }} }}'.encode()
    edited = JSONSource(document).edited(without=["b"], added={"c": b"1", "e": b"{}"})
    assert edited == f'{{"a":{number},"d":{{"b": {number} }},"c":1,"e":{{}}}}'.encode()
    assert JSONSource(document).edited(without="abcd") == b"{}"
    inner = JSONSource(document)
    assert inner.edited(inner.find("d"), added={"x": b"0"}) == f'{{"b":{number},"x":0}}'.encode()


@pytest.mark.parametrize("document", [b"", b" ", b"{", b"[1", b'{"a"', b'{"a":', b"[1 2]", b'{"a" 1}', b"\xff"])
def test_invalid_json(document: bytes) -> None:
    """Nothing is found in invalid JSON."""
    for path in (["a"], [EACH_ITEM], []):
        with pytest.raises(ValueError, match="."):
            JSONSource(document).find(*path)
    with pytest.raises(ValueError, match="."):
        JSONSource(document).edited()


def test_missing_path() -> None:
    """A path that leads nowhere, or through another type of value."""
    for path in (["b"], ["a", "b"], [EACH_ITEM], ["a", EACH_ITEM]):
        assert texts_at(b'{"a":1}', *path) is None
    assert texts_at(b"[]", EACH_ITEM) == []
    with pytest.raises(ValueError, match="no object"):
        JSONSource(b"[]").edited()


def test_limits_members() -> None:
    """The number of examined members is limited in total; a value may have any number."""
    many = b",".join([b"0"] * (MAX_MEMBERS - 1))
    assert len(texts_at(b'{"a":[%b]}' % many, "a", EACH_ITEM)) == MAX_MEMBERS - 1
    with pytest.raises(ValueError, match="too many"):
        texts_at(b"[0,%b,0]" % many, EACH_ITEM)
    assert texts_at(b'{"a":[%b]}' % b",".join([many] * 50), "a")
    with pytest.raises(ValueError, match="too deep"):
        texts_at(b'{"a":%b%b}' % (b"[" * 5000, b"]" * 5000), "a")


@given(values)
def test_depth(text: str) -> None:
    """As a parser counts; brackets in strings do not count."""
    assert measure_nesting_depth(text.encode()) == depth_of(json.loads(text, object_pairs_hook=list))


def depth_of(value: Any) -> int:
    """Depth of objects, here lists of pairs, and arrays."""
    if isinstance(value, list):
        return 1 + max((depth_of(item[1] if isinstance(item, tuple) else item) for item in value), default=0)
    return 0
