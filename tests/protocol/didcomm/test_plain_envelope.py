"""Opening envelopes of the plain form gives what the general parser gives, or nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mediatord.errors import MediatorError
from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.jwe import OpenedEnvelope, decrypt_envelope, open_plain_envelope, parse_envelope
from mediatord.protocol.didcomm.keys import PrivateKey, PublicKey

ALICE, BOB = "did:web:alice.example#1", "did:web:bob.example#1"
ALICE_KEY, BOB_KEY = PrivateKey.generate("X25519"), PrivateKey.generate("X25519")
P256_KEY = PrivateKey.generate("P-256")
CONTENT = b'{"id": "1", "type": "https://didcomm.org/empty/1.0/empty", "body": {"text": "hello"}}'
AUTHCRYPT = jwe.encrypt_authcrypt(CONTENT, (ALICE, ALICE_KEY), [(BOB, BOB_KEY.public)])
ANONCRYPT = jwe.encrypt_anoncrypt(CONTENT, [(BOB, BOB_KEY.public)])


def find_key(kid: str) -> PublicKey | None:
    """Alice's key."""
    return ALICE_KEY.public if kid == ALICE else None


def open_plain(raw: bytes) -> OpenedEnvelope | None:
    """Open an envelope to Bob, as an authcrypt or an anoncrypt."""
    keys = {BOB: [BOB_KEY]}
    return open_plain_envelope(raw, keys, find_key) or open_plain_envelope(raw, keys)


def open_generally(raw: bytes) -> tuple[bytes, str | None, bytes] | None:
    """Content, sender and digest by the general parser; None for an error."""
    try:
        envelope = parse_envelope(raw)
        sender = None if envelope.sender_kid is None else find_key(envelope.sender_kid)
        content = decrypt_envelope(envelope, BOB, BOB_KEY, sender)
    except MediatorError:
        return None
    return content, envelope.sender_kid, envelope.compute_digest()


def assert_agreement(raw: bytes) -> OpenedEnvelope | None:
    """What is opened equals the general result; digests are those of authcrypts."""
    opened = open_plain(raw)
    if opened is not None:
        digest = opened.digest if opened.sender_kid else open_generally(raw)[2]  # type: ignore[index]
        assert (opened.plaintext, opened.sender_kid, digest) == open_generally(raw)
        assert (opened.kid, opened.key) == (BOB, BOB_KEY)
    return opened


def changed(raw: bytes, **members: Any) -> bytes:
    """An envelope with other members; None removes one."""
    value = {**json.loads(raw), **members}
    return json.dumps({name: member for name, member in value.items() if member is not None}).encode()


def test_usual_envelopes() -> None:
    """Authcrypts and anoncrypts of our own are opened, and the sender is known."""
    for raw, sender in ((AUTHCRYPT, ALICE), (ANONCRYPT, None)):
        for written in (raw, changed(raw)):
            opened = assert_agreement(written)
            assert opened is not None and opened.sender_kid == sender
    assert CONTENT.decode() not in repr(opened)


def test_only_the_wanted_kind_is_opened() -> None:
    """With a function that finds senders only authcrypts are opened, without one only anoncrypts."""
    assert open_plain_envelope(ANONCRYPT, {BOB: [BOB_KEY]}, find_key) is None
    assert open_plain_envelope(AUTHCRYPT, {BOB: [BOB_KEY]}) is None


def test_flattened_envelope() -> None:
    """The flattened serialisation is opened too."""
    (entry,) = json.loads(AUTHCRYPT)["recipients"]
    opened = assert_agreement(changed(AUTHCRYPT, recipients=None, **entry))
    assert opened is not None and opened.plaintext == CONTENT


@pytest.mark.parametrize(
    "raw",
    (
        changed(AUTHCRYPT, aad="YQ"),
        changed(AUTHCRYPT, unprotected={}),
        changed(AUTHCRYPT, recipients=[]),
        changed(AUTHCRYPT, tag="A" * 43),
        changed(AUTHCRYPT, protected=json.loads(ANONCRYPT)["protected"]),
        jwe.encrypt_authcrypt(CONTENT, (BOB, BOB_KEY), [(BOB, BOB_KEY.public)]),
        jwe.encrypt_authcrypt(CONTENT, (ALICE, BOB_KEY), [(BOB, BOB_KEY.public)]),
        jwe.encrypt_authcrypt(CONTENT, (ALICE, ALICE_KEY), [(ALICE, ALICE_KEY.public)]),
        jwe.encrypt_anoncrypt(CONTENT, [("did:web:bob.example#2", P256_KEY.public)]),
        jwe.encrypt_anoncrypt(CONTENT, [(BOB, BOB_KEY.public), (ALICE, ALICE_KEY.public)]),
        b"",
        b"{}",
        b'{"ciphertext":',
    ),
)
def test_other_envelopes(raw: bytes) -> None:
    """All others are left to the general parser."""
    assert open_plain(raw) is None


def test_no_key_is_used_for_an_unknown_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """An authcrypt by an unknown sender costs no key agreement."""
    for name in ("load_key_exchange", "derive_static_secret"):
        monkeypatch.setattr(jwe, name, lambda *_: pytest.fail("a key was used"))
    assert open_plain_envelope(AUTHCRYPT, {BOB: [BOB_KEY]}) is None


@settings(max_examples=300, deadline=None)
@given(st.sampled_from((AUTHCRYPT, ANONCRYPT)), st.data())
def test_changed_bytes(raw: bytes, data: st.DataObject) -> None:
    """An envelope with changed bytes is never opened in another way than by the general parser."""
    start = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(start, min(len(raw), start + 4)))
    replacement = data.draw(st.sampled_from([b"", raw[start:end] * 2, b'"', b" ", b"="]) | st.binary(max_size=3))
    assert_agreement(raw[:start] + replacement + raw[end:])
