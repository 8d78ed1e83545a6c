"""
Nothing that a Decentrl client says, and none of our keys, turns up where it does not belong, and nothing is opened
that is not for the mediator (DCTRL-0004 12.1, decision D15).

As in the canary test of the DIDComm part: what may be kept as it is has one mark, everything else another. Nonces,
signatures and keys cannot carry one, so they are looked for as they are.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from twisted.logger import ILogObserver, LogEvent, eventAsText, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

import mediatord
from mediatord.bench.raw_clients import CLOSE_OPCODE, TEXT_OPCODE
from mediatord.errors import StoreUnavailable
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import ChannelType
from mediatord.protocol.decentrl.contracts import sign_contract, sign_contract_request
from mediatord.protocol.encoding import encode_base64
from mediatord.store.interfaces.decentrl import IDecentrlStore
from mediatord.wallet.decentrl_client import DIRECT_CHANNEL, PRIVATE_CHANNEL, PUBLIC_CHANNEL, read_mediator_document
from tests.http.in_memory_site import HTTPResponse, InMemorySite, encode_masked_frame, encode_request
from tests.integration.daemon import PLENTY, Daemon, merge_settings
from tests.integration.message_load import PATIENCE_SECONDS, prepare_daemon
from tests.integration.raw_decentrl_client import (
    JSON,
    DaemonClient,
    PeerClosedSocket,
    RawDecentrlClient,
    RawWebSocket,
)
from tests.integration.refusal_test_case import REQUEST, RESPOND, SAVE
from tests.integration.test_canary import MARKED_HEADERS, SECRET, STORED, secrets_of, traces
from tests.observability.counter_oracle import read_segments
from tests.protocol.decentrl.mutations import replaced, to_json, without

# All nonces begin like this.
NONCES = "caca0b1e-7f3a-4e0e-9a37"
BINARY = 2
# Everything that a command can make the store do.
OPERATIONS = (
    "check_guard",
    "save_contract",
    "contracts",
    "request_contract",
    "contract_requests",
    "acknowledge_requests",
    "enqueue_event",
    "pending_events",
    "acknowledge_events",
    "save_events",
    "events",
    "update_tags",
    "publish",
    "unpublish",
    "public_events",
)
# Where a payload may be, and nowhere else.
PLACES = {
    ("contract", "text"),
    ("contract_request", "public_key"),
    ("contract_request", "request"),
    ("label", "text"),
    ("pending_event", "payload"),
    ("public_event", "event"),
    ("stored_event", "contract_id"),
    ("stored_payload", "payload"),
}


class Marked(RawDecentrlClient):
    """
    An identity whose commands have a mark wherever one can be.

    :ivar unique: what it has said that can be recognised: signatures and keys.
    """

    def __init__(self, daemon_client: DaemonClient, alias: str) -> None:
        super().__init__(daemon_client, alias)
        seed: bytes = self.identity.seed
        self.unique = {encode_base64(seed), seed.hex()}
        self._number = id(self) & 0xFFFF

    def nonce(self) -> str:
        """Another one."""
        self._number += 0x10000
        return f"{NONCES}-{self._number:012x}"

    def command(
        self,
        payload: dict[str, Any] | str,
        *,
        to: str | None = None,
        channel: ChannelType = DIRECT_CHANNEL,
        **header: Any,
    ) -> bytes:
        if isinstance(payload, dict):
            payload = {**payload, "private_key": encode_base64(self.identity.seed), SECRET: {SECRET: [SECRET]}}
        raw = super().command(payload, to=to, channel=channel, **{"nonce": self.nonce(), SECRET: SECRET, **header})
        self.unique.add(json.loads(raw)["signature"])
        return raw

    def sealed(self, plaintext: Any, prekey: bytes | None = None) -> dict[str, Any]:
        members = super().sealed(plaintext, prekey)
        self.unique.update(members.values())
        return members

    def signed(self, peer: Marked, **changes: Any) -> dict[str, Any]:
        """A contract with marks in it, which both have signed."""
        keys = {"requestor_encryption_public_key": STORED, "recipient_encryption_public_key": STORED}
        full = {**self.terms(peer.did), **keys, STORED: STORED, **changes}
        signed: dict[str, Any] = {
            "communication_contract": full,
            "requestor_signature": sign_contract_request(full, self.identity.seed),
            "recipient_signature": sign_contract(full, peer.identity.seed),
        }
        self.unique.update((signed["requestor_signature"], signed["recipient_signature"]))
        return {**signed, STORED: STORED}

    def greeting(self, **members: Any) -> dict[str, Any]:
        greeting = super().greeting(**{"nonce": self.nonce(), **members})
        self.unique.add(greeting["signature"])
        return {**greeting, SECRET: SECRET}


class MarkedRequests:
    """Everything that can be said to Decentrl, marked; Alice and Bob are registered, Carol is not."""

    def __init__(self, daemon_client: DaemonClient) -> None:
        self.alice, self.bob, self.carol = (Marked(daemon_client, alias) for alias in ("alice", "bob", "carol"))
        self.everybody = (self.alice, self.bob, self.carol)
        for one in (self.alice, self.bob):
            one.register()
        for one, other in ((self.alice, self.bob), (self.bob, self.alice)):
            assert one.save(one.signed(other)).status == 200

    def needles(self) -> list[str]:
        """All that must not be found."""
        return sorted({SECRET, STORED, NONCES}.union(*(one.unique for one in self.everybody)))

    def good(self) -> Iterator[bytes]:
        """Every command; with a working store all of them are carried out, but for the deletion."""
        alice, bob = self.alice, self.bob
        asked = "COMMUNICATION_CONTRACT"
        terms = {**alice.terms(alice.mediator), STORED: STORED, "requestor_encryption_public_key": STORED}
        request = {
            "communication_contract": terms,
            "requestor_signature": sign_contract_request(terms, alice.identity.seed),
        }
        contract = {"signed_communication_contract": bob.signed(alice)}
        tags = (STORED, f"{STORED} 2")
        event = {**alice.event(STORED, sender=bob.did, tags=tags), "contract_id": STORED, SECRET: SECRET}
        public = alice.public_event(STORED, tags, STORED)
        alice.unique.add(public["event_signature"])
        ids = [one["id"] for one in alice.items("EVENTS", "events")]
        filters = {"encrypted_tags": [SECRET], "participant_did": SECRET}
        sealed = {"encrypted_contract_request": STORED, "requestor_ephemeral_public_key": STORED}
        for type_, members, to in (
            (REQUEST, alice.sealed({**request, SECRET: SECRET}), None),
            (REQUEST, sealed, bob.did),
            (RESPOND, contract, bob.did),
            (SAVE, contract, None),
            (f"QUERY_PENDING_{asked}_REQUESTS", {}, None),
            (f"ACKNOWLEDGE_PENDING_{asked}_REQUESTS", {"communication_contract_ids": [SECRET]}, None),
            (f"QUERY_{asked}S", {"filter": {"did": SECRET, SECRET: SECRET}}, None),
            (f"QUERY_{asked}S", {}, None),
            ("QUERY_PENDING_EVENTS", {"filter": {"sender_did": SECRET}}, None),
            ("QUERY_PENDING_EVENTS", {}, None),
            ("ACKNOWLEDGE_PENDING_EVENTS", {"event_ids": [SECRET]}, None),
            ("SAVE_EVENTS", {"events": [event, {**event, "sender_did": alice.did}]}, None),
            ("QUERY_EVENTS", {"filter": filters}, None),
            ("QUERY_EVENTS", {"pagination": {SECRET: SECRET}}, None),
            (
                "UPDATE_EVENT_TAGS",
                {"events": [{"event_id": id_, "encrypted_tags": [STORED]} for id_ in [SECRET, *ids[:5]]]},
                None,
            ),
        ):
            yield alice.command({"type": type_, **members}, to=to)
        yield alice.command(STORED, to=bob.did, channel=PRIVATE_CHANNEL)
        yield alice.command({"type": "PUBLISH_PUBLIC_EVENT", **public}, channel=PUBLIC_CHANNEL)
        yield alice.command({"type": "DELETE_PUBLIC_EVENT", "public_event_id": SECRET}, channel=PUBLIC_CHANNEL)

    def bad(self) -> Iterator[bytes]:
        """Commands that are refused, for every reason there is, and bodies that are none."""
        yield from self._no_commands()
        yield from self._false()
        yield from self._senseless()

    def _no_commands(self) -> Iterator[bytes]:
        good = json.loads(self._secret())
        yield from (SECRET.encode(), b"\xff" + SECRET.encode(), to_json(SECRET), to_json([SECRET]), to_json({}))
        yield to_json({SECRET: SECRET})
        yield to_json(good)[:-1]
        yield to_json(good).replace(b'"header"', b'"header":{},"header"')
        yield to_json({**good, SECRET: "\ud800"})
        for path in (("header",), ("payload",), ("signature",), *(("header", name) for name in good["header"])):
            yield to_json(without(good, path))
            for odd in (f"not {SECRET}", None, [SECRET], {SECRET: SECRET}):
                yield to_json(replaced(good, path, odd))
        for type_ in (REQUEST, RESPOND, SAVE, "SAVE_EVENTS", "QUERY_EVENTS", "ACKNOWLEDGE_PENDING_EVENTS", SECRET):
            for none in (SECRET, [{SECRET: SECRET}], None):
                members = dict.fromkeys(("signed_communication_contract", "events", "filter", "event_ids"), none)
                yield self.alice.command({"type": type_, **members})

    def _secret(self, sender: Marked | None = None, **header: Any) -> bytes:
        """An event that would be kept, were it not refused."""
        return (sender or self.alice).command(SECRET, **{"to": self.bob.did, "channel": PRIVATE_CHANNEL, **header})

    def _false(self) -> Iterator[bytes]:
        """Not who they say, or not now."""
        alice, bob, carol = self.alice, self.bob, self.carol
        good = json.loads(self._secret())
        yield to_json({**good, "signature": SECRET})
        yield to_json({**good, "payload": f"{SECRET} {SECRET}"})
        yield self._secret(timestamp_ms=1)
        yield self._secret(sender_did=f"did:web:{SECRET}", sender_signing_key_id=SECRET)
        yield self._secret(sender_signing_key_id=f"{alice.did}#{SECRET}")
        yield self._secret(to=f"did:web:{SECRET}")
        yield self._secret(to=carol.did)
        yield self._secret(carol)
        once = self._secret(to=carol.did)
        yield once
        yield once
        for to in (bob.did, SECRET):
            yield alice.command({"type": "SAVE_EVENTS", "events": [alice.event(SECRET, tags=(SECRET,))]}, to=to)
        yield carol.command({"type": "SAVE_EVENTS", "events": [carol.event(SECRET, tags=(SECRET,))]})
        secret = {"encrypted_contract_request": SECRET, "requestor_ephemeral_public_key": SECRET}
        yield carol.command({"type": REQUEST, **secret}, to=SECRET)
        yield alice.command(
            {"type": "PUBLISH_PUBLIC_EVENT", **carol.public_event(SECRET, (SECRET,))}, channel=PUBLIC_CHANNEL
        )
        forged = {**alice.public_event(SECRET), "event_signature": SECRET}
        yield alice.command({"type": "PUBLISH_PUBLIC_EVENT", **forged}, channel=PUBLIC_CHANNEL)

    def _senseless(self) -> Iterator[bytes]:
        """Registrations and contracts that are none."""
        alice, bob, carol = self.alice, self.bob, self.carol
        secret = {"encrypted_contract_request": SECRET, "requestor_ephemeral_public_key": SECRET}
        yield alice.command({"type": REQUEST, **secret})
        terms = {**alice.terms(alice.mediator), SECRET: SECRET, "requestor_encryption_public_key": SECRET}
        for plaintext in (
            SECRET,
            {SECRET: SECRET},
            {"communication_contract": {SECRET: SECRET}, "requestor_signature": SECRET},
            {"communication_contract": terms, "requestor_signature": SECRET},
            {"communication_contract": {**terms, "expires_at": 1}, "requestor_signature": SECRET},
            {"communication_contract": {**terms, "requestor_did": SECRET}, "requestor_signature": SECRET},
            {**terms, "signature": SECRET},
        ):
            yield alice.command({"type": REQUEST, **alice.sealed(plaintext)})
            yield alice.command({"type": REQUEST, **alice.sealed(plaintext, bob.daemon_client.mediator.signing_key)})
        good = bob.contract_with(alice)
        for signed in (
            {**good, "requestor_signature": SECRET},
            {**good, "recipient_signature": SECRET},
            replaced(good, ("communication_contract", SECRET), SECRET),
            replaced(good, ("communication_contract", "requestor_did"), f"did:web:{SECRET}"),
            replaced(good, ("communication_contract", "requestor_signing_key_id"), SECRET),
            replaced(good, ("communication_contract", "expires_at"), SECRET),
            replaced(bob.contract_with(carol), ("communication_contract", SECRET), SECRET),
        ):
            yield alice.command({"type": SAVE, "signed_communication_contract": signed})
            yield alice.command({"type": RESPOND, "signed_communication_contract": signed}, to=bob.did)

    def first_messages(self) -> Iterator[tuple[bytes, int]]:
        """What a socket may begin with, and as which kind of frame."""
        alice = self.alice
        good = alice.greeting()
        yield to_json(good), BINARY
        yield to_json(good), TEXT_OPCODE
        yield to_json(good), TEXT_OPCODE
        for name in ("type", "did", "signing_key_id", "timestamp", "nonce", "signature"):
            yield to_json({**alice.greeting(), name: SECRET}), TEXT_OPCODE
        yield to_json(alice.greeting(timestamp_ms=1)), TEXT_OPCODE
        yield to_json(alice.greeting(did=f"did:web:{SECRET}", signing_key_id=SECRET)), TEXT_OPCODE
        yield to_json(alice.greeting(signing_key_id=f"{alice.did}#{SECRET}")), TEXT_OPCODE
        yield to_json(self.carol.greeting()), TEXT_OPCODE
        yield SECRET.encode(), TEXT_OPCODE
        yield b"\xff" + SECRET.encode(), BINARY
        yield to_json({"protected": SECRET, "ciphertext": SECRET}), TEXT_OPCODE

    def chatter(self) -> Iterator[bytes]:
        """What an authenticated socket may go on with."""
        yield SECRET.encode()
        yield to_json({"type": "PONG", "timestamp": SECRET})
        yield to_json(self.bob.greeting())
        yield self._secret()

    def addresses(self) -> Iterator[str]:
        """Where public channels are looked for."""
        did = self.alice.did
        yield f"/public/{did}"
        for path in (SECRET, f"did:{SECRET}", f"did:x:{SECRET}?{SECRET}", f"%ff{SECRET}"):
            yield f"/public/{path}"
        yield f"/public/{did}?tags={SECRET},{STORED}&channel_id={SECRET}"
        for name in ("tags=%ff", "after=", "before=", "page=", "page_size=", "channel_id=%ff"):
            yield f"/public/{did}?{name}{SECRET}"
        yield f"/public/{did}?page=1&page={SECRET}&{SECRET}={SECRET}"


class Findings:
    """What came back and what was written, to be searched."""

    def __init__(self) -> None:
        self.places: dict[str, bytes] = {}

    def answer(self, answered: HTTPResponse) -> None:
        """
        An answer, which may have what is kept in it when it says yes, and who was asked for, but nothing else that
        was said; what a refusal says is searched for everything.
        """
        self.places[f"answer {len(self.places)}"] = str(answered.headers).encode()
        if answered.status == 200:
            body = re.sub(rb'"publisher_did":"[^"]*"', b"", answered.body)
            assert traces(SECRET, {"": body}) == traces(NONCES, {"": body}) == []
        else:
            self.places[f"refusal {len(self.places)}"] = answered.body

    def frames(self, frames: Iterable[bytes]) -> None:
        """What a socket got, pushes excepted: those are events as they came."""
        for frame in frames:
            if not frame.startswith(b'{"type":"PENDING_EVENTS"'):
                self.places[f"frame {len(self.places)}"] = frame

    def found(self, needles: Iterable[str]) -> list[tuple[str, str]]:
        """Which of these are where."""
        everything = {"": b"\n".join(self.places.values())}
        there = [needle for needle in needles if traces(needle, everything)]
        return [(needle, place) for needle in there for place in traces(needle, self.places)]


class InProcessClient(DaemonClient):
    """A mediator in this process, asked through its front door."""

    def __init__(self, site_fixture: InMemorySite) -> None:
        self._premises = site_fixture
        self.mediator = read_mediator_document(site_fixture.base.identity.now.web_document)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        source: str = "127.0.0.1",
    ) -> HTTPResponse:
        """Without any connection."""
        return self._premises.request(method, path, body, dict(headers or {}), peer=source)

    def now(self) -> float:
        """By the clock in the test's hand."""
        return self._premises.clock.seconds()


