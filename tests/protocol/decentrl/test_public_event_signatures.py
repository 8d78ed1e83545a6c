"""Signatures of public events (reference 10.1 and section 16)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mediatord.protocol.decentrl.crypto import sign_event, verify_event_signature
from tests.protocol.decentrl.vectors import VECTORS, secret, signing_key

EVENT = VECTORS["public_event"]
GIVEN: dict[str, Any] = {name: EVENT[name] for name in ("event", "tags", "timestamp")}
KEY = signing_key("alice")


@pytest.mark.parametrize(("name", "channel"), [("signature_of_three", None), ("signature_of_four", "blog")])
def test_known_answers(name: str, channel: str | None) -> None:
    """Both generations of clients: a channel is signed as well (reference section 16)."""
    assert sign_event(**GIVEN, seed=secret("alice", "signing"), channel_id=channel) == EVENT[name]
    assert verify_event_signature(**GIVEN, signature=EVENT[name], key=KEY, channel_id=channel)


@pytest.mark.parametrize(("name", "channel"), [("signature_of_three", "blog"), ("signature_of_four", None)])
def test_channel_is_signed(name: str, channel: str | None) -> None:
    """An event can neither be moved into a channel nor out of it."""
    assert not verify_event_signature(**GIVEN, signature=EVENT[name], key=KEY, channel_id=channel)


@pytest.mark.parametrize(
    "changed",
    [
        {"event": "{}"},
        {"event": "\ud800"},
        {"tags": ["blog"]},
        {"tags": ["é", "blog"]},
        {"tags": []},
        {"timestamp": 1760000001},
        {"timestamp": float("nan")},
        {"signature": ""},
        {"signature": EVENT["signature_of_four"]},
        {"key": signing_key("mediator")},
        {"key": b""},
        {"channel_id": ""},
    ],
)
def test_changed_event_does_not_verify(changed: dict[str, Any]) -> None:
    """Every member counts, and so do the order of tags and the key; no error is raised."""
    event = {**GIVEN, "signature": EVENT["signature_of_three"], "key": KEY}
    assert verify_event_signature(**event)
    assert not verify_event_signature(**{**event, **changed})


def test_numbers_as_in_javascript() -> None:
    """A whole number is signed as an integer, whatever its type; tags may be a tuple."""
    given_ = {**GIVEN, "tags": tuple(GIVEN["tags"]), "timestamp": 1760000000.0}
    assert verify_event_signature(**given_, signature=EVENT["signature_of_three"], key=KEY)


@settings(deadline=None)
@given(st.text(), st.lists(st.text()), st.floats(0, 1e12), st.none() | st.text(min_size=1))
def test_round_trip(event: str, tags: list[str], timestamp: float, channel: str | None) -> None:
    """Signed events verify."""
    signature = sign_event(event, tags, timestamp, secret("alice", "signing"), channel)
    assert verify_event_signature(event, tags, timestamp, signature, KEY, channel)
