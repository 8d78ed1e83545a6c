"""
DIDComm wallets and their devices, over real connections and without a reactor.

A device is a socket on which messages of the wallet are pushed; a wallet may have many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from mediatord.bench.raw_clients import PONG_OPCODE, WebSocketClient
from mediatord.protocol.didcomm.did_methods import resolve_local
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.protocol.didcomm.message import Message
from mediatord.wallet.didcomm_client import PICKUP, DeliveredMessage, read_delivery
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import (
    BASIC_MESSAGE,
    OpenedMessage,
    anoncrypt,
    authcrypt,
    build_forward,
    compose_message,
    unpack_message,
)
from tests.http.in_memory_site import HTTPResponse
from tests.integration.raw_decentrl_client import DaemonClient, RawWebSocket

CM3 = "https://didcomm.org/coordinate-mediation/3.0"
# Receive buffer of a socket that is not read.
_SMALL_RECEIVE_BUFFER = 65_536
ENVELOPE = {"Content-Type": ENCRYPTED_MEDIA_TYPE}


class DeviceWallet:
    """A wallet, with or without an account."""

    def __init__(self, daemon_client: DaemonClient, identity: WalletIdentity | None = None) -> None:
        self.daemon_client = daemon_client
        self.mediator = resolve_local(daemon_client.request("GET", "/did").body.decode())
        self.identity = identity or WalletIdentity.generate(endpoint=self.mediator.did)
        self.did = self.identity.did

    def pack(self, type_: str, body: dict[str, Any] | None = None, **headers: Any) -> bytes:
        """An authcrypted message to the mediator that requests its reply on the connection."""
        standard = {"from": self.did, "to": [self.mediator.did], "return_route": "all"}
        return authcrypt(compose_message(type_, body, **{**standard, **headers}), self.identity, self.mediator)

    def request(self, type_: str, body: dict[str, Any] | None = None, *, source: str = "127.0.0.1") -> HTTPResponse:
        """Send a request over HTTP."""
        return self.post(self.pack(type_, body), source=source)

    def post(self, raw: bytes, *, source: str = "127.0.0.1", **headers: str) -> HTTPResponse:
        """POST bytes to the mediator."""
        return self.daemon_client.request("POST", "/didcomm", raw, {**ENVELOPE, **headers}, source=source)

    def request_message(self, type_: str, body: dict[str, Any] | None = None) -> Message:
        """Send a request that must be answered 200; return the decrypted reply."""
        response = self.request(type_, body)
        assert response.status == 200, response.body
        return self.open(response.body).message

    def open(self, raw: bytes) -> OpenedMessage:
        """Decrypt an envelope for this wallet."""
        return unpack_message(raw, self.identity, resolve_local)

    def enrol(self, *dids: str) -> DeviceWallet:
        """Request mediation and register these recipient DIDs, or its own."""
        self.request_message(f"{CM3}/mediate-request")
        updates = [{"recipient_did": did, "action": "add"} for did in dids or (self.did,)]
        results = (self.request_message(f"{CM3}/recipient-update", {"updates": updates}).body or {})["updated"]
        assert {result["result"] for result in results} == {"success"}, results
        return self

    def pack_message(self, text: str, size: int = 0) -> bytes:
        """An anoncrypted message to this wallet. :param size: approximate bytes in addition to the text."""
        body = {"content": text, "ballast": "x" * size}
        return anoncrypt(compose_message(BASIC_MESSAGE, body, to=[self.did]), self.identity.document)

    def pack_forward(self, *payloads: bytes, to: str | None = None, **headers: Any) -> bytes:
        """An anonymous forward."""
        return anoncrypt(build_forward(to or self.did, payloads, **headers), self.mediator)

    def send_text(self, text: str, size: int = 0, *, to: str | None = None) -> None:
        """Forward a message, which must be accepted."""
        response = self.post(self.pack_forward(self.pack_message(text, size), to=to))
        assert (response.status, response.body) == (202, b""), (response.status, response.body)

    def read_text(self, delivered: DeliveredMessage) -> str:
        """The text of a delivered message."""
        return str((self.open(delivered.payload).message.body or {})["content"])

    def fetch(self, limit: int = 100) -> list[DeliveredMessage]:
        """The oldest queued messages."""
        message = self.request_message(f"{PICKUP}/delivery-request", {"limit": limit})
        return read_delivery(message) if message.type.uri == f"{PICKUP}/delivery" else []

    def queued_texts(self) -> list[str]:
        """Texts of all queued messages, oldest first; they must fit into one delivery."""
        return [self.read_text(delivered) for delivered in self.fetch()]

    def queued_count(self) -> int:
        """Number of queued messages, from a status."""
        return int((self.request_message(f"{PICKUP}/status-request").body or {})["message_count"])

    def acknowledge(self, *ids: str) -> None:
        """Acknowledge over HTTP."""
        self.request_message(f"{PICKUP}/messages-received", {"message_id_list": list(ids)})


class LiveDevice:
    """A socket of a wallet."""

    def __init__(self, owner: DeviceWallet) -> None:
        self.owner = owner
        self.socket = RawWebSocket(owner.daemon_client, "/didcomm")
        self._pushed: deque[DeliveredMessage] = deque()

    def request(self, type_: str, body: dict[str, Any] | None = None) -> Message:
        """Send a request and return the reply; pushes before it are kept."""
        message = compose_message(
            type_, body, return_route="all", to=[self.owner.mediator.did], **{"from": self.owner.did}
        )
        self.socket.send(authcrypt(message, self.owner.identity, self.owner.mediator))
        while (reply := self._receive()).thid != message["id"]:
            self._pushed.extend(read_delivery(reply))
        return reply

    def set_live(self, on: bool = True) -> LiveDevice:
        """Switch live delivery."""
        status = self.request(f"{PICKUP}/live-delivery-change", {"live_delivery": on})
        assert (status.body or {})["live_delivery"] is on
        return self

    def next_push(self) -> DeliveredMessage:
        """The next pushed message."""
        while not self._pushed:
            self._pushed.extend(read_delivery(self._receive()))
        return self._pushed.popleft()

    def has_no_push(self) -> bool:
        """Whether nothing was pushed so far: the reply to a later request arrives first."""
        self.request(f"{PICKUP}/status-request")
        return not self._pushed

    def acknowledge(self, *ids: str) -> None:
        """Acknowledge on this socket."""
        self.request(f"{PICKUP}/messages-received", {"message_id_list": list(ids)})

    def close(self) -> None:
        """Close the connection without a close frame."""
        self.socket.close()

    def _receive(self) -> Message:
        return self.owner.open(self.socket.receive_raw()).message


class UnreadDevice:
    """
    A socket that is not read after its first messages.

    :param messages: messages that it sends, each after the response to the one before.
    """

    def __init__(self, daemon_client: DaemonClient, path: str, *messages: bytes) -> None:
        self._socket = WebSocketClient(
            f"ws://127.0.0.1:{daemon_client.port}{path}", kernel_bytes=_SMALL_RECEIVE_BUFFER
        )
        for message in messages:
            self._socket.send(message)
            self._socket.receive()

    def keep_alive(self) -> None:
        """Send a PONG: the daemon closes a socket that leaves two pings unanswered."""
        self._socket.send(b"", PONG_OPCODE)

    def receive(self, number: int) -> list[bytes]:
        """Read the first messages that have arrived."""
        frames: list[bytes] = []
        while len(frames) < number:
            frames += self._socket.take()
        return frames[:number]

    def close(self) -> None:
        """Close the connection without a close frame."""
        self._socket.close()


def read_metric(daemon_client: DaemonClient, name: str) -> float:
    """Value of a metric, by name and labels."""
    lines = daemon_client.request("GET", "/metrics").body.decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def read_next_pushes(devices: Sequence[LiveDevice]) -> list[str]:
    """Texts of the next push of each device."""
    return [device.owner.read_text(device.next_push()) for device in devices]
