"""
A server with the requests of Affinidi's mediator that the benchmark uses, and nothing else; it writes its port.

With the argument `forget`, every tenth forward is answered and not stored. It is strict where the mediator is.
`GET /counts` says what it has seen.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import RLock
from typing import Any

import click

from mediatord.bench.wallet_group import SystemClock
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.protocol.didcomm.forward import FORWARD
from mediatord.protocol.didcomm.jwe import parse_envelope
from mediatord.wallet.didcomm_client import PICKUP
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import (
    OpenedMessage,
    UnreadableMessage,
    authcrypt,
    compose_message,
    unpack_message,
)

API = "/mediator/v1"
_AUTHENTICATE = "https://affinidi.com/atm/1.0/authenticate"
_FORGET_EVERY = 10


class Refused(Exception):
    """A request that the mediator would reject."""


class Mediator:
    """What all connections share."""

    def __init__(self, port: int, forgetful: bool) -> None:
        self.identity = WalletIdentity.generate(endpoint=f"http://127.0.0.1:{port}{API}")
        self.counts = Counter[str]()
        self._forgetful = forgetful
        self._lock = RLock()
        self._challenges: dict[str, tuple[str, str]] = {}
        self._tokens: dict[str, str] = {}
        self._queues: dict[str, dict[str, bytes]] = defaultdict(dict)
        self._live: dict[str, Callable[[bytes], None]] = {}

    def challenge(self, body: bytes) -> dict[str, str]:
        """First step of authentication."""
        session, challenge = secrets.token_hex(6), secrets.token_hex(16)
        self._challenges[session] = json.loads(body)["did"], challenge
        return {"challenge": challenge, "session_id": session}

    def authenticate(self, body: bytes) -> dict[str, str]:
        """Second step; a challenge is good for one answer."""
        opened = self._open(body)
        did, challenge = self._challenges.pop(opened.body["session_id"])
        if (opened.message.type.uri, opened.sender, opened.body["challenge"]) != (_AUTHENTICATE, did, challenge):
            raise Refused("the answer to another challenge")
        self._require_expiry(opened)
        token = secrets.token_hex(8)
        self._tokens[token] = did
        self.counts["authenticated"] += 1
        return {"access_token": token}

    def owner(self, authorization: str | None) -> str:
        """The DID that a request's header proves."""
        try:
            return self._tokens[(authorization or "").removeprefix("Bearer ")]
        except KeyError:
            raise Refused("no valid token") from None

    def inbound(self, body: bytes, authorization: str | None) -> Any:
        """A forward, which may be anonymous, or a Pickup request of a wallet."""
        opened = self._open(body)
        if opened.message.type.uri != FORWARD:
            return {"Ephemeral": self.pickup(opened, self.owner(authorization)).decode()}
        self._require_expiry(opened)
        (attachment,) = opened.message.attachments or ()
        self._deliver(opened.body["next"], json.dumps(attachment["data"]["json"]).encode())
        return "Forwarded"

    def socket_message(self, body: bytes, did: str, send: Callable[[bytes], None]) -> None:
        """A Pickup request on a socket; the response is pushed, to a wallet in live mode only."""
        opened = self._open(body)
        if opened.message.type.uri == f"{PICKUP}/live-delivery-change":
            self._live[did] = send
        response = self.pickup(opened, did)
        if did in self._live:
            send(response)

    def pickup(self, opened: OpenedMessage, did: str) -> bytes:
        """The status that responds to any Pickup request."""
        if json.loads(opened.plaintext).get("return_route") != "all":
            raise Refused("return_route is not all")
        if opened.sender != did:
            raise Refused("of another DID than the token")
        with self._lock:
            for id_ in opened.body.get("message_id_list", ()):
                self.counts["deleted"] += self._queues[did].pop(id_, None) is not None
            status = {
                "recipient_did": did,
                "message_count": len(self._queues[did]),
                "live_delivery": did in self._live,
            }
        headers: dict[str, Any] = {"from": self.identity.did, "to": [did], "thid": opened.message.id}
        return authcrypt(compose_message(f"{PICKUP}/status", status, **headers), self.identity, resolve_local(did))

    def _deliver(self, did: str, payload: bytes) -> None:
        with self._lock:
            self.counts["forwards"] += 1
            if send := self._live.get(did):
                send(payload)
            if not self._forgetful or self.counts["forwards"] % _FORGET_EVERY:
                # Equal messages count each, and are one when they are deleted.
                self._queues[did][_name(payload, self._queues[did])] = payload

    def _open(self, body: bytes) -> OpenedMessage:
        parse_envelope(body)
        return unpack_message(body, self.identity, resolve_local)

    @staticmethod
    def _require_expiry(opened: OpenedMessage) -> None:
        if not SystemClock().seconds() < json.loads(opened.plaintext)["expires_time"]:
            raise Refused("no expires_time")


def _name(payload: bytes, queue: dict[str, bytes]) -> str:
    digest = sha256(payload).hexdigest()
    return f"{digest} {len(queue)}" if digest in queue else digest


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    mediator: Mediator

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""

    def do_GET(self) -> None:
        """The DID, the counts, or the upgrade to a WebSocket."""
        if self.path == f"{API}/.well-known/did":
            self._answer(200, self.mediator.identity.did)
        elif self.path == "/counts":
            self._answer(200, dict(self.mediator.counts))
        elif self.path == f"{API}/ws":
            self._serve_socket()
        else:
            self._answer(404, None)

    def do_POST(self) -> None:
        """Authentication and messages."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            if self.path == f"{API}/inbound":
                self._answer(200, self.mediator.inbound(body, self.headers["Authorization"]))
            elif self.headers["Content-Type"] != "application/json":
                self._answer(415, None)
            elif self.path == f"{API}/authenticate/challenge":
                self._answer(200, self.mediator.challenge(body))
            else:
                self._answer(200, self.mediator.authenticate(body))
        except (Refused, UnreadableMessage) as error:
            self._answer(403, None, str(error))

    def _answer(self, status: int, data: Any, message: str = "Success") -> None:
        body = json.dumps({"httpCode": status, "errorCodeStr": "NA", "message": message, "data": data}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _serve_socket(self) -> None:
        did = self.mediator.owner(self.headers["Authorization"])
        self.wfile.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        self.close_connection = True
        while head := self.rfile.read(2):
            length = head[1] & 0x7F
            if length > 125:
                length = int.from_bytes(self.rfile.read(2 if length == 126 else 8), "big")
            mask, masked = self.rfile.read(4), self.rfile.read(length)
            text = bytes(byte ^ mask[place % 4] for place, byte in enumerate(masked))
            self.mediator.socket_message(text, did, self._push)

    def _push(self, payload: bytes) -> None:
        length = len(payload)
        size = bytes([length]) if length < 126 else b"\x7e" + length.to_bytes(2, "big")
        self.wfile.write(b"\x81" + size + payload)


def main() -> None:
    """Serve until standard input ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    _Handler.mediator = Mediator(server.server_port, "forget" in sys.argv)
    click.echo(server.server_port)
    server.serve_forever()


if __name__ == "__main__":
    main()
