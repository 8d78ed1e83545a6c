"""Oversized DIDs, which any sender can make the mediator resolve."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from mediatord.errors import UnresolvableDID
from mediatord.protocol import encoding
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.did_document import MAX_DID_LENGTH, is_did
from mediatord.protocol.didcomm.did_methods import parse_did_web_document, resolve_local
from tests.did_factories import make_did_peer_4
from tests.fuzz.bombs import BombTestCase
from tests.fuzz.fuzz_mediator import measure_cost
from tests.in_memory_mediator import PING

E_KEY = "z6LSqaU49Tn4sboPj9gbrxmcJ7sHF5gu6bzAASfJnh9meXK6"
V_KEY = "z6Mkon3Necd6NkkyfoGoHxid2znGc59LU3K7mubaRcFbLfLX"
MEGABYTE = 1_000_000
UNRESOLVABLE = "e.p.did.unresolvable"


def build_peer_4(document: bytes) -> str:
    """The long form of any document."""
    encoded = "z" + encoding.encode_base58(b"\x80\x04" + document)
    return f"did:peer:4z{encoding.encode_base58(bytes((0x12, 0x20)) + sha256(encoded.encode()).digest())}:{encoded}"


class DIDTests(BombTestCase):
    """As the sender of an authcrypt, and in the resolver."""

    def refusal_of_sender(self, did: str, *, most_calls: int) -> str:
        """The code with which a message from a DID is refused."""
        key = self.guest.identity.agreement.private
        message = json.dumps({"id": "1", "type": PING, "body": {}, "from": did}).encode()
        # Short and long ids of the sender's key cost the same: none is searched for.
        raw = json.dumps(self.encrypt_by_writer(message, sender=(f"{did}#key-1", key))).encode()
        return self.refusal_code(raw, most_calls=most_calls)

    def test_megabyte_did(self) -> None:
        """Of any method: it is refused before anything in it is parsed."""
        for start in ("did:key:z", "did:peer:0z", "did:peer:2.E", "did:peer:4z", "did:web:", "did:x:", "did:web:%3"):
            long = start + "6" * MEGABYTE
            self.assertFalse(is_did(long))
            with self.assertRaises(UnresolvableDID):
                resolve_local(long)
            self.assert_cost(measure_cost(is_did, long), 20, 10_000)
            self.assert_cost(measure_cost(canonicalize_did, long), 20, 10_000)
        self.assertEqual(self.refusal_of_sender("did:peer:2.E" + "6" * 20_000, most_calls=3_000), UNRESOLVABLE)

    def test_syntax(self) -> None:
        """The longest allowed DID that is invalid at its end is scanned once."""
        for unit in ("a", "a.", "%41", ":", "a:", "%4", "-._:"):
            text = "did:a:" + unit * (MAX_DID_LENGTH // len(unit) - 10) + "!"
            work = measure_cost(is_did, text)
            self.assert_cost(work, 20, 50_000)
            self.assertFalse(is_did(text))

    def test_services_of_peer_2(self) -> None:
        """More than 64 are refused, in as many elements or in one."""
        service = {"t": "dm", "s": "http://a"}
        one = encoding.encode_base64url(encoding.dumps(service))
        many = encoding.encode_base64url(encoding.dumps([{"t": "dm"}] * 500))
        for services in (f".S{one}" * 65, ".SAA" * 2_000, f".S{many}", ".S" * 4_000):
            did = f"did:peer:2.E{E_KEY}.V{V_KEY}{services}"[:MAX_DID_LENGTH]
            self.assertEqual(self.refusal_of_sender(did, most_calls=15_000), UNRESOLVABLE)
        document = resolve_local(f"did:peer:2.E{E_KEY}.V{V_KEY}" + f".S{one}" * 64)
        self.assertEqual(len(document.endpoints), 64)

    def test_keys_of_peer_2(self) -> None:
        """More than 64 are refused without decoding their points."""
        did = f"did:peer:2.E{E_KEY}" + f".V{V_KEY}" * 155
        self.assertLessEqual(len(did), MAX_DID_LENGTH)
        self.assertEqual(self.refusal_of_sender(did, most_calls=5_000), UNRESOLVABLE)
        self.assertEqual(self.refusal_of_sender("did:peer:2" + ".Ez" * 2_700, most_calls=10_000), UNRESOLVABLE)

    def test_depth_of_peer_4(self) -> None:
        """A document nested as deep as a DID may be long."""
        for deep in (b"[" * 5_000, b"[" * 1_000 + b"]" * 1_000, b'{"a":' * 1_000 + b"1" + b"}" * 1_000):
            for document in (deep, b'{"service":%b}' % deep, b'{"keyAgreement":%b}' % deep):
                self.assertEqual(self.refusal_of_sender(build_peer_4(document), most_calls=8_000), UNRESOLVABLE)

    def test_lists_of_peer_4(self) -> None:
        """More than 64 keys, references, services or endpoints."""
        endpoints = [{"type": "DIDCommMessaging", "serviceEndpoint": ["a"] * 65}]
        for member, value in (
            ("verificationMethod", [{}] * 500),
            ("keyAgreement", ["#a"] * 500),
            ("service", [{}] * 500),
            ("service", endpoints),
        ):
            long, _ = make_did_peer_4({member: value})
            self.assertEqual(self.refusal_of_sender(long, most_calls=8_000), UNRESOLVABLE)

    def test_wrong_hash(self) -> None:
        """The hash is verified before the document is parsed."""
        long, _ = make_did_peer_4({"a": "x" * 5_000})
        self.assertEqual(
            self.refusal_of_sender(long[:-1] + ("2" if long[-1] != "2" else "3"), most_calls=4_000), UNRESOLVABLE
        )

    def test_fetched_documents(self) -> None:
        """Documents of maximum size from a stranger's host."""
        lists: tuple[Any, ...] = ([{}] * 20_000, ["#a"] * 20_000, [[]] * 20_000)
        for value in lists:
            for member in ("verificationMethod", "keyAgreement", "authentication", "service"):
                raw = json.dumps({"id": "did:web:a", member: value}).encode()
                with self.assertRaises(UnresolvableDID):
                    parse_did_web_document("did:web:a", raw)
                self.assert_cost(measure_cost(self.parse_refused, raw), 2_000, 40 * len(raw))
        deep = b'{"id":"did:web:a","service":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        self.assert_cost(measure_cost(self.parse_refused, deep), 200, 20 * len(deep))

    def parse_refused(self, raw: bytes) -> None:
        """Read a document, which is refused."""
        try:
            parse_did_web_document("did:web:a", raw)
        except UnresolvableDID:
            return
        self.fail("it was read")
