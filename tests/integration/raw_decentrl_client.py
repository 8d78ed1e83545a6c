"""
Decentrl identities that use a daemon over real connections, without a reactor.

They sign and send exactly what a test asks for, and return responses unchecked.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from mediatord.bench.raw_clients import CLOSE_OPCODE, PING_OPCODE, PONG_OPCODE, TEXT_OPCODE, encode_frame, parse_frame
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import ChannelType
from mediatord.protocol.decentrl.contracts import sign_contract, sign_contract_request
from mediatord.protocol.decentrl.crypto import derive_shared_secret, encrypt, generate_key_pair, sign_event
from mediatord.protocol.encoding import encode_base64
from mediatord.wallet.decentrl_client import (
    DIRECT_CHANNEL,
    PRIVATE_CHANNEL,
    PUBLIC_CHANNEL,
    DecentrlIdentity,
    DecentrlMediator,
    compose_authentication,
    compose_command,
    read_mediator_document,
)
from tests.http.in_memory_site import HTTPResponse, encode_masked_frame, encode_request, parse_responses
from tests.integration.daemon import Daemon
from tests.integration.message_load import PATIENCE_SECONDS

JSON = "application/json"
YEAR = 31_536_000
MANY = 1000
# Prefixes of tables that a refused command may change: nonces and counters.
_EXCLUDED_TABLES = ("nonce", "counter")


def unix_time() -> float:
    """Unix seconds."""
    return datetime.now(UTC).timestamp()


def read_all_rows(database: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Rows of all tables except nonces and counters, read from the file."""
    with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
        connection.execute("BEGIN")
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        tables = [name for name in names if name not in _EXCLUDED_TABLES and not name.startswith("sqlite_")]
        return {name: sorted(connection.execute(f"SELECT * FROM {name}"), key=repr) for name in tables}


class DaemonClient:
    """
    HTTP client of a daemon.

    :ivar mediator: as its DID document describes it.
    :ivar database: its SQLite file.
    """

    mediator: DecentrlMediator

    def __init__(self, daemon: Daemon) -> None:
        self.port = daemon.port
        self.database = daemon.directory / "mediator.sqlite3"
        self.mediator = read_mediator_document(self.request("GET", "/.well-known/did.json").json)

    def connection(self, source: str = "127.0.0.1") -> HTTPConnection:
        """A persistent connection."""
        return HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS, source_address=(source, 0))

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        source: str = "127.0.0.1",
    ) -> HTTPResponse:
        """Send one request on a new connection."""
        with contextlib.closing(self.connection(source)) as connection:
            return send_request_on(connection, method, path, body, headers)

    def post_command(self, raw: bytes, *, source: str = "127.0.0.1", **headers: str) -> HTTPResponse:
        """POST a command."""
        return self.request("POST", "/", raw, {"Content-Type": JSON, **headers}, source=source)

    def post_concurrently(self, commands: Sequence[bytes]) -> list[HTTPResponse]:
        """POST commands at the same time, on connections opened before; return the responses."""
        connections = [self.connection() for _ in commands]
        with contextlib.ExitStack() as closing:
            for connection in connections:
                closing.callback(connection.close)
                connection.connect()
            for connection, raw in zip(connections, commands, strict=True):
                connection.request("POST", "/", raw, {"Content-Type": JSON})
            return [read_response_on(connection) for connection in connections]

    def send_raw(self, raw: bytes) -> list[HTTPResponse]:
        """Send raw bytes; return the responses until the daemon closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS) as connection:
            received = b""
            with contextlib.suppress(ConnectionError):
                connection.sendall(raw)
            with contextlib.suppress(ConnectionError):
                while data := connection.recv(1 << 16):
                    received += data
            return parse_responses(received)

    def now(self) -> float:
        """Unix seconds, by the mediator's clock."""
        return unix_time()

    def read_rows(self) -> dict[str, list[tuple[Any, ...]]]:
        """As :func:`read_all_rows`."""
        return read_all_rows(self.database)