class MemoryTests(SynchronousTestCase):
    """In this process, where faults can be made to happen."""

    def setUp(self) -> None:
        self.findings = Findings()
        observer = cast(ILogObserver, self.observe)
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)
        self.site_fixture = InMemorySite(self, **PLENTY, log={"level": "debug", "dids": "plain"})
        self.volley = MarkedRequests(InProcessClient(self.site_fixture))

    def observe(self, event: LogEvent) -> None:
        """Keep a log event of any level, with everything that any observer could make of it."""
        values = {name: repr(value) for name, value in event.items() if not name.startswith("log_")}
        line = f"{eventAsText(event, includeTraceback=True)} {values}"
        self.findings.places[f"line {len(self.findings.places)}"] = line.encode()

    def post(self, commands: Iterable[bytes]) -> list[int]:
        """The statuses of the answers."""
        statuses = []
        for raw in commands:
            answered = self.site_fixture.request("POST", "/", raw, {"Content-Type": JSON, **MARKED_HEADERS})
            self.findings.answer(answered)
            statuses.append(answered.status)
        return statuses

    def read(self) -> list[int]:
        """The statuses of the answers to those who read public channels."""
        statuses = []
        for path in self.volley.addresses():
            answered = self.site_fixture.request("GET", path, None, MARKED_HEADERS)
            self.findings.answer(answered)
            statuses.append(answered.status)
        return statuses

    def talk(self) -> None:
        """On sockets."""
        for message, opcode in self.volley.first_messages():
            websocket_client = self.site_fixture.websocket_client("/ws", **MARKED_HEADERS)
            websocket_client.send(message, opcode)
            for chatter in self.volley.chatter():
                websocket_client.transport.feed(encode_masked_frame(chatter))
            self.findings.frames(payload for _, payload in websocket_client.frames())
        self.assertIn(b'{"type":"AUTH_SUCCESS"}', self.findings.places.values())

    def assert_untold(self) -> None:
        """No trace of what was said is in any log line, event, metric or refusal; nor of a key of ours."""
        self.site_fixture.clock.advance(100)
        self.site_fixture.run_due_calls()
        places = self.findings.places
        places |= {path.name: path.read_bytes() for path in self.site_fixture.config.log.directory.glob("events*")}
        places["metrics"] = self.site_fixture.request("GET", "/metrics", peer="127.0.0.1").body
        needles = [*self.volley.needles(), *secrets_of(self.site_fixture.config.identity.keys)]
        self.assertGreater(len(needles), 40)
        self.assertIn(b"req.done", b"".join(places.values()))
        self.assertEqual(self.findings.found(needles), [])

    def test_every_message(self) -> None:
        """All that can be said, good and bad, while a socket listens; the good twice, so that something is there."""
        listening = self.site_fixture.websocket_client("/ws")
        listening.send(to_json(self.volley.bob.greeting()))
        statuses = self.post(self.volley.good())
        self.assertEqual(statuses, [200] * 17 + [404])
        self.assertEqual(self.post(self.volley.good()), statuses)
        self.assertEqual(set(self.post(self.volley.bad())), {400, 401, 404})
        self.assertEqual(set(self.read()), {200, 400})
        self.talk()
        pushes = [payload for _, payload in listening.frames() if STORED.encode() in payload]
        self.assertEqual(len(pushes), 2)
        self.assert_untold()

    def test_a_store_that_is_away(self) -> None:
        """Every operation of the store fails, in turn."""
        for operation in OPERATIONS:
            commands = list(self.volley.good())
            with self.site_fixture.failing(operation, StoreUnavailable()):
                statuses = {*self.post(commands), *self.read()}
                self.assertIn(503, statuses, operation)
                if operation == "check_guard":
                    self.talk_in_vain(1013)
        self.assert_untold()

    def test_faults_of_ours(self) -> None:
        """Exceptions nobody thought of, with what was sent in their text as libraries do it."""
        for operation in OPERATIONS:
            commands = list(self.volley.good())
            with self.site_fixture.failing(operation, RuntimeError(f"cannot handle {SECRET} {STORED} {NONCES}")):
                statuses = {*self.post(commands), *self.read()}
                self.assertIn(500, statuses, operation)
                if operation == "check_guard":
                    self.talk_in_vain(1011)
        self.assert_untold()
        self.assertNotEqual(self.flushLoggedErrors(RuntimeError), [])

    def talk_in_vain(self, code: int) -> None:
        """Nobody can authenticate."""
        websocket_client = self.site_fixture.websocket_client("/ws")
        websocket_client.send(to_json(self.volley.alice.greeting()))
        frames = websocket_client.frames()
        self.findings.frames(payload for _, payload in frames)
        self.assertEqual(int.from_bytes(frames[-1][1][:2], "big"), code)

    def test_the_list_is_complete(self) -> None:
        """Every operation that a command or a question needs is made to fail; others are for nodes that hint."""
        others = {"find_pending", "find_pending_arrivals", "registered_until"}
        self.assertEqual(set(IDecentrlStore.names()) - set(OPERATIONS), others)

    def test_it_would_be_found(self) -> None:
        """A line with anything of a command in it does not go unnoticed."""
        list(self.volley.good())
        for needle in self.volley.needles():
            self.findings.places["line"] = f"a line with {needle} in it".encode()
            self.assertEqual(self.findings.found(self.volley.needles()), [(needle, "line")])


