"""The query part of `GET /public/:did` (reference 10.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.web.http import parse_qs

from mediatord.errors import InvalidCommand
from mediatord.protocol.decentrl.commands import PublicQuery, parse_public_query


def parse(query: str) -> PublicQuery:
    """Parse the query part of a URL."""
    return parse_public_query(parse_qs(query.encode(), keep_blank_values=1))


def test_defaults() -> None:
    """No filter, and the first twenty."""
    asked = parse("")
    assert (asked.tags, asked.after, asked.before, asked.channel_id) == ((), None, None, None)
    assert (asked.page, asked.page_size) == (0, 20)


def test_all_parameters() -> None:
    """As clients send them: JSON numbers, tags joined by commas."""
    asked = parse("tags=a%2Cb&after=1710000000&before=1.71e9&page=3&page_size=100&channel_id=my+%C3%A9")
    assert asked == PublicQuery(
        tags=("a", "b"), after=1710000000, before=1710000000, channel_id="my é", page=3, page_size=100
    )


@pytest.mark.parametrize(
    ("query", "tags"),
    [
        ("tags=a", ("a",)),
        ("tags=a,b&tags=c", ("a", "b", "c")),
        ("tags=", ()),
        ("tags=,a,,b,", ("a", "b")),
        ("tags=%20a%20", (" a ",)),
        ("tags=%C3%A9,%F0%9F%98%80", ("é", "😀")),
    ],
)
def test_tags(query: str, tags: tuple[str, ...]) -> None:
    """Joined, repeated or both; nothing is trimmed, empty tags are dropped."""
    assert parse(query).tags == tags


@pytest.mark.parametrize("name", ["after", "before", "page", "page_size"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "1_0",
        "%201",
        "1%20",
        "%2B1",
        "inf",
        "-Infinity",
        "NaN",
        "0x1",
        "01",
        "1.",
        ".1",
        "1e400",
        "%D9%A3",
        "1%0A",
        "true",
        '"1"',
        "x",
    ],
)
def test_invalid_numbers(name: str, text: str) -> None:
    """Numbers are JSON numbers without surrounding text."""
    with pytest.raises(InvalidCommand):
        parse(f"{name}={text}")


@pytest.mark.parametrize("query", ["page=-1", "page=0.5", "page=9007199254740992", "page_size=0", "page_size=1001"])
def test_invalid_pages(query: str) -> None:
    """Pages are natural numbers, and have at most 1000 events."""
    with pytest.raises(InvalidCommand):
        parse(query)


@pytest.mark.parametrize("query", ["after=-1.5", "before=0", "after=1e21", "page=9007199254740991", "page_size=1000"])
def test_boundary_numbers(query: str) -> None:
    """Numbers at the bounds are accepted."""
    name, _, text = query.partition("=")
    assert getattr(parse(query), name) == float(text)


@pytest.mark.parametrize("name", ["after", "before", "page", "page_size", "channel_id"])
def test_repeated_parameters(name: str) -> None:
    """A repeated parameter is refused as ambiguous."""
    with pytest.raises(InvalidCommand):
        parse(f"{name}=1&{name}=1")
    with pytest.raises(InvalidCommand):
        parse_public_query({name.encode(): []})


@pytest.mark.parametrize(
    "query",
    [
        "tags=%FF",
        "channel_id=%FF",
        "channel_id=%ED%A0%80",
        "channel_id=",
        f"channel_id={'x' * 1025}",
        f"tags={'x' * 1025}",
        f"tags={','.join(['x'] * 1001)}",
    ],
)
def test_invalid_text(query: str) -> None:
    """Invalid UTF-8, and text longer than an event can have, is refused."""
    with pytest.raises(InvalidCommand):
        parse(query)


def test_unknown_parameters() -> None:
    """Unknown parameters are ignored."""
    assert parse("later=1&later=2&=&page_=x&%FF=") == PublicQuery()


@given(
    st.dictionaries(
        st.sampled_from([b"tags", b"after", b"before", b"page", b"page_size", b"channel_id", b"x"]),
        st.lists(
            st.binary(max_size=8) | st.sampled_from([b"1", b"0", b"-0", b"1e3", b"1e-3", b"9" * 30]), max_size=3
        ),
    )
)
def test_arbitrary_queries(arguments: Mapping[bytes, Sequence[bytes]]) -> None:
    """Any query is parsed or refused."""
    try:
        asked = parse_public_query(arguments)
    except InvalidCommand:
        return
    assert 0 <= asked.page * asked.page_size < 2**63
    assert all(asked.tags)
