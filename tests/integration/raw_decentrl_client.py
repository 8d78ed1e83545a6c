"""
Decentrl identities that live at a daemon, over real connections and without a reactor.

They sign and send byte for byte what a test wants them to, and read what comes back without believing any of it.
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
# Of what a command leaves behind even when it is refused, and what the daemon counts for itself.
_PASSING = ("nonce", "counter")


def unix_time() -> float:
    """Unix seconds."""
    return datetime.now(UTC).timestamp()


def read_all_rows(database: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table but those of nonces and of counters, as somebody else reads the file."""
    with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
        connection.execute("BEGIN")
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        wanted = [name for name in names if name not in _PASSING and not name.startswith("sqlite_")]
        return {name: sorted(connection.execute(f"SELECT * FROM {name}"), key=repr) for name in wanted}


class DaemonClient:
    """
    A daemon from outside.

    :ivar mediator: as its DID document describes it.
    :ivar database: the file that it keeps everything in.
    """

    mediator: DecentrlMediator

    def __init__(self, daemon: Daemon) -> None:
        self.port = daemon.port
        self.database = daemon.directory / "mediator.sqlite3"
        self.mediator = read_mediator_document(self.ask("GET", "/.well-known/did.json").json)

    def connection(self, source: str = "127.0.0.1") -> HTTPConnection:
        """A connection that stays open."""
        return HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS, source_address=(source, 0))

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        source: str = "127.0.0.1",
    ) -> HTTPResponse:
        """One request on a connection of its own."""
        with contextlib.closing(self.connection(source)) as connection:
            return send_request_on(connection, method, path, body, headers)

    def command(self, raw: bytes, *, source: str = "127.0.0.1", **headers: str) -> HTTPResponse:
        """The answer to a command."""
        return self.ask("POST", "/", raw, {"Content-Type": JSON, **headers}, source=source)

    def at_once(self, commands: Sequence[bytes]) -> list[HTTPResponse]:
        """The answers to commands that arrive at the same time, on connections that are open by then."""
        connections = [self.connection() for _ in commands]
        with contextlib.ExitStack() as closing:
            for connection in connections:
                closing.callback(connection.close)
                connection.connect()
            for connection, raw in zip(connections, commands, strict=True):
                connection.request("POST", "/", raw, {"Content-Type": JSON})
            return [read_response_on(connection) for connection in connections]

    def say(self, raw: bytes) -> list[HTTPResponse]:
        """What comes back for these bytes until the other side has enough of us."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS) as connection:
            got = b""
            with contextlib.suppress(ConnectionError):
                connection.sendall(raw)
            with contextlib.suppress(ConnectionError):
                while more := connection.recv(1 << 16):
                    got += more
            return parse_responses(got)

    def now(self) -> float:
        """Unix seconds, by the clock behind the door."""
        return unix_time()

    def kept(self) -> dict[str, list[tuple[Any, ...]]]:
        """As :func:`kept`."""
        return read_all_rows(self.database)


def send_request_on(
    connection: HTTPConnection,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> HTTPResponse:
    """One request on a connection that stays open."""
    connection.request(method, path, body, dict(headers or {}))
    return read_response_on(connection)


def read_response_on(connection: HTTPConnection) -> HTTPResponse:
    """The answer to what was asked on a connection."""
    response = connection.getresponse()
    found = {name.lower(): value for name, value in response.getheaders()}
    return HTTPResponse(response.status, found, response.read())


class RawDecentrlClient:
    """
    One identity, which may or may not be registered.

    :param mediator_did: what its DID names as its mediator; the one behind the door unless given.
    """

    def __init__(self, daemon_client: DaemonClient, alias: str, *, mediator_did: str | None = None) -> None:
        self.daemon_client = daemon_client
        self.identity = DecentrlIdentity.generate(alias, mediator_did or daemon_client.mediator.did)
        self.did = self.identity.did

    @property
    def mediator(self) -> str:
        """DID of the mediator behind the door."""
        return self.daemon_client.mediator.did

    def command(
        self,
        payload: dict[str, Any] | str,
        *,
        to: str | None = None,
        channel: ChannelType = DIRECT_CHANNEL,
        **header: Any,
    ) -> bytes:
        """A command of now, signed. :param header: as those of :func:`compose`."""
        times = {"timestamp_ms": int(self.daemon_client.now() * 1000), **header}
        return encoding.dumps(compose_command(self.identity, channel, to or self.mediator, payload, **times))

    def ask(
        self, type_: str, *, to: str | None = None, channel: ChannelType = DIRECT_CHANNEL, **members: Any
    ) -> HTTPResponse:
        """Send a command with these members."""
        return self.daemon_client.command(self.command({"type": type_, **members}, to=to, channel=channel))

    def get(
        self, type_: str, *, to: str | None = None, channel: ChannelType = DIRECT_CHANNEL, **members: Any
    ) -> dict[str, Any]:
        """As :meth:`ask`, for what has to succeed; the reply."""
        answered = self.ask(type_, to=to, channel=channel, **members)
        assert (answered.status, answered.json["type"]) == (200, "SUCCESS"), answered.body
        return answered.json

    def tell(self, recipient: RawDecentrlClient, payload: str = "sealed") -> HTTPResponse:
        """Send an event to another identity."""
        return self.daemon_client.command(self.command(payload, to=recipient.did, channel=PRIVATE_CHANNEL))

    def items(self, what: str, list_: str, **members: Any) -> list[dict[str, Any]]:
        """Everything that a query finds, page by page."""
        found: list[dict[str, Any]] = []
        while True:
            pagination = {"page": len(found) // MANY, "page_size": MANY}
            payload = self.get(f"QUERY_{what}", pagination=pagination, **members)["payload"]
            found += payload[list_]
            total = payload["pagination"]["total"]
            if len(found) == total:
                return found
            assert len(found) < total and payload[list_], f"{len(found)} of {total} {list_}"

    def pending(self) -> list[dict[str, Any]]:
        """The events that wait for it."""
        return self.items("PENDING_EVENTS", "pending_events")

    def requests(self) -> list[dict[str, Any]]:
        """The requests for a contract that wait for it."""
        name = "PENDING_COMMUNICATION_CONTRACT_REQUESTS"
        return self.items(name, name.lower())

    def terms(self, peer_did: str, **changes: Any) -> dict[str, Any]:
        """What it would ask `make_mediator_peer_did` to sign, without the peer's encryption key."""
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

    def registration(self, **changes: Any) -> dict[str, Any]:
        """The members of a request for registration; `changes` are those of the terms."""
        terms = self.terms(self.mediator, **changes)
        signature = sign_contract_request(terms, self.identity.seed)
        return self.sealed({"communication_contract": terms, "requestor_signature": signature})

    def sealed(self, plaintext: Any, prekey: bytes | None = None) -> dict[str, Any]:
        """Anything, encrypted as a request for a contract is; for the mediator unless somebody's key is given."""
        private, public = generate_key_pair()
        secret = derive_shared_secret(private, self.daemon_client.mediator.prekey if prekey is None else prekey)
        return {
            "encrypted_contract_request": encrypt(encoding.dumps(plaintext), secret),
            "requestor_ephemeral_public_key": encode_base64(public),
        }

    def register(self, **changes: Any) -> dict[str, Any]:
        """Become registered; the signed contract."""
        reply = self.get("REQUEST_COMMUNICATION_CONTRACT", **self.registration(**changes))
        assert reply["code"] == "MEDIATOR_REGISTRATION_SUCCESS"
        signed: dict[str, Any] = reply["payload"]["signed_communication_contract"]
        return signed

    def contract_with(self, peer: RawDecentrlClient, **changes: Any) -> dict[str, Any]:
        """A contract that both have signed, this one having asked for it."""
        terms = self.terms(peer.did, **changes)
        full = {**terms, "recipient_encryption_public_key": encode_base64(generate_key_pair()[1])}
        return {
            "communication_contract": full,
            "requestor_signature": sign_contract_request(terms, self.identity.seed),
            "recipient_signature": sign_contract(full, peer.identity.seed),
        }

    def save(self, signed: Mapping[str, Any]) -> HTTPResponse:
        """Have a contract kept."""
        return self.ask("SAVE_COMMUNICATION_CONTRACT", signed_communication_contract=dict(signed))

    def befriend(self, peer: RawDecentrlClient, **changes: Any) -> None:
        """Let `peer` write to this one."""
        answered = self.save(peer.contract_with(self, **changes))
        assert answered.status == 200, answered.body

    def event(self, payload: str, *, sender: str | None = None, tags: tuple[str, ...] = ()) -> dict[str, Any]:
        """An event to be saved; its own unless another sender is named."""
        return {
            "sender_did": sender or self.did,
            "recipient_did": self.did,
            "timestamp": int(self.daemon_client.now()),
            "payload": payload,
            "encrypted_tags": list(tags),
        }

    def public_event(self, event: str, tags: tuple[str, ...] = (), channel_id: str | None = None) -> dict[str, Any]:
        """The members of something to be published."""
        timestamp = int(self.daemon_client.now())
        return {
            "event": event,
            "tags": list(tags),
            "timestamp": timestamp,
            "event_signature": sign_event(event, tags, timestamp, self.identity.seed, channel_id),
            **({} if channel_id is None else {"channel_id": channel_id}),
        }

    def publish(self, event: str) -> str:
        """Publish; the id."""
        reply = self.get("PUBLISH_PUBLIC_EVENT", channel=PUBLIC_CHANNEL, **self.public_event(event))
        return str(reply["public_event_id"])

    def greeting(self, **members: Any) -> dict[str, Any]:
        """The first message on a socket, signed as it is. :param members: as those of :func:`authenticate`."""
        return compose_authentication(
            self.identity, members.pop("timestamp_ms", int(self.daemon_client.now() * 1000)), **members
        )

    def socket(self) -> RawWebSocket:
        """One that is authenticated."""
        line = RawWebSocket(self.daemon_client)
        line.say(self.greeting())
        heard = line.hear()
        assert heard == {"type": "AUTH_SUCCESS"}, heard
        return line