@pytest.mark.parametrize("backend", ["sqlite", "memory"])
def test_a_whole_daemon(backend: str) -> None:
    """A process at its most talkative: its output, logs, metrics and refusals, and every byte of its files."""
    daemon = prepare_daemon(merge_settings({"log": {"level": "debug"}}, {"storage": {"backend": backend}}))
    with daemon:
        daemon_client = DaemonClient(daemon)
        volley, findings = MarkedRequests(daemon_client), Findings()
        statuses = [say(daemon_client, findings, raw) for raw in [*volley.good(), *volley.good()]]
        assert statuses == ([200] * 17 + [404]) * 2
        kept = daemon_client.kept() if backend == "sqlite" else {}
        assert {say(daemon_client, findings, raw) for raw in volley.bad()} == {400, 401, 404}
        assert say(daemon_client, findings, SECRET.encode() * 100_000) == 413
        for path in volley.addresses():
            findings.answer(daemon_client.ask("GET", path, None, MARKED_HEADERS))
        for message, opcode in volley.first_messages():
            findings.frames(said(daemon_client, message, opcode, volley.chatter()))
        for raw in BAD_HTTP:
            for answered in daemon_client.say(raw):
                findings.answer(answered)
        if backend == "sqlite":
            assert daemon_client.kept() == kept
            trouble(daemon_client, volley, findings)
            files = {path.name: path.read_bytes() for path in daemon.directory.glob("mediator.sqlite3*")}
            assert_only_payloads(daemon_client.database, files, volley)
        findings.places["metrics"] = daemon_client.ask("GET", "/metrics").body
        daemon.stop()
        collect(daemon, findings)
        assert findings.found([*volley.needles(), *secrets_of(daemon.directory / "keys.jwks")]) == []


