"""Envelopes that would be expensive to process after the first error."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

from mediatord.protocol import encoding
from tests.fuzz.bombs import USUAL, BombTestCase
from tests.in_memory_mediator import CM3, MP, PING

DEEP = 100_000
CRYPTO, NO_MESSAGE = "e.p.trust.crypto", "e.p.msg"
FORWARD = "https://didcomm.org/routing/2.0/forward"


class DepthTests(BombTestCase):
    """Nesting of 100 000 levels, at any place in JSON."""

    def test_around(self) -> None:
        """In the envelope itself, in arrays and objects, closed or not."""
        for raw in (b"[" * DEEP, b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP):
            self.assertEqual(self.refusal_code(raw), NO_MESSAGE)

    def test_protected_header(self) -> None:
        """In the protected header; also at the maximum depth, which the slow parser reads."""
        envelope = self.encrypt_by_writer()
        for header in (b'{"a":' * DEEP, b'{ "a":' * 900 + b"1" + b"}" * 900):
            raw = json.dumps({**envelope, "protected": encoding.encode_base64url(header)}).encode()
            self.assertEqual(self.refusal_code(raw, most_calls=5_000), CRYPTO)

    def test_message(self) -> None:
        """In the message and its attachments."""
        for depth in (b"[" * DEEP, b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP):
            self.assertEqual(
                self.refusal_code(self.anoncrypted(b'{"id":"1","type":"a/b/1/c","body":' + depth)), NO_MESSAGE
            )

    def test_attachment(self) -> None:
        """An attachment that can be parsed and not written is refused, and not stored."""
        deep = b'{"ciphertext":"A","a":' + b"[" * 800 + b"]" * 800 + b"}"
        forward = b'{"id":"1","type":"%b","body":{"next":"%b"},"attachments":[{"data":{"json":%b}}]}'
        raw = forward % (FORWARD.encode(), self.guest.did.encode(), deep)
        self.assertEqual(self.refusal_code(self.anoncrypted(raw)), "e.p.msg.bad-attachment")


class ManyTests(BombTestCase):
    """Ten thousand items of every list."""

    def test_recipients(self) -> None:
        """A list that is too long is refused before its items are read; one of maximum length costs no decryption."""
        entries = [{"header": {"kid": f"did:key:z{number}#a"}, "encrypted_key": "AA"} for number in range(10_000)]
        raw = json.dumps({**self.encrypt_by_writer(), "recipients": entries}).encode()
        self.assertEqual(self.refusal_code(raw, most=30 * len(raw)), CRYPTO)
        raw = json.dumps({**self.encrypt_by_writer(), "recipients": entries[:100]}).encode()
        self.assertEqual(self.refusal_code(raw, most_calls=6_000), CRYPTO)

    def test_attachments(self) -> None:
        """A forward of more than twenty is refused."""
        self.assertEqual(
            self.refusal_code(self.build_forward_of(10_000), most_calls=30_000, most=20_000_000),
            "e.p.msg.bad-attachment",
        )
        self.assertEqual(self.post(self.build_forward_of(20), most_calls=6_000).status, 202)
        self.assertEqual(self.guest.count_queued(), 20)

    def build_forward_of(self, count: int) -> bytes:
        """To the wallet."""
        attachments = [{"data": {"json": {"ciphertext": "A"}}}] * count
        return self.anoncrypted(
            json.dumps(
                {"id": "1", "type": FORWARD, "body": {"next": self.guest.did}, "attachments": attachments}
            ).encode()
        )

    def test_ids_and_updates(self) -> None:
        """A list that is too long costs at most a check per entry; one of maximum length a few calls per entry."""
        updates = [{"recipient_did": f"did:x:{number}", "action": "add"} for number in range(10_000)]
        for type_, member, entries, longest in (
            (f"{MP}/messages-received", "message_id_list", [f"i-{number}" for number in range(49_000)], 10_000),
            (f"{CM3}/recipient-update", "updates", updates, 1_000),
        ):
            for count, most_calls in ((longest, 130_000), (longest + 1, USUAL), (len(entries), USUAL)):
                raw = self.authcrypted(self.message(type_, {member: entries[:count]}, return_route="all"))
                answer = self.post(raw, most_calls=most_calls, most=40 * len(raw) + 2_000_000)
                is_refused = self.guest.open(answer.body).message.type.uri.endswith("/problem-report")
                self.assertIs(is_refused, count > longest)

    def test_duplicate_names(self) -> None:
        """A header with a duplicate name is parsed twice and refused, however many there are."""
        header = b"{" + b'"a":1,' * 6_000 + b'"b":1}'
        raw = json.dumps({**self.encrypt_by_writer(), "protected": encoding.encode_base64url(header)}).encode()
        self.assertEqual(self.refusal_code(raw, most=60 * len(raw)), CRYPTO)


class CompressionTests(BombTestCase):
    """Nothing is decompressed, and no header causes work."""

    def test_zip(self) -> None:
        """A compressed envelope is refused before decryption (DIDComm has none)."""
        packed = zlib.compress(bytes(100_000_000), 9)[2:-4]
        raw = json.dumps(self.encrypt_by_writer(packed, change=lambda header: header.update(zip="DEF"))).encode()
        self.assertEqual(self.refusal_code(raw), CRYPTO)
        raw = json.dumps(self.encrypt_by_writer(packed, headers={"zip": "DEF"})).encode()
        self.assertEqual(self.refusal_code(raw), CRYPTO)

    def test_gzip(self) -> None:
        """A compressed body is not decompressed, whatever its headers."""
        packed = gzip.compress(bytes(100_000_000))
        for coding in ("gzip", "deflate", "br", "gzip, gzip"):
            headers: dict[str, Any] = {"Content-Encoding": coding}
            self.assertEqual(self.refusal_code(packed, **headers), NO_MESSAGE)

    def test_key_derivation_rounds(self) -> None:
        """Senders cannot set the number of rounds: such parameters are ignored (CVE-2023-6681)."""
        message = json.dumps({"id": "1", "type": PING, "body": {}}).encode()
        raw = json.dumps(
            self.encrypt_by_writer(message, change=lambda header: header.update(p2c=2**31, p2s="AA"))
        ).encode()
        self.assertEqual(self.post(raw).status, 202)
        for alg in ("PBES2-HS512+A256KW", "dir", "RSA-OAEP", "none", "ECDH-ES"):
            header = {"alg": alg, "p2c": 2**31, "p2s": "AA"}
            raw = json.dumps(
                self.encrypt_by_writer(message, change=lambda found, more=header: found.update(more))
            ).encode()
            self.assertEqual(self.refusal_code(raw), CRYPTO)

    def test_base64(self) -> None:
        """Endless padding, line ends and foreign characters, in each part of an envelope."""
        for junk in ("=" * 60_000, "A" * 60_000 + "=", " \n" * 30_000, "é" * 30_000, "A=" * 30_000, "\0" * 60_000):
            for member in ("protected", "iv", "ciphertext", "tag"):
                raw = json.dumps({**self.encrypt_by_writer(), member: junk}).encode()
                self.assertEqual(self.refusal_code(raw), CRYPTO)
