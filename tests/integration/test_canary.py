"""
Nothing that a peer sends, and none of our keys, turns up where it does not belong (reference 12, decision D15).

A marked text goes down every route, good and bad; then it is looked for, as it is and in the disguises it may have
taken, in events, log lines, metrics, answers, the output of the process and its files. DIDs and ids are not marked:
the log is about the former, and a report has to name the latter.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from twisted.logger import ILogObserver, LogEvent, eventAsText, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from mediatord.protocol import encoding
from mediatord.protocol.didcomm import json_web_signature, jwe
from mediatord.protocol.didcomm.did_document import DIDDocument
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.protocol.didcomm.forward import FORWARD
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import anoncrypt, authcrypt, build_forward, compose_message
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
from tests.in_memory_mediator import CM2, CM3, MP, PING, InMemoryWallet, from_header
from tests.integration.daemon import Daemon
from tests.integration.message_load import PATIENCE_SECONDS
from tests.observability.counter_oracle import read_segments

# In everything that may not be kept at all, and in what may be kept as a payload and nowhere else.
SECRET = "Kanarienvogel-7f3a"
STORED = "Zaunkoenig-91c4-im-Nest"


def disguises(text: str) -> list[bytes]:
    """The text as it is, in hexadecimal, and what every base64 of something that contains it contains."""
    raw = text.encode()
    found = [raw, raw.hex().encode(), raw.upper()]
    for shift in range(3):
        # The characters at both ends depend on the neighbours.
        encoded = b64encode(b"\0" * shift + raw)
        found.append(encoded[(0, 2, 3)[shift] : len(encoded) - 4])
    return found


def traces(text: str, places: dict[str, bytes]) -> list[str]:
    """The places where the text can be found."""
    return [name for name, value in places.items() if any(mark in value for mark in disguises(text))]


def marked_envelope(mark: str) -> bytes:
    """Something like an envelope with the mark in every part of it."""
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


class MarkedRequests:
    """Everything that can be said to a mediator, marked."""

    def __init__(self, identity: WalletIdentity, document: DIDDocument, did: str) -> None:
        self._identity = identity
        self._document = document
        self._did = did

    def envelopes(self) -> Iterator[bytes]:
        """All of it, good and bad."""
        yield from self._no_envelopes()
        yield from self._broken_envelopes()
        yield from self.messages()
        yield from self._impostors()

    def messages(self) -> Iterator[bytes]:
        """What can be opened."""
        yield from self._forwards()
        yield from self._requests()

    def _no_envelopes(self) -> Iterator[bytes]:
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

    def _broken_envelopes(self) -> Iterator[bytes]:
        good = json.loads(self._anon(compose_message(PING, {"comment": SECRET})))
        part = encoding.encode_base64url(SECRET.encode())
        yield marked_envelope(SECRET)
        for name in ("protected", "iv", "ciphertext", "tag"):
            yield encoding.dumps({**good, name: part})
            yield encoding.dumps({**good, name: SECRET})
            yield encoding.dumps({**good, name: {SECRET: SECRET}})
        yield encoding.dumps({**good, "recipients": [{**good["recipients"][0], "encrypted_key": part}]})
        yield encoding.dumps({**good, "recipients": [{"header": {"kid": SECRET}, "encrypted_key": SECRET}]})
        yield encoding.dumps({**good, "recipients": SECRET})
        for header in (
            {"alg": SECRET, "enc": SECRET},
            {"alg": "ECDH-1PU+A256KW", "enc": "A256CBC-HS512", "skid": SECRET, "apu": part},
            {"alg": "ECDH-ES+A256KW", "enc": "A256GCM", "epk": {"kty": "OKP", "crv": "X25519", "x": SECRET}},
            {"zip": SECRET, "crit": [SECRET], "typ": SECRET},
        ):
            yield encoding.dumps({**good, "protected": encoding.encode_base64url(encoding.dumps(header))})
        for inside in (SECRET.encode(), encoding.dumps({SECRET: SECRET}), encoding.dumps({"id": SECRET})):
            yield jwe.encrypt_anoncrypt(inside, [(one.id, one.key) for one in self._document.key_agreement])

    def _forwards(self) -> Iterator[bytes]:
        good = [{"data": {"json": json.loads(marked_envelope(STORED))}}]
        bob = {"next": self._identity.did}
        marked: dict[str, Any] = {"lang": SECRET, "please_ack": [SECRET], "trace": SECRET, SECRET: SECRET}
        yield from self._both(FORWARD, bob, attachments=good, **marked)
        yield from self._both(FORWARD, {**bob, SECRET: SECRET}, attachments=good, delay_milli=1)
        yield from self._both(FORWARD, {"next": SECRET}, attachments=good)
        yield from self._both(FORWARD, {"next": {SECRET: SECRET}}, attachments=good)
        yield from self._both(FORWARD, bob, attachments=good, expires_time=1)
        yield from self._both(FORWARD, bob, attachments=good, expires_time=SECRET, delay_milli=SECRET)
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
            # One that fails beside one that is good: neither is kept.
            refused = [{**good[0], "filename": SECRET}, {"media_type": SECRET, "description": SECRET, "data": data}]
            yield from self._both(FORWARD, bob, attachments=refused)
        yield from self._both(FORWARD, bob, attachments=SECRET)
        yield self._anon(build_forward(self._did, [marked_envelope(SECRET)]))
        marks: dict[str, Any] = {SECRET: SECRET}
        onion = self._anon(compose_message(PING, {"comment": SECRET}))
        for _ in range(6):
            yield onion
            onion = self._anon(build_forward(self._did, [onion], **marks))

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
            yield from self._both(type_, body, **{SECRET: SECRET})
        yield from self._both(PING, SECRET)
        for header in ("from_prior", "return_route", "thid", "created_time", "to", "typ", "attachments"):
            yield self.auth(PING, {}, **{header: SECRET})
        yield from self._both(f"{MP}/status-request", {"recipient_did": SECRET}, expires_time=1)
        replayed = self.auth(f"{MP}/status-request", {SECRET: SECRET})
        yield replayed
        yield replayed

    def _impostors(self) -> Iterator[bytes]:
        stranger = WalletIdentity.generate()
        body = {"comment": SECRET}
        yield self.auth(f"{MP}/status-request", body, **from_header(SECRET))
        yield self.auth(f"{MP}/status-request", body, **from_header(stranger.did))
        yield self.auth(f"{MP}/status-request", body, to=[stranger.did, SECRET])
        yield authcrypt(
            compose_message(f"{MP}/status-request", body, **from_header(stranger.did)), stranger, self._document
        )
        yield anoncrypt(compose_message(PING, body), stranger.document)

    def _both(self, type_: str, body: Any, **headers: Any) -> Iterator[bytes]:
        """Anonymous, authenticated, and signed inside."""
        yield self._anon({**compose_message(type_, **headers), "body": body})
        yield self.auth(type_, body, **headers)
        key = self._identity.signing
        message = {
            **compose_message(type_, **{"to": [self._did], **headers}, **from_header(self._identity.did)),
            "body": body,
        }
        jws = json_web_signature.sign(encoding.dumps(message), key.kid, key.private)
        yield jwe.encrypt_anoncrypt(jws, [(one.id, one.key) for one in self._document.key_agreement])

    def auth(self, type_: str, body: Any, **headers: Any) -> bytes:
        """An authenticated request."""
        headers = {"to": [self._did], "return_route": "all", **from_header(self._identity.did), **headers}
        return authcrypt({**compose_message(type_, **headers), "body": body}, self._identity, self._document)

    def _anon(self, message: dict[str, Any]) -> bytes:
        return anoncrypt(message, self._document)


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


_GOODBYE = encode_masked_frame(b"\x03\xe8", CLOSE)


class MemoryTests(SynchronousTestCase):
    """In this process, where faults can be made to happen."""

    def setUp(self) -> None:
        self.lines: list[str] = []
        observer = cast(ILogObserver, self.observe)
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)

    def observe(self, event: LogEvent) -> None:
        """Keep a log event of any level, with everything that any observer could make of it."""
        values = {name: repr(value) for name, value in event.items() if not name.startswith("log_")}
        self.lines.append(f"{eventAsText(event, includeTraceback=True)} {values}")

    def open(self, dids: str = "plain") -> None:
        """Begin with a mediator at its most talkative."""
        self.site_fixture = InMemorySite(self, limits=HIGH_LIMITS, log={"level": "debug", "dids": dids})
        self.bob = InMemoryWallet(self.site_fixture).enrol()
        self.salvo = MarkedRequests(self.bob.identity, self.site_fixture.document, self.site_fixture.did)

    def websocket_client(self, old: InMemoryWebSocketClient | None = None) -> InMemoryWebSocketClient:
        """A socket that is open still."""
        if old is not None and not old.transport.disconnecting and old.transport.protocol.state == 3:  # type: ignore[attr-defined]
            return old
        return self.site_fixture.websocket_client(**MARKED_HEADERS)

    def post_messages(self) -> list[bytes]:
        """What can be opened, by HTTP; everything that was answered."""
        return [self.site_fixture.post(raw, **MARKED_HEADERS).body for raw in self.salvo.messages()]

    def say_everything(self) -> list[bytes]:
        """By HTTP and by WebSocket; everything that was answered in the clear."""
        answers = []
        websocket_client = None
        for raw in self.salvo.envelopes():
            answers.append(self.site_fixture.post(raw, **MARKED_HEADERS).body)
            websocket_client = self.websocket_client(websocket_client)
            websocket_client.transport.feed(encode_masked_frame(raw))
            answers += [payload for _, payload in websocket_client.frames()]
        return answers

    def assert_untold(self, answers: list[bytes]) -> None:
        """No trace of what was said is in any log line, event, metric or answer; nor of a key of ours."""
        self.site_fixture.clock.advance(100)
        self.site_fixture.run_due_calls()
        places = {f"line {number}": line.encode() for number, line in enumerate(self.lines)}
        places |= {f"answer {number}": answer for number, answer in enumerate(answers)}
        places |= {path.name: path.read_bytes() for path in self.site_fixture.config.log.directory.glob("events*")}
        places["metrics"] = self.site_fixture.request("GET", "/metrics", peer="127.0.0.1").body
        self.assertGreater(sum(map(len, places.values())), 10_000)
        for text in (SECRET, STORED, *secrets_of(self.site_fixture.config.identity.keys)):
            self.assertEqual(traces(text, places), [])

    def test_every_message(self) -> None:
        """All that can be said, over both transports."""
        for dids in ("plain", "keyed"):
            self.open(dids)
            answers = self.say_everything()
            self.assertGreater(self.bob.waiting(), 0)
            self.assert_untold(answers)
            self.lines.clear()

    def test_every_breach_of_http_and_websocket(self) -> None:
        """Requests, handshakes and frames that are none."""
        self.open()
        answers = []
        for raw in BAD_HTTP + BAD_HANDSHAKES:
            line = self.site_fixture.connect("127.0.0.1")
            line.feed(raw)
            self.site_fixture.run_due_calls()
            answers.append(line.take_output())
        for raw in BAD_FRAMES:
            websocket_client = self.websocket_client()
            websocket_client.transport.feed(raw)
            self.site_fixture.run_due_calls()
            pong = encode_masked_frame(SECRET.encode(), PING_FRAME)
            if raw != pong and raw[0] & 0x0F != CLOSE:  # whose payloads are to be repeated
                answers.append(websocket_client.transport.take_output())
        self.assert_untold(answers)

    def test_a_store_that_is_away(self) -> None:
        """Every operation of the store fails, in turn."""
        for operation in OPERATIONS:
            self.open()
            with self.site_fixture.failing(operation, StoreUnavailable()):
                answers = self.post_messages()
            self.assert_untold(answers)

    def test_faults_of_ours(self) -> None:
        """Exceptions nobody thought of, with what was sent in their text as libraries do it."""
        for operation in OPERATIONS:
            self.open()
            with self.site_fixture.failing(operation, RuntimeError(f"cannot handle {SECRET} {STORED}")):
                answers = self.post_messages()
            self.assert_untold(answers)
        self.assertNotEqual(self.flushLoggedErrors(RuntimeError), [])

    def test_a_fault_in_a_push(self) -> None:
        """A socket whose peer's key suddenly is none, and an end of things in the middle of a delivery."""
        self.open()
        websocket_client = self.websocket_client()
        websocket_client.send(self.bob.pack(f"{MP}/live-delivery-change", {"live_delivery": True}))
        for operation in ("mark_delivered", "mark_pending", "acknowledge"):
            with self.site_fixture.failing(operation, ValueError(SECRET)):
                answers = self.post_messages()
                websocket_client.transport.disconnect()
        self.assert_untold(answers)
        self.flushLoggedErrors(ValueError)

    def test_it_would_be_found(self) -> None:
        """The search finds what it is looking for, in every disguise."""
        for text in (SECRET, STORED):
            for shift in range(3):
                encoded = b64encode(b"abc"[:shift] + text.encode() + b"and more")
                self.assertEqual(traces(text, {"here": encoded}), ["here"])
            self.assertEqual(traces(text, {"there": text.encode().hex().encode(), "no": b"x"}), ["there"])


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
    "acknowledge_once",
)