_ONCE = {**MARKED_HEADERS, "Connection": "close"}
BAD_HTTP = [
    encode_request("POST", f"/?{SECRET}", SECRET.encode(), {**_ONCE, "Content-Type": f"application/{SECRET}"}),
    encode_request("PUT", f"/public/{SECRET}", SECRET.encode(), _ONCE),
    encode_request("GET", f"/ws?{SECRET}", None, _ONCE),
    encode_request("GET", f"/openapi.json?{SECRET}", None, {"Connection": "close"}),
    encode_request("POST", "/", None, {**_ONCE, "Content-Length": SECRET}),
    encode_request("POST", "/", None, {**_ONCE, "Transfer-Encoding": "chunked"}) + SECRET.encode() + b"\r\n",
    encode_request("POST", "/", b"{", {SECRET: SECRET, **_ONCE}),
]


def say(daemon_client: DaemonClient, findings: Findings, raw: bytes) -> int:
    """Send a command; the status."""
    answered = daemon_client.command(raw, **MARKED_HEADERS)
    findings.answer(answered)
    return answered.status


def said(daemon_client: DaemonClient, message: bytes, opcode: int, chatter: Iterable[bytes]) -> Iterator[bytes]:
    """What a socket gets to hear that begins like this, and goes on talking."""
    line = RawWebSocket(daemon_client)
    with contextlib.suppress(OSError):
        line.say(message, opcode)
        for more in chatter:
            line.say(more)
        line.say_part(b"\x03\xe8" + SECRET.encode(), CLOSE_OPCODE)
    # Who closes without waiting for an answer may get none.
    with contextlib.suppress(PeerClosedSocket, ConnectionError):
        while True:
            yield line.hear_raw()
    line.close()


