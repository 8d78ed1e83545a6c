"""Envelopes: as bytes, with arbitrary headers, and with arbitrary content."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from mediatord.protocol.didcomm import json_web_signature
from mediatord.protocol.didcomm.jwe import encrypt_anoncrypt, encrypt_authcrypt
from mediatord.protocol.didcomm.push_notifications import PUSH_PROTOCOLS
from mediatord.ratelimit.admission import RequestReply
from mediatord.wallet.didcomm_messages import UnreadableMessage
from tests.fuzz.fuzz_mediator import STATUSES, FuzzMediator, problem_code
from tests.fuzz.targets import replace_words
from tests.http.in_memory_site import InMemorySite
from tests.in_memory_mediator import CM2, CM3, MP, PING, InMemoryWallet
from tests.protocol.didcomm.foreign_jwe import JWEWriter
from tests.push.registries import APNS, FCM, SUBSCRIPTION, make_core_registry

PROBLEM = "https://didcomm.org/report-problem/2.0/problem-report"
FORWARD = "https://didcomm.org/routing/2.0/forward"
INNER = {"protected": "e30", "recipients": [{"header": {"kid": "@GUEST@#key-1"}}], "ciphertext": "AAAA"}


class EnvelopeTarget:
    """
    DIDComm over HTTP, or over a socket if the mode is a capital letter.

    Modes: `r` raw, `a` anoncrypted, `c` authcrypted, `n` nested, `s` signed and anoncrypted, `w` by an independent
    writer as the input says.
    """

    words = (
        *(b'"protected"', b'"recipients"', b'"ciphertext"', b'"epk"', b'"zip":"DEF"', b'"p2c":2147483647', b'"crit"'),
        *(b"@MEDIATOR@", b"@GUEST@", b"@KID@", b'"attachments"', b'"base64"', b'"delay_milli"', b'"expires_time"'),
    )
    longest = 16_384
    # Decrypting an authcrypt resolves a DID with hundreds of base58 digits, each of a call or two.
    most_calls = (15_000, 30)
    most_memory = (4_000_000, 600)

    def __init__(self) -> None:
        self._mediator = FuzzMediator(self._prepare, devices=make_core_registry)
        self._guest: InMemoryWallet = None  # type: ignore[assignment]  # there is one as soon as there is a mediator

    def _prepare(self, site_fixture: InMemorySite) -> None:
        self._guest = InMemoryWallet(site_fixture).enrol()

    def close(self) -> None:
        """Stop the mediator."""
        self._mediator.close()

    def run(self, data: bytes) -> None:
        """Send the input, and check the reply and the store."""
        site_fixture = self._mediator.enter()
        method = site_fixture.document.key_agreement[0]
        words = {b"@MEDIATOR@": site_fixture.did, b"@GUEST@": self._guest.did, b"@KID@": method.id}
        way, rest = data[:1], replace_words(data[1:], words)
        raw = self._build(way.lower(), rest)
        if raw is None:
            return
        kept = self._mediator.store_content()
        socket = site_fixture.socket() if way.isupper() else None
        reply = site_fixture.receive(raw, socket)
        self._mediator.assert_no_failures()
        if self._is_refusal(reply):
            assert self._mediator.store_content() == kept, "stored, although it was refused"
        if socket is not None:
            site_fixture.base.connections.closed(socket)
        site_fixture.clock.advance(0)
        self._mediator.assert_no_failures()

    def _build(self, way: bytes, rest: bytes) -> bytes | None:
        document = self._mediator.enter().document
        to = [(method.id, method.key) for method in document.key_agreement if method.key.curve == "X25519"]
        sender = (self._guest.identity.agreement.kid, self._guest.identity.agreement.private)
        if way == b"a":
            return encrypt_anoncrypt(rest, to)
        if way == b"c":
            return encrypt_authcrypt(rest, sender, to)
        if way == b"n":
            return encrypt_anoncrypt(encrypt_authcrypt(rest, sender, to), to)
        if way == b"s":
            signing = self._guest.identity.signing
            return encrypt_anoncrypt(json_web_signature.sign(rest, signing.kid, signing.private), to)
        return self._write_independently(rest, sender, to) if way == b"w" else rest

    def _write_independently(self, rest: bytes, sender: Any, to: Any) -> bytes | None:
        """The envelope that the independent writer makes as the input says; None if it cannot."""
        try:
            orders = json.loads(rest)
            writing = JWEWriter(
                sender=sender if orders.get("sender") else None,
                enc=orders.get("enc", "A256CBC-HS512"),
                draft03=bool(orders.get("draft03")),
                change=lambda header: header.update(orders.get("change", {})),
                headers=orders.get("headers", {}),
                moved=tuple(orders.get("moved", ())),
            )
            jwe = writing.write(json.dumps(orders.get("plaintext")).encode(), *to)
            jwe.update(orders.get("outer", {}))
            return json.dumps(jwe).encode()
        except (ValueError, TypeError, AttributeError, KeyError, LookupError, RecursionError):
            return None

    def _is_refusal(self, reply: RequestReply) -> bool:
        """Whether the reply is a refusal; a refusal must be one valid error."""
        assert reply.status in STATUSES, reply.status
        if reply.status == 202:
            assert not reply.body
            return False
        if b'"ciphertext"' not in reply.body:
            problem_code(reply.body)
            return True
        try:
            opened = self._guest.open(reply.body)
        except UnreadableMessage:
            raise AssertionError("an answer that its recipient cannot read") from None
        return opened.message.type.uri == PROBLEM

    def seeds(self) -> Iterable[bytes]:
        """One input per service, and one per refusal."""
        for type_, body, more in _MESSAGES:
            headers = {"from": "@GUEST@", "to": ["@MEDIATOR@"], "return_route": "all", **more}
            message = {"id": "m-1", "type": type_, "body": body, **headers}
            for way in b"cCns" if type_ == PING else b"c":
                yield bytes([way]) + json.dumps(message).encode()
        for data in (
            {"json": INNER},
            {"base64": "eyJjaXBoZXJ0ZXh0IjoiQUFBQSJ9"},
            {"links": ["http://a"], "hash": "b"},
        ):
            yield (
                b"a"
                + json.dumps(
                    {"id": "f-1", "type": FORWARD, "body": {"next": "@GUEST@"}, "attachments": [{"data": data}]}
                ).encode()
            )
        for orders in _ORDERS:
            message = {"id": "w-1", "type": PING, "body": {}, "from": "@GUEST@", "to": ["@MEDIATOR@"]}
            yield b"w" + json.dumps({"plaintext": message, **orders}).encode()
        yield from (b"r{}", b"r", b"R[]", b'r{"payload":"e30","signatures":[]}', b'r{"id":"1","type":"2"}')
        yield b"r" + json.dumps({"ciphertext": "AAAA", "protected": "e30", **INNER, "iv": "AA", "tag": "AA"}).encode()


_UPDATES = {
    "updates": [{"recipient_did": "did:example:x", "action": "add"}, {"recipient_did": "#", "action": "remove"}]
}
_MESSAGES: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    (PING, {"response_requested": True}, {}),
    (PING, {}, {"expires_time": "2001-01-01T00:00:00Z", "created_time": 1.5}),
    (PING, {}, {"from_prior": "e30.e30.AAAA", "thid": "t", "pthid": "p", "to": "@MEDIATOR@"}),
    (f"{CM3}/mediate-request", {}, {}),
    (f"{CM2}/mediate-request", {}, {}),
    (f"{CM3}/recipient-update", _UPDATES, {}),
    (f"{CM2}/keylist-update", {"updates": [{"recipient_key": "did:key:z6Mk", "action": "add"}]}, {}),
    (f"{CM3}/recipient-query", {"paginate": {"limit": 10, "offset": 0}}, {}),
    (f"{CM2}/keylist-query", {}, {}),
    (f"{MP}/status-request", {"recipient_did": "@GUEST@"}, {}),
    (f"{MP}/delivery-request", {"limit": 10, "recipient_did": "@GUEST@"}, {}),
    (f"{MP}/messages-received", {"message_id_list": ["a", "b"]}, {}),
    (f"{MP}/live-delivery-change", {"live_delivery": True}, {}),
    (
        "https://didcomm.org/discover-features/2.0/queries",
        {"queries": [{"feature-type": "protocol", "match": "https://didcomm.org/*"}]},
        {},
    ),
    (PROBLEM, {"code": "e.p", "comment": "{1}", "args": ["a"]}, {"pthid": "x"}),
    (FORWARD, {"next": "@GUEST@"}, {"attachments": [{"id": "a", "data": {"json": INNER}}], "delay_milli": 5}),
    (FORWARD, {"next": "@MEDIATOR@"}, {"attachments": [{"data": {"json": INNER}}], "expires_time": 2e9}),
    (FORWARD, {"next": "@GUEST@"}, {"attachments": [{"data": {"json": INNER}}] * 3}),
    (PUSH_PROTOCOLS["fcm"].type("set"), FCM, {}),
    (PUSH_PROTOCOLS["fcm"].type("get"), {}, {}),
    (PUSH_PROTOCOLS["apns"].type("set"), APNS, {}),
    (PUSH_PROTOCOLS["web_push"].type("set"), {"subscription": SUBSCRIPTION}, {"please_ack": [""]}),
    (PUSH_PROTOCOLS["web_push"].type("get"), {}, {}),
    ("https://didcomm.org/empty/1.0/empty", {}, {"please_ack": [""], "ack": ["x"]}),
)
_ORDERS: tuple[dict[str, Any], ...] = (
    {"enc": "A256GCM"},
    {"sender": True},
    {"sender": True, "draft03": True, "enc": "A256GCM"},
    {"change": {"zip": "DEF", "crit": ["zip"], "p2c": 2**31, "p2s": "AA"}},
    {"change": {"apu": "AAAA", "apv": "AA", "skid": "did:example:a#b", "alg": "dir"}},
    {"headers": {"epk": {"kty": "OKP", "crv": "X25519", "x": "AA"}}, "moved": ["epk", "enc"]},
    {"outer": {"unprotected": {"a": 1}, "aad": "AA", "recipients": []}},
    {"outer": {"iv": "AA", "tag": "", "ciphertext": "===="}},
)


def make() -> EnvelopeTarget:
    """Create the target."""
    return EnvelopeTarget()