def send_request_on(
    connection: HTTPConnection,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> HTTPResponse:
    """Send a request on a persistent connection."""
    connection.request(method, path, body, dict(headers or {}))
    return read_response_on(connection)


def read_response_on(connection: HTTPConnection) -> HTTPResponse:
    """Read the response on a connection."""
    response = connection.getresponse()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return HTTPResponse(response.status, headers, response.read())


class RawDecentrlClient:
    """
    An identity, registered or not.

    :param mediator_did: the mediator that its DID names; the daemon's unless given.
    """

    def __init__(self, daemon_client: DaemonClient, alias: str, *, mediator_did: str | None = None) -> None:
        self.daemon_client = daemon_client
        self.identity = DecentrlIdentity.generate(alias, mediator_did or daemon_client.mediator.did)
        self.did = self.identity.did

    @property
    def mediator(self) -> str:
        """DID of the daemon's mediator."""
        return self.daemon_client.mediator.did

    def command(
        self,
        payload: dict[str, Any] | str,
        *,
        to: str | None = None,
        channel: ChannelType = DIRECT_CHANNEL,
        **header: Any,
    ) -> bytes:
        """A signed command with the current time. :param header: as of :func:`compose_command`."""
        times = {"timestamp_ms": int(self.daemon_client.now() * 1000), **header}
        return encoding.dumps(compose_command(self.identity, channel, to or self.mediator, payload, **times))

    def request(
        self, type_: str, *, to: str | None = None, channel: ChannelType = DIRECT_CHANNEL, **members: Any
    ) -> HTTPResponse:
        """Send a command with these members."""
        return self.daemon_client.post_command(self.command({"type": type_, **members}, to=to, channel=channel))

    def execute(
        self, type_: str, *, to: str | None = None, channel: ChannelType = DIRECT_CHANNEL, **members: Any
    ) -> dict[str, Any]:
        """As :meth:`request`, for a command that must succeed; return the reply."""
        response = self.request(type_, to=to, channel=channel, **members)
        assert (response.status, response.json["type"]) == (200, "SUCCESS"), response.body
        return response.json

    def send_event(self, recipient: RawDecentrlClient, payload: str = "sealed") -> HTTPResponse:
        """Send an event to another identity."""
        return self.daemon_client.post_command(self.command(payload, to=recipient.did, channel=PRIVATE_CHANNEL))

    def query(self, what: str, list_: str, **members: Any) -> list[dict[str, Any]]:
        """All items of a query, page by page."""
        items: list[dict[str, Any]] = []
        while True:
            pagination = {"page": len(items) // MANY, "page_size": MANY}
            payload = self.execute(f"QUERY_{what}", pagination=pagination, **members)["payload"]
            items += payload[list_]
            total = payload["pagination"]["total"]
            if len(items) == total:
                return items
            assert len(items) < total and payload[list_], f"{len(items)} of {total} {list_}"

    def pending_events(self) -> list[dict[str, Any]]:
        """Its pending events."""
        return self.query("PENDING_EVENTS", "pending_events")

    def contract_requests(self) -> list[dict[str, Any]]:
        """Its pending contract requests."""
        name = "PENDING_COMMUNICATION_CONTRACT_REQUESTS"
        return self.query(name, name.lower())

    def contract_terms(self, peer_did: str, **changes: Any) -> dict[str, Any]:
        """Contract terms as requestor, without the peer's encryption key."""
        return {
            "requestor_did": self.did,
            "recipient_did": peer_did,
            "requestor_signing_key_id": self.identity.signing_key_id,
            "recipient_signing_key_id": f"{peer_did}#signing",
            "requestor_encryption_public_key": encode_base64(generate_key_pair()[1]),
            "expires_at": int(self.daemon_client.now()) + YEAR,
            "timestamp": int(self.daemon_client.now()),
            **changes,
        }

    def registration_request(self, **changes: Any) -> dict[str, Any]:
        """Members of a registration request; `changes` apply to the terms."""
        terms = self.contract_terms(self.mediator, **changes)
        signature = sign_contract_request(terms, self.identity.seed)
        return self.encrypt_contract_request({"communication_contract": terms, "requestor_signature": signature})

    def encrypt_contract_request(self, plaintext: Any, prekey: bytes | None = None) -> dict[str, Any]:
        """Encrypt a plaintext as a contract request, for the mediator unless a key is given."""
        private, public = generate_key_pair()
        secret = derive_shared_secret(private, self.daemon_client.mediator.prekey if prekey is None else prekey)
        return {
            "encrypted_contract_request": encrypt(encoding.dumps(plaintext), secret),
            "requestor_ephemeral_public_key": encode_base64(public),
        }

    def register(self, **changes: Any) -> dict[str, Any]:
        """Become registered; the signed contract."""
        reply = self.execute("REQUEST_COMMUNICATION_CONTRACT", **self.registration_request(**changes))
        assert reply["code"] == "MEDIATOR_REGISTRATION_SUCCESS"
        signed: dict[str, Any] = reply["payload"]["signed_communication_contract"]
        return signed

    def contract_with(self, peer: RawDecentrlClient, **changes: Any) -> dict[str, Any]:
        """A contract requested by this identity and signed by both."""
        terms = self.contract_terms(peer.did, **changes)
        full = {**terms, "recipient_encryption_public_key": encode_base64(generate_key_pair()[1])}
        return {
            "communication_contract": full,
            "requestor_signature": sign_contract_request(terms, self.identity.seed),
            "recipient_signature": sign_contract(full, peer.identity.seed),
        }

    def save_contract(self, signed: Mapping[str, Any]) -> HTTPResponse:
        """Save a contract."""
        return self.request("SAVE_COMMUNICATION_CONTRACT", signed_communication_contract=dict(signed))

    def permit_sender(self, peer: RawDecentrlClient, **changes: Any) -> None:
        """Save a contract that permits `peer` to send to this identity."""
        response = self.save_contract(peer.contract_with(self, **changes))
        assert response.status == 200, response.body

    def stored_event(self, payload: str, *, sender: str | None = None, tags: tuple[str, ...] = ()) -> dict[str, Any]:
        """An event to save, from itself unless another sender is named."""
        return {
            "sender_did": sender or self.did,
            "recipient_did": self.did,
            "timestamp": int(self.daemon_client.now()),
            "payload": payload,
            "encrypted_tags": list(tags),
        }

    def public_event(self, event: str, tags: tuple[str, ...] = (), channel_id: str | None = None) -> dict[str, Any]:
        """Members of a command that publishes an event."""
        timestamp = int(self.daemon_client.now())
        return {
            "event": event,
            "tags": list(tags),
            "timestamp": timestamp,
            "event_signature": sign_event(event, tags, timestamp, self.identity.seed, channel_id),
            **({} if channel_id is None else {"channel_id": channel_id}),
        }

    def publish(self, event: str) -> str:
        """Publish an event; return its id."""
        reply = self.execute("PUBLISH_PUBLIC_EVENT", channel=PUBLIC_CHANNEL, **self.public_event(event))
        return str(reply["public_event_id"])

    def authentication(self, **members: Any) -> dict[str, Any]:
        """A signed AUTHENTICATE message. :param members: as of :func:`compose_authentication`."""
        return compose_authentication(
            self.identity, members.pop("timestamp_ms", int(self.daemon_client.now() * 1000)), **members
        )

    def open_socket(self) -> RawWebSocket:
        """Open an authenticated socket."""
        socket = RawWebSocket(self.daemon_client)
        socket.send(self.authentication())
        reply = socket.receive()
        assert reply == {"type": "AUTH_SUCCESS"}, reply
        return socket


class PeerClosedSocket(Exception):
    """
    The peer has closed the socket.

    :param code: code of the close frame; None if there was none.
    """

    def __init__(self, code: int | None, reason: str) -> None:
        super().__init__(f"{code} {reason}")
        self.code = code
        self.reason = reason


class RawWebSocket:
    """A WebSocket client on raw frames; reading times out although pings arrive."""

    def __init__(self, daemon_client: DaemonClient, path: str = "/ws", *, source: str = "127.0.0.1") -> None:
        address = ("127.0.0.1", daemon_client.port)
        self._socket = socket.create_connection(address, timeout=PATIENCE_SECONDS, source_address=(source, 0))
        headers = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        }
        self._socket.sendall(encode_request("GET", path, None, headers))
        self._received = b""
        self._deadline = time.monotonic() + PATIENCE_SECONDS
        while b"\r\n\r\n" not in self._received:
            self._read()
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 "), head

    def send(self, message: Mapping[str, Any] | bytes, opcode: int = TEXT_OPCODE) -> None:
        """Send one message."""
        self._socket.sendall(encode_frame(message if isinstance(message, bytes) else encoding.dumps(message), opcode))

    def send_frame(self, payload: bytes, opcode: int, *, final: bool = True) -> None:
        """Send one frame, possibly a fragment."""
        self._socket.sendall(encode_masked_frame(payload, opcode, final=final))

    def receive(self) -> dict[str, Any]:
        """
        The next message, except the PING that an authenticated socket gets every half minute.

        :raise PeerClosedSocket: the peer closed the socket.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (message := dict(json.loads(self.receive_raw()))).get("type") == "PING":
            assert time.monotonic() < deadline, "nothing but PING messages"
        return message

    def receive_raw(self) -> bytes:
        """As :meth:`receive`, for any text message."""
        self._deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            opcode, payload = self._next()
            if opcode == TEXT_OPCODE:
                return payload
            if opcode == PING_OPCODE:
                self.send(payload, PONG_OPCODE)
            elif opcode == CLOSE_OPCODE:
                with contextlib.suppress(ConnectionError):
                    self.send(payload, CLOSE_OPCODE)
                raise PeerClosedSocket(int.from_bytes(payload[:2], "big"), payload[2:].decode())

    def read_until_close(self) -> tuple[list[bytes], PeerClosedSocket]:
        """All messages until the peer closes, and the close; the peer must also end the connection."""
        messages: list[bytes] = []
        deadline = time.monotonic() + PATIENCE_SECONDS
        try:
            while True:
                messages.append(self.receive_raw())
                assert time.monotonic() < deadline, "it stays open"
        except PeerClosedSocket as close:
            assert self._received == b"", "something after the close frame"
            with contextlib.suppress(ConnectionError):
                assert self._socket.recv(1) == b"", "something after the close frame"
            self.close()
            return messages, close

    def messages(self) -> Iterator[dict[str, Any]]:
        """Messages as they arrive, until the connection ends."""
        with contextlib.suppress(PeerClosedSocket, OSError):
            while True:
                yield self.receive()

    def close(self) -> None:
        """Close the connection without a close frame."""
        self._socket.close()

    def _next(self) -> tuple[int, bytes]:
        while (parsed := parse_frame(self._received)) is None:
            self._read()
        opcode, payload, size = parsed
        self._received = self._received[size:]
        return opcode, payload

    def _read(self) -> None:
        self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
        data = self._socket.recv(1 << 16)
        if not data:
            raise PeerClosedSocket(None, "cut off")
        self._received += data