class PeerClosedSocket(Exception):
    """
    The other side has closed a socket.

    :param code: of the close frame; None when there was none.
    """

    def __init__(self, code: int | None, reason: str) -> None:
        super().__init__(f"{code} {reason}")
        self.code = code
        self.reason = reason


class RawWebSocket:
    """A WebSocket, written and read by hand; waiting for anything but a ping ends before long."""

    def __init__(self, daemon_client: DaemonClient, path: str = "/ws", *, source: str = "127.0.0.1") -> None:
        address = ("127.0.0.1", daemon_client.port)
        self._socket = socket.create_connection(address, timeout=PATIENCE_SECONDS, source_address=(source, 0))
        opening = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        }
        self._socket.sendall(encode_request("GET", path, None, opening))
        self._got = b""
        self._until = time.monotonic() + PATIENCE_SECONDS
        while b"\r\n\r\n" not in self._got:
            self._read()
        head, _, self._got = self._got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 "), head

    def say(self, message: Mapping[str, Any] | bytes, opcode: int = TEXT_OPCODE) -> None:
        """Send one message."""
        self._socket.sendall(encode_frame(message if isinstance(message, bytes) else encoding.dumps(message), opcode))

    def say_part(self, payload: bytes, opcode: int, *, final: bool = True) -> None:
        """Send one frame, which may be a part of a message."""
        self._socket.sendall(encode_masked_frame(payload, opcode, final=final))

    def hear(self) -> dict[str, Any]:
        """
        The next message, other than the PING that an authenticated socket gets every half minute.

        :raise PeerClosedSocket: there are none any more.
        """
        until = time.monotonic() + PATIENCE_SECONDS
        while (message := dict(json.loads(self.hear_raw()))).get("type") == "PING":
            assert time.monotonic() < until, "nothing but PING messages"
        return message

    def hear_raw(self) -> bytes:
        """As :meth:`hear`, of whatever kind."""
        self._until = time.monotonic() + PATIENCE_SECONDS
        while True:
            opcode, payload = self._next()
            if opcode == TEXT_OPCODE:
                return payload
            if opcode == PING_OPCODE:
                self.say(payload, PONG_OPCODE)
            elif opcode == CLOSE_OPCODE:
                with contextlib.suppress(ConnectionError):
                    self.say(payload, CLOSE_OPCODE)
                raise PeerClosedSocket(int.from_bytes(payload[:2], "big"), payload[2:].decode())

    def rest(self) -> tuple[list[bytes], PeerClosedSocket]:
        """All messages until the other side closes, and how it did; it has to end the connection as well."""
        heard: list[bytes] = []
        until = time.monotonic() + PATIENCE_SECONDS
        try:
            while True:
                heard.append(self.hear_raw())
                assert time.monotonic() < until, "it stays open"
        except PeerClosedSocket as end:
            assert self._got == b"", "something after the close frame"
            with contextlib.suppress(ConnectionError):
                assert self._socket.recv(1) == b"", "something after the close frame"
            self.close()
            return heard, end

    def messages(self) -> Iterator[dict[str, Any]]:
        """Messages as they come, until the line is cut."""
        with contextlib.suppress(PeerClosedSocket, OSError):
            while True:
                yield self.hear()

    def close(self) -> None:
        """Without ceremony."""
        self._socket.close()

    def _next(self) -> tuple[int, bytes]:
        while (parsed := parse_frame(self._got)) is None:
            self._read()
        opcode, payload, size = parsed
        self._got = self._got[size:]
        return opcode, payload

    def _read(self) -> None:
        self._socket.settimeout(max(0.001, self._until - time.monotonic()))
        data = self._socket.recv(1 << 16)
        if not data:
            raise PeerClosedSocket(None, "cut off")
        self._got += data
