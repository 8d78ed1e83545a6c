"""
No data sent by Decentrl clients and no private key leaks, and nothing is decrypted that is not for the mediator
(DCTRL-0004 12.1, decision D15).

As in test_canary.py: data that may be stored has one mark, everything else another. Nonces, signatures and keys
cannot be marked, so they are searched for as they are.
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
from tests.integration.test_canary import MARKED_HEADERS, SECRET, STORED, find_text, private_key_values
from tests.observability.counter_oracle import read_segments
from tests.protocol.decentrl.mutations import replaced, to_json, without

# Prefix of all nonces.
NONCE_PREFIX = "caca0b1e-7f3a-4e0e-9a37"
BINARY = 2
# Store operations that commands use.
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
# The only columns that may contain payloads.
PAYLOAD_COLUMNS = {
    ("contract", "text"),
    ("contract_request", "public_key"),
    ("contract_request", "request"),
    ("label", "text"),
    ("pending_event", "payload"),
    ("public_event", "event"),
    ("stored_event", "contract_id"),
    ("stored_payload", "payload"),
}


class MarkedIdentity(RawDecentrlClient):
    """
    An identity whose commands are marked wherever possible.

    :ivar unique: signatures and keys that it has sent.
    """

    def __init__(self, daemon_client: DaemonClient, alias: str) -> None:
        super().__init__(daemon_client, alias)
        seed: bytes = self.identity.seed
        self.unique = {encode_base64(seed), seed.hex()}
        self._number = id(self) & 0xFFFF

    def new_nonce(self) -> str:
        """A new nonce."""
        self._number += 0x10000
        return f"{NONCE_PREFIX}-{self._number:012x}"

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
        raw = super().command(
            payload, to=to, channel=channel, **{"nonce": self.new_nonce(), SECRET: SECRET, **header}
        )
        self.unique.add(json.loads(raw)["signature"])
        return raw

    def encrypt_contract_request(self, plaintext: Any, prekey: bytes | None = None) -> dict[str, Any]:
        members = super().encrypt_contract_request(plaintext, prekey)
        self.unique.update(members.values())
        return members

    def signed_contract(self, peer: MarkedIdentity, **changes: Any) -> dict[str, Any]:
        """A marked contract signed by both."""
        keys = {"requestor_encryption_public_key": STORED, "recipient_encryption_public_key": STORED}
        contract = {**self.contract_terms(peer.did), **keys, STORED: STORED, **changes}
        signed: dict[str, Any] = {
            "communication_contract": contract,
            "requestor_signature": sign_contract_request(contract, self.identity.seed),
            "recipient_signature": sign_contract(contract, peer.identity.seed),
        }
        self.unique.update((signed["requestor_signature"], signed["recipient_signature"]))
        return {**signed, STORED: STORED}

    def authentication(self, **members: Any) -> dict[str, Any]:
        message = super().authentication(**{"nonce": self.new_nonce(), **members})
        self.unique.add(message["signature"])
        return {**message, SECRET: SECRET}


class MarkedCommands:
    """Marked commands of every kind; Alice and Bob are registered, Carol is not."""

    def __init__(self, daemon_client: DaemonClient) -> None:
        self.alice, self.bob, self.carol = (
            MarkedIdentity(daemon_client, alias) for alias in ("alice", "bob", "carol")
        )
        self.identities = (self.alice, self.bob, self.carol)
        for one in (self.alice, self.bob):
            one.register()
        for one, other in ((self.alice, self.bob), (self.bob, self.alice)):
            assert one.save_contract(one.signed_contract(other)).status == 200

    def forbidden_texts(self) -> list[str]:
        """All texts that must not be found."""
        return sorted({SECRET, STORED, NONCE_PREFIX}.union(*(identity.unique for identity in self.identities)))

    def valid_commands(self) -> Iterator[bytes]:
        """Every command; with a working store all of them succeed, except the deletion."""
        alice, bob = self.alice, self.bob
        contracts = "COMMUNICATION_CONTRACT"
        terms = {**alice.contract_terms(alice.mediator), STORED: STORED, "requestor_encryption_public_key": STORED}
        request = {
            "communication_contract": terms,
            "requestor_signature": sign_contract_request(terms, alice.identity.seed),
        }
        contract = {"signed_communication_contract": bob.signed_contract(alice)}
        tags = (STORED, f"{STORED} 2")
        event = {**alice.stored_event(STORED, sender=bob.did, tags=tags), "contract_id": STORED, SECRET: SECRET}
        public = alice.public_event(STORED, tags, STORED)
        alice.unique.add(public["event_signature"])
        ids = [event["id"] for event in alice.query("EVENTS", "events")]
        filters = {"encrypted_tags": [SECRET], "participant_did": SECRET}
        sealed = {"encrypted_contract_request": STORED, "requestor_ephemeral_public_key": STORED}
        for type_, members, to in (
            (REQUEST, alice.encrypt_contract_request({**request, SECRET: SECRET}), None),
            (REQUEST, sealed, bob.did),
            (RESPOND, contract, bob.did),
            (SAVE, contract, None),
            (f"QUERY_PENDING_{contracts}_REQUESTS", {}, None),
            (f"ACKNOWLEDGE_PENDING_{contracts}_REQUESTS", {"communication_contract_ids": [SECRET]}, None),
            (f"QUERY_{contracts}S", {"filter": {"did": SECRET, SECRET: SECRET}}, None),
            (f"QUERY_{contracts}S", {}, None),
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

    def invalid_commands(self) -> Iterator[bytes]:
        """Commands refused for every possible reason, and bodies that are no commands."""
        yield from self._malformed_commands()
        yield from self._forged_commands()
        yield from self._invalid_contracts()

    def _malformed_commands(self) -> Iterator[bytes]:
        valid = json.loads(self._refused_event())
        yield from (SECRET.encode(), b"\xff" + SECRET.encode(), to_json(SECRET), to_json([SECRET]), to_json({}))
        yield to_json({SECRET: SECRET})
        yield to_json(valid)[:-1]
        yield to_json(valid).replace(b'"header"', b'"header":{},"header"')
        yield to_json({**valid, SECRET: "\ud800"})
        for path in (("header",), ("payload",), ("signature",), *(("header", name) for name in valid["header"])):
            yield to_json(without(valid, path))
            for value in (f"not {SECRET}", None, [SECRET], {SECRET: SECRET}):
                yield to_json(replaced(valid, path, value))
        for type_ in (REQUEST, RESPOND, SAVE, "SAVE_EVENTS", "QUERY_EVENTS", "ACKNOWLEDGE_PENDING_EVENTS", SECRET):
            for invalid in (SECRET, [{SECRET: SECRET}], None):
                members = dict.fromkeys(("signed_communication_contract", "events", "filter", "event_ids"), invalid)
                yield self.alice.command({"type": type_, **members})

    def _refused_event(self, sender: MarkedIdentity | None = None, **header: Any) -> bytes:
        """An event that would be stored, were it not refused."""
        return (sender or self.alice).command(SECRET, **{"to": self.bob.did, "channel": PRIVATE_CHANNEL, **header})

    def _forged_commands(self) -> Iterator[bytes]:
        """Wrong senders, recipients and times."""
        alice, bob, carol = self.alice, self.bob, self.carol
        valid = json.loads(self._refused_event())
        yield to_json({**valid, "signature": SECRET})
        yield to_json({**valid, "payload": f"{SECRET} {SECRET}"})
        yield self._refused_event(timestamp_ms=1)
        yield self._refused_event(sender_did=f"did:web:{SECRET}", sender_signing_key_id=SECRET)
        yield self._refused_event(sender_signing_key_id=f"{alice.did}#{SECRET}")
        yield self._refused_event(to=f"did:web:{SECRET}")
        yield self._refused_event(to=carol.did)
        yield self._refused_event(carol)
        repeated = self._refused_event(to=carol.did)
        yield repeated
        yield repeated
        for to in (bob.did, SECRET):
            yield alice.command(
                {"type": "SAVE_EVENTS", "events": [alice.stored_event(SECRET, tags=(SECRET,))]}, to=to
            )
        yield carol.command({"type": "SAVE_EVENTS", "events": [carol.stored_event(SECRET, tags=(SECRET,))]})
        secret = {"encrypted_contract_request": SECRET, "requestor_ephemeral_public_key": SECRET}
        yield carol.command({"type": REQUEST, **secret}, to=SECRET)
        yield alice.command(
            {"type": "PUBLISH_PUBLIC_EVENT", **carol.public_event(SECRET, (SECRET,))}, channel=PUBLIC_CHANNEL
        )
        forged = {**alice.public_event(SECRET), "event_signature": SECRET}
        yield alice.command({"type": "PUBLISH_PUBLIC_EVENT", **forged}, channel=PUBLIC_CHANNEL)

    def _invalid_contracts(self) -> Iterator[bytes]:
        """Invalid registrations and contracts."""
        alice, bob, carol = self.alice, self.bob, self.carol
        secret = {"encrypted_contract_request": SECRET, "requestor_ephemeral_public_key": SECRET}
        yield alice.command({"type": REQUEST, **secret})
        terms = {**alice.contract_terms(alice.mediator), SECRET: SECRET, "requestor_encryption_public_key": SECRET}
        for plaintext in (
            SECRET,
            {SECRET: SECRET},
            {"communication_contract": {SECRET: SECRET}, "requestor_signature": SECRET},
            {"communication_contract": terms, "requestor_signature": SECRET},
            {"communication_contract": {**terms, "expires_at": 1}, "requestor_signature": SECRET},
            {"communication_contract": {**terms, "requestor_did": SECRET}, "requestor_signature": SECRET},
            {**terms, "signature": SECRET},
        ):
            yield alice.command({"type": REQUEST, **alice.encrypt_contract_request(plaintext)})
            yield alice.command(
                {"type": REQUEST, **alice.encrypt_contract_request(plaintext, bob.daemon_client.mediator.signing_key)}
            )
        valid = bob.contract_with(alice)
        for signed in (
            {**valid, "requestor_signature": SECRET},
            {**valid, "recipient_signature": SECRET},
            replaced(valid, ("communication_contract", SECRET), SECRET),
            replaced(valid, ("communication_contract", "requestor_did"), f"did:web:{SECRET}"),
            replaced(valid, ("communication_contract", "requestor_signing_key_id"), SECRET),
            replaced(valid, ("communication_contract", "expires_at"), SECRET),
            replaced(bob.contract_with(carol), ("communication_contract", SECRET), SECRET),
        ):
            yield alice.command({"type": SAVE, "signed_communication_contract": signed})
            yield alice.command({"type": RESPOND, "signed_communication_contract": signed}, to=bob.did)

    def first_messages(self) -> Iterator[tuple[bytes, int]]:
        """First messages of a socket, with their opcodes."""
        alice = self.alice
        valid = alice.authentication()
        yield to_json(valid), BINARY
        yield to_json(valid), TEXT_OPCODE
        yield to_json(valid), TEXT_OPCODE
        for name in ("type", "did", "signing_key_id", "timestamp", "nonce", "signature"):
            yield to_json({**alice.authentication(), name: SECRET}), TEXT_OPCODE
        yield to_json(alice.authentication(timestamp_ms=1)), TEXT_OPCODE
        yield to_json(alice.authentication(did=f"did:web:{SECRET}", signing_key_id=SECRET)), TEXT_OPCODE
        yield to_json(alice.authentication(signing_key_id=f"{alice.did}#{SECRET}")), TEXT_OPCODE
        yield to_json(self.carol.authentication()), TEXT_OPCODE
        yield SECRET.encode(), TEXT_OPCODE
        yield b"\xff" + SECRET.encode(), BINARY
        yield to_json({"protected": SECRET, "ciphertext": SECRET}), TEXT_OPCODE

    def ignored_messages(self) -> Iterator[bytes]:
        """Messages that an authenticated socket may send, which are ignored."""
        yield SECRET.encode()
        yield to_json({"type": "PONG", "timestamp": SECRET})
        yield to_json(self.bob.authentication())
        yield self._refused_event()

    def public_paths(self) -> Iterator[str]:
        """Paths of public channels."""
        did = self.alice.did
        yield f"/public/{did}"
        for path in (SECRET, f"did:{SECRET}", f"did:x:{SECRET}?{SECRET}", f"%ff{SECRET}"):
            yield f"/public/{path}"
        yield f"/public/{did}?tags={SECRET},{STORED}&channel_id={SECRET}"
        for name in ("tags=%ff", "after=", "before=", "page=", "page_size=", "channel_id=%ff"):
            yield f"/public/{did}?{name}{SECRET}"
        yield f"/public/{did}?page=1&page={SECRET}&{SECRET}={SECRET}"


class CollectedOutput:
    """Responses and log output, to be searched."""

    def __init__(self) -> None:
        self.places: dict[str, bytes] = {}

    def add_response(self, response: HTTPResponse) -> None:
        """
        Add a response. A success may contain stored data and the requested DID, but no other mark; a refusal is
        searched for everything.
        """
        self.places[f"response {len(self.places)}"] = str(response.headers).encode()
        if response.status == 200:
            body = re.sub(rb'"publisher_did":"[^"]*"', b"", response.body)
            assert find_text(SECRET, {"": body}) == find_text(NONCE_PREFIX, {"": body}) == []
        else:
            self.places[f"refusal {len(self.places)}"] = response.body

    def add_frames(self, frames: Iterable[bytes]) -> None:
        """Add frames of a socket, except pushes, which contain events as sent."""
        for frame in frames:
            if not frame.startswith(b'{"type":"PENDING_EVENTS"'):
                self.places[f"frame {len(self.places)}"] = frame

    def find(self, texts: Iterable[str]) -> list[tuple[str, str]]:
        """Forbidden texts and where they are."""
        everything = {"": b"\n".join(self.places.values())}
        present = [text for text in texts if find_text(text, everything)]
        return [(text, place) for text in present for place in find_text(text, self.places)]


class InProcessClient(DaemonClient):
    """Client of a mediator in this process."""

    def __init__(self, site_fixture: InMemorySite) -> None:
        self._site = site_fixture
        self.mediator = read_mediator_document(site_fixture.base.identity.now.web_document)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        source: str = "127.0.0.1",
    ) -> HTTPResponse:
        """Without a connection."""
        return self._site.request(method, path, body, dict(headers or {}), peer=source)

    def now(self) -> float:
        """Unix seconds of the manual clock."""
        return self._site.clock.seconds()


class InProcessLeakTests(SynchronousTestCase):
    """In this process, where faults can be injected."""

    def setUp(self) -> None:
        self.collected = CollectedOutput()
        observer = cast(ILogObserver, self.observe)
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)
        self.site_fixture = InMemorySite(self, **PLENTY, log={"level": "debug", "dids": "plain"})
        self.marked = MarkedCommands(InProcessClient(self.site_fixture))

    def observe(self, event: LogEvent) -> None:
        """Record a log event of any level, with all of its values."""
        values = {name: repr(value) for name, value in event.items() if not name.startswith("log_")}
        line = f"{eventAsText(event, includeTraceback=True)} {values}"
        self.collected.places[f"line {len(self.collected.places)}"] = line.encode()

    def post_commands(self, commands: Iterable[bytes]) -> list[int]:
        """POST commands; return the response statuses."""
        statuses = []
        for raw in commands:
            response = self.site_fixture.request("POST", "/", raw, {"Content-Type": JSON, **MARKED_HEADERS})
            self.collected.add_response(response)
            statuses.append(response.status)
        return statuses

    def read_public_channels(self) -> list[int]:
        """Read public channels; return the response statuses."""
        statuses = []
        for path in self.marked.public_paths():
            response = self.site_fixture.request("GET", path, None, MARKED_HEADERS)
            self.collected.add_response(response)
            statuses.append(response.status)
        return statuses

    def use_sockets(self) -> None:
        """Send all first messages, and further ones, on sockets."""
        for message, opcode in self.marked.first_messages():
            websocket_client = self.site_fixture.websocket_client("/ws", **MARKED_HEADERS)
            websocket_client.send(message, opcode)
            for chatter in self.marked.ignored_messages():
                websocket_client.transport.feed(encode_masked_frame(chatter))
            self.collected.add_frames(payload for _, payload in websocket_client.frames())
        self.assertIn(b'{"type":"AUTH_SUCCESS"}', self.collected.places.values())

    def assert_no_leak(self) -> None:
        """No marked text and no private key is in any log line, event, metric or refusal."""
        self.site_fixture.clock.advance(100)
        self.site_fixture.run_due_calls()
        places = self.collected.places
        places |= {path.name: path.read_bytes() for path in self.site_fixture.config.log.directory.glob("events*")}
        places["metrics"] = self.site_fixture.request("GET", "/metrics", peer="127.0.0.1").body
        texts = [*self.marked.forbidden_texts(), *private_key_values(self.site_fixture.config.identity.keys)]
        self.assertGreater(len(texts), 40)
        self.assertIn(b"req.done", b"".join(places.values()))
        self.assertEqual(self.collected.find(texts), [])

    def test_commands_do_not_leak(self) -> None:
        """Valid and invalid commands while a socket is open; the valid ones twice, so that queries find something."""
        websocket_client = self.site_fixture.websocket_client("/ws")
        websocket_client.send(to_json(self.marked.bob.authentication()))
        statuses = self.post_commands(self.marked.valid_commands())
        self.assertEqual(statuses, [200] * 17 + [404])
        self.assertEqual(self.post_commands(self.marked.valid_commands()), statuses)
        self.assertEqual(set(self.post_commands(self.marked.invalid_commands())), {400, 401, 404})
        self.assertEqual(set(self.read_public_channels()), {200, 400})
        self.use_sockets()
        pushes = [payload for _, payload in websocket_client.frames() if STORED.encode() in payload]
        self.assertEqual(len(pushes), 2)
        self.assert_no_leak()

    def test_store_failures_do_not_leak(self) -> None:
        """Every store operation fails in turn."""
        for operation in OPERATIONS:
            commands = list(self.marked.valid_commands())
            with self.site_fixture.failing(operation, StoreUnavailable()):
                statuses = {*self.post_commands(commands), *self.read_public_channels()}
                self.assertIn(503, statuses, operation)
                if operation == "check_guard":
                    self.assert_authentication_fails(1013)
        self.assert_no_leak()

    def test_unexpected_exceptions_do_not_leak(self) -> None:
        """Exceptions whose text contains the input, as libraries raise them."""
        for operation in OPERATIONS:
            commands = list(self.marked.valid_commands())
            with self.site_fixture.failing(
                operation, RuntimeError(f"cannot handle {SECRET} {STORED} {NONCE_PREFIX}")
            ):
                statuses = {*self.post_commands(commands), *self.read_public_channels()}
                self.assertIn(500, statuses, operation)
                if operation == "check_guard":
                    self.assert_authentication_fails(1011)
        self.assert_no_leak()
        self.assertNotEqual(self.flushLoggedErrors(RuntimeError), [])

    def assert_authentication_fails(self, code: int) -> None:
        """Authentication fails with this close code."""
        websocket_client = self.site_fixture.websocket_client("/ws")
        websocket_client.send(to_json(self.marked.alice.authentication()))
        frames = websocket_client.frames()
        self.collected.add_frames(payload for _, payload in frames)
        self.assertEqual(int.from_bytes(frames[-1][1][:2], "big"), code)

    def test_every_store_operation_is_covered(self) -> None:
        """Operations of commands and queries are in `OPERATIONS`; the others serve notifications."""
        others = {"find_pending", "find_pending_arrivals", "registered_until"}
        self.assertEqual(set(IDecentrlStore.names()) - set(OPERATIONS), others)

    def test_search_finds_every_forbidden_text(self) -> None:
        """In a log line."""
        list(self.marked.valid_commands())
        for text in self.marked.forbidden_texts():
            self.collected.places["line"] = f"a line with {text} in it".encode()
            self.assertEqual(self.collected.find(self.marked.forbidden_texts()), [(text, "line")])


@pytest.mark.parametrize("backend", ["sqlite", "memory"])
def test_daemon_process_does_not_leak(backend: str) -> None:
    """A daemon with maximum logging: output, logs, metrics, refusals and every byte of its files."""
    daemon = prepare_daemon(merge_settings({"log": {"level": "debug"}}, {"storage": {"backend": backend}}))
    with daemon:
        daemon_client = DaemonClient(daemon)
        marked, collected = MarkedCommands(daemon_client), CollectedOutput()
        statuses = [
            post_and_collect(daemon_client, collected, raw)
            for raw in [*marked.valid_commands(), *marked.valid_commands()]
        ]
        assert statuses == ([200] * 17 + [404]) * 2
        rows = daemon_client.read_rows() if backend == "sqlite" else {}
        assert {post_and_collect(daemon_client, collected, raw) for raw in marked.invalid_commands()} == {
            400,
            401,
            404,
        }
        assert post_and_collect(daemon_client, collected, SECRET.encode() * 100_000) == 413
        for path in marked.public_paths():
            collected.add_response(daemon_client.request("GET", path, None, MARKED_HEADERS))
        for message, opcode in marked.first_messages():
            collected.add_frames(exchange_messages(daemon_client, message, opcode, marked.ignored_messages()))
        for raw in BAD_HTTP:
            for response in daemon_client.send_raw(raw):
                collected.add_response(response)
        if backend == "sqlite":
            assert daemon_client.read_rows() == rows
            send_with_missing_tables(daemon_client, marked, collected)
            files = {path.name: path.read_bytes() for path in daemon.directory.glob("mediator.sqlite3*")}
            assert_only_payloads_stored(daemon_client.database, files, marked)
        collected.places["metrics"] = daemon_client.request("GET", "/metrics").body
        daemon.stop()
        collect_log_output(daemon, collected)
        assert collected.find([*marked.forbidden_texts(), *private_key_values(daemon.directory / "keys.jwks")]) == []


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


def post_and_collect(daemon_client: DaemonClient, collected: CollectedOutput, raw: bytes) -> int:
    """POST a command and collect the response; return its status."""
    response = daemon_client.post_command(raw, **MARKED_HEADERS)
    collected.add_response(response)
    return response.status


def exchange_messages(
    daemon_client: DaemonClient, message: bytes, opcode: int, messages: Iterable[bytes]
) -> Iterator[bytes]:
    """Frames received on a socket with this first message and further ones."""
    socket = RawWebSocket(daemon_client)
    with contextlib.suppress(OSError):
        socket.send(message, opcode)
        for further in messages:
            socket.send(further)
        socket.send_frame(b"\x03\xe8" + SECRET.encode(), CLOSE_OPCODE)
    # Closing without waiting for the response may lose it.
    with contextlib.suppress(PeerClosedSocket, ConnectionError):
        while True:
            yield socket.receive_raw()
    socket.close()


def send_with_missing_tables(daemon_client: DaemonClient, marked: MarkedCommands, collected: CollectedOutput) -> None:
    """Each table is missing once while all valid commands are sent."""
    database = daemon_client.database
    with contextlib.closing(sqlite3.connect(database, isolation_level=None, timeout=PATIENCE_SECONDS)) as connection:
        connection.execute("PRAGMA legacy_alter_table = ON")
        for table in sorted({table for table, _ in PAYLOAD_COLUMNS} | {"nonce", "party"}):
            commands = list(marked.valid_commands())
            connection.execute(f"ALTER TABLE {table} RENAME TO missing")
            statuses = {post_and_collect(daemon_client, collected, raw) for raw in commands}
            connection.execute(f"ALTER TABLE missing RENAME TO {table}")
            assert 503 in statuses, table


def collect_log_output(daemon: Daemon, collected: CollectedOutput) -> None:
    """Collect event log and output of the daemon."""
    for name, lines in read_segments(daemon.log_directory).items():
        collected.places[name] = b"".join(lines)
    collected.places["output"] = daemon.output().encode()
    assert b"req.done" in b"".join(collected.places.values())
    assert b"DUPLICATE_NONCE" in b"".join(collected.places.values())


def assert_only_payloads_stored(database: Path, files: Mapping[str, bytes], marked: MarkedCommands) -> None:
    """Stored data is in its columns only; no nonce, command signature or key is stored."""
    assert find_text(SECRET, dict(files)) == find_text(NONCE_PREFIX, dict(files)) == []
    contracts = {name for name in marked.forbidden_texts() if name in column_text(database, "contract", "text")}
    published = {
        name for name in marked.forbidden_texts() if name in column_text(database, "public_event", "signature")
    }
    for text in set(marked.forbidden_texts()) - contracts - published - {STORED}:
        assert find_text(text, dict(files)) == [], text
    with contextlib.closing(sqlite3.connect(database)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        columns = [(table, column) for table in tables for column in column_names(connection, table)]
    columns_with_payload = {column_name for column_name in columns if STORED in column_text(database, *column_name)}
    assert columns_with_payload == PAYLOAD_COLUMNS


def column_names(connection: sqlite3.Connection, table: str) -> list[str]:
    """Column names of a table."""
    return [str(row[1]) for row in connection.execute(f"PRAGMA table_info({table})")]


def column_text(database: Path, table: str, column: str) -> str:
    """All values of a column."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        values = [value for (value,) in connection.execute(f"SELECT {column} FROM {table}")]
    return "\n".join(value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in values)