def secrets_of(path: Path) -> list[str]:
    """The private parts of a key set."""
    return [key["d"] for key in json.loads(path.read_bytes())["keys"]]


class DaemonConversation:
    """A conversation with a daemon over real sockets, one connection for each thing that is said."""

    def __init__(self, port: int) -> None:
        self._port = port

    def say(self, *parts: bytes) -> bytes:
        """Send the first part, the others after something came back; all that comes back until there is no more."""
        first, *others = parts
        with socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE_SECONDS) as connection:
            got = b""
            # Who is refused may be hung up on before everything is said.
            with contextlib.suppress(ConnectionError):
                connection.sendall(first)
            with contextlib.suppress(ConnectionError):
                while more := connection.recv(65_536):
                    got += more
                    if others:
                        connection.sendall(b"".join(others))
                        others = []
            return got

    def post(self, body: bytes) -> HTTPResponse:
        """The response to an envelope."""
        raw = self.say(encode_request("POST", "/didcomm", body, _ONCE))
        (response,) = parse_responses(raw)
        return response

    def get(self, path: str) -> bytes:
        """A page."""
        (response,) = parse_responses(self.say(encode_request("GET", path, None, {"Connection": "close"})))
        return response.body

    def frame(self, body: bytes) -> bytes:
        """What comes back on a socket for one message and a goodbye, handshake included."""
        return self.say(
            encode_request("GET", "/ws", None, {**MARKED_HEADERS, **_OPENING}), encode_masked_frame(body), _GOODBYE
        )


