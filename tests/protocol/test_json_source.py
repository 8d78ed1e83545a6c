"""Slices of JSON documents."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediatord.protocol.json_source import MAX_MEMBERS, JSONSource
from tests.protocol.json_texts import NUMBERS, values


@given(st.lists(values, max_size=5), st.sampled_from(["", " ", "\n\t"]))
def test_items(texts: list[str], blank: str) -> None:
    """Every item is found as it was written."""
    document = f"{blank}[{blank}{f'{blank},{blank}'.join(texts)}{blank}]{blank}".encode()
    source = JSONSource(document)
    assert [source.text(span).decode() for span in source.items(source.root)] == texts


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), values, max_size=5), st.booleans())
def test_members(texts: dict[str, str], ascii_only: bool) -> None:
    """And every member, however its name is spelled."""
    members = [f"{json.dumps(name, ensure_ascii=ascii_only)} : {text}" for name, text in texts.items()]
    source = JSONSource(f"{{{' , '.join(members)}}}".encode())
    found = {name: source.text(span).decode() for name, span in source.members(source.root).items()}
    assert found == texts


@given(values, values)
def test_paths(text: str, other: str) -> None:
    """Of members with the same name the last one counts, at every step."""
    document = (
        f'{{"x":{other},"a":{{"b":{other}}},"a":{{"b":{other},"\\u0062":[{text}]}},"y":{other},"b":{other}}}'
    ).encode()
    source = JSONSource(document)
    (item,) = source.items(source.value("a", "b"))
    assert source.text(item).decode() == text


@pytest.mark.parametrize("number", NUMBERS)
def test_edited(number: str) -> None:
    """What stays in an object is as it was; what is added replaces what was there."""
    document = f'{{ "a" : {number}, "b":2, "\\u0063":[ ], "d":{{"b": {number} }} }}'.encode()
    source = JSONSource(document)
    edited = source.edited(source.root, without=["b"], added={"c": b"1", "e": b"{}"})
    assert edited == f'{{"a":{number},"d":{{"b": {number} }},"c":1,"e":{{}}}}'.encode()
    assert source.edited(source.root, without="abcd") == b"{}"


@pytest.mark.parametrize(
    "document", [b"", b" ", b"{", b"[1", b'{"a"', b'{"a":', b"[1 2]", b"7", b'"x"', b"{]", b"\xff"]
)
def test_no_json(document: bytes) -> None:
    """Of what is no JSON, or another kind of value, nothing is found."""
    for read in (lambda source: source.members(source.root), lambda source: source.items(source.root)):
        with pytest.raises(ValueError):
            read(JSONSource(document))


def test_missing() -> None:
    """A path that leads nowhere is an error."""
    for names in (["b"], ["a", "b"]):
        with pytest.raises(ValueError, match="no such member|another kind"):
            JSONSource(b'{"a":1}').value(*names)


def test_bounds() -> None:
    """Only so many members are looked at, in all; a value may have any number of them."""
    many = b",".join([b"0"] * (MAX_MEMBERS - 1))
    source = JSONSource(b'{"a":[%b]}' % many)
    assert len(source.items(source.value("a"))) == MAX_MEMBERS - 1
    with pytest.raises(ValueError, match="too many"):
        JSONSource(b"[0,%b,0]" % many).items((0, 1))
    assert JSONSource(b'{"a":[%b]}' % b",".join([many] * 50)).value("a")
    with pytest.raises(ValueError, match="too deep"):
        JSONSource(b'{"a":%b%b}' % (b"[" * 5000, b"]" * 5000)).value("a")