def test_does_not_decrypt_data_for_others() -> None:
    """
    Anything but a registration is returned byte for byte and has no effect, even a registration encrypted to the
    mediator (DCTRL-0004 12.1).
    """
    with prepare_daemon() as daemon:
        daemon_client = DaemonClient(daemon)
        bob, carol = RawDecentrlClient(daemon_client, "bob"), RawDecentrlClient(daemon_client, "carol")
        bob.register()
        bob.permit_sender(carol)
        registration = carol.registration_request()
        assert carol.execute(REQUEST, to=bob.did, **registration) == {"type": "SUCCESS", "code": "REQUESTED"}
        ciphertext = registration["encrypted_contract_request"]
        assert carol.send_event(bob, ciphertext).status == 200
        payload = encoding.dumps({"type": REQUEST, **registration}).decode()
        bob.execute(
            "SAVE_EVENTS", events=[bob.stored_event(ciphertext, tags=(ciphertext[:100],)), bob.stored_event(payload)]
        )
        bob.publish(payload)
        assert carol.request("QUERY_EVENTS").status == 401
        (request,) = bob.contract_requests()
        assert {name: request[name] for name in registration} == registration
        assert [event["payload"] for event in bob.pending_events()] == [ciphertext]
        assert [event["payload"] for event in bob.query("EVENTS", "events")] == [ciphertext, payload]
        (event,) = daemon_client.request("GET", f"/public/{bob.did}").json["events"]
        assert event["event"] == payload
        # The mediator could have decrypted it.
        carol.execute(REQUEST, **registration)
        assert carol.request("QUERY_EVENTS").status == 200