def test_a_whole_daemon() -> None:
    """A process at its most talkative: its output, logs, metrics and answers, and every byte of its files."""
    with Daemon({"log": {"level": "debug"}}) as daemon:
        talk = DaemonConversation(daemon.port)
        did = talk.get("/did").decode()
        bob = WalletIdentity.generate(endpoint=did)
        salvo = MarkedRequests(bob, resolve_local(did), did)
        for type_, body in (
            (f"{CM3}/mediate-request", {}),
            (f"{CM3}/recipient-update", {"updates": [{"recipient_did": bob.did, "action": "add"}]}),
        ):
            assert talk.post(salvo.auth(type_, body)).status == 200
        places: dict[str, bytes] = {}
        accepted = 0
        for number, raw in enumerate(salvo.envelopes()):
            response = talk.post(raw)
            accepted += response.status == 202
            places[f"answer {number}"] = response.body
            places[f"frames {number}"] = talk.frame(raw)
        assert accepted > 10
        for number, raw in enumerate(BAD_HTTP):
            places[f"bad request {number}"] = talk.say(raw)
        for number, raw in enumerate(BAD_HANDSHAKES):
            places[f"bad handshake {number}"] = talk.say(raw, _GOODBYE)
        for raw in BAD_FRAMES:
            talk.say(encode_request("GET", "/ws", None, _OPENING), raw, _GOODBYE)
        places["metrics"] = talk.get("/metrics")
        database = daemon.directory / str(daemon.configuration()["storage"]["sqlite"]["path"])
        # While it runs there is a write-ahead log, too.
        files = {path.name: path.read_bytes() for path in database.parent.glob(f"{database.name}*")}
        assert traces(SECRET, files) == []
        assert traces(STORED, files) != []
        daemon.stop()
        assert_only_payloads(database)
        segments = {name: b"".join(lines) for name, lines in read_segments(daemon.log_directory).items()}
        places.update(segments)
        places["output"] = daemon.output().encode()
        assert b"req.done" in b"".join(segments.values())
        for text in (SECRET, STORED, *secrets_of(daemon.directory / "keys.jwks")):
            assert traces(text, places) == []
        assert traces(SECRET, {database.name: database.read_bytes()}) == []


def assert_only_payloads(database: Path) -> None:
    """No column of any table has a trace of what was said, but the payloads of stored messages have."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = set()
        for table in tables:
            cursor = connection.execute(f"SELECT * FROM {table}")
            columns = [column for column, *_ in cursor.description]
            for row in cursor:
                values = {column: str(value).encode() for column, value in zip(columns, row, strict=True)}
                values |= {
                    column: value for column, value in zip(columns, row, strict=True) if isinstance(value, bytes)
                }
                assert traces(SECRET, values) == []
                found |= {(table, column) for column in traces(STORED, values)}
    assert {column for _, column in found} == {"payload"}
    assert len(found) == 1