def trouble(daemon_client: DaemonClient, volley: MarkedRequests, findings: Findings) -> None:
    """Every table is away once while everything is said."""
    database = daemon_client.database
    with contextlib.closing(sqlite3.connect(database, isolation_level=None, timeout=PATIENCE_SECONDS)) as connection:
        connection.execute("PRAGMA legacy_alter_table = ON")
        for table in sorted({table for table, _ in PLACES} | {"nonce", "party"}):
            commands = list(volley.good())
            connection.execute(f"ALTER TABLE {table} RENAME TO missing")
            statuses = {say(daemon_client, findings, raw) for raw in commands}
            connection.execute(f"ALTER TABLE missing RENAME TO {table}")
            assert 503 in statuses, table


def collect(daemon: Daemon, findings: Findings) -> None:
    """What the daemon has written about itself."""
    for name, lines in read_segments(daemon.log_directory).items():
        findings.places[name] = b"".join(lines)
    findings.places["output"] = daemon.output().encode()
    assert b"req.done" in b"".join(findings.places.values())
    assert b"DUPLICATE_NONCE" in b"".join(findings.places.values())


def assert_only_payloads(database: Path, files: Mapping[str, bytes], volley: MarkedRequests) -> None:
    """What is kept is where it belongs, and nothing else is kept: no nonce, no signature of a command, no key."""
    assert traces(SECRET, dict(files)) == traces(NONCES, dict(files)) == []
    contracts = {name for name in volley.needles() if name in text_of(database, "contract", "text")}
    published = {name for name in volley.needles() if name in text_of(database, "public_event", "signature")}
    for needle in set(volley.needles()) - contracts - published - {STORED}:
        assert traces(needle, dict(files)) == [], needle
    with contextlib.closing(sqlite3.connect(database)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        columns = [(table, column) for table in tables for column in columns_of(connection, table)]
    found = {place for place in columns if STORED in text_of(database, *place)}
    assert found == PLACES


def columns_of(connection: sqlite3.Connection, table: str) -> list[str]:
    """Names."""
    return [str(row[1]) for row in connection.execute(f"PRAGMA table_info({table})")]


def text_of(database: Path, table: str, column: str) -> str:
    """Everything in a column."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        values = [value for (value,) in connection.execute(f"SELECT {column} FROM {table}")]
    return "\n".join(value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in values)


def test_what_is_not_opened() -> None:
    """
    Anything but a registration comes back byte for byte and has no effect, though it be a registration encrypted to
    the mediator, which could open it (DCTRL-0004 12.1).
    """
    with prepare_daemon() as daemon:
        daemon_client = DaemonClient(daemon)
        bob, carol = RawDecentrlClient(daemon_client, "bob"), RawDecentrlClient(daemon_client, "carol")
        bob.register()
        bob.befriend(carol)
        registration = carol.registration()
        assert carol.get(REQUEST, to=bob.did, **registration) == {"type": "SUCCESS", "code": "REQUESTED"}
        sealed = registration["encrypted_contract_request"]
        assert carol.tell(bob, sealed).status == 200
        payload = encoding.dumps({"type": REQUEST, **registration}).decode()
        bob.get("SAVE_EVENTS", events=[bob.event(sealed, tags=(sealed[:100],)), bob.event(payload)])
        bob.publish(payload)
        assert carol.ask("QUERY_EVENTS").status == 401
        (request,) = bob.requests()
        assert {name: request[name] for name in registration} == registration
        assert [one["payload"] for one in bob.pending()] == [sealed]
        assert [one["payload"] for one in bob.items("EVENTS", "events")] == [sealed, payload]
        (event,) = daemon_client.ask("GET", f"/public/{bob.did}").json["events"]
        assert event["event"] == payload
        # It could have been opened.
        carol.get(REQUEST, **registration)
        assert carol.ask("QUERY_EVENTS").status == 200


def test_who_can_open_anything() -> None:
    """
    In all of the daemon, decryption is imported by registration alone, and so is the key agreement it needs. The
    cipher itself opens the file of our own keys as well.
    """
    room = Path(mediatord.__file__).parent
    ours = [path for path in room.rglob("*.py") if not {"wallet", "bench"} & set(path.relative_to(room).parts)]
    importers: dict[str, set[str]] = {name: set() for name in ("decrypt", "derive_shared_secret", "crypto", "AESGCM")}
    for path in ours:
        for name in names_of(path) & set(importers):
            importers[name].add(str(path.relative_to(room)))
    assert importers["decrypt"] == importers["derive_shared_secret"] == {"decentrl/contracts_and_registration.py"}
    assert importers["crypto"] == {"net/listeners.py"}  # that of OpenSSL
    halves = {path for path in importers["AESGCM"] if "didcomm" not in path}
    assert halves == {"protocol/decentrl/crypto.py", "identity/encrypted_file.py"}


def names_of(path: Path) -> set[str]:
    """The names that a module imports from others; those of modules as well."""
    tree = ast.parse(path.read_text("utf-8"))
    return {one.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in node.names}