def test_few_modules_import_decryption() -> None:
    """
    Only registrations and devices for push notifications are decrypted, which are for the mediator; devices are
    encrypted for their owner, too. The cipher also opens the encrypted key file, and devices in the store.
    """
    root = Path(mediatord.__file__).parent
    sources = [path for path in root.rglob("*.py") if not {"wallet", "bench"} & set(path.relative_to(root).parts)]
    importers: dict[str, set[str]] = {name: set() for name in ("decrypt", "derive_shared_secret", "crypto", "AESGCM")}
    for path in sources:
        for name in imported_names(path) & set(importers):
            importers[name].add(str(path.relative_to(root)))
    assert importers["decrypt"] == {"decentrl/context.py"}
    assert importers["derive_shared_secret"] == {"decentrl/context.py", "decentrl/push_devices.py"}
    assert importers["crypto"] == {"net/listeners.py"}  # OpenSSL.crypto
    users = {path for path in importers["AESGCM"] if "didcomm" not in path}
    assert users == {"protocol/decentrl/crypto.py", "identity/encrypted_file.py", "push/devices.py"}


def imported_names(path: Path) -> set[str]:
    """Names that a module imports, those of modules included."""
    tree = ast.parse(path.read_text("utf-8"))
    return {one.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in node.names}
