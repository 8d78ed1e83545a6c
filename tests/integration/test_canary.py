"""
No data sent by peers and no private key of the mediator leaks into logs, metrics or files (reference 12, decision
D15).

Marked texts are sent through every code path, valid and invalid. Events, log lines, metrics, responses, output and
files are then searched for them in several encodings. DIDs and ids are not marked: the log records the former, and
problem reports must name the latter.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.logger import ILogObserver, LogEvent, eventAsText, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.messages import MessageOrigin
from mediatord.errors import StoreUnavailable
from mediatord.identity.invitation import make_v1_invitation
from mediatord.protocol import encoding
from mediatord.protocol.didcomm import json_web_signature, jwe
from mediatord.protocol.didcomm.did_document import DIDDocument
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.protocol.didcomm.forward import FORWARD
from mediatord.protocol.didcomm_v1.envelope import pack_anoncrypt, pack_authcrypt
from mediatord.protocol.didcomm_v1.keys import encode_base58_key
from mediatord.ratelimit.admission import RequestReply
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import anoncrypt, authcrypt, build_forward, compose_message
from mediatord.wallet.didcomm_v1_messages import V1Handshake, V1Invitation
from tests.didcomm_v1.in_memory_wallet import InMemoryV1Wallet, compose, compose_forward, get_identity, make_key
from tests.http.in_memory_site import (
    CLOSE,
    HTTPResponse,
    InMemorySite,
    InMemoryWebSocketClient,
    encode_masked_frame,
    encode_request,
    parse_responses,
)
from tests.http.in_memory_site import PING as PING_FRAME
from tests.http.test_websocket import HIGH_LIMITS
from tests.in_memory_mediator import CM2, CM3, MP, PEER, PING, FakeSocket, InMemoryWallet, from_header
from tests.integration.daemon import Daemon
from tests.integration.message_load import PATIENCE_SECONDS
from tests.observability.counter_oracle import read_segments

# Marks data that must never be stored or logged, and payloads, which may be stored as such only.
SECRET = "Kanarienvogel-7f3a"
STORED = "Zaunkoenig-91c4-im-Nest"


def encodings_of(text: str) -> list[bytes]:
    """The text as it is, in hexadecimal, and the part common to all base64 encodings that contain it."""
    raw = text.encode()
    encodings = [raw, raw.hex().encode(), raw.upper()]
    for shift in range(3):
        # The first and last characters depend on adjacent bytes.
        encoded = b64encode(b"\0" * shift + raw)
        encodings.append(encoded[(0, 2, 3)[shift] : len(encoded) - 4])
    return encodings


def find_text(text: str, places: dict[str, bytes]) -> list[str]:
    """Names of the places that contain the text in any encoding."""
    return [name for name, value in places.items() if any(encoded in value for encoded in encodings_of(text))]


def marked_envelope(mark: str) -> bytes:
    """An envelope-like document with the mark in every member."""
    part = encoding.encode_base64url(mark.encode())
    return encoding.dumps(
        {
            "protected": part,
            "unprotected": {"note": mark},
            "recipients": [{"header": {"kid": f"{mark}#key"}, "encrypted_key": part}],
            "iv": part,
            "ciphertext": part,
            "tag": part,
            mark: mark,
        }
    )


class MarkedMessages:
    """Marked messages of every kind."""

    def __init__(self, identity: WalletIdentity, document: DIDDocument, did: str) -> None:
        self._identity = identity
        self._document = document
        self._did = did

    def envelopes(self) -> Iterator[bytes]:
        """Valid and invalid messages."""
        yield from self._non_envelopes()
        yield from self._malformed_envelopes()
        yield from self.decryptable_messages()
        yield from self._forged_senders()

    def decryptable_messages(self) -> Iterator[bytes]:
        """Messages that can be decrypted."""
        yield from self._forwards()
        yield from self._requests()

    def _non_envelopes(self) -> Iterator[bytes]:
        message = compose_message(PING, {"comment": SECRET})
        key = self._identity.signing
        yield SECRET.encode()
        yield b""
        yield b"\xff" + SECRET.encode()
        yield encoding.dumps({SECRET: SECRET})
        yield encoding.dumps([SECRET])
        yield encoding.dumps(message)
        yield json_web_signature.sign(encoding.dumps(message), key.kid, key.private)
        yield b'{"protected":"%b","protected":"x","ciphertext":"x"}' % SECRET.encode()

    def _malformed_envelopes(self) -> Iterator[bytes]:
        valid = json.loads(self._anoncrypt(compose_message(PING, {"comment": SECRET})))
        part = encoding.encode_base64url(SECRET.encode())
        yield marked_envelope(SECRET)
        for name in ("protected", "iv", "ciphertext", "tag"):
            yield encoding.dumps({**valid, name: part})
            yield encoding.dumps({**valid, name: SECRET})
            yield encoding.dumps({**valid, name: {SECRET: SECRET}})
        yield encoding.dumps({**valid, "recipients": [{**valid["recipients"][0], "encrypted_key": part}]})
        yield encoding.dumps({**valid, "recipients": [{"header": {"kid": SECRET}, "encrypted_key": SECRET}]})
        yield encoding.dumps({**valid, "recipients": SECRET})
        for header in (
            {"alg": SECRET, "enc": SECRET},
            {"alg": "ECDH-1PU+A256KW", "enc": "A256CBC-HS512", "skid": SECRET, "apu": part},
            {"alg": "ECDH-ES+A256KW", "enc": "A256GCM", "epk": {"kty": "OKP", "crv": "X25519", "x": SECRET}},
            {"zip": SECRET, "crit": [SECRET], "typ": SECRET},
        ):
            yield encoding.dumps({**valid, "protected": encoding.encode_base64url(encoding.dumps(header))})
        for plaintext in (SECRET.encode(), encoding.dumps({SECRET: SECRET}), encoding.dumps({"id": SECRET})):
            yield jwe.encrypt_anoncrypt(
                plaintext, [(method.id, method.key) for method in self._document.key_agreement]
            )

    def _forwards(self) -> Iterator[bytes]:
        valid = [{"data": {"json": json.loads(marked_envelope(STORED))}}]
        bob = {"next": self._identity.did}
        marked: dict[str, Any] = {"lang": SECRET, "please_ack": [SECRET], "trace": SECRET, SECRET: SECRET}
        yield from self._all_envelope_kinds(FORWARD, bob, attachments=valid, **marked)
        yield from self._all_envelope_kinds(FORWARD, {**bob, SECRET: SECRET}, attachments=valid, delay_milli=1)
        yield from self._all_envelope_kinds(FORWARD, {"next": SECRET}, attachments=valid)
        yield from self._all_envelope_kinds(FORWARD, {"next": {SECRET: SECRET}}, attachments=valid)
        yield from self._all_envelope_kinds(FORWARD, bob, attachments=valid, expires_time=1)
        yield from self._all_envelope_kinds(FORWARD, bob, attachments=valid, expires_time=SECRET, delay_milli=SECRET)
        part = encoding.encode_base64url(SECRET.encode())
        for data in (
            {"base64": SECRET + "?"},
            {"base64": part},
            {"json": {SECRET: SECRET}},
            {"json": SECRET},
            {"links": [f"https://{SECRET}.example/"], "hash": SECRET},
            {"base64": part, "hash": SECRET, "jws": {SECRET: SECRET}},
            SECRET,
        ):
            # An invalid attachment beside a valid one: neither is stored.
            attachments = [
                {**valid[0], "filename": SECRET},
                {"media_type": SECRET, "description": SECRET, "data": data},
            ]
            yield from self._all_envelope_kinds(FORWARD, bob, attachments=attachments)
        yield from self._all_envelope_kinds(FORWARD, bob, attachments=SECRET)
        yield self._anoncrypt(build_forward(self._did, [marked_envelope(SECRET)]))
        marks: dict[str, Any] = {SECRET: SECRET}
        onion = self._anoncrypt(compose_message(PING, {"comment": SECRET}))
        for _ in range(6):
            yield onion
            onion = self._anoncrypt(build_forward(self._did, [onion], **marks))

    def _requests(self) -> Iterator[bytes]:
        update = {"recipient_did": SECRET, "action": SECRET, SECRET: SECRET}
        for type_, body in (
            (PING, {"comment": SECRET, "response_requested": SECRET}),
            ("https://didcomm.org/discover-features/2.0/queries", {"queries": [{"feature-type": SECRET}]}),
            ("https://didcomm.org/discover-features/2.0/queries", {"queries": SECRET}),
            ("https://didcomm.org/report-problem/2.0/problem-report", {"code": SECRET, "comment": SECRET}),
            ("https://didcomm.org/empty/1.0/empty", {SECRET: SECRET}),
            (f"{CM2}/mediate-request", {SECRET: SECRET}),
            (f"{CM3}/recipient-update", {"updates": [update]}),
            (f"{CM2}/keylist-update", {"updates": SECRET}),
            (f"{CM3}/recipient-query", {"paginate": {"limit": SECRET, "offset": SECRET}}),
            (f"{MP}/status-request", {"recipient_did": SECRET}),
            (f"{MP}/delivery-request", {"limit": SECRET}),
            (f"{MP}/delivery-request", {"limit": 10, SECRET: SECRET}),
            (f"{MP}/live-delivery-change", {"live_delivery": SECRET}),
            (f"{MP}/live-delivery-change", {"live_delivery": True, SECRET: SECRET}),
            (f"{MP}/messages-received", {"message_id_list": [SECRET, {SECRET: 1}]}),
            (f"https://didcomm.org/{SECRET}/1.0/x", {SECRET: SECRET}),
            (f"https://didcomm.org/trust-ping/2.{SECRET}/ping", {SECRET: SECRET}),
            (f"https://didcomm.org/trust-ping/2.0-{SECRET}/ping", {}),
            (f"https://{SECRET}.example/trust-ping/2.0/ping", {}),
            (SECRET, {}),
        ):
            yield from self._all_envelope_kinds(type_, body, **{SECRET: SECRET})
        yield from self._all_envelope_kinds(PING, SECRET)
        for header in ("from_prior", "return_route", "thid", "created_time", "to", "typ", "attachments"):
            yield self.authcrypt_request(PING, {}, **{header: SECRET})
        yield from self._all_envelope_kinds(f"{MP}/status-request", {"recipient_did": SECRET}, expires_time=1)
        replayed = self.authcrypt_request(f"{MP}/status-request", {SECRET: SECRET})
        yield replayed
        yield replayed

    def _forged_senders(self) -> Iterator[bytes]:
        other = WalletIdentity.generate()
        body = {"comment": SECRET}
        yield self.authcrypt_request(f"{MP}/status-request", body, **from_header(SECRET))
        yield self.authcrypt_request(f"{MP}/status-request", body, **from_header(other.did))
        yield self.authcrypt_request(f"{MP}/status-request", body, to=[other.did, SECRET])
        yield authcrypt(
            compose_message(f"{MP}/status-request", body, **from_header(other.did)), other, self._document
        )
        yield anoncrypt(compose_message(PING, body), other.document)

    def _all_envelope_kinds(self, type_: str, body: Any, **headers: Any) -> Iterator[bytes]:
        """Anoncrypted, authcrypted, and signed within anoncrypt."""
        yield self._anoncrypt({**compose_message(type_, **headers), "body": body})
        yield self.authcrypt_request(type_, body, **headers)
        key = self._identity.signing
        message = {
            **compose_message(type_, **{"to": [self._did], **headers}, **from_header(self._identity.did)),
            "body": body,
        }
        jws = json_web_signature.sign(encoding.dumps(message), key.kid, key.private)
        yield jwe.encrypt_anoncrypt(
            jws, [(key_agreement.id, key_agreement.key) for key_agreement in self._document.key_agreement]
        )

    def authcrypt_request(self, type_: str, body: Any, **headers: Any) -> bytes:
        """An authcrypted request."""
        headers = {"to": [self._did], "return_route": "all", **from_header(self._identity.did), **headers}
        return authcrypt({**compose_message(type_, **headers), "body": body}, self._identity, self._document)

    def _anoncrypt(self, message: dict[str, Any]) -> bytes:
        return anoncrypt(message, self._document)


class MarkedV1Messages:
    """Marked messages of DIDComm v1."""

    def __init__(self, in_memory: InMemorySite, wallet: InMemoryV1Wallet) -> None:
        self._in_memory = in_memory
        self._wallet = wallet
        self._identity = get_identity(in_memory)

    def envelopes(self) -> Iterator[bytes]:
        """Valid and invalid messages."""
        all_: dict[str, Any] = {"~transport": {"return_route": "all"}, SECRET: SECRET}
        for type_, members in (
            ("trust_ping/1.0/ping", {"comment": SECRET}),
            ("discover-features/1.0/query", {"query": SECRET}),
            ("coordinate-mediation/1.0/mediate-request", {}),
            ("coordinate-mediation/1.0/keylist-update", {"updates": [{"recipient_key": SECRET, "action": SECRET}]}),
            ("coordinate-mediation/1.0/keylist-query", {"paginate": SECRET}),
            ("messagepickup/2.0/status-request", {"recipient_key": SECRET}),
            ("messagepickup/2.0/messages-received", {"message_id_list": [SECRET]}),
            ("messagepickup/1.0/list-pickup", {"message_ids": [SECRET]}),
            ("push-notifications-fcm/1.0/set-device-info", {"device_token": SECRET, "device_platform": SECRET}),
            ("notification/1.0/problem-report", {"description": {"en": SECRET, "code": SECRET}}),
            (f"{SECRET}/1.0/x", {}),
            ("did-rotate/1.0/rotate", {"to_did": SECRET}),
        ):
            yield self._wallet.pack(compose(type_, **members, **all_))
        replayed = self._wallet.pack(compose("messagepickup/2.0/status-request", **all_))
        yield from (replayed, replayed)
        yield from self._handshakes()
        yield from self._forwards()
        for plaintext in (SECRET.encode(), encoding.dumps({"@id": SECRET}), encoding.dumps({SECRET: SECRET})):
            yield self._wallet.pack(plaintext)
        envelope = json.loads(self._wallet.pack(b"{}"))
        for name in ("iv", "ciphertext", "tag"):
            yield encoding.dumps({**envelope, name: SECRET, SECRET: SECRET})

    def _handshakes(self) -> Iterator[bytes]:
        invitation = V1Invitation.from_url(
            make_v1_invitation(
                self._in_memory.config.public_url, self._in_memory.base.identity.now.root_secret, "mediatord"
            ).url
        )
        for number, protocol in enumerate(("didexchange/1.1", "didexchange/1.0", "connections/1.0")):
            key = make_key(f"{SECRET} {number}")
            endpoint = f"https://wallet.example/{SECRET}"
            handshake = V1Handshake(invitation, key, cast(Any, protocol), label=SECRET, endpoint=endpoint)
            for changed in ({}, {"did": SECRET, "connection": {"DID": SECRET}}, {"~thread": {"pthid": SECRET}}):
                message = {**handshake.make_request(), **changed, "goal": SECRET, "@id": f"handshake-{len(changed)}"}
                yield pack_authcrypt(encoding.dumps(message), invitation.key, key)

    def _forwards(self) -> Iterator[bytes]:
        to, payload = self._wallet.recipient_base58, marked_envelope(STORED)
        routing_key = self._identity.routing_key.did_key
        for plaintext in (
            compose_forward(to, payload, comment=SECRET),
            compose("routing/1.0/forward", to=to, msg=SECRET),
            compose("routing/1.0/forward", to=SECRET, msg=SECRET),
            compose("routing/1.0/forward", to=to, msg={SECRET: SECRET}),
            compose_forward(routing_key, marked_envelope(SECRET)),
            compose_forward(f"did:example:{SECRET}", marked_envelope(SECRET)),
        ):
            yield pack_anoncrypt(plaintext, routing_key)
            yield pack_authcrypt(plaintext, routing_key, self._wallet.key)


MARKED_HEADERS = {
    "Authorization": f"Bearer {SECRET}",
    "Cookie": f"session={SECRET}",
    "User-Agent": SECRET,
    "Referer": f"https://x.example/{SECRET}",
    "Origin": f"https://{SECRET}.example",
    "X-Forwarded-For": SECRET,
    "X-Other": SECRET,
}
_ONCE = {**MARKED_HEADERS, "Connection": "close"}

BAD_HTTP = [
    encode_request("GET", f"/{SECRET}?{SECRET}={SECRET}", None, _ONCE),
    encode_request("GET", f"/invitation?_oob={SECRET}", None, {**_ONCE, "Accept": SECRET}),
    encode_request("GET", f"/didcomm?{SECRET}", None, _ONCE),
    encode_request("GET", f"/metrics?{SECRET}", None, _ONCE),
    encode_request(SECRET, "/didcomm", b"x", _ONCE),
    encode_request("POST", "/didcomm", SECRET.encode(), {**_ONCE, "Content-Type": f"text/{SECRET}"}),
    encode_request("POST", f"/didcomm/{SECRET}", b"x", _ONCE),
    encode_request("POST", "/didcomm", SECRET.encode() * 100_000, _ONCE),
    encode_request("POST", "/didcomm", None, {"Content-Length": SECRET, **_ONCE}),
    encode_request("POST", "/didcomm", None, {**_ONCE, "Transfer-Encoding": SECRET}),
    encode_request("POST", "/didcomm", None, {**_ONCE, "Transfer-Encoding": "chunked"}) + SECRET.encode() + b"\r\n",
    f"GET {SECRET}\r\n\r\n".encode(),
    f"GET / HTTP/1.1\r\n{SECRET}\r\n\r\n".encode(),
    f"GET / HTTP/1.1\r\n{SECRET}: {'x' * 20_000}\r\n\r\n".encode(),
]
_UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket"}
_OPENING = {**_UPGRADE, "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
BAD_HANDSHAKES = [
    encode_request("GET", f"/ws?{SECRET}", None, {**MARKED_HEADERS, **_OPENING, **change})
    for change in (
        {"Sec-WebSocket-Version": SECRET},
        {"Sec-WebSocket-Key": SECRET},
        {"Sec-WebSocket-Protocol": f"{SECRET},{SECRET}"},
        {"Sec-WebSocket-Extensions": f"{SECRET}; {SECRET}={SECRET}"},
        {"Host": f"{SECRET}:{SECRET}"},
        {"Connection": SECRET},
    )
]
BAD_FRAMES = [
    encode_masked_frame(SECRET.encode(), PING_FRAME),
    encode_masked_frame(SECRET.encode(), 3),
    encode_masked_frame(b"\x03\xe8" + SECRET.encode(), CLOSE),
    encode_masked_frame(b"\x00\x01" + SECRET.encode(), CLOSE),
    encode_masked_frame(b"\x03\xe8\xff" + SECRET.encode(), CLOSE),
    encode_masked_frame(SECRET.encode() * 20, PING_FRAME),
    encode_masked_frame(SECRET.encode(), 0),
    encode_masked_frame(SECRET.encode() * 100_000),
    SECRET.encode(),
]


_CLOSE_FRAME = encode_masked_frame(b"\x03\xe8", CLOSE)


class InProcessLeakTests(SynchronousTestCase):
    """In this process, where faults can be injected."""

    def setUp(self) -> None:
        self.lines: list[str] = []
        observer = cast(ILogObserver, self.observe)
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)

    def observe(self, event: LogEvent) -> None:
        """Record a log event of any level, with all of its values."""
        values = {name: repr(value) for name, value in event.items() if not name.startswith("log_")}
        self.lines.append(f"{eventAsText(event, includeTraceback=True)} {values}")

    def open_mediator(self, dids: str = "plain") -> None:
        """Start a mediator with maximum logging."""
        self.site_fixture = InMemorySite(self, limits=HIGH_LIMITS, log={"level": "debug", "dids": dids})
        self.bob = InMemoryWallet(self.site_fixture).enrol()
        self.marked = MarkedMessages(self.bob.identity, self.site_fixture.document, self.site_fixture.did)

    def websocket_client(self, old: InMemoryWebSocketClient | None = None) -> InMemoryWebSocketClient:
        """An open socket."""
        if old is not None and not old.transport.disconnecting and old.transport.protocol.state == 3:  # type: ignore[attr-defined]
            return old
        return self.site_fixture.websocket_client(**MARKED_HEADERS)

    def post_decryptable_messages(self) -> list[bytes]:
        """POST them; return the responses."""
        return [self.site_fixture.post(raw, **MARKED_HEADERS).body for raw in self.marked.decryptable_messages()]

    def send_everything(self) -> list[bytes]:
        """Send all messages by HTTP and WebSocket; return what was answered in the clear."""
        responses = []
        websocket_client = None
        for raw in self.marked.envelopes():
            responses.append(self.site_fixture.post(raw, **MARKED_HEADERS).body)
            websocket_client = self.websocket_client(websocket_client)
            websocket_client.transport.feed(encode_masked_frame(raw))
            responses += [payload for _, payload in websocket_client.frames()]
        return responses

    def assert_no_leak(self, responses: list[bytes]) -> None:
        """No marked text and no private key is in any log line, event, metric or response."""
        self.site_fixture.clock.advance(100)
        self.site_fixture.run_due_calls()
        places = {f"line {number}": line.encode() for number, line in enumerate(self.lines)}
        places |= {f"response {number}": response for number, response in enumerate(responses)}
        places |= {path.name: path.read_bytes() for path in self.site_fixture.config.log.directory.glob("events*")}
        places["metrics"] = self.site_fixture.request("GET", "/metrics", peer="127.0.0.1").body
        self.assertGreater(sum(map(len, places.values())), 10_000)
        for text in (SECRET, STORED, *private_key_values(self.site_fixture.config.identity.keys)):
            self.assertEqual(find_text(text, places), [])

    def test_messages_do_not_leak(self) -> None:
        """All messages, over both transports."""
        for dids in ("plain", "keyed"):
            self.open_mediator(dids)
            responses = self.send_everything()
            self.assertGreater(self.bob.count_queued(), 0)
            self.assert_no_leak(responses)
            self.lines.clear()

    def test_messages_of_v1_do_not_leak(self) -> None:
        """
        Handshakes, requests and forwards of DIDComm v1, valid and invalid, by HTTP and by WebSocket; and with keyed
        DIDs no key of a wallet either, in either spelling.
        """
        for dids in ("plain", "keyed"):
            self.open_mediator(dids)
            wallet = InMemoryV1Wallet(self.site_fixture).enrol()
            statuses, responses = Counter[int](), []
            for raw in MarkedV1Messages(self.site_fixture, wallet).envelopes():
                for line in (None, self.site_fixture.socket()):
                    reply = self.receive(raw, line)
                    statuses[reply.status] += 1
                    responses.append(reply.body)
            self.assertEqual(set(statuses), {200, 202, 400, 404})
            self.lines.append("-" * 10_000)  # there may be few
            self.assert_no_leak(responses)
            if dids == "keyed":
                places = {"lines": "".join(self.lines).encode()}
                places |= {
                    path.name: path.read_bytes() for path in self.site_fixture.config.log.directory.glob("events*")
                }
                for key in (wallet.key, wallet.recipient, wallet.own_key):
                    for text in (encode_base58_key(key.did_key), key.did_key.removeprefix("did:key:")):
                        self.assertEqual(find_text(text, places), [])
            self.lines.clear()

    def receive(self, raw: bytes, socket: FakeSocket | None) -> RequestReply:
        """The reply to a message; a forward to an unknown key waits for it."""
        origin = MessageOrigin(PEER, socket)
        receiving = Deferred.fromCoroutine(self.site_fixture.didcomm.receive(raw, origin, None))
        if not receiving.called:
            self.site_fixture.clock.pump([0.3] * 5)
        return self.successResultOf(receiving)

    def test_malformed_http_and_websocket_input_does_not_leak(self) -> None:
        """Malformed requests, handshakes and frames."""
        self.open_mediator()
        responses = []
        for raw in BAD_HTTP + BAD_HANDSHAKES:
            connection = self.site_fixture.connect("127.0.0.1")
            connection.feed(raw)
            self.site_fixture.run_due_calls()
            responses.append(connection.take_output())
        for raw in BAD_FRAMES:
            websocket_client = self.websocket_client()
            websocket_client.transport.feed(raw)
            self.site_fixture.run_due_calls()
            pong = encode_masked_frame(SECRET.encode(), PING_FRAME)
            if raw != pong and raw[0] & 0x0F != CLOSE:  # their payloads are echoed
                responses.append(websocket_client.transport.take_output())
        self.assert_no_leak(responses)

    def test_store_failures_do_not_leak(self) -> None:
        """Every store operation fails in turn."""
        for operation in OPERATIONS:
            self.open_mediator()
            with self.site_fixture.failing(operation, StoreUnavailable()):
                responses = self.post_decryptable_messages()
            self.assert_no_leak(responses)

    def test_unexpected_exceptions_do_not_leak(self) -> None:
        """Exceptions whose text contains the input, as libraries raise them."""
        for operation in OPERATIONS:
            self.open_mediator()
            with self.site_fixture.failing(operation, RuntimeError(f"cannot handle {SECRET} {STORED}")):
                responses = self.post_decryptable_messages()
            self.assert_no_leak(responses)
        self.assertNotEqual(self.flushLoggedErrors(RuntimeError), [])

    def test_push_failures_do_not_leak(self) -> None:
        """Operations fail and connections end during a delivery."""
        self.open_mediator()
        websocket_client = self.websocket_client()
        websocket_client.send(self.bob.pack(f"{MP}/live-delivery-change", {"live_delivery": True}))
        for operation in ("mark_delivered", "mark_pending", "acknowledge"):
            with self.site_fixture.failing(operation, ValueError(SECRET)):
                responses = self.post_decryptable_messages()
                websocket_client.transport.disconnect()
        self.assert_no_leak(responses)
        self.flushLoggedErrors(ValueError)

    def test_search_finds_every_encoding(self) -> None:
        """The search finds marked texts in every encoding."""
        for text in (SECRET, STORED):
            for shift in range(3):
                encoded = b64encode(b"abc"[:shift] + text.encode() + b"and more")
                self.assertEqual(find_text(text, {"here": encoded}), ["here"])
            self.assertEqual(find_text(text, {"there": text.encode().hex().encode(), "no": b"x"}), ["there"])


OPERATIONS = (
    "claim_nonce",
    "get_account",
    "find_owner",
    "enqueue",
    "enqueue_each",
    "grant",
    "update_recipients",
    "list_recipients",
    "fetch_messages",
    "get_queue_status",
    "acknowledge",
    "acknowledge_each",
)


def private_key_values(path: Path) -> list[str]:
    """Private parts of a key set."""
    return [key["d"] for key in json.loads(path.read_bytes())["keys"]]


class RawConnectionClient:
    """Sends raw bytes to a daemon, on a new connection each time."""

    def __init__(self, port: int) -> None:
        self._port = port

    def exchange(self, *parts: bytes) -> bytes:
        """Send the first part, the others after the first response; return all data until the daemon closes."""
        first, *remaining = parts
        with socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE_SECONDS) as connection:
            received = b""
            # The daemon may refuse and close before everything is sent.
            with contextlib.suppress(ConnectionError):
                connection.sendall(first)
            with contextlib.suppress(ConnectionError):
                while data := connection.recv(65_536):
                    received += data
                    if remaining:
                        connection.sendall(b"".join(remaining))
                        remaining = []
            return received

    def post(self, body: bytes) -> HTTPResponse:
        """POST an envelope; return the response."""
        raw = self.exchange(encode_request("POST", "/didcomm", body, _ONCE))
        (response,) = parse_responses(raw)
        return response

    def get_page(self, path: str) -> bytes:
        """GET a page; return its body."""
        (response,) = parse_responses(self.exchange(encode_request("GET", path, None, {"Connection": "close"})))
        return response.body

    def send_frame(self, body: bytes) -> bytes:
        """Send one message and a close frame on a socket; return all received data, the handshake included."""
        return self.exchange(
            encode_request("GET", "/ws", None, {**MARKED_HEADERS, **_OPENING}),
            encode_masked_frame(body),
            _CLOSE_FRAME,
        )


def test_daemon_process_does_not_leak() -> None:
    """A daemon with maximum logging: output, logs, metrics, responses and every byte of its files."""
    with Daemon({"log": {"level": "debug"}}) as daemon:
        client = RawConnectionClient(daemon.port)
        did = client.get_page("/did").decode()
        bob = WalletIdentity.generate(endpoint=did)
        marked = MarkedMessages(bob, resolve_local(did), did)
        for type_, body in (
            (f"{CM3}/mediate-request", {}),
            (f"{CM3}/recipient-update", {"updates": [{"recipient_did": bob.did, "action": "add"}]}),
        ):
            assert client.post(marked.authcrypt_request(type_, body)).status == 200
        places: dict[str, bytes] = {}
        accepted = 0
        for number, raw in enumerate(marked.envelopes()):
            response = client.post(raw)
            accepted += response.status == 202
            places[f"response {number}"] = response.body
            places[f"frames {number}"] = client.send_frame(raw)
        assert accepted > 10
        for number, raw in enumerate(BAD_HTTP):
            places[f"bad request {number}"] = client.exchange(raw)
        for number, raw in enumerate(BAD_HANDSHAKES):
            places[f"bad handshake {number}"] = client.exchange(raw, _CLOSE_FRAME)
        for raw in BAD_FRAMES:
            client.exchange(encode_request("GET", "/ws", None, _OPENING), raw, _CLOSE_FRAME)
        places["metrics"] = client.get_page("/metrics")
        database = daemon.directory / str(daemon.configuration()["storage"]["sqlite"]["path"])
        # While it runs there is a write-ahead log as well.
        files = {path.name: path.read_bytes() for path in database.parent.glob(f"{database.name}*")}
        assert find_text(SECRET, files) == []
        assert find_text(STORED, files) != []
        daemon.stop()
        assert_only_payloads_stored(database)
        segments = {name: b"".join(lines) for name, lines in read_segments(daemon.log_directory).items()}
        places.update(segments)
        places["output"] = daemon.output().encode()
        assert b"req.done" in b"".join(segments.values())
        for text in (SECRET, STORED, *private_key_values(daemon.directory / "keys.jwks")):
            assert find_text(text, places) == []
        assert find_text(SECRET, {database.name: database.read_bytes()}) == []


def assert_only_payloads_stored(database: Path) -> None:
    """No column contains a marked text except the payloads of stored messages."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        matches = set()
        for table in tables:
            cursor = connection.execute(f"SELECT * FROM {table}")
            columns = [column for column, *_ in cursor.description]
            for row in cursor:
                values = {column: str(value).encode() for column, value in zip(columns, row, strict=True)}
                values |= {
                    column: value for column, value in zip(columns, row, strict=True) if isinstance(value, bytes)
                }
                assert find_text(SECRET, values) == []
                matches |= {(table, column) for column in find_text(STORED, values)}
    assert {column for _, column in matches} == {"payload"}
    assert len(matches) == 1
