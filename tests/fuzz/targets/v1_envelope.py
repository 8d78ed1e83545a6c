"""Envelopes of DIDComm v1: as bytes, and by an independent writer with arbitrary headers and members."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from mediatord.errors import DecryptionError, InvalidEnvelope
from mediatord.protocol.didcomm_v1.envelope import (
    MAX_RECIPIENTS,
    Envelope,
    is_v1_envelope,
    open_envelope,
    pack_authcrypt,
    parse_envelope,
    parse_envelope_object,
)
from mediatord.protocol.didcomm_v1.keys import InvalidKey, SigningKey, find_spelling, parse_key, spell_key
from mediatord.protocol.encoding import loads_object
from tests.protocol.didcomm_v1.foreign_envelope import EnvelopeWriter, KeyPair

ALICE, BOB, CAROL = (KeyPair(bytes([number]) * 32) for number in (1, 2, 7))
_BOB_KEY = SigningKey.from_seed(BOB.seed)
_ALICE_NAME = SigningKey.from_seed(ALICE.seed).did_key
_TEXT = b'{"@type":"https://didcomm.org/trust_ping/1.0/ping","@id":"12345678"}'
# Repeatable, so that an input always means the same.
_EPHEMERAL = b"\6" * 32


class V1EnvelopeTarget:
    """
    Modes: `r` raw, `a` anoncrypted and `c` authcrypted by an independent writer, `k` a key.

    The writer merges an object into the protected header, the entries of recipients, their headers, or the envelope,
    as the input says.
    """

    words = (
        *(b'"protected"', b'"recipients"', b'"ciphertext"', b'"encrypted_key"', b'"header"', b'"sender"', b'"kid"'),
        *(b'"iv"', b'"tag"', b'"alg"', b'"Authcrypt"', b'"Anoncrypt"', b'"enc"', b'"typ"', b'"JWM/1.0"', b"null"),
        *(b"did:key:z6Mk", b"did:key:z6LS", b"did:key:", b"#", BOB.name.encode(), b"==", b"-_", b"+/"),
    )
    longest = 8_192
    # A hundred recipients are read, and one is decrypted; the independent writer is measured with them.
    most_calls = (5_000, 30)
    most_memory = (1_000_000, 400)

    def close(self) -> None:
        """No-op."""

    def run(self, data: bytes) -> None:
        """Recognise, parse and open the input; what opens is as it was written."""
        mode, rest = data[:1], data[1:]
        if mode == b"k":
            self._read_key(rest.decode("utf-8", "replace"))
        elif mode in (b"a", b"c"):
            self._check(self._write(ALICE if mode == b"c" else None, rest))
        else:
            self._check(rest)

    def _read_key(self, text: str) -> None:
        try:
            key = parse_key(text)
        except InvalidKey:
            return
        assert parse_key(key) == key == parse_key(spell_key(key, find_spelling(text)))
        try:
            raw = pack_authcrypt(_TEXT, key, _BOB_KEY)
        except InvalidKey:
            return
        assert [recipient.key for recipient in parse_envelope(raw).recipients] == [key]

    def _write(self, sender: KeyPair | None, rest: bytes) -> bytes:
        try:
            orders = json.loads(rest)
            changes = {name: dict(orders.get(name, {})) for name in ("protected", "entry", "header", "outer")}
            removed = [name for name in orders.get("removed", ()) if isinstance(name, str)]
            others = [CAROL] * bool(orders.get("others"))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return b""

        def change(header: dict[str, Any]) -> None:
            entry = header["recipients"][0]
            entry["header"].update(changes["header"])
            entry.update(changes["entry"])
            header.update(changes["protected"])
            for name in removed:
                for members in (header, entry, entry["header"]):
                    if isinstance(members, dict):
                        members.pop(name, None)

        try:
            written = EnvelopeWriter(sender, change=change, ephemeral=_EPHEMERAL).write(_TEXT, BOB, *others)
            return json.dumps({**written, **changes["outer"]}).encode()
        except (ValueError, RecursionError):
            return b""

    def _check(self, raw: bytes) -> None:
        recognised = is_v1_envelope(raw)
        try:
            envelope = parse_envelope(raw)
        except InvalidEnvelope:
            return
        # Recognition reads no escapes, and of several members of this name only the first.
        is_plain = b"\\" not in raw and raw.count(b'"protected"') == 1
        assert recognised or not is_plain, "read as what it was not recognised as"
        assert parse_envelope_object(loads_object(raw)) == envelope, "read in two ways"
        self._check_members(envelope)
        for recipient in envelope.recipients:
            try:
                opened = open_envelope(envelope, recipient, _BOB_KEY)
            except DecryptionError:
                continue
            assert opened == (_TEXT, _ALICE_NAME if envelope.is_authcrypt else None), "opened as what nobody wrote"

    def _check_members(self, envelope: Envelope) -> None:
        keys = [recipient.key for recipient in envelope.recipients]
        assert 1 <= len(keys) == len(set(keys)) <= MAX_RECIPIENTS
        assert (len(envelope.iv), len(envelope.tag), len(envelope.digest)) == (12, 16, 32)
        for recipient in envelope.recipients:
            assert parse_key(recipient.key) == recipient.key
            assert (recipient.sender is not None) == (recipient.iv is not None) == envelope.is_authcrypt
            assert len(recipient.encrypted_key) == (48 if envelope.is_authcrypt else 80)

    def seeds(self) -> Iterable[bytes]:
        """Both kinds, raw and with one order for each member, and keys in each spelling."""
        for sender in (ALICE, None):
            value = EnvelopeWriter(sender, ephemeral=_EPHEMERAL).write(_TEXT, BOB)
            yield b"r" + json.dumps(value).encode()
            yield b"r" + json.dumps({"more": {"protected": value["protected"]}, **value}).encode()
        for orders in _ORDERS:
            for mode in (b"a", b"c"):
                yield mode + json.dumps(orders).encode()
        for key in (
            _BOB_KEY.did_key,
            f"{_BOB_KEY.did_key}#{_BOB_KEY.did_key[8:]}",
            BOB.name,
            "1" * 32,
            "did:key:z6LS",
        ):
            yield b"k" + key.encode()
        yield from (
            b"",
            b"r",
            b"r{}",
            b"r[]",
            b'r{"protected":"e30"}',
            b'r{"protected":"eyJhbGciOiJBdXRoY3J5cHQifQ"}',
        )


_ORDERS: tuple[dict[str, Any], ...] = (
    {},
    {"others": 1},
    {"protected": {"enc": "chacha20poly1305_ietf", "typ": "JWM/1.0"}},
    {"protected": {"enc": "A256GCM"}},
    {"protected": {"alg": "Authcrypt"}},
    {"protected": {"alg": "Anoncrypt", "recipients": []}},
    {"entry": {"encrypted_key": "AAAA", "header": None}},
    {"header": {"kid": CAROL.name, "sender": None, "iv": None}},
    {"header": {"kid": _BOB_KEY.did_key}},
    {"header": {"sender": "AAAA" * 30, "iv": "AAAA" * 8}},
    {"removed": ["sender", "iv"]},
    {"removed": ["kid"]},
    {"outer": {"iv": "AAAA" * 4, "tag": "AAAA", "ciphertext": ""}},
    {"outer": {"recipients": [], "aad": "AA"}},
)


def make() -> V1EnvelopeTarget:
    """Create the target."""
    return V1EnvelopeTarget()
